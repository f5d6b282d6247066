"""A shard: chunk KV in this process's arena and on its disks. No network; thread-safe.

It validates calls, owns the tiers' files and the threads that do their I/O, and leaves every decision about a
chunk to its `EntryTable`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.namespaces.rules import NamespaceRules
from kintsugi.core.spaces import ChunkKey, check_namespace
from kintsugi.store.shard.admission import ShardConfig
from kintsugi.store.shard.entry import Address, ChunkEntry
from kintsugi.store.shard.put import ChunkPut, Committed, PutOptions
from kintsugi.store.shard.reading import Reading
from kintsugi.store.shard.reports import Reports
from kintsugi.store.shard.table import EntryTable
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.home import Home
from kintsugi.store.shard.tiers.ram_tier import RamTier
from kintsugi.store.shard.tiers.uses import Uses
from kintsugi.store.shard.workers.promotion import Promoter
from kintsugi.store.shard.workers.tier_writer import TierWriter
from kintsugi.store.shard.workers.writeback import WriteBack


class Shard:
    """The chunk KV of one process: an arena in memory, and SSD tiers. `close` it."""

    def __init__(
        self,
        ram: RamTier,
        disks: Sequence[DiskTier] = (),
        shard_id: str | None = None,
        config: ShardConfig | None = None,
        home: Home | None = None,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shard_id = shard_id or str(uuid.uuid4())
        self.ram = ram
        self.disks = disks
        self.table = EntryTable(ram, disks, config or ShardConfig(), wall_clock, clock)
        self.reports = Reports(None if home is None else home.path / "reports")
        self._uses = Uses(None if home is None or not disks else home.path / "uses")
        self._home = home
        self._writers: list[WriteBack] = []
        below: TierWriter | None = None
        for queue in reversed(self.table.queues):
            below = TierWriter(self.table, queue.tier, below)
            self._writers.insert(0, WriteBack(self.table, queue, below, ram.arena))
        self._promoter = Promoter(self.table, ram.arena)
        try:
            uses = self._uses.load()
            for disk in disks:
                self.table.recover(disk.recover(lambda chunk: self.table.get(chunk) is not None, uses))
        except BaseException:
            self.reports.close()  # LMDB opens a folder once in a process
            raise
        for writer in self._writers:
            writer.start()
        self._promoter.start()

    def __len__(self) -> int:
        return len(self.table)

    @property
    def tiers(self) -> tuple[RamTier | DiskTier, ...]:
        """All of them, fastest first."""
        return (self.ram, *self.disks)

    @property
    def draining(self) -> bool:
        """Whether puts are refused because the shard is about to end."""
        return self.table.draining

    @property
    def failure(self) -> BaseException | None:
        """What killed one of its threads: nothing is served any more."""
        return self.table.failure

    def _check(self, namespace: str) -> None:
        """Raise `InvalidField` for a malformed namespace, `Unavailable` once the shard has failed."""
        check_namespace(namespace)
        self.table.check_alive()

    def _addresses(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Address]:
        """Addresses of the keys, after `_check`."""
        self._check(namespace)
        return [(namespace, key) for key in keys]

    # Finding

    def lookup(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkEntry | None]:
        """The entry of each key; a hit counts as a use."""
        return self.table.use(self._addresses(namespace, keys))

    def lookup_anchors(
        self, namespace: str, space_digest: bytes, anchors: Sequence[int]
    ) -> dict[int, list[ChunkManifest]]:
        """As `ChunkStore.lookup_anchors`."""
        self._check(namespace)
        return self.table.find_candidates(namespace, space_digest, anchors)

    def page(self, namespace: str, limit: int, after: ChunkKey | None) -> list[ChunkEntry]:
        """Entries in key order."""
        self._check(namespace)
        return self.table.page(namespace, limit, after)

    # Writing

    def begin_put(
        self, manifest: ChunkManifest, options: PutOptions | None = None, wait_s: float = 0.0
    ) -> ChunkPut | None:
        """Reserve room for a chunk; None if the shard has it already. End it with `commit` or `abort`.

        Raises `ResourceExhausted` for what can never fit, `NoRoomYet` if `wait_s` was too short.
        """
        return self.table.begin_put(manifest, options or PutOptions(), wait_s)

    def commit(self, put: ChunkPut) -> Committed:
        """Make the chunk visible. Raises `InvalidField` where frames are missing, `NoRoomYet` where puts that
        began together exceed a quota."""
        if not put.complete:
            self.abort(put)
            raise InvalidField("frames", "the put was committed before its last layer")
        return self.table.commit(put)

    def abort(self, put: ChunkPut) -> None:
        """Give the room back."""
        self.table.abort(put)

    def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks; the number that was there. Durable once `flush_writers` is done."""
        return self.table.delete(self._addresses(namespace, keys))

    def clear(self, namespace: str) -> int:
        """Forget a namespace's chunks; their number."""
        self._check(namespace)
        return self.table.clear(namespace)

    def flush_writers(self) -> list[Future[None]]:
        """Done once every put and deletion until now is on disk."""
        return self.table.flush()

    # Reading

    def open(self, namespace: str, keys: Sequence[ChunkKey], layers: range, heads: HeadRange) -> Reading:
        """Hold chunks in place, and start to bring those on disk into RAM; end with `close_reading`.

        Raises `InvalidField` for a range that a chunk lacks.
        """
        return self.table.open(self._addresses(namespace, keys), layers, heads)

    def close_reading(self, reading: Reading) -> None:
        """Let the chunks go."""
        self.table.close(reading)

    def prefetch(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """Start to bring chunks into RAM; how many are there or on their way."""
        return self.table.prefetch(self._addresses(namespace, keys))

    def verify(self, namespace: str, keys: Sequence[ChunkKey]) -> dict[ChunkKey, bool]:
        """Read chunks from every tier that holds them; copies whose digests are wrong are quarantined.

        Key -> whether all its copies are intact; absent ones are left out. Blocks; one xxh3 pass over the
        bytes.
        """
        check_namespace(namespace)
        intact: dict[ChunkKey, bool] = {}
        for key in keys:
            opened = self.table.open_copies((namespace, key))
            if opened is None:
                continue
            entry, reading = opened
            held = [chunk for chunk in reading.chunks if chunk is not None]
            damaged = [chunk.residence for chunk in held if not chunk.is_intact()]
            self.close_reading(reading)
            intact[key] = not damaged
            if damaged:
                self.table.quarantine_copies(entry, [chunk.residence for chunk in held], damaged)
        return intact

    # Keeping

    def pin(self, namespace: str, keys: Sequence[ChunkKey], lease_s: float) -> tuple[str, int]:
        """Keep chunks from leaving; the lease's id and how many of them are there."""
        self._check(namespace)
        return self.table.pin(namespace, keys, lease_s)

    def set_rules(self, rules: NamespaceRules) -> None:
        """Replace the rules for namespaces. Chunks beyond a new limit leave when more are put."""
        self.table.shares.rules = rules

    def unpin(self, lease_id: str) -> int:
        """End a lease early; how many chunks it held."""
        return self.table.unpin(lease_id)

    def save_uses(self) -> None:
        """Remember over a restart how chunks were used."""
        self._uses.save(entry for entry in self.table.entries() if entry.disk is not None)

    def drain(self, timeout_s: float) -> int:
        """Refuse puts and write back what only RAM holds; the bytes that were not written in time.

        Raises `InvalidField` for a time that is none."""
        if not timeout_s >= 0:
            raise InvalidField("timeout_s", f"{timeout_s} is not a duration")
        return self.table.drain(timeout_s)

    def close(self) -> None:
        """Write what waits, stop the threads, let go of memory and directories. Once."""
        self._promoter.close()
        for writer in self._writers:
            writer.close()
        self.save_uses()
        for disk in self.disks:
            disk.close()
        self.reports.close()
        self.ram.arena.close()
        if self._home is not None:
            self._home.close()
