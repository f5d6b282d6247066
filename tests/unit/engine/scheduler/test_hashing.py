"""Names of blended blocks: ordinary before the fork, their own from it on, also for blocks filled later."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.engine.scheduler import hashing
from kintsugi.engine.scheduler.hashing import measured_salt, split_salt

BLOCK = 4


class FakeRequest:
    """What `hashing` uses of vLLM's `Request`: names of full blocks, chained, computed as tokens arrive."""

    def __init__(self, token_ids: list[int], salt: str | None = None) -> None:
        self.token_ids = list(token_ids)
        self.cache_salt = salt
        self.named: list[int] = []
        """Every block that was given a name, as often as it was."""
        self.block_hashes: list[bytes] = []
        self._block_hasher: Any = ordinary
        self.update_block_hashes()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def update_block_hashes(self) -> None:
        self.block_hashes.extend(self._block_hasher(self))

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.update_block_hashes()


def ordinary(request: FakeRequest) -> list[bytes]:
    import hashlib

    names = list(request.block_hashes)
    known = len(names)
    for start in range(known * BLOCK, request.num_tokens - BLOCK + 1, BLOCK):
        request.named.append(start // BLOCK)
        parent = names[-1] if names else (request.cache_salt or "").encode()
        block = request.token_ids[start : start + BLOCK]
        names.append(hashlib.sha256(parent + repr(block).encode()).digest())
    return names[known:]


def forked(token_ids: list[int], first_block: int, tag: bytes = b"plan", salt: str = "acme") -> FakeRequest:
    request = FakeRequest(token_ids, "acme")
    fork(request, first_block, tag, salt)
    return request


def fork(request: FakeRequest, first_block: int, tag: bytes = b"plan", salt: str = "acme") -> None:
    hashing.fork(request, first_block, tag, BLOCK, salt)  # type: ignore[arg-type]


@given(st.integers(0, 40), st.integers(0, 12), st.integers(0, 20))
def test_the_fork_is_where_it_was_asked_for(length: int, first_block: int, later: int) -> None:
    plain, request = FakeRequest(list(range(length)), "acme"), forked(list(range(length)), first_block)
    for token in range(later):
        plain.append(token)
        request.append(token)
    assert len(request.block_hashes) == len(plain.block_hashes) == (length + later) // BLOCK
    assert request.block_hashes[:first_block] == plain.block_hashes[:first_block]
    assert not set(request.block_hashes[first_block:]) & set(plain.block_hashes[first_block:])


@given(st.integers(0, 40), st.integers(0, 12), st.integers(0, 20))
def test_names_do_not_depend_on_when_tokens_arrived(length: int, first_block: int, later: int) -> None:
    grown = forked(list(range(length)), first_block)
    for token in range(later):
        grown.append(token)
    at_once = forked([*range(length), *range(later)], first_block)
    assert grown.block_hashes == at_once.block_hashes


def test_another_plan_has_other_names() -> None:
    one, other = forked(list(range(12)), 1, b"one"), forked(list(range(12)), 1, b"other")
    assert one.block_hashes[0] == other.block_hashes[0]
    assert not set(one.block_hashes[1:]) & set(other.block_hashes[1:])


@given(st.integers(0, 40), st.integers(0, 8), st.integers(0, 8), st.integers(0, 20))
def test_a_forked_request_is_forked_again_before_or_behind(
    length: int, first: int, second: int, later: int
) -> None:
    once, twice = forked(list(range(length)), first), forked(list(range(length)), first)
    plain = FakeRequest(list(range(length)), "acme")
    fork(twice, second, b"other")
    for request in (plain, once, twice):
        for token in range(later):
            request.append(token)
    assert len(twice.block_hashes) == (length + later) // BLOCK
    assert twice.block_hashes[:second] == once.block_hashes[:second]
    assert not set(twice.block_hashes[second:]) & {*once.block_hashes, *plain.block_hashes}
    assert hashing.exact_tokens(twice) == BLOCK * min(first, second)  # type: ignore[arg-type]
    at_once = forked([*range(length), *range(later)], first)
    fork(at_once, second, b"other")
    assert at_once.block_hashes == twice.block_hashes


def test_unforking_gives_the_exact_names_back() -> None:
    request = forked(list(range(12)), 0)
    hashing.unfork(request, ordinary)  # type: ignore[arg-type]
    assert request.block_hashes == FakeRequest(list(range(12)), "acme").block_hashes


def test_a_salt_renames_every_block() -> None:
    request = FakeRequest(list(range(12)))
    hashing.set_salt(request, "acme")  # type: ignore[arg-type]
    assert request.block_hashes == FakeRequest(list(range(12)), "acme").block_hashes
    assert request.block_hashes[0] != FakeRequest(list(range(12))).block_hashes[0]


def test_a_salt_that_is_there_already_renames_nothing() -> None:
    request = FakeRequest(list(range(12)), "acme")
    request.named.clear()
    hashing.set_salt(request, "acme")  # type: ignore[arg-type]
    assert request.named == []


@pytest.mark.parametrize("first_block", [0, 1, 3, 9])
def test_a_fork_names_every_block_once(first_block: int) -> None:
    """The scheduler waits for it: with a new salt all of them, else those from the fork on."""
    salted, unsalted = (FakeRequest(list(range(22)), salt) for salt in ("acme", None))
    for request in (salted, unsalted):
        request.named.clear()
        fork(request, first_block)
    assert unsalted.named == [0, 1, 2, 3, 4]
    assert salted.named == [0, 1, 2, 3, 4][first_block:]
    assert salted.block_hashes == unsalted.block_hashes


@pytest.mark.parametrize("first_block", [0, 1])
def test_without_prefix_caching_there_is_nothing_to_name(first_block: int) -> None:
    request = FakeRequest([])
    request._block_hasher = None
    fork(request, first_block)
    assert request.cache_salt == "acme"
    assert request._block_hasher is None


def test_a_measurement_shares_no_block_with_others_whatever_its_namespaces_salt_becomes() -> None:
    tokens = list(range(12))
    measured = FakeRequest(tokens, measured_salt("acme", "m1"))
    assert not set(measured.block_hashes) & set(FakeRequest(tokens, "acme").block_hashes)
    fork(measured, 1)
    same = FakeRequest(tokens, measured_salt("acme", "m1"))
    fork(same, 1)
    assert measured.block_hashes == same.block_hashes
    assert not set(measured.block_hashes) & set(forked(tokens, 1).block_hashes)
    hashing.set_salt(measured, "acme\0001")  # type: ignore[arg-type]
    assert split_salt(measured.cache_salt) == ("acme\0001", "m1")
    assert not set(measured.block_hashes) & set(same.block_hashes)
