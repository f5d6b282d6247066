"""Where the chunks of a prompt lie: what a router asks before it chooses an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kintsugi.core.exchange import MatchedChunk
from kintsugi.core.plan import ChunkSource
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway.recent_info import Spaces
from kintsugi.gateway.texts.segments import Segment, SegmentResolver
from kintsugi.gateway.threaded_store import ThreadedStore
from kintsugi.store.protocol.interface import ChunkStore, Found


@dataclass(frozen=True)
class ChunkResidence:
    """One chunk, and where it would be read from now."""

    key: ChunkKey
    num_tokens: int
    """0 for a chunk that was named by its key and is not there."""
    namespace: str
    """The namespace that it was found in: the request's, or the one that it shares."""
    source: ChunkSource | None
    """None: no shard that answers holds it."""


class Residency:
    """For one event loop."""

    def __init__(
        self,
        spaces: Spaces,
        resolver: SegmentResolver,
        store: ThreadedStore,
        shared_of: Callable[[str], str],
    ) -> None:
        """``shared_of``: the namespace whose chunks another may use, too; empty: none."""
        self._spaces = spaces
        self._resolver = resolver
        self._store = store
        self._shared_of = shared_of

    async def find(self, namespace: str, segments: Sequence[Segment]) -> list[ChunkResidence]:
        """Where the chunks of segments lie, in order; segments that are too short for a chunk are left out.

        Counts as a use of what is found. Raises what resolving the segments raises.
        """
        space = await self._spaces.find(namespace)
        pieces = [one for one in await self._resolver.pieces(space, segments, "chunks") if one.is_chunk]
        keys = [piece.key for piece in pieces]
        found = await self._look_up(namespace, keys)
        places = [namespace] * len(keys)
        shared = self._shared_of(namespace)
        missing = [index for index, one in enumerate(found) if one is None]
        if shared and missing:
            theirs = await self._spaces.find(shared)
            others = [ChunkKey.of(theirs, pieces[index].token_ids) for index in missing]
            for index, one in zip(missing, await self._look_up(shared, others), strict=True):
                if one is not None:
                    found[index], places[index] = one, shared
        return [
            ChunkResidence(piece.key, piece.num_tokens, place, None if one is None else one.source)
            for piece, place, one in zip(pieces, places, found, strict=True)
        ]

    async def find_matched(self, chunks: Sequence[MatchedChunk]) -> list[ChunkResidence]:
        """As `find`, of chunks that an engine has found in a prompt."""
        found: dict[MatchedChunk, Found | None] = {}
        for namespace in dict.fromkeys(one.namespace for one in chunks):
            there = [one for one in chunks if one.namespace == namespace]
            entries = await self._look_up(namespace, [one.key for one in there])
            found |= zip(there, entries, strict=True)
        return [
            ChunkResidence(one.key, one.num_tokens, one.namespace, None if entry is None else entry.source)
            for one in chunks
            for entry in [found[one]]
        ]

    async def find_keys(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkResidence]:
        """As `find`, of chunks that are named by their keys."""
        found = await self._look_up(namespace, keys)
        return [
            ChunkResidence(
                key,
                0 if one is None else one.manifest.num_tokens,
                namespace,
                None if one is None else one.source,
            )
            for key, one in zip(keys, found, strict=True)
        ]

    async def _look_up(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Found | None]:
        def look_up(store: ChunkStore) -> list[Found | None]:
            return store.find(namespace, keys)

        return await self._store.run(look_up) if keys else []
