"""Recent events of chunks: which a store inserted and which it removed. For routers.

Every shard logs its own events, whatever their cause: puts, chunks that engines discover, copies from other
shards, evictions, deletions. It logs only *followed* namespaces, whose events were read lately. Each
namespace has its own log with its own numbers, so that a reader of one namespace learns nothing about
another. A log has a bounded length and is read with a cursor. Events are hints: `ChunkStore.find` returns
what is stored now."""

from __future__ import annotations

import heapq
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

import blake3

from kintsugi.core.errors import InvalidField, ResourceExhausted
from kintsugi.core.namespaces import without_digest
from kintsugi.core.spaces import ChunkKey

EVENTS_MAX = 1024
"""Maximum number of events in one namespace's log: 0.3 MiB."""
FOLLOWED_MAX = 128
"""Maximum number of namespaces that a store logs."""
FOLLOWED_OF_TENANT_MAX = 16
"""Maximum number of followed sessions, cache keys or salts of one namespace, or of one tenant in it."""
FOLLOWED_S = 60.0
"""A namespace whose log was not read for this long may lose it to another namespace."""


class ChunkEventType(StrEnum):
    """Type of an event."""

    STORED = "chunk_stored"
    REMOVED = "chunk_removed"
    """Deleted, erased, evicted, expired or found damaged."""


@dataclass(frozen=True, slots=True)
class ChunkEvent:
    """An event of one chunk in one shard."""

    type: ChunkEventType
    key: ChunkKey
    num_tokens: int
    at_s: float
    """Unix seconds of the shard's clock."""
    shard: str = ""
    """The shard's address; empty for a store without shards."""


@dataclass(frozen=True)
class EventPage:
    """One page of a namespace's events; the events of one shard are in order."""

    events: Sequence[ChunkEvent]
    cursor: str
    """Where the next page begins."""
    lost: bool
    """Whether earlier events are missing, so that conclusions from previous pages may be wrong."""

    @property
    def is_empty(self) -> bool:
        """Whether the page contains no information."""
        return not (self.events or self.lost)


class EventLog:
    """The newest events of one shard. Thread-safe. An event of a namespace that is not followed costs a
    lookup in a dict, any other event about two microseconds."""

    def __init__(
        self, clock: Callable[[], float] = time.time, since_start: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` returns Unix seconds, `since_start` seconds of a monotonic clock."""
        self._clock = clock
        self._since_start = since_start
        self._lock = threading.Lock()
        self._followed: OrderedDict[str, _Followed] = OrderedDict()
        """By namespace, least recently read first."""

    def add(self, kind: ChunkEventType, namespace: str, key: ChunkKey, num_tokens: int) -> None:
        if namespace not in self._followed:  # the usual case, decided without the lock
            return
        event = ChunkEvent(kind, key, num_tokens, self._clock())
        with self._lock:
            if (followed := self._followed.get(namespace)) is not None:
                followed.add(event)

    def read(self, namespace: str, cursor: str, limit: int) -> EventPage:
        """Return events as `ChunkStore.events` does, and follow the namespace from now on. Raises
        `InvalidField`, and `ResourceExhausted` if too many other namespaces are followed."""
        epoch, seen = _parse_cursor(cursor) if cursor else ("", 0)
        with self._lock:
            if namespace not in self._followed:
                self._make_room(namespace)
                self._followed[namespace] = _Followed()
            followed = self._followed[namespace]
            followed.read_at_s = self._since_start()
            self._followed.move_to_end(namespace)
            return followed.read(epoch, seen, limit)

    def _make_room(self, namespace: str) -> None:
        tenant = without_digest(namespace)
        own = [name for name in self._followed if without_digest(name) == tenant]
        if len(own) >= FOLLOWED_OF_TENANT_MAX:
            self._give_up(own[0])
        elif len(self._followed) >= FOLLOWED_MAX:
            self._give_up(next(iter(self._followed)))

    def _give_up(self, namespace: str) -> None:
        if self._since_start() - self._followed[namespace].read_at_s < FOLLOWED_S:
            raise ResourceExhausted(
                f"events of {FOLLOWED_MAX} namespaces, or of {FOLLOWED_OF_TENANT_MAX} parts of this one, are "
                "read already; read those of fewer, or try again in a minute",
                FOLLOWED_S,
            )
        del self._followed[namespace]


class _Followed:
    """The log of one namespace."""

    def __init__(self) -> None:
        self.read_at_s = 0.0
        self._events: deque[ChunkEvent] = deque(maxlen=EVENTS_MAX)
        self._newest = 0
        """Number of the newest event."""
        self._epoch = secrets.token_hex(4)
        """Differs in every log, because the numbers begin again."""

    def add(self, event: ChunkEvent) -> None:
        self._events.append(event)
        self._newest += 1

    def read(self, epoch: str, seen: int, limit: int) -> EventPage:
        """Return the events after number `seen`; an empty `epoch` means that the reader has no cursor."""
        if epoch != self._epoch or seen > self._newest:
            return EventPage((), f"{self._epoch}-{self._newest}", bool(epoch))
        gone = self._newest - len(self._events)
        begin = max(seen, gone)
        events = list(islice(self._events, begin - gone, begin - gone + limit))
        return EventPage(events, f"{self._epoch}-{begin + len(events)}", seen < gone)


def _parse_cursor(cursor: str) -> tuple[str, int]:
    """Return the epoch of the log that a shard's cursor belongs to, and the number of the last event read.
    Raises `InvalidField`."""
    epoch, _, number = cursor.partition("-")
    if not epoch or not number.isascii() or not number.isdigit() or len(number) > 18:
        raise _no_cursor(cursor)
    return epoch, int(number)


def _no_cursor(text: str) -> InvalidField:
    return InvalidField("cursor", f"{text[:40]!r} is not a cursor; send the last page's, or omit it")


@dataclass(frozen=True)
class StoreCursor:
    """Positions in the logs of many shards, as one text: `TAG.CURSOR_TAG.CURSOR`."""

    parts: Mapping[str, str]
    """Shards' cursors by a digest of their ids, which is short because cursors are sent in URLs."""

    @staticmethod
    def parse(text: str) -> StoreCursor:
        """Raises `InvalidField`."""
        parts: dict[str, str] = {}
        for part in text.split("_") if text else ():
            tag, separator, cursor = part.partition(".")
            if not (tag and separator):
                raise _no_cursor(part)
            parts[tag] = cursor
        return StoreCursor(parts)

    def of(self, shard_id: str) -> str:
        """Return a shard's cursor; empty for an unknown shard."""
        return self.parts.get(_tag(shard_id), "")

    def merge(self, pages: Mapping[str, EventPage | None]) -> EventPage:
        """Merge the shards' pages, by shard id, into one page. Events of different shards are ordered by
        time. None stands for a shard that did not answer, whose position is kept. The page also counts as
        incomplete if a shard joined or left."""
        shards = {_tag(shard_id): page for shard_id, page in pages.items()}
        answers = {tag: page for tag, page in shards.items() if page is not None}
        silent = shards.keys() - answers.keys()
        parts = {tag: part for tag, part in self.parts.items() if tag in silent}
        parts |= {tag: page.cursor for tag, page in answers.items()}
        differs = bool(self.parts) and parts.keys() != self.parts.keys()
        return EventPage(
            list(heapq.merge(*(page.events for page in answers.values()), key=lambda event: event.at_s)),
            "_".join(f"{tag}.{part}" for tag, part in parts.items()),
            differs or any(page.lost for page in answers.values()),
        )


def _tag(shard_id: str) -> str:
    return blake3.blake3(shard_id.encode()).hexdigest(length=4)
