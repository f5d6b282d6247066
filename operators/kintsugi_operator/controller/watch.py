"""Keeps the index up to date: for each kind that is read, one LIST and then one WATCH that is reopened for
ever.

kopf is not used. It lists without `resourceVersion`, which the API server answers from its database. It
discovers kinds only once, or else watches CRDs, which an operator of one namespace may not do. A 404, or any
error event except 410, ends its watcher and with it the process. A watch of this module recovers:

| the API server | the watch |
|---|---|
| ends the stream | reopens it at the version that it has reached |
| answers 410: that version is too old | lists again, from the database |
| answers 404: the kind is not served | logs it once, drops the objects, and retries until it is served |
| refuses otherwise, or is silent for too long | keeps the objects, and retries with growing delays |

The first list may come from the API server's cache (`resourceVersion=0`) and be stale. Decisions tolerate
that: they can be repeated without harm, or name the version that they were made from (statuses, finalizers),
or use a fresh read before a step that cannot be undone (the end of a teardown).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import aclosing

from kintsugi.core.errors import Unavailable
from kintsugi_operator.api.manifest import API_VERSION
from kintsugi_operator.controller.cluster import GONE, NOT_FOUND, ApiServer, Refused
from kintsugi_operator.controller.index import Entry, Index, Knowledge, Shelf
from kintsugi_operator.controller.queue import ObjectKey
from kintsugi_operator.objects.base import RAY_API_VERSION

logger = logging.getLogger(__name__)

REOPEN_S = 0.5
"""Delay before a watch that has ended is opened again."""
MISSING_S = 10.0
"""Delay before the next request for a kind that is not served."""
BACKOFF_S_MIN, BACKOFF_S_MAX = 1.0, 60.0
REMEDIES = {API_VERSION: "apply the chart's CRDs", RAY_API_VERSION: "install KubeRay 1.6 or newer"}
"""What a person has to do if a group is not served. Other groups belong to Kubernetes and always exist."""
Changed = Callable[[Iterable[ObjectKey]], None]


class Watch:
    """Keeps one shelf up to date."""

    def __init__(
        self, cluster: ApiServer, shelf: Shelf, on_change: Changed, on_served: Callable[[], None]
    ) -> None:
        """`on_served` is called when the API server begins or ceases to serve the kind."""
        self._cluster = cluster
        self._shelf = shelf
        self._on_change = on_change
        self._on_served = on_served
        self._must_list = True
        self._list_from = "0"
        self._failures = 0
        self.has_answer = asyncio.Event()
        """Set after the first attempt, even if it failed."""

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            try:
                if self._must_list:
                    await self._list()
                await self._follow()
                delay_s = REOPEN_S
            except Refused as error:
                delay_s = self._take_refusal(error)
            except Unavailable as error:
                delay_s = self._back_off(error)
            self.has_answer.set()
            await asyncio.sleep(delay_s)

    async def _list(self) -> None:
        shelf, kind = self._shelf, self._shelf.kind
        entries: list[Entry] = []

        def take(one: dict[str, object]) -> None:
            entries.append(shelf.pack(one))

        version = await self._cluster.scan(kind.resource, shelf.namespace, kind.label, self._list_from, take)
        was_missing = shelf.knowledge is Knowledge.MISSING
        self._on_change(shelf.replace(entries, version))
        self._must_list, self._failures = False, 0
        self.has_answer.set()
        if was_missing:
            logger.info("the API server serves %s now", kind.resource.plural)
            self._on_served()

    async def _follow(self) -> None:
        shelf, kind = self._shelf, self._shelf.kind
        events = self._cluster.watch(kind.resource, shelf.namespace, kind.label, str(shelf.version))
        async with aclosing(events):
            async for event in events:
                self._failures = 0
                self._on_change(shelf.apply(event))

    def _take_refusal(self, error: Refused) -> float:
        """Decide what to do next. Returns the delay in seconds."""
        was_listing, self._must_list = self._must_list, True
        # From the database: the cache may be stale.
        self._list_from = ""
        if error.status == NOT_FOUND and not was_listing:
            return 0.0
        if error.status == NOT_FOUND and self._shelf.kind.resource.api_version in REMEDIES:
            self._miss()
            return MISSING_S
        if error.status == GONE and not was_listing:
            return REOPEN_S
        return self._back_off(error)

    def _miss(self) -> None:
        self._list_from, self._failures = "0", 0
        if self._shelf.knowledge is Knowledge.MISSING:
            return
        resource = self._shelf.kind.resource
        logger.warning(
            "the API server does not serve %s: %s", resource.plural, REMEDIES[resource.api_version]
        )
        self._on_change(self._shelf.miss())
        self._on_served()

    def _back_off(self, error: Exception) -> float:
        self._shelf.problem = str(error)
        self._failures += 1
        delay_s = min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2 ** (self._failures - 1))
        # No warning for a watch that can be reopened at once: a proxy may cut streams at any time.
        if self._failures == (1 if self._must_list else 2) or delay_s == BACKOFF_S_MAX:
            logger.warning("%s; next try in %.0f s", error, delay_s)
        return float(delay_s)


class Watches:
    """Keeps all shelves up to date, and passes the keys of changed objects to `on_change`."""

    def __init__(self, cluster: ApiServer, index: Index, on_change: Changed) -> None:
        self._index = index
        self._on_change = on_change
        self._watches = [
            Watch(cluster, shelf, on_change, self._take_served) for shelf in index.shelves.values()
        ]

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for one in self._watches:
                tasks.create_task(one.run())

    async def wait(self) -> None:
        """Wait until each kind is listed, is not served, or could not be read."""
        for one in self._watches:
            await one.has_answer.wait()

    def _take_served(self) -> None:
        """Schedule the reconciliation of all objects, because any of them may depend on the kind."""
        self._on_change(self._index.keys())
