"""kill -9 at random points of put, evict, demote, delete and start-up; flipped bits everywhere.

Every chunk afterwards is whole or absent, the last put that was acknowledged as durable is there, what was
deleted stays deleted, and nothing damaged is ever served. A failure prints its seed:
`KINTSUGI_SEED=n` runs it again.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from kintsugi.core.errors import Corrupted
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.shard.entry import Copying, Residence
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.lower_tier import _decode_catalog_record, _encode_catalog_record, catalog_key
from kintsugi.store.shard.tiers.ram_tier import PutOptions
from kintsugi.store.shard.work import Eviction
from kintsugi.store.shard.workers.writeback import TierWriter
from tests.contracts.store_contract import make_chunk, make_mixed_chunk

pytestmark = pytest.mark.simulation

MIB = 1 << 20


def spec(folder: Path) -> ShardSpec:
    ssds = (SsdSpec(folder / "fast", 2 * MIB), SsdSpec(folder / "slow", 3 * MIB))
    return ShardSpec(MIB, folder / "data", ssds)


FIRST_TIER_MS, LAST_TIER_MS = 0.0, 1e9
"""Costs of a chunk that goes to the first SSD tier, because the cost is unknown, and to the last, because any
tier loads the chunk in time."""
COSTS_MS = (FIRST_TIER_MS, LAST_TIER_MS)
DAY_S = 86400.0
Chunk = tuple[ChunkManifest, list[bytes]]
Putting = tuple[ChunkKey, float, Future[None]]
"""A chunk that was put, when it expires by this put (Unix seconds), and the future that says that it is
durable."""


class Life:
    """The life of a shard until it is killed: prints what it is about to put and to delete, and what it was
    told is durable or deleted. Every put expires at a time of its own, which tells puts of one key apart."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._chance = random.Random(seed)
        self._shard = open_shard(spec(folder))
        self._ranges: dict[ChunkKey, tuple[Callable[[range], Chunk], range]] = {}
        """How chunks that were put are made again."""
        print("open", flush=True)

    def live(self) -> None:
        while True:
            way = self._chance.random()
            if way < 0.2:
                key = self._any_chunk()[0].key
                self._delete([key])
                for flushed in self._shard.flush_writers():
                    flushed.result(30.0)
                print(f"deleted {key.hex}", flush=True)
                self._check_catalogs()
            elif way < 0.4:
                self._put_again()
            elif way < 0.45:
                manifest, _ = self._any_chunk()
                put = self._shard.begin_put(manifest, PutOptions(durable=True), wait_s=30.0)
                if put is not None:
                    self._shard.table.abort(put)
            else:
                self._await_durable([self._put(self._any_chunk(), self._chance.choice(COSTS_MS))])

    def _check_catalogs(self) -> None:
        """At rest, each tier's catalog names what the shard finds there."""
        self._shard.record_lifetimes()  # a chunk that was put again is kept for longer
        for disk in self._shard.disks:
            named = dict(disk.catalog.records())
            for entry in self._shard.table.entries():
                if entry.disk is not None and entry.disk.tier is disk:
                    record = named[catalog_key(entry.address)]
                    assert record is not None
                    assert record.expires_at_s == entry.expires_at_s

    def _any_chunk(self) -> Chunk:
        tokens = self._chance.choice((33, 100, 200, 400))
        make = self._chance.choice((make_chunk, make_mixed_chunk))
        chosen = range(start := self._chance.randrange(60) * 1000, start + tokens)
        chunk = make(chosen)
        self._ranges[chunk[0].key] = make, chosen
        return chunk

    def _put(self, chunk: Chunk, recompute_ms: float) -> Putting | None:
        """Put a chunk, and do not wait until it is durable; None for one that is there."""
        manifest, frames = chunk
        put = self._shard.begin_put(
            manifest, PutOptions(durable=True, ttl_s=DAY_S, recompute_ms=recompute_ms), wait_s=30.0
        )
        if put is None:
            return None
        for layer, frame in zip(manifest.layers, frames, strict=True):
            put.write(layer, memoryview(frame))
        print(f"putting {manifest.key.hex}", flush=True)
        expires_at_s = put.entry.expires_at_s  # what is promised: a later put may keep the chunk for longer
        durable = self._shard.commit(put).durable
        assert durable is not None
        return manifest.key, expires_at_s, durable

    def _await_durable(self, puts: Iterable[Putting | None]) -> None:
        for key, expires_at_s, durable in filter(None, puts):
            durable.result(30.0)
            print(f"durable {key.hex} {expires_at_s!r}", flush=True)

    def _put_again(self) -> None:
        """While chunks are written to the first tier, which makes others leave it, delete some of either and
        put them again, to any tier. Nothing is waited for in between."""
        puts = [self._put(self._any_chunk(), FIRST_TIER_MS) for _ in range(4)]
        held = sorted(entry.manifest.key for entry in self._shard.table.entries())
        held = [key for key in held if key in self._ranges]
        time.sleep(self._chance.choice((0.0, 0.001, 0.003, 0.01)))  # the writers have got somewhere
        again = self._chance.sample(held, min(3, len(held)))
        self._delete(again)
        puts = [put for put in puts if put is not None and put[0] not in again]
        for key in again:
            make, tokens = self._ranges[key]
            puts.append(self._put(make(tokens), self._chance.choice(COSTS_MS)))
        self._await_durable(puts)

    def _delete(self, keys: list[ChunkKey]) -> None:
        for key in keys:
            print(f"deleting {key.hex}", flush=True)
        self._shard.delete("acme", keys)


