"""What happened to chunks lately: which a store got, and which it gave up. For routers.

Every shard logs its own events, whoever caused them: puts, what engines discover, copies from other shards,
evictions, deletions. The log has a bounded length and is read by a cursor. It is a hint: `ChunkStore.find`
says what is there now.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kintsugi.core.errors import InvalidField
from kintsugi.core.spaces import ChunkKey

EVENTS_MAX = 8192
"""Events that a store keeps, of all namespaces together: 2 MiB."""


class ChunkEventType(StrEnum):
    """What happened."""

    STORED = "chunk_stored"
    REMOVED = "chunk_removed"
    """Deleted, erased, evicted, expired or found damaged."""


@dataclass(frozen=True)
class ChunkEvent:
    """One chunk in one shard."""

    type: ChunkEventType
    key: ChunkKey
    num_tokens: int
    at_s: float
    """Unix seconds, by the shard's clock."""
    shard: str = ""
    """Its address; empty for a store without shards."""


@dataclass(frozen=True)
class EventPage:
    """Some events of one namespace; those of one shard are in their order."""

    events: Sequence[ChunkEvent]
    cursor: str
    """Where the next page begins."""
    lost: bool
    """Whether events before these are not known: what was learned from earlier ones may be wrong."""

    @property
    def is_empty(self) -> bool:
        """Whether it tells nothing."""
        return not (self.events or self.lost)


class EventLog:
    """The newest events of one shard. Thread-safe. An event costs some two microseconds, a page as much for
    each event that came since, of other namespaces as well."""

    def __init__(self, clock: Callable[[], float] = time.time, events_max: int = EVENTS_MAX) -> None:
        """``clock`` gives Unix seconds."""
        self._clock = clock
        self._events_max = events_max
        self._lock = threading.Lock()
        self._log: dict[int, tuple[str, ChunkEvent]] = {}
        """Namespaces and their events, by number: those up to `_number`, without a gap."""
        self._epoch = secrets.token_hex(4)
        """Another one after a restart, whose numbers begin anew."""
        self._number = 0

    def add(self, kind: ChunkEventType, namespace: str, key: ChunkKey, num_tokens: int) -> None:
        event = ChunkEvent(kind, key, num_tokens, self._clock())
        with self._lock:
            self._number += 1
            self._log[self._number] = namespace, event
            self._log.pop(self._number - self._events_max, None)

    def read(self, namespace: str, cursor: str, limit: int) -> EventPage:
        """As `ChunkStore.events`. Raises `InvalidField`."""
        epoch, seen = _parse_cursor(cursor) if cursor else ("", 0)
        with self._lock:
            end, first = self._number, self._number - len(self._log) + 1
            is_known = epoch == self._epoch and seen <= end
            newer = [self._log[one] for one in range(max(first, seen + 1), end + 1)] if is_known else []
        events: list[ChunkEvent] = []
        for number, (place, event) in enumerate(newer, end - len(newer) + 1):
            if place == namespace:
                events.append(event)
            if len(events) == limit:
                end = number
                break
        lost = bool(cursor) and (not is_known or seen + 1 < first)
        return EventPage(events, f"{self._epoch}-{end}", lost)


def _parse_cursor(cursor: str) -> tuple[str, int]:
    epoch, dash, number = cursor.partition("-")
    if not dash or not number.isascii() or not number.isdigit() or len(number) > 18:
        raise InvalidField("cursor", f"{cursor[:40]!r} is none; send the one of the last page, or none")
    return epoch, int(number)
