"""Loads chunks from an SSD tier or a bucket into RAM.

A few threads serve all promotions in turns of a few megabytes, so a large one does not delay others' first
layers. Layers arrive in order, and streams send each as it arrives. Reads from disk go straight into the
arena, without a copy. Frames from a bucket are verified before they are sent, at the cost of one xxh3 pass.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence

from kintsugi.core.errors import Corrupted
from kintsugi.core.layout import HeadRange
from kintsugi.store.shard.table import EntryTable
from kintsugi.store.shard.tiers.bucket import ObjectMissing
from kintsugi.store.shard.tiers.ram_tier import Arena
from kintsugi.store.shard.work import LoadQueue, LoadStep

log = logging.getLogger(__name__)

READERS = 3
"""Concurrent reads: with one, an NVMe drive is idle between requests."""
FAR_READERS = 4
"""Concurrent reads of a bucket."""
FAULTS = {"missing": "the object is gone", "damaged": "its bytes are damaged", "failed": "it cannot be read"}
"""Reasons of failed loads for readers. Engines repeat them in answers, so they name no host, path or object;
the shard's log does."""


class Promoter:
    """Threads that fill the arena from one queue."""

    def __init__(
        self, table: EntryTable, queue: LoadQueue, arena: Arena, readers: int = READERS, name: str = "read"
    ) -> None:
        self.faults: Counter[str] = Counter()
        """Number of chunks that the tier lost (`missing`, `damaged`), and of loads that failed (`failed`)."""
        self._table = table
        self._queue = queue
        self._arena = arena
        self._threads = [
            threading.Thread(target=self._run, name=f"kintsugi-{name}{i}", daemon=True)
            for i in range(readers)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Finish running loads from SSD tiers, stop loads from a bucket, then end."""
        self._table.close_loads(self._queue)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            while (step := self._table.next_load(self._queue)) is not None:
                self._table.advance_load(step, *self._read(step))
        except BaseException as error:  # noqa: BLE001 - the shard fails, visibly
            self._table.fail(error)

    def _read(self, step: LoadStep) -> tuple[str, bool]:
        """Read the frames of a step. Returns why they cannot be read (empty if they are in place), and
        whether the chunk may be readable later, as in a bucket that does not answer."""
        load, target = step.load, step.load.target
        if target.lost:
            return target.lost, False
        if load.tier.is_remote and self._queue.closed:
            return f"{load.tier.name}: the shard is ending", True
        frames = [self._arena.view(*place) for place in target.places(step.start, step.stop)]
        try:
            load.tier.read(load.source, step.start, frames)
            if load.tier.is_remote:
                _check_frames(step, frames)
        except ObjectMissing as error:
            fault, failure = "missing", str(error)
        except Corrupted as error:
            fault, failure = "damaged", str(error)
        except OSError as error:
            fault, failure = "failed", str(error)
        else:
            return "", False
        self.faults[fault] += 1
        log.error("chunk %s cannot be read: %s: %s", load.entry.manifest.key, load.tier.name, failure)
        return f"{load.tier.name}: {FAULTS[fault]}", load.tier.is_remote and fault == "failed"


def _check_frames(step: LoadStep, frames: Sequence[memoryview]) -> None:
    """Raise `Corrupted` unless padded frames match the manifest's digests. Cost: one xxh3 pass. Encrypted
    frames are not checked."""
    manifest = step.load.entry.manifest
    every_head = HeadRange(0, manifest.layout.num_kv_heads)
    for layer, frame in zip(manifest.layers[step.start : step.stop], frames, strict=True):
        if not manifest.frame_is_intact(layer, every_head, frame[: manifest.frame_bytes_of(layer)]):
            raise Corrupted(f"layer {layer} does not match its digest")
