"""Power loss at random moments: what was written since the last sync is dropped, torn or kept, by chance.

A shard works on real files while a model of the disk follows every write and every sync. At random moments
the model makes an image: what a disk might hold if the power went now. A shard opens each image and is asked
for all that had been acknowledged before. A failure prints its seed: `KINTSUGI_SEED=n` runs it again.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kintsugi.core.errors import KintsugiError
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.disk_tier import Slab
from kintsugi.store.shard.tiers.lower_tier import Catalog
from kintsugi.store.shard.tiers.ram_tier import PutOptions
from tests.contracts.store_contract import make_chunk
from tests.simulation.test_store_crashes import seeds

pytestmark = pytest.mark.simulation

MIB = 1 << 20
SECTOR = 512
PAGE = 4096
META_PAGES = 2
"""LMDB's first pages: one of them is written after all others were synced."""
STEPS = 30
IMAGES = 6


def spec(folder: Path, ssd_mib: tuple[int, ...]) -> ShardSpec:
    tiers = tuple(SsdSpec(folder / f"disk{i}", size * MIB) for i, size in enumerate(ssd_mib))
    return ShardSpec(MIB, folder / "data", tiers)


@dataclass
class SlabModel:
    """What of one slab is on the disk for sure, and the writes since that may be."""

    safe: bytearray
    pending: list[tuple[int, bytes]] = field(default_factory=list)


class Power:
    """The model of the disk below a folder. Its lock makes every call, and every image, one moment."""

    def __init__(self, folder: Path, images: Path, chance: random.Random) -> None:
        self.lock = threading.RLock()
        self.acknowledged: set[ChunkKey] = set()
        self.deleted: set[ChunkKey] = set()
        self.images: list[tuple[Path, set[ChunkKey], set[ChunkKey]]] = []
        """Where each image lies, and what was acknowledged before it."""
        self.sync_fails = 0.0
        """Share of slab syncs that fail and lose what they were to write."""
        self._folder, self._target, self._chance = folder, images, chance
        self._slabs: dict[Path, SlabModel] = {}
        self._catalogs: dict[Path, bytes] = {}
        self._names: dict[Path, set[str]] = {}
        """Names in each folder at its last sync."""
        self._due = 0.0

    def take_images(self, share: float) -> None:
        """From now on make an image at this share of moments."""
        self._due = share

    def write(self, slab: Slab, offset: int, data: bytes) -> None:
        with self.lock:
            self._moment()
            self._slab(slab.path).pending.append((offset, data))

    def sync(self, slab: Slab) -> None:
        """Raises `OSError` where the sync fails; the kernel then forgets what it could not write."""
        with self.lock:
            self._moment()
            model = self._slab(slab.path)
            if self._chance.random() < self.sync_fails:
                model.pending.clear()
                raise OSError(errno.EIO, "Input/output error")
            for offset, data in model.pending:
                model.safe[offset : offset + len(data)] = data
            model.pending.clear()

    def commit(self, file: Path, apply: Callable[[], None]) -> None:
        """One transaction of LMDB: its pages, a sync, then the page that makes it count."""
        with self.lock:
            before = file.read_bytes()
            apply()
            after = file.read_bytes()
            self._catalogs[file] = self._tear_pages(before, after)
            self._moment()
            self._catalogs[file] = after
            self._moment()

    def sync_names(self, folder: Path) -> None:
        with self.lock:
            self._names[folder] = {path.name for path in folder.iterdir()}

    def _slab(self, path: Path) -> SlabModel:
        return self._slabs.setdefault(path, SlabModel(bytearray(path.stat().st_size)))

    def _tear_pages(self, before: bytes, after: bytes) -> bytes:
        """A catalog during its transaction: some of the new pages, none of them counts yet."""
        torn = bytearray(before.ljust(len(after), b"\0"))
        for start in range(META_PAGES * PAGE, len(after), PAGE):
            if self._chance.random() < 0.5:
                torn[start : start + PAGE] = after[start : start + PAGE]
        return bytes(torn)

    def _moment(self) -> None:
        """The power may go now."""
        if self._chance.random() < self._due and len(self.images) < IMAGES:
            self.go()

    def go(self) -> None:
        """The power goes now: make an image."""
        with self.lock:
            image = self._target / f"image-{len(self.images)}"
            self._write_image(self._folder, image)
            self.images.append((image, set(self.acknowledged), set(self.deleted)))

    def _write_image(self, source: Path, target: Path) -> None:
        """Copy what survives: of a folder the names at its last sync, of files what was synced."""
        target.mkdir(parents=True)
        for path in source.iterdir():
            if path.name not in self._names.get(source, ()):
                continue
            if path.is_dir():
                self._write_image(path, target / path.name)
            elif path in self._slabs:
                (target / path.name).write_bytes(self._torn_slab(self._slabs[path]))
            else:
                (target / path.name).write_bytes(self._catalogs.get(path) or path.read_bytes())

    def _torn_slab(self, model: SlabModel) -> bytes:
        data = bytearray(model.safe)
        for offset, written in model.pending:
            for start in range(0, len(written), SECTOR):
                if self._chance.random() < 0.5:
                    data[offset + start : offset + start + SECTOR] = written[start : start + SECTOR]
        return bytes(data)


