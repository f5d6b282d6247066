"""Streams of several shards as one, layer-major, with failover to replicas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from kintsugi.core.errors import KintsugiError
from kintsugi.store.client.directory import ShardAddress
from kintsugi.store.protocol.interface import ChunkLost, LayerFrame


class ShardStream:
    """One shard's stream of some of the chunks, with the item that comes next."""

    def __init__(self, chunks: Sequence[int], items: AsyncGenerator[LayerFrame | ChunkLost, None]) -> None:
        """`chunks`: for each chunk of the stream, its index in the whole request."""
        self.chunks = chunks
        self._items = items
        self._head: LayerFrame | ChunkLost | None = None
        self._failure: KintsugiError | None = None

    async def prime(self) -> None:
        """Fetch the first item: the call to the shard starts here, not when its turn comes."""
        try:
            self._head = await anext(self._items, None)
        except KintsugiError as error:
            self._failure = error

    async def next_of(self, layer: int) -> LayerFrame | ChunkLost | None:
        """The next item that is not of a later layer, chunks numbered as in the whole request.

        An item of a later layer stays, and its bytes with it, because nothing more is taken before.
        """
        if self._failure is not None:
            raise self._failure
        if self._head is None:
            self._head = await anext(self._items, None)
        if self._head is None or self._head.layer > layer:
            return None
        item, self._head = self._head, None
        chunk = self.chunks[item.chunk]
        if isinstance(item, ChunkLost):
            return ChunkLost(chunk, item.layer, item.reason)
        return LayerFrame(chunk, item.layer, item.data)

    async def close(self) -> None:
        """End the shard's stream early."""
        await self._items.aclose()


OpenPart = Callable[[ShardAddress, Sequence[int], int], ShardStream]


class _Merge:
    def __init__(
        self,
        owners: Sequence[Sequence[ShardAddress]],
        open_part: OpenPart,
        failures: tuple[type[KintsugiError], ...],
        prime: Callable[[Sequence[ShardStream]], Awaitable[None]],
    ) -> None:
        self._owners = owners
        self._prime = prime
        self._open_part = open_part
        self._failures = failures
        self._rank = [0] * len(owners)
        self._done: list[int] = [-1] * len(owners)
        """The last layer yielded of each chunk."""
        self._lost: set[int] = set()
        self._without_owner: list[ChunkLost] = []
        """Lost when a part failed, not yielded yet."""
        self.parts: list[ShardStream] = []

    async def assign(self, chunks: Sequence[int], layer: int) -> list[ChunkLost]:
        """Open streams for chunks from `layer` on at their current owner; those without one are lost."""
        by_owner: dict[ShardAddress, list[int]] = {}
        lost: list[ChunkLost] = []
        for chunk in chunks:
            if self._rank[chunk] < len(self._owners[chunk]):
                by_owner.setdefault(self._owners[chunk][self._rank[chunk]], []).append(chunk)
            else:
                self._lost.add(chunk)
                lost.append(ChunkLost(chunk, layer, "no shard that owns it has it or answers"))
        parts = [self._open_part(owner, owned, layer) for owner, owned in by_owner.items()]
        self.parts += parts
        await self._prime(parts)
        return lost

    async def layer(self, layer: int) -> AsyncGenerator[LayerFrame | ChunkLost, None]:
        """Everything of one layer."""
        for part in self.parts:  # failover appends
            item: LayerFrame | ChunkLost | None
            while (item := await self._next_of(part, layer)) is not None:
                if isinstance(item, LayerFrame):
                    self._done[item.chunk] = item.layer
                    yield item
                    continue
                for lost in await self._try_next_owner([item.chunk], layer):
                    yield lost
            for lost in self._without_owner:
                yield lost
            self._without_owner = []

    async def _next_of(self, part: ShardStream, layer: int) -> LayerFrame | ChunkLost | None:
        """As `ShardStream.next_of`. Where a stream fails, the next owners send what is still missing."""
        try:
            return await part.next_of(layer)
        except self._failures:
            await part.close()
            mine = [c for c in part.chunks if c not in self._lost and self._done[c] < layer]
            later = [c for c in part.chunks if c not in self._lost and self._done[c] >= layer]
            part.chunks = ()
            self._without_owner += [
                *await self._try_next_owner(mine, layer),
                *await self._try_next_owner(later, layer + 1),
            ]
            return None

    async def _try_next_owner(self, chunks: Sequence[int], layer: int) -> list[ChunkLost]:
        for chunk in chunks:
            self._rank[chunk] += 1
        return await self.assign(chunks, layer)


async def merge_streams(
    owners: Sequence[Sequence[ShardAddress]],
    layers: range,
    open_part: OpenPart,
    failures: tuple[type[KintsugiError], ...],
    prime: Callable[[Sequence[ShardStream]], Awaitable[None]],
) -> AsyncGenerator[LayerFrame | ChunkLost, None]:
    """Every chunk from the first of its owners that has it; from the next where one fails midway.

    `open_part(owner, chunks, first_layer)` opens a stream, `prime` starts some side by side.
    A chunk that no owner gives is a `ChunkLost`.
    """
    merge = _Merge(owners, open_part, failures, prime)
    try:
        for lost in await merge.assign(range(len(owners)), layers.start):
            yield lost
        for layer in layers:
            async for item in merge.layer(layer):
                yield item
    finally:
        for part in merge.parts:
            await part.close()
