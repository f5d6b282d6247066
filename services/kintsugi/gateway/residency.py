"""Finds the shards that hold chunks, and reads the events of chunks, for routers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
"""Maximum rate of the reads of all waiting readers together."""
READING_MAX = 4
"""Maximum number of concurrent reads; the remaining threads are for the store's other calls."""
WAIT_S_MAX = 5.0
"""Maximum time for which a reader waits: a gateway that stops waits for its requests."""
WAITING_MAX = 16
"""Maximum number of waiting readers of one caller; a router needs one for each namespace that it follows."""


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


class EventReaders:
    """Reads the store's events, also for callers that wait for the next one. For one event loop.

    It keeps nothing between calls, so a cursor is valid at every gateway of the store.
    """

    def __init__(self, store: ThreadedStore) -> None:
        self._store = store
        self._places = asyncio.Semaphore(READING_MAX)
        self._waiting: Counter[str] = Counter()
        """Number of waiting readers of each caller, by its name."""

    async def read(self, namespace: str, cursor: str, limit: int) -> EventPage:
        """Return `ChunkStore.events`. Raises the same errors."""
        async with self._places:
            return await self._store.run(lambda store: store.events(namespace, cursor, limit))

    async def wait(self, caller: str, namespace: str, cursor: str, limit: int, wait_s: float) -> EventPage:
        """Return `read`'s result as soon as there is an event, but after ``wait_s`` or `WAIT_S_MAX` at the
        latest.

        Every shard is asked twice a second, and less often if many readers wait. ``caller``: its name. Raises
        as `read`, and `ResourceExhausted` if `WAITING_MAX` readers of the caller wait.
        """
        if self._waiting[caller] >= WAITING_MAX:
            raise ResourceExhausted(
                f"{WAITING_MAX} readers of {caller!r} wait for events; read with wait_s=0, or stop one",
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
