"""What becomes of a question to the store: answered, late, broken, or not asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")

from kintsugi.core.errors import InvalidField, NotBlendable, Unavailable
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, Span
from kintsugi.engine.scheduler.lookups import Lookup, Lookups
from kintsugi.engine.scheduler.matching import Match, match_spans
from kintsugi.store.client.breaker import FAILURES_MAX, OPEN_S, CircuitBreaker
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.interface import Found

SPACE = ChunkSpace(ModelFingerprint.of({"model": "toy"}), "acme")
SPANS = (Span(0, 2, ChunkKey.of(SPACE, [1, 2])),)


class StubStore(RamStore):
    """Answers once it may, as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.lookups = 0

    def find(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Found | None]:
        self.lookups += 1
        assert self.may_answer.wait(10)
        if self.error is not None:
            raise self.error
        return super().find(namespace, keys)


@pytest.fixture
def store() -> StubStore:
    return StubStore()


@pytest.fixture
def lookups(store: StubStore) -> Iterator[Lookups]:
    made = Lookups(store, 10_000.0, lambda: None)
    yield made
    store.may_answer.set()
    made.close()


def asked(lookups: Lookups) -> Lookup:
    return lookups.start(match_spans, SPACE, SPANS)


def answered(lookups: Lookups) -> Match:
    lookup = asked(lookups)
    lookup.future.exception(10)
    match = lookups.result(lookup, lambda: False)
    assert match is not None
    assert match is lookup.answer
    lookups.take(lookup)
    return match


def given_up(lookups: Lookups) -> str:
    lookup = asked(lookups)
    lookup.future.exception(10)
    with pytest.raises(NotBlendable) as caught:
        lookups.result(lookup, lambda: False)
    assert lookup.answer is None
    return str(caught.value)


def polled(lookups: Lookups, lookup: Lookup) -> Match:
    while True:
        match = lookups.result(lookup, lambda: True)
        if match is not None:
            return match


def test_an_answer_is_there_or_not_yet(store: StubStore, lookups: Lookups) -> None:
    assert answered(lookups).spans == SPANS
    store.may_answer.clear()
    lookup = asked(lookups)
    for is_alone in (lambda: False, lambda: True):
        assert lookups.result(lookup, is_alone) is None
        assert lookup.answer is None
    store.may_answer.set()
    lookup.future.result(10)
    assert lookups.result(lookup, lambda: False) is not None


def test_who_takes_too_long_is_not_waited_for(store: StubStore) -> None:
    hurried = Lookups(store, 0.0, lambda: None)
    store.may_answer.clear()
    lookup = asked(hurried)
    with pytest.raises(NotBlendable, match="store_timeout: lookup took too long"):
        polled(hurried, lookup)
    store.may_answer.set()
    hurried.close()


@pytest.mark.parametrize(("error", "counts"), [(Unavailable("down"), True), (InvalidField("a", "b"), False)])
def test_a_store_that_fails_is_left_alone(
    store: StubStore, lookups: Lookups, error: Exception, counts: bool
) -> None:
    store.error = error
    for _ in range(FAILURES_MAX):
        lookups.check_store(SPACE, [1])
        assert given_up(lookups) == f"store_unavailable: {type(error).__name__}: {error}"
    if not counts:
        lookups.check_store(SPACE, [1])
        return
    with pytest.raises(NotBlendable, match="it failed lately"):
        lookups.check_store(SPACE, [1])
    assert store.lookups == FAILURES_MAX, "nobody is asked"


def test_a_defect_is_logged(store: StubStore, lookups: Lookups, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    monkeypatch.setattr(
        "kintsugi.engine.scheduler.lookups.logger.exception", lambda *_, **values: logged.append(values)
    )
    store.error = ZeroDivisionError("by the test")
    assert given_up(lookups) == "store_unavailable: ZeroDivisionError: by the test"
    assert logged == [{"exc_info": store.error}]


def test_it_is_found_out_beside_the_prompts_whether_a_store_is_back(
    store: StubStore, lookups: Lookups
) -> None:
    now_s = 0.0
    lookups._breaker = CircuitBreaker(clock=lambda: now_s)
    store.error = Unavailable("down")
    for _ in range(FAILURES_MAX):
        given_up(lookups)
    for error in (store.error, None):
        store.error, store.lookups = error, 0
        now_s += OPEN_S
        with pytest.raises(NotBlendable):
            lookups.check_store(SPACE, [1])
        heard_back(lookups, store)
        assert lookups._breaker.is_closed is (error is None)
    lookups.check_store(SPACE, [1])
    answered(lookups)


def heard_back(lookups: Lookups, store: StubStore) -> None:
    for _ in range(10_000):
        lookups._threads.submit(int).result(10)
        if store.lookups and lookups._breaker._probe_s is None:
            return
    raise AssertionError("the store was not asked, or its answer forgotten")
