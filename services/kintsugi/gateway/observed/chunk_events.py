"""What this gateway saw of chunks lately: which were stored, and which were deleted. For routers.

A log of bounded length that is read by a cursor. It is a hint: chunks that a store evicts or expires, or that
others store, are not in it. `observed.residency` says what is there now.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from kintsugi.core.errors import InvalidField, ResourceExhausted
from kintsugi.core.namespaces.parts import is_within
from kintsugi.core.spaces import ChunkKey

EVENTS_MAX = 8192
"""Events that are kept, of all namespaces together."""
WAIT_S_MAX = 5.0
"""A gateway that stops waits for its requests; these must not keep it long."""
WAITING_MAX = 16
"""Readers of one caller that wait at a time; one for each namespace that a router follows is enough."""


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

    @property
    def is_empty(self) -> bool:
        """Whether it tells nothing."""
        return not (self.events or self.lost)


class ChunkEvents:
    """For one event loop."""

    def __init__(self, events_max: int = EVENTS_MAX) -> None:
        self._events_max = events_max
        self._log: dict[int, ChunkEvent] = {}
        """The newest, by their numbers: those up to `_number`, without a gap."""
        self._epoch = secrets.token_hex(4)
        """Another one after a restart, whose numbers begin anew."""
        self._number = 0
        self._added = asyncio.Event()
        self._waiting: Counter[str] = Counter()
        """Readers that wait, by their callers' names."""

    def stored(self, namespace: str, key: ChunkKey, num_tokens: int) -> None:
        self._add(ChunkEventType.STORED, namespace, key, num_tokens)

    def deleted(self, namespace: str, keys: Sequence[ChunkKey] | None) -> None:
        """``keys`` None: all of the namespace."""
        for key in [None] if keys is None else keys:
            self._add(ChunkEventType.DELETED, namespace, key, 0)

    def _add(self, kind: ChunkEventType, namespace: str, key: ChunkKey | None, num_tokens: int) -> None:
        self._number += 1
        self._log[self._number] = ChunkEvent(self._number, kind, namespace, key, num_tokens, time.time())
        self._log.pop(self._number - self._events_max, None)
        self._added.set()
        self._added = asyncio.Event()

    def read(self, namespace: str, cursor: str, limit: int) -> EventPage:
        """At most ``limit`` events of a namespace after ``cursor``, which an earlier page gave; empty: none,
        only the cursor behind the latest. Raises `InvalidField`."""
        if not cursor:
            return EventPage((), self._cursor(self._number), False)
        epoch, number = _parse_cursor(cursor)
        if epoch != self._epoch or number > self._number:
            return EventPage((), self._cursor(self._number), True)
        first = self._number - len(self._log) + 1
        newer = (self._log[one] for one in range(max(first, number + 1), self._number + 1))
        found = list(islice((event for event in newer if event.concerns(namespace)), limit))
        end = found[-1].number if len(found) == limit else self._number
        return EventPage(found, self._cursor(end), number + 1 < first)

    async def wait(self, caller: str, namespace: str, cursor: str, limit: int, wait_s: float) -> EventPage:
        """As `read`, once there is an event, after ``wait_s`` and `WAIT_S_MAX` at most. ``caller``: its name.
        Raises `InvalidField`, and `ResourceExhausted` where `WAITING_MAX` readers of the caller wait."""
        if self._waiting[caller] >= WAITING_MAX:
            raise ResourceExhausted(
                f"{WAITING_MAX} readers of {caller!r} wait for events; read with wait_s=0, or end some",
                WAIT_S_MAX,
            )
        self._waiting[caller] += 1
        try:
            async with asyncio.timeout(min(wait_s, WAIT_S_MAX)):
                while (page := self.read(namespace, cursor, limit)).is_empty:
                    cursor = page.cursor
                    await self._added.wait()
        except TimeoutError:
            page = self.read(namespace, cursor, limit)
        finally:
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller]
        return page

    def _cursor(self, number: int) -> str:
        return f"{self._epoch}-{number}"


def _parse_cursor(cursor: str) -> tuple[str, int]:
    epoch, dash, number = cursor.partition("-")
    if not dash or not number.isascii() or not number.isdigit() or len(number) > 18:
        raise InvalidField("cursor", f"{cursor[:40]!r} is none; send the one of the last page, or none")
    return epoch, int(number)
