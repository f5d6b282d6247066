"""Readers of the store's events, and those that wait for the next one."""

from __future__ import annotations

import asyncio
from collections import Counter

from kintsugi.core.errors import ResourceExhausted
from kintsugi.gateway.threaded_store import ThreadedStore
from kintsugi.store.protocol.chunk_events import EventPage

POLL_S = 0.5
POLLS_PER_S_MAX = 32
"""How often readers that wait together have the store asked again: each rarely, where they are many."""
READING_MAX = 4
"""Reads at a time. The store's other calls have the rest of the threads."""
WAIT_S_MAX = 5.0
"""A gateway that stops waits for its requests; these must not keep it long."""
WAITING_MAX = 16
"""Readers of one caller that wait at a time; one for each namespace that a router follows is enough."""


class EventReaders:
    """For one event loop. Keeps nothing between calls: a cursor is good at every gateway of the store."""

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