def live(folder: Path, seed: int) -> None:
    Life(folder, seed).live()


def life_and_death(folder: Path, seed: int, after_s: float) -> list[str]:
    """Run `live` and kill it; what it said."""
    code = f"from pathlib import Path; from {__name__} import live; live(Path({str(folder)!r}), {seed})"
    path = os.pathsep.join(entry for entry in (str(Path.cwd()), *sys.path) if entry)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()  # a life that is shorter than its start-up dies in it
        if after_s > 0 and first:
            time.sleep(after_s)
    finally:
        process.send_signal(signal.SIGKILL)
    said, complaint = process.communicate()
    assert process.returncode == -signal.SIGKILL, complaint
    return [line for line in said.splitlines(keepends=True) if line.endswith("\n")]


def die_in_start_up(folder: Path, chance: random.Random) -> None:
    code = f"from pathlib import Path; from {__name__} import live; live(Path({str(folder)!r}), 0)"
    path = os.pathsep.join(entry for entry in (str(Path.cwd()), *sys.path) if entry)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path}
    )
    time.sleep(chance.uniform(0.0, 1.0))
    process.send_signal(signal.SIGKILL)
    process.wait()


def check(folder: Path, said: list[str]) -> None:
    """Everything is whole, and what was acknowledged is so."""
    last = {ChunkKey.from_hex(line.split()[1]): line.split()[0] for line in said}
    expires_at_s = {
        ChunkKey.from_hex(words[1]): float(words[2]) for words in map(str.split, said) if words[2:]
    }
    durable = [ChunkKey.from_hex(line.split()[1]) for line in said if line.startswith("durable")]
    shard = open_shard(spec(folder))
    try:
        keys = {entry.manifest.key for entry in shard.table.entries()}
        assert shard.verify("acme", sorted(keys)) == dict.fromkeys(keys, True)
        assert shard.table.counters.quarantined == 0
        assert not {key for key, word in last.items() if word == "deleted"} & keys
        if durable and last[durable[-1]] == "durable":
            assert durable[-1] in keys
        # No chunk is an older one than that which was last acknowledged under its key.
        for entry in shard.table.entries():
            assert entry.expires_at_s >= expires_at_s.get(entry.manifest.key, 0.0)
        for disk in shard.disks:
            assert disk.allocator.used_bytes <= disk.capacity_bytes
    finally:
        shard.close()


def crash(folder: Path, seed: int, rounds: int) -> None:
    print(f"KINTSUGI_SEED={seed}")
    chance = random.Random(seed)
    for round_ in range(rounds):
        if chance.random() < 0.2:
            die_in_start_up(folder, chance)
        check(folder, life_and_death(folder, seed * 1000 + round_, chance.uniform(0.0, 0.6)))


def seeds(default: int) -> int:
    return int(os.environ.get("KINTSUGI_SEED", default))


def test_five_crashes(tmp_path: Path) -> None:
    crash(tmp_path, seeds(1), rounds=5)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_hundred_crashes(tmp_path: Path) -> None:
    crash(tmp_path, seeds(random.randrange(1 << 16)), rounds=100)


