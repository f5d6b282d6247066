"""Chunks on their way from a full tier to the next lower one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from kintsugi.store.shard import life
from kintsugi.store.shard.entry import ChunkEntry, Residence
from kintsugi.store.shard.eviction.room import Room, give_up
from kintsugi.store.shard.tiers.lower_tier import LowerTier
from kintsugi.store.shard.work import Eviction


class Demotions:
    """The demotions of a table, whose lock every method takes. Thread-safe."""

    def __init__(self, changed: threading.Condition, room: Room, is_draining: Callable[[], bool]) -> None:
        """`changed`: the condition of the table's lock."""
        self._changed, self._room, self._is_draining = changed, room, is_draining
        self.running: set[Eviction] = set()
        """Read it under the lock."""

    def begin(self, tier: LowerTier, needed_bytes: int) -> list[Eviction]:
        """Take chunks that the tier's policy gives up, for more bytes than needed. Their copies stay until
        `end`."""
        with self._changed:
            evictions = give_up(tier, needed_bytes)
            self.running.update(evictions)
        return evictions

    def begin_copy(self, eviction: Eviction) -> bool:
        """Hold the leaving copy until `end_copy`. Returns False for a chunk that is gone or being loaded."""
        with self._changed:
            if eviction.entry.disk is not eviction.source or eviction.entry.is_loading:
                return False
            life.acquire(eviction.source)
            return True

    def end_copy(self, eviction: Eviction, upload: Residence | None = None) -> None:
        """Release a copy that has been read. `upload`: a new copy to hold until `end_upload`."""
        with self._changed:
            life.release(eviction.source)
            if upload is not None:
                life.acquire(upload)

    def end_upload(self, entry: ChunkEntry, target: Residence, failed: bool) -> None:
        """Note that an upload to the bucket has ended. If it failed, the copy is lost."""
        with self._changed:
            if failed and life.lose_copy(entry, target):
                self._room.forget(entry)
            life.release(target)
            self._changed.notify_all()

    def end(self, evictions: Iterable[Eviction], placed: Mapping[Eviction, Residence] | None) -> None:
        """Drop the leaving copies. `placed`: new copies in the next tier; None: it failed, so all copies
        stay."""
        with self._changed:
            self.running.difference_update(evictions)
            for eviction in evictions:
                if placed is None:
                    life.cancel_demotion(eviction)
                elif life.end_demotion(eviction, placed.get(eviction)):
                    self._room.forget(eviction.entry)
                elif self._is_draining() and life.is_in_ram_alone(eviction.entry):
                    self._room.write_or_forget(eviction.entry, eviction.source.tier)
