"""Finds the shards that hold chunks, for routers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kintsugi.core.exchange import MatchedChunk
from kintsugi.core.plan import ChunkSource
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway.chunks import Spaces
from kintsugi.gateway.texts.segments import Segment, SegmentResolver
from kintsugi.gateway.threaded_store import ThreadedStore
from kintsugi.store.protocol.interface import ChunkStore, Found


@dataclass(frozen=True)
class ChunkResidence:
    """One chunk, and the shard and tier from which it would be read now."""

    key: ChunkKey
    num_tokens: int
    """0 for a chunk that was named by its key and is not stored."""
    namespace: str
    """The namespace in which it was found: the request's, or the one that it shares."""
    source: ChunkSource | None
    """None: no shard that answers holds it."""


class Residency:
    """Finds the shards that hold chunks. A lookup counts as a use of the chunk. For one event loop."""

    def __init__(
        self,
        spaces: Spaces,
        resolver: SegmentResolver,
        store: ThreadedStore,
        shared_of: Callable[[str], str],
    ) -> None:
        """``shared_of`` returns the namespace whose chunks the given one may use, too; empty: none."""
        self._spaces = spaces
        self._resolver = resolver
        self._store = store
        self._shared_of = shared_of

    async def find(self, namespace: str, segments: Sequence[Segment]) -> list[ChunkResidence]:
        """Find the chunks of segments, in order; segments that are too short for a chunk are omitted.

        Raises the errors of resolving the segments.
        """
        space = await self._spaces.find(namespace)
        pieces = [one for one in await self._resolver.pieces(space, segments, "chunks") if one.is_chunk]
        found = await self.find_keys(namespace, [piece.key for piece in pieces])
        found = [replace(one, num_tokens=piece.num_tokens) for one, piece in zip(found, pieces, strict=True)]
        shared = self._shared_of(namespace)
        missing = [index for index, one in enumerate(found) if one.source is None]
        if shared and missing:
            theirs = await self._spaces.find(shared)
            others = [ChunkKey.of(theirs, pieces[index].token_ids) for index in missing]
            for index, one in zip(missing, await self.find_keys(shared, others), strict=True):
                if one.source is not None:
                    found[index] = replace(one, key=found[index].key)
        return found

    async def find_matched(self, chunks: Sequence[MatchedChunk]) -> list[ChunkResidence]:
        """Find chunks that an engine has matched in a prompt, in order."""
        found: dict[MatchedChunk, ChunkResidence] = {}
        for namespace in dict.fromkeys(one.namespace for one in chunks):
            there = [one for one in chunks if one.namespace == namespace]
            found |= zip(there, await self.find_keys(namespace, [one.key for one in there]), strict=True)
        return [replace(found[one], num_tokens=one.num_tokens) for one in chunks]

    async def find_keys(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkResidence]:
        """Find chunks by their keys, in order."""
        if not keys:
            return []

        def find(store: ChunkStore) -> list[Found | None]:
            return store.find(namespace, keys)

        return [
            ChunkResidence(key, 0, namespace, None)
            if one is None
            else ChunkResidence(key, one.manifest.num_tokens, namespace, one.source)
            for key, one in zip(keys, await self._store.run(find), strict=True)
        ]
