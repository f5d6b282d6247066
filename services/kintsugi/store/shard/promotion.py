"""Chunks on their way from an SSD tier into RAM.

A few threads serve all promotions in turns of a few megabytes, so that a large one delays nobody's first
layer. Layers arrive in order; whoever streams the chunk takes each as it is there. Cost per byte: the
disk's own, straight into the arena.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kintsugi.core.errors import Corrupted
from kintsugi.store.shard.entry import ChunkEntry, Residence
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.ram_tier import RamTier

log = logging.getLogger(__name__)

STEP_BYTES = 4 << 20
READERS = 3
"""Reads in flight: one leaves an NVMe drive idle between requests."""


@dataclass(frozen=True)
class Promotion:
    """One chunk on its way; both residences are held until it is there."""

    entry: ChunkEntry
    source: Residence
    tier: DiskTier
    target: Residence


class Promoter:
    """Threads that fill the arena from slabs."""

    def __init__(
        self,
        ram: RamTier,
        lock: threading.RLock,
        on_lost: Callable[[ChunkEntry], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._ram = ram
        self._lock = lock
        self._on_lost = on_lost
        self._on_death = on_death
        self._waiting = threading.Condition(lock)
        self._turns: deque[Iterator[tuple[Promotion, int, int]]] = deque()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kintsugi-read{i}", daemon=True) for i in range(READERS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, loads: Sequence[Promotion]) -> None:
        """Fill the targets, whose layers are all unloaded, layer-major. Under the lock."""
        self._turns.append(_steps(loads))
        self._waiting.notify_all()

    def close(self) -> None:
        """Finish what was begun, then end."""
        with self._lock:
            self._closed = True
            self._waiting.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    self._waiting.wait_for(lambda: self._turns or self._closed)
                    if not self._turns:
                        return
                    turn = self._turns.popleft()
                    step = next(turn, None)
                    if step is not None:
                        self._turns.append(turn)
                        self._waiting.notify()
                if step is not None:
                    self._load(*step)
        except BaseException as error:  # noqa: BLE001 - the shard fails, visibly
            self._on_death(error)

    def _load(self, load: Promotion, start: int, stop: int) -> None:
        target = load.target
        lost = target.lost
        if not lost:
            frames = [self._ram.arena.view(offset, target.stride) for offset in target.offsets[start:stop]]
            try:
                load.tier.read(load.source, start, frames)
            except (OSError, Corrupted) as error:
                lost = f"{load.tier.name}: {error}"
                log.error("chunk %s cannot be read: %s", load.entry.manifest.key, lost)
        with self._lock:
            target.unloaded.difference_update(range(start, stop))
            if lost and not target.lost:
                target.lost = lost
                self._on_lost(load.entry)
            target.wake()
            if not target.unloaded:
                load.source.release()
                target.release()


def _steps(loads: Sequence[Promotion]) -> Iterator[tuple[Promotion, int, int]]:
    """Layers `[start, stop)` of one load at a time, the earliest layers of every load first."""
    positions = dict.fromkeys(loads, 0)
    while positions:
        load = min(positions, key=positions.__getitem__)
        start = positions[load]
        stop = min(start + max(1, STEP_BYTES // load.target.stride), len(load.target.offsets))
        yield load, start, stop
        if stop == len(load.target.offsets):
            del positions[load]
        else:
            positions[load] = stop
