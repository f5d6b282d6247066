"""Disks that are full, read-only or broken, slabs that shrink, clocks that jump: clear errors, nothing wrong.

Faults hit a running shard below its tiers, at the calls that reach the disk. Whatever they do, a chunk is
served right or not at all, what RAM holds is served, and once the disk is well again so is the shard.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from kintsugi.core.errors import KintsugiError
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.shard.opening import open_shard
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.disk_tier import Slab
from kintsugi.store.shard.tiers.lower_tier import Catalog
from kintsugi.store.shard.tiers.ram_tier import PutOptions, RamTier
from kintsugi.store.shard.workers.keeper import Keeper
from tests.contracts.store_contract import make_chunk
from tests.simulation.test_store_crashes import filled, seeds, served_right, spec

pytestmark = pytest.mark.simulation

STEPS = 240
SICK_STEPS = range(60, 160)
FAULTS = {
    "disk full": (errno.ENOSPC, ("write", "commit"), 1.0),
    "read-only": (errno.EROFS, ("write", "sync", "commit"), 1.0),
    "input/output errors": (errno.EIO, ("read", "write", "sync", "commit"), 0.3),
}


class Disk:
    """Fails calls that reach a disk, while it is sick."""

    def __init__(self, chance: random.Random, number: int, calls: tuple[str, ...], share: float) -> None:
        self.sick = False
        self.failed = 0
        self._chance = chance
        self._number = number
        self._calls = calls
        self._share = share

    def check(self, call: str) -> None:
        if self.sick and call in self._calls and self._chance.random() < self._share:
            self.failed += 1
            message = os.strerror(self._number)
            raise lmdb.DiskError(message) if call == "commit" else OSError(self._number, message)


@contextmanager
def installed(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def through(owner: type, name: str, call: str) -> None:
        original: Callable[..., object] = getattr(owner, name)

        def checked(*arguments: object) -> object:
            disk.check(call)
            return original(*arguments)

        patch.setattr(owner, name, checked)

    with monkeypatch.context() as patch:
        for name in ("read", "write", "sync"):
            through(Slab, name, name)
        through(Catalog, "_apply", "commit")
        yield


class Life:
    """Random puts, reads and deletes against a shard, and what it has to remember of them."""

    def __init__(self, shard: Shard, chance: random.Random) -> None:
        self.shard = shard
        self.chance = chance
        self.frames: dict[ChunkKey, list[bytes]] = {}
        self.deleted: set[ChunkKey] = set()
        self.refused = 0

    def step(self) -> None:
        act = self.chance.choices((self.put, self.read, self.delete), (5, 6, 1))[0]
        try:
            act()
        except KintsugiError:
            self.refused += 1
        assert self.shard.failure is None
        self.shard.table.check()
        assert self.shard.ram.allocator.used_bytes <= self.shard.ram.capacity_bytes

    def put(self) -> None:
        start = self.chance.randrange(40) * 1000
        manifest, frames = make_chunk(range(start, start + self.chance.choice((33, 100, 300))))
        if self.put_chunk(manifest, frames, durable=self.chance.random() < 0.5):
            reading = self.shard.open("acme", [manifest.key], range(3), HeadRange(0, 4))
            held = reading.chunks[0]
            assert held is not None
            assert held.in_ram, "what was put last is served, whatever the disk does"
            assert [bytes(held.frame(layer)) for layer in range(3)] == frames
            self.shard.table.close(reading)

    def put_chunk(self, manifest: ChunkManifest, frames: list[bytes], durable: bool) -> bool:
        """Whether it was new."""
        begun = self.shard.begin_put(manifest, PutOptions(durable=durable), wait_s=10.0)
        self.frames[manifest.key] = frames
        if begun is None:
            return False
        for layer, frame in enumerate(frames):
            begun.write(layer, memoryview(frame))
        written = self.shard.commit(begun).durable
        self.deleted.discard(manifest.key)
        if durable:
            assert written is not None
            written.result(10.0)
        return True

    def read(self) -> None:
        """As a stream does: each layer is right, or the chunk is lost."""
        if not self.frames:
            return
        key = self.chance.choice(list(self.frames))
        reading = self.shard.open("acme", [key], range(3), HeadRange(0, 4))
        held = reading.chunks[0]
        try:
            for layer in range(3 if held is not None else 0):
                assert held is not None
                deadline_s = time.monotonic() + 10
                while held.in_ram and not held.ready(layer):
                    assert time.monotonic() < deadline_s
                if held.in_ram and held.lost:
                    break
                assert (
                    bytes(held.frame(layer) if held.in_ram else held.read(layer)) == self.frames[key][layer]
                )
        finally:
            self.shard.table.close(reading)
        if self.chance.random() < 0.3:
            self.shard.verify("acme", [key])

    def delete(self) -> None:
        if self.frames:
            key = self.chance.choice(list(self.frames))
            self.shard.delete("acme", [key])
            for flushed in self.shard.flush_writers():
                flushed.result(10.0)
            self.deleted.add(key)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_sick_disk_harms_nothing_but_what_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, seed: int
) -> None:
    seed = seeds(seed)
    print(f"KINTSUGI_SEED={seed}")
    chance = random.Random(seed)
    disk = Disk(random.Random(seed + 1), *FAULTS[fault])
    shard = open_shard(spec(tmp_path))
    life = Life(shard, chance)
    with installed(disk, monkeypatch):
        for step in range(STEPS):
            disk.sick = step in SICK_STEPS
            life.step()
    assert disk.failed
    assert life.refused
    last, frames = make_chunk(range(90_000, 90_100))
    life.put_chunk(last, frames, durable=True)
    assert shard.drain(20.0) == 0
    assert not any(tier.failure for tier in shard.disks)
    shard.close()
    shard = open_shard(spec(tmp_path))
    found = {entry.manifest.key for entry in shard.table.entries()}
    assert last.key in found
    assert not found & life.deleted
    assert served_right(shard, {key: life.frames[key] for key in found}) == len(found)
    assert shard.table.counters.quarantined == 0
    shard.close()


def test_a_slab_that_is_cut_while_it_is_used_loses_only_what_lay_there(tmp_path: Path) -> None:
    chunks = filled(tmp_path)
    shard = open_shard(spec(tmp_path))
    os.truncate(tmp_path / "fast/kintsugi-tier/slab", 3 * 28672 * 2)
    try:
        assert served_right(shard, chunks) == 2
        assert shard.table.counters.quarantined == len(chunks) - 2
        assert len(shard) == 2
    finally:
        shard.close()


def test_clocks_that_jump_expire_only_what_has_a_term() -> None:
    wall_s, monotonic_s = 1e9, 100.0
    shard = Shard(RamTier(1 << 20), wall_clock=lambda: wall_s, clock=lambda: monotonic_s)

    def put(start: int, options: PutOptions) -> ChunkKey:
        manifest, frames = make_chunk(range(start, start + 40))
        begun = shard.begin_put(manifest, options, wait_s=1.0)
        assert begun is not None
        for layer, frame in enumerate(frames):
            begun.write(layer, memoryview(frame))
        assert shard.commit(begun).inserted
        return manifest.key

    def alive(*keys: ChunkKey) -> list[bool]:
        Keeper(shard).turn()
        return [entry is not None for entry in shard.lookup("acme", keys)]

    forever, hour, pinned = put(0, PutOptions()), put(100, PutOptions(ttl_s=3600)), put(200, PutOptions())
    shard.pin("acme", [pinned], lease_s=60)
    wall_s -= 10 * 365 * 86400
    early = put(300, PutOptions(ttl_s=10))
    assert alive(forever, hour, pinned, early) == [True] * 4
    assert len(shard.table._leases) == 1
    wall_s += 20 * 365 * 86400
    assert alive(forever, hour, pinned, early) == [True, False, True, False]
    assert len(shard.table._leases) == 1, "leases follow a clock that does not jump"
    monotonic_s += 61
    alive(forever)
    assert len(shard.table._leases) == 0
    shard.close()
