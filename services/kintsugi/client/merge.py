"""Streams of several shards as one, layer-major, with failover to replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kintsugi.client.directory import ShardAddress
from kintsugi.client.interface import ChunkLost, LayerFrame
from kintsugi.core.errors import KintsugiError


class Part:
    """One shard's stream of some of the chunks, with the item that comes next."""

    def __init__(self, chunks: Sequence[int], items: Iterator[LayerFrame | ChunkLost]) -> None:
        """`chunks`: for each chunk of the stream, its index in the whole request."""
        self.chunks = chunks
        self._items = items
        self._head: LayerFrame | ChunkLost | None = None
        self._failure: KintsugiError | None = None

    def prime(self) -> None:
        """Fetch the first item: the call to the shard starts here, not when its turn comes."""
        try:
            self._head = next(self._items, None)
        except KintsugiError as error:
            self._failure = error

    def next_of(self, layer: int) -> LayerFrame | ChunkLost | None:
        """The next item that is not of a later layer, chunks numbered as in the whole request.

        An item of a later layer stays, and its bytes with it, because nothing more is taken before.
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
            return ChunkLost(chunk, item.layer, item.reason)
        return LayerFrame(chunk, item.layer, item.data)

    def close(self) -> None:
        """End the shard's stream early."""
        close = getattr(self._items, "close", None)
        if close is not None:
            close()


OpenPart = Callable[[ShardAddress, Sequence[int], int], Part]


class _Merge:
    def __init__(
        self,
        owners: Sequence[Sequence[ShardAddress]],
        open_part: OpenPart,
        failures: tuple[type[KintsugiError], ...],
        prime: Callable[[Sequence[Part]], None],
    ) -> None:
        self._owners = owners
        self._prime = prime
        self._open_part = open_part
        self._failures = failures
        self._rank = [0] * len(owners)
        self._done: list[int] = [-1] * len(owners)
        """The last layer yielded of each chunk."""
        self._lost: set[int] = set()
        self.parts: list[Part] = []

    def assign(self, chunks: Sequence[int], layer: int) -> Iterator[ChunkLost]:
        """Open streams for chunks from `layer` on at their current owner; those without one are lost."""
        by_owner: dict[ShardAddress, list[int]] = {}
        for chunk in chunks:
            if self._rank[chunk] < len(self._owners[chunk]):
                by_owner.setdefault(self._owners[chunk][self._rank[chunk]], []).append(chunk)
            else:
                self._lost.add(chunk)
                yield ChunkLost(chunk, layer, "no shard that owns it has it or answers")
        parts = [self._open_part(owner, owned, layer) for owner, owned in by_owner.items()]
        self.parts += parts
        self._prime(parts)

    def layer(self, layer: int) -> Iterator[LayerFrame | ChunkLost]:
        """Everything of one layer."""
        position = 0
        while position < len(self.parts):  # failover appends
            yield from self._layer_of(self.parts[position], layer)
            position += 1

    def _layer_of(self, part: Part, layer: int) -> Iterator[LayerFrame | ChunkLost]:
        while True:
            try:
                item = part.next_of(layer)
            except self._failures:
                part.close()
                mine = [c for c in part.chunks if c not in self._lost and self._done[c] < layer]
                later = [c for c in part.chunks if c not in self._lost and self._done[c] >= layer]
                part.chunks = ()
                yield from self._moved(mine, layer)
                yield from self._moved(later, layer + 1)
                return
            if item is None:
                return
            if isinstance(item, LayerFrame):
                self._done[item.chunk] = item.layer
                yield item
            else:
                yield from self._moved([item.chunk], layer)

    def _moved(self, chunks: Sequence[int], layer: int) -> Iterator[ChunkLost]:
        for chunk in chunks:
            self._rank[chunk] += 1
        yield from self.assign(chunks, layer)


def merged(
    owners: Sequence[Sequence[ShardAddress]],
    layers: range,
    open_part: OpenPart,
    failures: tuple[type[KintsugiError], ...],
    prime: Callable[[Sequence[Part]], None],
) -> Iterator[LayerFrame | ChunkLost]:
    """Every chunk from the first of its owners that has it; from the next where one fails midway.

    `open_part(owner, chunks, first_layer)` opens a stream, `prime` starts some side by side.
    A chunk that no owner gives is a `ChunkLost`.
    """
    merge = _Merge(owners, open_part, failures, prime)
    try:
        yield from merge.assign(range(len(owners)), layers.start)
        for layer in layers:
            yield from merge.layer(layer)
    finally:
        for part in merge.parts:
            part.close()
