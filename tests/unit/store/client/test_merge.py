"""Streams of several shards as one: which failures have the next owner asked."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import pytest

from kintsugi.core.errors import InvalidField, KintsugiError, NotFound, ResourceExhausted, Unavailable
from kintsugi.store.client.directory import ShardAddress
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

    def open_part(owner: ShardAddress, chunks: Sequence[int], first_layer: int) -> ShardStream:
        return ShardStream(chunks, items(owner, range(first_layer, 2)))

    found = merge_streams([(FIRST, SECOND)], range(2), open_part, READ_FAILURES, lambda parts: None)
    return [(item.layer, bytes(item.data)) for item in found if isinstance(item, LayerFrame)]


@pytest.mark.parametrize("failure", [Unavailable("gone"), ResourceExhausted("full"), NotFound("erased")])
def test_the_next_owner_goes_on_where_a_shard_cannot(failure: KintsugiError) -> None:
    assert merge(failure) == [(0, b"first"), (1, b"second")]


def test_a_mistake_of_the_callers_is_one_everywhere() -> None:
    with pytest.raises(InvalidField):
        merge(InvalidField("layers", "is wrong"))