def test_a_chunk_deleted_while_it_moves_down_is_gone_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next tier's catalog names the copy; then the chunk is deleted; the shard dies once it said so."""
    deletions: list[tuple[ChunkKey, list[Future[None]]]] = []
    shard = open_shard(spec(tmp_path / "shard"))
    copy_from = TierWriter.copy_from

    def delete_meanwhile(
        writer: TierWriter, tier: DiskTier, evictions: Sequence[Eviction]
    ) -> Mapping[Eviction, Residence]:
        placed = copy_from(writer, tier, evictions)
        if placed and not deletions:
            key = next(iter(placed)).entry.manifest.key
            shard.delete("acme", [key])
            deletions.append((key, shard.flush_writers()))
            (_, slow) = shard.table.queues
            with shard.table._lock:
                idle = slow.add_flush()
                shard.table._changed.notify_all()
            idle.result(10.0)  # whatever the slow tier's writer was to do by now is done
        return placed

    monkeypatch.setattr(TierWriter, "copy_from", delete_meanwhile)
    try:
        for start in range(0, 100_000, 1000):
            put_durably(shard, *make_chunk(range(start, start + 100)))
            if deletions:
                break
        ((key, flushes),) = deletions
        for flushed in flushes:
            flushed.result(10.0)
        shutil.copytree(tmp_path / "shard", tmp_path / "crashed")
    finally:
        shard.close()
    with closing(open_shard(spec(tmp_path / "crashed"))) as again:
        assert len(again)
        assert again.table.get(("acme", key)) is None


@pytest.mark.parametrize("late", ["ssd0", "ssd1"])
@pytest.mark.parametrize("flushed", [False, True])
def test_a_chunk_put_again_before_its_old_copy_is_committed_outlives_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str, flushed: bool
) -> None:
    """The old chunk's frames are in the slab of tier `late`, written back or moved down; before the catalog
    there names them, the chunk is deleted and put again, durably, on ssd1. The old copy is committed last."""
    shard = open_shard(spec(tmp_path / "shard"))
    chunks: dict[ChunkKey, Chunk] = {}
    again: list[ChunkKey] = []
    commit = TierWriter.sync_and_commit

    def put_again_before(
        writer: TierWriter, written: Sequence[tuple[Copying, Residence]], since: int
    ) -> None:
        if again or writer.tier.name != late:
            commit(writer, written, since)
            return
        again.append(key := written[0][0].entry.manifest.key)
        shard.delete("acme", [key])
        put_durably(shard, *chunks[key], PutOptions(durable=True, recompute_ms=LAST_TIER_MS))
        commit(writer, written, since)
        if not flushed:
            shutil.copytree(tmp_path / "shard", tmp_path / "crashed")

    monkeypatch.setattr(TierWriter, "sync_and_commit", put_again_before)
    try:
        for start in range(0, 100_000, 1000):
            manifest, frames = make_chunk(range(start, start + 100))
            chunks[manifest.key] = manifest, frames
            put_durably(shard, manifest, frames, PutOptions(durable=True, ttl_s=3600.0))
            if again:
                break
        (key,) = again
        for done in shard.flush_writers():
            done.result(10.0)
        assert_as_put_again(shard, key)
        if flushed:
            shutil.copytree(tmp_path / "shard", tmp_path / "crashed")
    finally:
        shard.close()
    with closing(open_shard(spec(tmp_path / "crashed"))) as recovered:
        assert_as_put_again(recovered, key)


def test_a_chunk_put_again_on_a_slower_tier_outlives_a_crash(tmp_path: Path) -> None:
    """The faster tier, which a restart reads first, has nothing to write meanwhile."""
    manifest, frames = make_chunk(range(100))
    with closing(open_shard(spec(tmp_path / "shard"))) as shard:
        put_durably(shard, manifest, frames, PutOptions(durable=True, ttl_s=3600.0))
        shard.delete("acme", [manifest.key])
        put_durably(shard, manifest, frames, PutOptions(durable=True, recompute_ms=LAST_TIER_MS))
        shutil.copytree(tmp_path / "shard", tmp_path / "crashed")
    with closing(open_shard(spec(tmp_path / "crashed"))) as recovered:
        assert_as_put_again(recovered, manifest.key)


