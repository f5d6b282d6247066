"""What a router learns of the store: where the chunks of a prompt lie, and what happens to chunks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kintsugi.core.errors import ResourceExhausted
from kintsugi.core.exchange import MatchedChunk
from kintsugi.core.plan import ChunkSource
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway.recent_info import Spaces
from kintsugi.gateway.texts.segments import Segment, SegmentResolver
from kintsugi.gateway.threaded_store import ThreadedStore
from kintsugi.store.protocol.chunk_events import EventPage
from kintsugi.store.protocol.interface import ChunkStore, Found

POLL_S = 0.5
POLLS_PER_S_MAX = 32
"""How often readers that wait together have the store asked again: each rarely, where they are many."""
READING_MAX = 4
"""Reads at a time. The store's other calls have the rest of the threads."""
WAIT_S_MAX = 5.0
"""A gateway that stops waits for its requests; these must not keep it long."""
WAITING_MAX = 16
"""Readers of one caller that wait at a time; one for each namespace that a router follows is enough."""


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


class EventReaders:
    """Reads the store's events, also for callers that wait for the next one. For one event loop. Keeps
    nothing between calls: a cursor is good at every gateway of the store."""

    def __init__(self, store: ThreadedStore) -> None:
        self._store = store
        self._places = asyncio.Semaphore(READING_MAX)
        self._waiting: Counter[str] = Counter()
        """Readers that wait, by their callers' names."""

    async def read(self, namespace: str, cursor: str, limit: int) -> EventPage:
        """As `ChunkStore.events`, whose errors it raises."""
        async with self._places:
            return await self._store.run(lambda store: store.events(namespace, cursor, limit))

    async def wait(self, caller: str, namespace: str, cursor: str, limit: int, wait_s: float) -> EventPage:
        """As `read`, once there is an event, or when ``wait_s`` and at most `WAIT_S_MAX` have passed.
        ``caller``: its name. Raises `ResourceExhausted`, too, where `WAITING_MAX` readers of the caller wait.

        A reader that waits has every shard asked twice a second, unless many do.
        """
        if self._waiting[caller] >= WAITING_MAX:
            raise ResourceExhausted(
                f"{WAITING_MAX} readers of {caller!r} wait for events; read with wait_s=0, or end some",
                WAIT_S_MAX,
            )
        self._waiting[caller] += 1
        loop = asyncio.get_running_loop()
        until_s = loop.time() + min(wait_s, WAIT_S_MAX)
        try:
            page = await self.read(namespace, cursor, limit)
            while page.is_empty and (left_s := until_s - loop.time()) > 0:
                await asyncio.sleep(min(left_s, max(POLL_S, self._waiting.total() / POLLS_PER_S_MAX)))
                page = await self.read(namespace, page.cursor, limit)
            return page
        finally:
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller]
