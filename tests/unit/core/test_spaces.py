"""Keys are stable for ever, namespaces are strict, anchors agree at every offset."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.core.errors import InvalidField
from kintsugi.core.spaces import (
    ANCHOR_TOKENS,
    NAMESPACE_BYTES_MAX,
    ChunkKey,
    ChunkSpace,
    ModelFingerprint,
    Span,
    anchored_at,
    anchors_at_every_offset,
    anchors_of,
    check_namespace,
    token_bytes,
)

FINGERPRINT = ModelFingerprint.of({"weights": "abc", "rope": "theta=10000"})
SPACE = ChunkSpace(FINGERPRINT, "acme/docs", (1, 2, 3))
NAME_KEY = bytes(range(32))
PREPARED = dataclasses.replace(SPACE, context_token_ids=(4, 5))

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=100)


class TestGoldenVectors:
    """Stored chunks are found by these: a change here loses every store. Bump FORMAT_VERSION instead."""

    def test_fingerprint(self) -> None:
        assert FINGERPRINT.hex == "c155bc3e5ef6791c33dd22f2d815279b1d7aff2c53a7ff9db3af653b59cde782"

    def test_space(self) -> None:
        assert SPACE.digest.hex() == "1f8fafe95250117194d2ffbd98d0c4941afa2e6f0167151f214e527b3eb27d4c"

    def test_space_with_a_context(self) -> None:
        digest = "989e14288aedcd07b9b3987147850bf7d6ffb46533c03989edb4eaac6582275f"
        assert PREPARED.digest.hex() == digest
        assert PREPARED.plain.digest == SPACE.digest, "a space without a context is what it always was"

    def test_key(self) -> None:
        key = ChunkKey.of(SPACE, [0, 1, 65536, 2**32 - 1])
        assert key.hex == "9b9e8d9e4d473d9df7eb0c4a730421e630438536f6946fd4570fe69f2d1d7776"

    def test_anchor(self) -> None:
        assert anchors_of(range(40)) == (3769686076003069549, 3641390418059457813, 11504426993993254445)

    def test_names_in_an_encrypted_namespace(self) -> None:
        keyed = dataclasses.replace(PREPARED, name_key=NAME_KEY)
        assert keyed.digest.hex() == "5d2f420f86e42b947508207ced00b0ab9b61771099a693462d92d900cf02a41c"
        assert keyed.plain.digest.hex() == "3a1cf4c2b125df2c90f6a8beac4870e678bb35f42acaef222129e2fc3b05d1bf"
        assert (
            ChunkKey.of(keyed, [0, 1]).hex
            == "66a5d775010ea11c8790b6eb1c8a67cd25c7d3faab16f804d66997c7d21602cb"
        )
        assert anchors_of(range(40), NAME_KEY) == (
            16829030648031898888,
            295621547354354688,
            5038293715006640995,
        )

    def test_token_bytes(self) -> None:
        assert token_bytes([1, 256, 2**32 - 1]).hex() == "0100000000010000ffffffff"


class TestFingerprint:
    def test_order_of_parts_does_not_matter(self) -> None:
        assert ModelFingerprint.of({"rope": "theta=10000", "weights": "abc"}) == FINGERPRINT

    def test_parts_do_not_run_together(self) -> None:
        assert ModelFingerprint.of({"a": "bc"}) != ModelFingerprint.of({"ab": "c"})
        assert ModelFingerprint.of({"a": "b", "c": "d"}) != ModelFingerprint.of({"a": "bcd"})

    @pytest.mark.parametrize("size", [0, 31, 33])
    def test_a_digest_of_another_length_is_refused(self, size: int) -> None:
        with pytest.raises(InvalidField, match="fingerprint"):
            ModelFingerprint(bytes(size))


class TestSpace:
    @pytest.mark.parametrize(
        "change",
        [
            {"fingerprint": ModelFingerprint.of({"weights": "abd"})},
            {"namespace": "acme/doc"},
            {"prefix_token_ids": (1, 2)},
            {"prefix_token_ids": (1, 2, 4)},
            {"prefix_token_ids": ()},
            {"portable": False},
            {"context_token_ids": (4,)},
            {"name_key": NAME_KEY},
        ],
    )
    def test_every_field_decides_the_key(self, change: dict[str, Any]) -> None:
        other = dataclasses.replace(SPACE, **change)
        assert other.digest != SPACE.digest
        assert ChunkKey.of(other, [7]) != ChunkKey.of(SPACE, [7])

    def test_a_portable_space_admits_any_prompt(self) -> None:
        assert SPACE.admits([9, 9])
        assert not SPACE.prefix_matches([9, 9])

    def test_a_bound_space_admits_only_its_prefix(self) -> None:
        bound = dataclasses.replace(SPACE, portable=False)
        assert bound.admits([1, 2, 3, 9])
        assert bound.admits([1, 2, 3])
        assert not bound.admits([1, 2])
        assert not bound.admits([1, 2, 4, 9])

    def test_a_prefix_of_impossible_ids_is_refused(self) -> None:
        with pytest.raises(InvalidField, match="token_ids"):
            ChunkSpace(FINGERPRINT, "acme", (-1,))
        with pytest.raises(InvalidField, match="token_ids"):
            ChunkSpace(FINGERPRINT, "acme", (), context_token_ids=(-1,))

    def test_prefix_and_context_do_not_run_together(self) -> None:
        spaces = [
            ChunkSpace(FINGERPRINT, "acme", (1, 2, 3), context_token_ids=(4, 5)),
            ChunkSpace(FINGERPRINT, "acme", (1, 2, 3, 4), context_token_ids=(5,)),
            ChunkSpace(FINGERPRINT, "acme", (1, 2, 3, 4, 5)),
        ]
        assert len({space.digest for space in spaces}) == 3
        assert len({space.lead_token_ids for space in spaces}) == 1

    def test_with_a_name_key_nothing_that_is_stored_confirms_a_guess(self) -> None:
        keyed = dataclasses.replace(PREPARED, name_key=NAME_KEY)
        stolen_digest = keyed.digest
        assert ChunkKey.of(keyed, [7]) == ChunkKey.in_space(stolen_digest, token_bytes([7]), NAME_KEY)
        assert ChunkKey.of(keyed, [7]) != ChunkKey.in_space(stolen_digest, token_bytes([7]))
        assert keyed.plain.name_key == NAME_KEY
        others = (anchors_of(range(40)), anchors_of(range(40), bytes(32)))
        for anchors in others:
            assert not set(anchors_of(range(40), NAME_KEY)) & set(anchors)

    def test_a_name_key_is_not_shown(self) -> None:
        assert repr(NAME_KEY) not in repr(dataclasses.replace(SPACE, name_key=NAME_KEY))

    @pytest.mark.parametrize("size", [1, 31, 33])
    def test_a_name_key_of_another_length_is_refused(self, size: int) -> None:
        with pytest.raises(InvalidField, match="name_key"):
            dataclasses.replace(SPACE, name_key=bytes(size))

    def test_a_chunk_has_two_copies_where_there_is_a_context(self) -> None:
        assert PREPARED.copies() == (PREPARED, SPACE)
        assert PREPARED.copies(plain=False) == (PREPARED,)
        assert SPACE.copies() == (SPACE,)
        assert SPACE.plain is SPACE

    def test_the_plain_copy_is_used_directly_behind_the_prefix_alone(self) -> None:
        assert PREPARED.space_at(3, [1, 2, 3, 9]) == SPACE
        assert PREPARED.space_at(4, [1, 2, 3, 9]) is PREPARED
        assert PREPARED.space_at(3, [1, 2, 9, 9]) is PREPARED, "another prefix"
        assert SPACE.space_at(3, [1, 2, 3, 9]) is SPACE


class TestNamespace:
    @pytest.mark.parametrize("name", ["a", "0", "Acme", "a.b_c-d/e", "a" * NAMESPACE_BYTES_MAX])
    def test_valid(self, name: str) -> None:
        assert check_namespace(name) == name

    @pytest.mark.parametrize(
        "name",
        ["", "/a", ".a", "-a", "_a", "a b", "a\n", "a\0", "é", "a:b", "a" * (NAMESPACE_BYTES_MAX + 1)],
    )
    def test_invalid(self, name: str) -> None:
        with pytest.raises(InvalidField) as raised:
            check_namespace(name)
        assert raised.value.field == "namespace"

    @pytest.mark.parametrize("name", [None, 3, b"acme"])
    def test_of_another_type(self, name: Any) -> None:
        with pytest.raises(InvalidField, match="mandatory"):
            check_namespace(name)

    @given(st.text(max_size=140))
    def test_a_name_is_accepted_or_refused_by_name(self, name: str) -> None:
        valid = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", name) is not None
        if valid:
            assert check_namespace(name) == name
        else:
            with pytest.raises(InvalidField, match="namespace"):
                check_namespace(name)


class TestTokenIds:
    @pytest.mark.parametrize(
        "ids", [[-1], [2**32], [2**63], [2**64], [-(2**63)], [1.0], [1.5], ["7"], [None], [True], [[1]]]
    )
    def test_what_is_no_id_is_refused(self, ids: list[Any]) -> None:
        with pytest.raises(InvalidField, match="token_ids"):
            token_bytes(ids)

    def test_ragged_lists_are_refused(self) -> None:
        ragged: list[Any] = [[1], [2, 3]]
        with pytest.raises(InvalidField, match="flat"):
            token_bytes(ragged)

    @pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
    def test_arrays_equal_lists(self, dtype: str) -> None:
        array: Any = np.array([0, 5, 2**31 - 1], dtype=dtype)
        assert token_bytes(array) == token_bytes([0, 5, 2**31 - 1])

    @given(token_ids)
    def test_four_bytes_per_id(self, ids: list[int]) -> None:
        assert token_bytes(ids) == b"".join(i.to_bytes(4, "little") for i in ids)


class TestKey:
    @given(token_ids, token_ids)
    def test_different_ids_have_different_keys(self, one: list[int], other: list[int]) -> None:
        assert (ChunkKey.of(SPACE, one) == ChunkKey.of(SPACE, other)) == (one == other)

    @given(st.binary(min_size=32, max_size=32))
    def test_hexadecimal_round_trip(self, digest: bytes) -> None:
        key = ChunkKey(digest)
        assert ChunkKey.from_hex(key.hex) == key
        assert str(key) == key.hex[:16]

    @pytest.mark.parametrize("text", ["", "zz", "00" * 31, "00" * 33, "0" * 63])
    def test_other_texts_are_refused(self, text: str) -> None:
        with pytest.raises(InvalidField) as raised:
            ChunkKey.from_hex(text)
        assert raised.value.field == "key"


class TestAnchor:
    def test_a_short_chunk_has_none(self) -> None:
        assert anchors_of(range(ANCHOR_TOKENS - 1)) == ()
        assert len(anchors_of(range(ANCHOR_TOKENS))) == 2, "the first window is the last"
        assert anchors_at_every_offset(range(ANCHOR_TOKENS - 1)) == []
        assert anchors_at_every_offset([]) == []

    def test_the_first_tokens_the_last_and_all_have_one(self) -> None:
        one, other = anchors_of(range(100)), anchors_of([*range(50), 7, *range(51, 100)])
        assert one[:2] == other[:2]
        assert one[2] != other[2]
        assert anchored_at(one) == tuple(anchors_at_every_offset(range(100))[i] for i in (0, -1))

    def test_a_chunk_that_ends_as_it_begins_has_two(self) -> None:
        first, last = anchored_at(anchors_of([7] * 100))
        assert first == last == anchors_at_every_offset([7] * 32)[0]
        assert len(anchors_of([7] * 100)) == 2

    @given(st.lists(st.integers(0, 2**32 - 1), min_size=ANCHOR_TOKENS, max_size=ANCHOR_TOKENS + 40))
    def test_every_offset_equals_the_slice(self, ids: list[int]) -> None:
        expected = [anchors_of(ids[i:])[0] for i in range(len(ids) - ANCHOR_TOKENS + 1)]
        assert anchors_at_every_offset(ids) == expected


def test_a_span_knows_its_length() -> None:
    assert Span(3, 10).num_tokens == 7