@contextmanager
def installed(power: Power, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a shard's files tell the model."""
    slab_write, fdatasync, fsync, apply = Slab.write, os.fdatasync, os.fsync, Catalog._apply

    def write(slab: Slab, offset: int, views: list[memoryview]) -> None:
        power.write(slab, offset, b"".join(views))
        slab_write(slab, offset, views)

    def sync_data(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.name == "slab":
            power.sync(next(slab for slab in slabs if slab.path == path))
        fdatasync(fd)

    def sync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            power.sync_names(path)
        fsync(fd)

    def commit(catalog: Catalog, *changes: object) -> None:
        file = Path(catalog._env.path()) / "data.mdb"
        power.commit(file, lambda: apply(catalog, *changes))  # type: ignore[arg-type]

    slabs: list[Slab] = []
    open_file = Slab._open_file

    def note_slab(slab: Slab) -> int:
        slabs.append(slab)
        return open_file(slab)

    with monkeypatch.context() as patch:
        patch.setattr(Slab, "_open_file", note_slab)
        patch.setattr(Slab, "write", write)
        patch.setattr(os, "fdatasync", sync_data)
        patch.setattr(os, "fsync", sync)
        patch.setattr(Catalog, "_apply", commit)
        yield


def live(power: Power, folder: Path, ssd_mib: tuple[int, ...], chance: random.Random, deletes: bool) -> None:
    """Put chunks durably, one after the other in flight with the next, and delete some."""
    with closing(open_shard(spec(folder, ssd_mib))) as shard:
        power.take_images(0.05)
        for _ in range(STEPS):
            begun = []
            for _ in range(chance.randrange(1, 4)):
                manifest, frames = make_chunk(range(start := chance.randrange(40) * 1000, start + 40))
                with power.lock:
                    power.deleted.discard(manifest.key)
                put = shard.begin_put(manifest, PutOptions(durable=True), wait_s=30.0)
                if put is None:
                    continue
                for layer, frame in enumerate(frames):
                    put.write(layer, memoryview(frame))
                begun.append((manifest.key, shard.commit(put).durable))
            for key, durable in begun:
                assert durable is not None
                try:
                    durable.result(30.0)
                except KintsugiError:
                    continue
                with power.lock:
                    power.acknowledged.add(key)
            if deletes and chance.random() < 0.3 and power.acknowledged:
                _delete(power, shard, chance.choice(sorted(power.acknowledged)))
        if not power.images:  # where syncs fail, few moments are left
            power.go()


def _delete(power: Power, shard: Shard, key: ChunkKey) -> None:
    with power.lock:
        power.acknowledged.discard(key)
    shard.delete("acme", [key])
    try:
        for flushed in shard.flush_writers():
            flushed.result(30.0)
    except KintsugiError:
        return
    with power.lock:
        power.deleted.add(key)


def check(image: Path, ssd_mib: tuple[int, ...], acknowledged: set[ChunkKey], deleted: set[ChunkKey]) -> None:
    """Everything in an image is whole, what was acknowledged is there, what was deleted is not."""
    with closing(open_shard(spec(image, ssd_mib))) as shard:
        keys = {entry.manifest.key for entry in shard.table.entries()}
        assert shard.verify("acme", sorted(keys)) == dict.fromkeys(keys, True)
        assert acknowledged <= keys, f"{len(acknowledged - keys)} acknowledged chunks are lost"
        assert not deleted & keys, "a deleted chunk is back"
        assert shard.table.counters.quarantined == 0


CASES: Mapping[str, tuple[tuple[int, ...], float, bool]] = {
    "one disk": ((16,), 0.0, True),
    "syncs that fail": ((16,), 0.3, False),
    "a full disk above another": ((1, 16), 0.0, True),
    "failing syncs on two disks": ((1, 16), 0.2, False),
}


def lose_power(folder: Path, case: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"KINTSUGI_SEED={seed}")
    ssd_mib, sync_fails, deletes = CASES[case]
    chance = random.Random(f"{case}/{seed}")
    source = folder / "disk"
    source.mkdir()
    power = Power(source, folder / "images", random.Random(f"{case}/{seed}/disk"))
    with installed(power, monkeypatch):
        power.sync_fails = sync_fails
        live(power, source, ssd_mib, chance, deletes)
    assert power.images, "the power never went"
    for image, acknowledged, deleted in power.images:
        check(image, ssd_mib, acknowledged, deleted)


@pytest.mark.parametrize("case", CASES)
def test_what_was_acknowledged_survives_a_power_loss(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_power(tmp_path, case, seeds(1), monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(2, 12))
def test_ten_more_seeds(tmp_path: Path, case: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_power(tmp_path, case, seed, monkeypatch)


def test_the_model_loses_what_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the sync before the commit, the same check fails: the simulation can."""
    monkeypatch.setattr(Slab, "sync", lambda slab, since: None)
    with pytest.raises(AssertionError):
        lose_power(tmp_path, "one disk", 1, monkeypatch)


def test_the_model_loses_files_whose_folder_is_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kintsugi.store.shard.tiers import lower_tier

    monkeypatch.setattr(lower_tier, "sync_path", lambda path: None)
    with pytest.raises(AssertionError, match="acknowledged chunks are lost"):
        lose_power(tmp_path, "one disk", 1, monkeypatch)
