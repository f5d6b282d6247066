"""Chunks on their way from an SSD tier into RAM.

A few threads serve all promotions in turns of a few megabytes, so that a large one delays nobody's first
layer. Layers arrive in order; whoever streams the chunk takes each as it is there. Cost per byte: the
disk's own, straight into the arena.
"""

from __future__ import annotations

import logging
import threading

from kintsugi.core.errors import Corrupted
from kintsugi.store.shard.table import EntryTable
from kintsugi.store.shard.tiers.arena import Arena
from kintsugi.store.shard.work import LoadStep

log = logging.getLogger(__name__)

READERS = 3
"""Reads in flight: one leaves an NVMe drive idle between requests."""


class Promoter:
    """Threads that fill the arena from slabs."""

    def __init__(self, table: EntryTable, arena: Arena) -> None:
        self._table = table
        self._arena = arena
        self._threads = [
            threading.Thread(target=self._run, name=f"kintsugi-read{i}", daemon=True) for i in range(READERS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Finish what was begun, then end."""
        self._table.close_loads()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            while (step := self._table.next_load()) is not None:
                self._table.advance_load(step, self._read(step))
        except BaseException as error:  # noqa: BLE001 - the shard fails, visibly
            self._table.fail(error)

    def _read(self, step: LoadStep) -> str:
        """Why the frames cannot be read; empty where they are in place."""
        load, target = step.load, step.load.target
        if target.lost:
            return target.lost
        try:
            frames = [self._arena.view(*place) for place in target.places(step.start, step.stop)]
            load.tier.read(load.source, step.start, frames)
        except (OSError, Corrupted) as error:
            log.error("chunk %s cannot be read: %s: %s", load.entry.manifest.key, load.tier.name, error)
            return f"{load.tier.name}: {error}"
        return ""
