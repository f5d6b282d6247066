"""Merges the streams of several shards into one, layer by layer, with failover to replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace

from kintsugi.core.errors import DeadlineExceeded, KintsugiError, Unavailable
from kintsugi.store.client.directory import ShardAddress
from kintsugi.store.client.grpc_store import LeftAlone
from kintsugi.store.protocol.interface import ChunkLost, LayerFrame


class ShardStream:
    """One shard's stream of some of the chunks, read one item ahead."""

    def __init__(self, chunks: Sequence[int], items: Generator[LayerFrame | ChunkLost, None, None]) -> None:
        """`chunks` holds, for each chunk of the stream, its index in the whole request."""
        self.chunks = chunks
        self._items = items
        self._head: LayerFrame | ChunkLost | None = None
        self._failure: KintsugiError | None = None

    def prime(self) -> None:
        """Fetch the first item, so that the call to the shard starts before its turn comes."""
        try:
            self._head = next(self._items, None)
        except KintsugiError as error:
            self._failure = error

    def next_item(self, layer: int) -> LayerFrame | ChunkLost | None:
        """Return the next item up to `layer`, with its chunk's index in the whole request; None if there is
        none.

        An item of a later layer waits. Its bytes stay valid, because the stream does not advance meanwhile.
        """
        if self._failure is not None:
            raise self._failure
        if self._head is None:
            self._head = next(self._items, None)
        if self._head is None or self._head.layer > layer:
            return None
        item, self._head = self._head, None
        chunk = self.chunks[item.chunk]
        if isinstance(item, ChunkLost):
            return replace(item, chunk=chunk)
        return LayerFrame(chunk, item.layer, item.data)

    def close(self) -> None:
        """End the shard's stream early."""
        self._items.close()


OpenParts = Callable[[Mapping[ShardAddress, Sequence[int]], int], list[ShardStream]]


class _Merge:
    def __init__(
        self,
        owners: Sequence[Sequence[ShardAddress]],
        open_parts: OpenParts,
        failures: tuple[type[KintsugiError], ...],
    ) -> None:
        self._owners = owners
        self._open_parts = open_parts
        self._failures = failures
        self._rank = [0] * len(owners)
        self._done: list[float] = [-math.inf] * len(owners)
        """For each chunk, the last layer that was yielded."""
        self._lost: set[int] = set()
        self._unanswered: set[int] = set()
        """Chunks of which an owner was called and did not answer."""
        self._without_owner: list[ChunkLost] = []
        """Losses after a failed part, not yet yielded."""
        self.parts: list[ShardStream] = []

    def assign(self, chunks: Sequence[int], layer: int) -> list[ChunkLost]:
        """Open streams of chunks, from `layer` on, at their current owners. Returns the chunks that have no
        owner left."""
        by_owner: dict[ShardAddress, list[int]] = {}
        lost: list[ChunkLost] = []
        for chunk in chunks:
            if self._rank[chunk] < len(self._owners[chunk]):
                by_owner.setdefault(self._owners[chunk][self._rank[chunk]], []).append(chunk)
            else:
                self._lost.add(chunk)
                lost.append(self._without(chunk, layer))
        self.parts += self._open_parts(by_owner, layer)
        return lost

    def _without(self, chunk: int, layer: int) -> ChunkLost:
        if chunk in self._unanswered:
            return ChunkLost(chunk, layer, "a shard that owns it does not answer", is_unanswered=True)
        return ChunkLost(chunk, layer, "no shard that owns it has it")

    def merge_layer(self, layer: int) -> Generator[LayerFrame | ChunkLost, None, None]:
        """Yield every item of one layer."""
        for part in self.parts:  # failover appends parts
            item: LayerFrame | ChunkLost | None
            while (item := self._next_item(part, layer)) is not None:
                if isinstance(item, LayerFrame):
                    self._done[item.chunk] = item.layer
                    yield item
                    continue
                yield from self._try_next_owner([item.chunk], layer)
            yield from self._without_owner
            self._without_owner = []

    def _next_item(self, part: ShardStream, layer: int) -> LayerFrame | ChunkLost | None:
        """Return the part's next item. If its stream fails, open streams of the missing frames at the next
        owners."""
        try:
            return part.next_item(layer)
        except self._failures as error:
            part.close()
            if isinstance(error, (Unavailable, DeadlineExceeded)) and not isinstance(error, LeftAlone):
                self._unanswered.update(part.chunks)
            mine = [c for c in part.chunks if c not in self._lost and self._done[c] < layer]
            later = [c for c in part.chunks if c not in self._lost and self._done[c] >= layer]
            part.chunks = ()
            self._without_owner += [
                *self._try_next_owner(mine, layer),
                *self._try_next_owner(later, layer + 1),
            ]
            return None

    def _try_next_owner(self, chunks: Sequence[int], layer: int) -> list[ChunkLost]:
        for chunk in chunks:
            self._rank[chunk] += 1
        return self.assign(chunks, layer)


def merge_streams(
    owners: Sequence[Sequence[ShardAddress]],
    layers: range,
    open_parts: OpenParts,
    failures: tuple[type[KintsugiError], ...],
) -> Generator[LayerFrame | ChunkLost, None, None]:
    """Yield the frames of every chunk from its first owner that has it, and from the next owner if a stream
    fails.

    `open_parts(chunks_by_owner, first_layer)` opens the streams of several shards.
    A chunk that no owner sends is a `ChunkLost`.
    """
    merge = _Merge(owners, open_parts, failures)
    try:
        yield from merge.assign(range(len(owners)), layers.start)
        for layer in layers:
            yield from merge.merge_layer(layer)
    finally:
        for part in merge.parts:
            part.close()
