"""Streams of several shards as one: which failures have the next owner asked."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import pytest

from kintsugi.core.errors import (
    DeadlineExceeded,
    InvalidField,
    KintsugiError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kintsugi.store.client.directory import ShardAddress
from kintsugi.store.client.grpc_store import LeftAlone
from kintsugi.store.client.merge import ShardStream, merge_streams
from kintsugi.store.client.sharded import READ_FAILURES
from kintsugi.store.protocol.interface import ChunkLost, LayerFrame

FIRST, SECOND = ShardAddress("first", "127.0.0.1:1"), ShardAddress("second", "127.0.0.1:2")


def merge(failure: KintsugiError) -> list[tuple[int, bytes]]:
    """Two layers of a chunk, of which the first owner sends one and then fails."""

    def items(owner: ShardAddress, layers: range) -> Generator[LayerFrame | ChunkLost, None, None]:
        for layer in layers:
            if owner is FIRST and layer:
                raise failure
            yield LayerFrame(0, layer, memoryview(owner.shard_id.encode()))

    def open_parts(chunks: Mapping[ShardAddress, Sequence[int]], first_layer: int) -> list[ShardStream]:
        return [ShardStream(own, items(owner, range(first_layer, 2))) for owner, own in chunks.items()]

    found = merge_streams([(FIRST, SECOND)], range(2), open_parts, READ_FAILURES)
    return [(item.layer, bytes(item.data)) for item in found if isinstance(item, LayerFrame)]


@pytest.mark.parametrize("failure", [Unavailable("gone"), ResourceExhausted("full"), NotFound("erased")])
def test_the_next_owner_goes_on_where_a_shard_cannot(failure: KintsugiError) -> None:
    assert merge(failure) == [(0, b"first"), (1, b"second")]


def test_a_mistake_of_the_callers_is_one_everywhere() -> None:
    with pytest.raises(InvalidField):
        merge(InvalidField("layers", "is wrong"))


def losses(first: ChunkLost | KintsugiError) -> list[ChunkLost]:
    """What a reader hears of a chunk that the first owner loses or fails with, and the second lacks."""

    def items(owner: ShardAddress) -> Generator[LayerFrame | ChunkLost, None, None]:
        found = first if owner is FIRST else ChunkLost(0, 0, "absent")
        if isinstance(found, KintsugiError):
            raise found
        yield found

    def open_parts(chunks: Mapping[ShardAddress, Sequence[int]], first_layer: int) -> list[ShardStream]:
        return [ShardStream(own, items(owner)) for owner, own in chunks.items()]

    found = merge_streams([(FIRST, SECOND)], range(1), open_parts, READ_FAILURES)
    return [item for item in found if isinstance(item, ChunkLost)]


@pytest.mark.parametrize(
    ("first", "is_unanswered"),
    [
        (ChunkLost(0, 0, "absent"), False),
        (ChunkLost(0, 0, "digest mismatch"), False),
        (ResourceExhausted("full"), False),
        (NotFound("erased"), False),
        (LeftAlone("not asked"), False),
        (Unavailable("gone"), True),
        (DeadlineExceeded("late"), True),
    ],
)
def test_a_loss_says_whether_an_owner_did_not_answer(
    first: ChunkLost | KintsugiError, is_unanswered: bool
) -> None:
    (lost,) = losses(first)
    assert lost.is_unanswered is is_unanswered
    outer = ShardStream([0], (item for item in [lost]))
    assert outer.next_item(0) == lost, "also behind another merge"