def assert_as_put_again(shard: Shard, key: ChunkKey) -> None:
    """A shard holds a chunk that was first put for an hour, then for good on ssd1."""
    entry = shard.table.get(("acme", key))
    assert entry is not None
    assert entry.disk is not None
    assert (entry.expires_at_s, entry.disk.tier.name) == (math.inf, "ssd1")
    assert shard.verify("acme", [key]) == {key: True}


def filled(folder: Path, count: int = 6) -> dict[ChunkKey, list[bytes]]:
    """A shard of chunks that all lie on its first disk, closed."""
    chunks = {}
    shard = open_shard(spec(folder))
    for start in range(0, 1000 * count, 1000):
        manifest, frames = make_chunk(range(start, start + 100))
        put_durably(shard, manifest, frames)
        chunks[manifest.key] = frames
    shard.close()
    return chunks


DURABLE = PutOptions(durable=True)


def put_durably(
    shard: Shard, manifest: ChunkManifest, frames: list[bytes], options: PutOptions = DURABLE
) -> None:
    put = shard.begin_put(manifest, options, wait_s=10.0)
    assert put is not None
    for layer, frame in enumerate(frames):
        put.write(layer, memoryview(frame))
    durable = shard.commit(put).durable
    assert durable is not None
    durable.result(10.0)


def served_right(shard: Shard, chunks: dict[ChunkKey, list[bytes]]) -> int:
    """How many chunks are served; none of them wrong."""
    served = 0
    for key, frames in chunks.items():
        intact = shard.verify("acme", [key])
        assert intact in ({key: True}, {key: False}, {})
        if intact.get(key):
            reading = shard.open("acme", [key], range(3), HeadRange(0, 4))
            held = reading.chunks[0]
            assert held is not None
            for layer, frame in enumerate(frames):
                deadline_s = time.monotonic() + 10
                while held.in_ram and not held.ready(layer):
                    assert time.monotonic() < deadline_s
                assert bytes(held.frame(layer) if held.in_ram else held.read(layer)) == frame
            shard.table.close(reading)
            served += 1
    return served


@pytest.mark.parametrize("seed", range(5))
def test_a_flipped_bit_in_the_slab_costs_at_most_its_chunk(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    chunks = filled(tmp_path)
    slab = tmp_path / "fast/kintsugi-tier/slab"
    used = sum(3 * 28672 for _ in chunks)
    with open(slab, "r+b") as file:
        position = chance.randrange(used)
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    shard = open_shard(spec(tmp_path))
    try:
        assert served_right(shard, chunks) >= len(chunks) - 1
    finally:
        shard.close()


@pytest.mark.parametrize("seed", range(5))
def test_a_flipped_bit_in_a_catalog_value_costs_its_chunk(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    chunks = filled(tmp_path)
    catalog = lmdb.open(str(tmp_path / "fast/kintsugi-tier/catalog"))
    with catalog, catalog.begin(write=True) as transaction:
        key, value = chance.choice(list(transaction.cursor()))
        damaged = bytearray(value)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        transaction.put(key, bytes(damaged))
    shard = open_shard(spec(tmp_path))
    try:
        assert served_right(shard, chunks) == len(chunks) - 1
        assert shard.table.counters.quarantined == 1
    finally:
        shard.close()


def test_records_that_claim_the_same_bytes_are_both_dropped(tmp_path: Path) -> None:
    chunks = filled(tmp_path)
    catalog = lmdb.open(str(tmp_path / "fast/kintsugi-tier/catalog"))
    with catalog, catalog.begin(write=True) as transaction:
        (_, first), (key, second) = [(k, _decode_catalog_record(k, v)) for k, v in transaction.cursor()][:2]
        assert first is not None
        assert second is not None
        second.extents[0].offset = first.extents[0].offset
        transaction.put(key, _encode_catalog_record(key, second))
    shard = open_shard(spec(tmp_path))
    try:
        assert served_right(shard, chunks) == len(chunks) - 2
    finally:
        shard.close()


def test_an_identity_that_is_none_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, count=1)
    (tmp_path / "data/kintsugi.json").write_text('{"format_version"')
    with pytest.raises(Corrupted, match="restore"):
        open_shard(spec(tmp_path))
