"""What this gateway saw of chunks lately: which were stored, and which were deleted. For routers.

A log of bounded length that is read by a cursor. It is a hint: chunks that a store evicts or expires, or that
others store, are not in it. `observed.residency` says what is there now.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kintsugi.core.errors import InvalidField
from kintsugi.core.namespaces.parts import is_within
from kintsugi.core.spaces import ChunkKey

EVENTS_MAX = 8192
"""Events that are kept, of all namespaces together."""
WAIT_S_MAX = 5.0
"""A gateway that stops waits for its requests; these must not keep it long."""


class ChunkEventType(StrEnum):
    """What happened."""

    STORED = "chunk_stored"
    DELETED = "chunk_deleted"
    """With no key: every chunk of the namespace and its parts."""


@dataclass(frozen=True)
class ChunkEvent:
    """One chunk, or all of a namespace."""

    number: int
    type: ChunkEventType
    namespace: str
    key: ChunkKey | None
    num_tokens: int
    """0 where it is not known."""
    at_s: float
    """Unix seconds."""

    def concerns(self, namespace: str) -> bool:
        """Whether callers of a namespace are told. One that is deleted as a whole takes its parts with it."""
        return self.namespace == namespace or (self.key is None and is_within(namespace, self.namespace))


@dataclass(frozen=True)
class EventPage:
    """Some events in their order."""

    events: Sequence[ChunkEvent]
    cursor: str
    """Where the next page begins."""
    lost: bool
    """Whether events before these are not kept any more: what was learned from earlier ones may be wrong."""


class ChunkEvents:
    """For one event loop."""

    def __init__(self, events_max: int = EVENTS_MAX) -> None:
        self._log: deque[ChunkEvent] = deque(maxlen=events_max)
        self._epoch = secrets.token_hex(4)
        """Another one after a restart, whose numbers begin anew."""
        self._number = 0
        self._added = asyncio.Event()

    def stored(self, namespace: str, key: ChunkKey, num_tokens: int) -> None:
        self._add(ChunkEventType.STORED, namespace, key, num_tokens)

    def deleted(self, namespace: str, keys: Sequence[ChunkKey] | None) -> None:
        """``keys`` None: all of the namespace."""
        for key in [None] if keys is None else keys:
            self._add(ChunkEventType.DELETED, namespace, key, 0)

    def _add(self, kind: ChunkEventType, namespace: str, key: ChunkKey | None, num_tokens: int) -> None:
        self._number += 1
        self._log.append(ChunkEvent(self._number, kind, namespace, key, num_tokens, time.time()))
        self._added.set()
        self._added = asyncio.Event()

    async def read(self, namespace: str, cursor: str, limit: int, wait_s: float = 0.0) -> EventPage:
        """At most ``limit`` events of a namespace after ``cursor``, which an earlier page gave; empty: none,
        only the cursor behind the latest. Where there is none, waits for one, for ``wait_s`` and `WAIT_S_MAX`
        at most. Raises `InvalidField`."""
        deadline_s = time.monotonic() + min(wait_s, WAIT_S_MAX)
        page = self._page(namespace, cursor, limit)
        while not page.events and not page.lost and (left_s := deadline_s - time.monotonic()) > 0:
            added = self._added
            try:
                await asyncio.wait_for(added.wait(), left_s)
            except TimeoutError:
                break
            page = self._page(namespace, page.cursor, limit)
        return page

    def _page(self, namespace: str, cursor: str, limit: int) -> EventPage:
        if not cursor:
            return EventPage((), self._cursor(self._number), False)
        epoch, number = _parse_cursor(cursor)
        if epoch != self._epoch or number > self._number:
            return EventPage((), self._cursor(self._number), True)
        first = self._log[0].number if self._log else self._number + 1
        newer = (event for event in self._log if event.number > number)
        found = [event for event in newer if event.concerns(namespace)][:limit]
        end = found[-1].number if len(found) == limit else self._number
        return EventPage(found, self._cursor(end), number + 1 < first)

    def _cursor(self, number: int) -> str:
        return f"{self._epoch}-{number}"


def _parse_cursor(cursor: str) -> tuple[str, int]:
    epoch, dash, number = cursor.partition("-")
    if not dash or not number.isascii() or not number.isdigit() or len(number) > 18:
        raise InvalidField("cursor", f"{cursor[:40]!r} is none; send the one of the last page, or none")
    return epoch, int(number)
