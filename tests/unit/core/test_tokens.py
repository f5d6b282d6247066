"""Token ids behave as a tuple of the same ids, except that they cannot be anything but ids."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.core.errors import InvalidField
from kintsugi.core.spaces import TokenIds
from kintsugi.rpc.v1 import gateway_pb2 as pb

lists = st.lists(st.integers(0, 2**32 - 1), max_size=60)
bounds = st.none() | st.integers(-70, 70)


@given(lists, bounds, bounds, st.sampled_from([None, 1, 2, -1, -3]))
def test_they_read_like_the_tuple_of_their_ids(
    ids: list[int], start: int | None, stop: int | None, step: int | None
) -> None:
    tokens = TokenIds.of(ids)
    assert tuple(tokens) == tuple(ids)
    assert tokens.to_list() == ids
    assert len(tokens) == len(ids)
    assert bool(tokens) == bool(ids)
    assert tokens[start:stop:step].to_list() == ids[start:stop:step]
    assert [tokens[index] for index in range(-len(ids), len(ids))] == ids * 2
    with pytest.raises(IndexError):
        tokens[len(ids)]


@given(lists, lists)
def test_equal_ids_are_equal_and_hash_alike(one: list[int], other: list[int]) -> None:
    assert (TokenIds.of(one) == TokenIds.of(other)) == (one == other)
    assert hash(TokenIds.of(one)) == hash(TokenIds.of(tuple(one)))
    assert TokenIds.join([TokenIds.of(one), TokenIds(), TokenIds.of(other)]) == TokenIds.of(one + other)


@given(lists)
def test_they_survive_a_journey(ids: list[int]) -> None:
    tokens = TokenIds.of(ids)
    assert TokenIds.of(tokens) is tokens
    assert TokenIds.of(pb.TokenIds(ids=ids).ids) == tokens
    assert list(pb.TokenIds(ids=tokens.to_list()).ids) == ids
    assert pickle.loads(pickle.dumps(tokens)) == copy.deepcopy(tokens) == tokens
    assert eval(repr(tokens)) == tokens


def test_their_bytes_are_little_endian() -> None:
    assert TokenIds.of([1, 256, 2**32 - 1]).data.hex() == "0100000000010000ffffffff"
    assert TokenIds.of(np.array([1, 256], ">u4")) == TokenIds.of([1, 256])  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.0], ["7"], [True], [None], [[1]], [[1], [2, 3]]])
def test_what_is_no_id_is_refused(ids: list[Any]) -> None:
    with pytest.raises(InvalidField, match="token_ids"):
        TokenIds.of(ids)
