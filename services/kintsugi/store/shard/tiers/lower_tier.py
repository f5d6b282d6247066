"""The tiers below RAM: how an SSD tier and a bucket record their chunks in a catalog, and read it again.

A catalog is an LMDB file. A chunk is durable when its record is committed there. A value is an xxh3-128
digest of key and body, then the body, a `CatalogRecord`: a flipped bit is found when the record is read, and
costs one chunk. Values have a few kilobytes. Cost: one transaction (a sync of some pages) per batch of puts
or deletes; reading 100,000 records takes seconds.

A catalog names a chunk by its address, and a chunk may be deleted and put again while its old copy still
leaves. So a tier remembers which copy the catalog names, and forgets a record only together with its own
copy.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import lmdb
import xxhash
from google.protobuf.message import DecodeError

from kintsugi.core.errors import InvalidField, VersionMismatch
from kintsugi.core.layout import FORMAT, ChunkManifest
from kintsugi.core.spaces import KEY_BYTES, ChunkKey
from kintsugi.rpc.v1 import catalog_pb2 as pb
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.files import make_private, sync_path
from kintsugi.store.shard.entry import Address, ChunkEntry, CopyTier, MakePolicy, Residence
from kintsugi.store.shard.tiers.extents import BLOCK_BYTES, Extent, Strides

log = logging.getLogger(__name__)

_FILE = "data.mdb"
_REWRITTEN = "rewritten"
_READERS_MAX = 8
_CHECKSUM_BYTES = 16
_MAP_BYTES_MIN = 64 << 20
_FILL_MAX = 0.9
"""The map is doubled when this share of it is used: LMDB slows down, then fails, when the map is full."""


def catalog_key(address: Address) -> bytes:
    """Return the namespace, a zero byte (which no namespace contains) and the chunk key."""
    namespace, key = address
    return namespace.encode() + b"\0" + key.digest


def check_format(path: Path) -> None:
    """Refuse the catalog at `path` if any intact record has a format that this version does not read.

    Call it before opening the tier, which may drop such records as damaged. It changes no file (except to pad
    one that was cut) and takes no LMDB lock, so the caller must own the folder. It reads every record,
    because only records name the format; this takes a tenth of the time of opening the tier. Raises
    `VersionMismatch`, and `lmdb.Error` for a damaged file.
    """
    file = path / _FILE
    if not file.exists() or not file.stat().st_size:
        return
    with lmdb.open(str(path), readonly=True, lock=False) as env:
        _pad_if_cut(env, file)
        with env.begin() as transaction:
            records = (_decode_catalog_record(key, value) for key, value in transaction.cursor())
            formats = Counter(r.manifest.format_version for r in records if r is not None)
    if formats.keys() - {FORMAT}:
        raise VersionMismatch(_refusal(path.parent, formats))


def _refusal(folder: Path, formats: Mapping[int, int]) -> str:
    """Describe why a folder with chunks of these formats is refused, and what to do."""
    held = " and ".join(f"{count} chunks of format {version}" for version, count in sorted(formats.items()))
    return (
        f"{folder} holds {held}; this version of kintsugi reads format {FORMAT}. "
        "Nothing was changed: use the version that wrote them, or name another folder"
    )


def _pad_if_cut(env: lmdb.Environment, file: Path) -> None:
    """Append zeros to a file that was cut. Reading zeros raises `lmdb.Error`; reading past the end of the
    mapped file would kill the process (SIGBUS)."""
    size = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if file.stat().st_size < size:
        os.truncate(file, size)


def open_private(folder: Path, map_size: int, readers_max: int = 126) -> lmdb.Environment:
    """Open the LMDB environment in a folder, whose files only their owner may read. Raises `lmdb.Error`,
    `OSError`, and `InvalidField` for a link."""
    for name in (_FILE, "lock.mdb"):
        make_private(folder / name)
    return lmdb.open(str(folder), map_size=map_size, max_readers=readers_max)


class Catalog:
    """The records of a tier. Thread-safe. Writes are serialised, because the map may only grow between
    transactions. Methods raise `lmdb.Error` if LMDB cannot read the file."""

    def __init__(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        self._path = path
        shutil.rmtree(path / _REWRITTEN, ignore_errors=True)  # a crash may have left it
        self._write_lock = threading.Lock()
        self._env = open_private(path, _MAP_BYTES_MIN, _READERS_MAX)
        sync_path(path)
        _pad_if_cut(self._env, path / _FILE)
        self._grow_if_full()

    def records(self) -> Iterator[tuple[bytes, pb.CatalogRecord | None]]:
        """Yield every catalog key with its record, in key order. The record is None if the value is
        damaged."""
        with self._env.begin() as transaction:
            for key, value in transaction.cursor():
                yield key, _decode_catalog_record(key, value)

    def apply(self, puts: Sequence[tuple[Address, pb.CatalogRecord]], deletes: Sequence[bytes] = ()) -> None:
        """Delete, then put, in one durable transaction. Raises `lmdb.Error` if the disk fails; then nothing
        has changed."""
        with self._write_lock:
            self._apply_growing(puts, deletes)

    def _apply_growing(
        self, puts: Sequence[tuple[Address, pb.CatalogRecord]], deletes: Sequence[bytes]
    ) -> None:
        self._grow_if_full()
        try:
            self._apply(puts, deletes)
        except lmdb.MapFullError:
            self._grow()
            self._apply(puts, deletes)

    def _apply(self, puts: Sequence[tuple[Address, pb.CatalogRecord]], deletes: Sequence[bytes]) -> None:
        with self._env.begin(write=True) as transaction:
            for key in deletes:
                transaction.delete(key)
            for address, record in puts:
                key = catalog_key(address)
                transaction.put(key, _encode_catalog_record(key, record))

    def extend(self, expiries: Iterable[tuple[Address, float]]) -> None:
        """Change when chunks expire, in Unix seconds, in one durable transaction. Chunks without a record are
        left out. Raises like `apply`."""
        puts = []
        with self._write_lock:
            with self._env.begin() as transaction:
                for address, at_s in expiries:
                    key = catalog_key(address)
                    record = _decode_catalog_record(key, transaction.get(key, b""))
                    if record is not None:
                        record.MergeFrom(pb.CatalogRecord(expires_at_s=at_s))
                        puts.append((address, record))
            self._apply_growing(puts, ())

    def rewrite(self) -> None:
        """Move the records to a new file and delete the old one, because LMDB keeps deleted records in freed
        pages. Raises `lmdb.Error` and `OSError`; then the old file stays in use."""
        fresh = self._path / _REWRITTEN
        with self._write_lock:
            map_size = self._env.info()["map_size"]
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            with (
                closing(open_private(fresh, map_size, _READERS_MAX)) as copy,
                self._env.begin() as source,
                copy.begin(write=True) as target,
            ):
                for key, value in source.cursor():
                    target.put(key, value, append=True)
            self._env.close()
            try:
                os.replace(fresh / _FILE, self._path / _FILE)
                sync_path(self._path)
            finally:
                self._env = open_private(self._path, map_size, _READERS_MAX)
            shutil.rmtree(fresh, ignore_errors=True)

    def _grow_if_full(self) -> None:
        info, stat = self._env.info(), self._env.stat()
        if (info["last_pgno"] + 1) * stat["psize"] > _FILL_MAX * info["map_size"]:
            self._grow()

    def _grow(self) -> None:
        size = 2 * self._env.info()["map_size"]
        log.info("growing the catalog's map to %d bytes", size)
        self._env.set_mapsize(size)

    def close(self) -> None:
        self._env.close()


def _encode_catalog_record(key: bytes, record: pb.CatalogRecord) -> bytes:
    body = record.SerializeToString()
    return xxhash.xxh3_128_digest(key + body) + body


def _decode_catalog_record(key: bytes, value: bytes) -> pb.CatalogRecord | None:
    checksum, body = value[:_CHECKSUM_BYTES], value[_CHECKSUM_BYTES:]
    if xxhash.xxh3_128_digest(key + body) != checksum:
        return None
    try:
        record = pb.CatalogRecord.FromString(body)
    except DecodeError:
        return None
    manifest = record.manifest
    if len(manifest.key) != KEY_BYTES:
        return None
    expected_key = catalog_key((manifest.namespace, ChunkKey(manifest.key)))
    return record if key == expected_key else None


READ_RATE_WEIGHT = 0.1


class Unrecorded:
    """Chunks whose lifetimes are longer than their records say. Thread-safe."""

    def __init__(self) -> None:
        self._entries: set[ChunkEntry] = set()
        self._adding = threading.Lock()
        self._recording = threading.Lock()

    def add(self, entry: ChunkEntry) -> None:
        with self._adding:
            self._entries.add(entry)

    def record(self, write: Callable[[Collection[ChunkEntry]], None]) -> None:
        """Return when every chunk added before the call is recorded, by this or another thread. Raises the
        errors of `write`; then the chunks wait for the next call."""
        with self._recording:
            with self._adding:
                entries, self._entries = self._entries, set()
            try:
                if entries:
                    write(entries)
            except BaseException:
                with self._adding:
                    self._entries |= entries
                raise


class LowerTier(CopyTier):
    """An SSD tier or a bucket.

    The table's lock guards policy and counts. The rest is thread-safe: `_lock` guards what is in memory and
    is never held during I/O; `_catalog_lock` is held over each change of the catalog.
    """

    catalog: Catalog

    def __init__(self, name: str, folder: Path, capacity_bytes: int, policy: MakePolicy) -> None:
        """`folder` contains the catalog. Raises `VersionMismatch` for chunks of another format, and then
        changes nothing in the folder. The subclass calls `_open_catalog`."""
        check_format(folder / "catalog")
        super().__init__(name, lambda: policy(capacity_bytes))
        self.folder = folder
        self.read_bytes_per_s = 0.0
        """Moving average over recent reads; starts with a measurement."""
        self.failure = ""
        """Why the last write failed; empty if it succeeded."""
        self.read_failure = ""
        """Why the last read failed; empty if it succeeded."""
        self._recorded: dict[Address, Residence] = {}
        """The copies that the catalog names."""
        self._unlinked: list[Residence] = []
        """Copies that no entry holds and that the catalog may still name."""
        self._catalog_lock = threading.Lock()
        self._lock = threading.Lock()

    def _open_catalog(self) -> None:
        """Raises `OSError` and `lmdb.Error`."""
        self.catalog = Catalog(self.folder / "catalog")
        sync_path(self.folder)  # otherwise a power loss may remove even synced files

    @abstractmethod
    def read(self, residence: Residence, first: int, frames: Sequence[memoryview]) -> None:
        """Fill padded frames from `first` on. Raises `OSError` if the tier cannot be read now, `Corrupted` if
        the frames are lost."""

    def _note_read(self, num_bytes: int, began_s: float) -> None:
        """Note a successful read. `began_s`: by `time.perf_counter`."""
        self.read_failure = ""
        rate = num_bytes / max(time.perf_counter() - began_s, 1e-6)
        self.read_bytes_per_s += READ_RATE_WEIGHT * (rate - self.read_bytes_per_s)

    # The catalog

    def unlink(self, residence: Residence) -> None:
        """Make the next `bury` delete a residence that no entry holds from the catalog."""
        self.lingering.add(residence)
        with self._lock:
            self._unlinked.append(residence)

    def extend(self, entries: Iterable[ChunkEntry]) -> None:
        """Record how long chunks are kept. Chunks that were forgotten are left out: their addresses may name
        chunks that were put since. Raises `lmdb.Error`; then nothing changed."""
        with self._catalog_lock:  # a chunk that is being committed is recorded with its earlier lifetime
            with self._lock:
                named = [entry for entry in entries if not entry.gone and entry.address in self._recorded]
            if named:
                self.catalog.extend((entry.address, entry.expires_at_s) for entry in named)

    def _record(self, copies: Sequence[tuple[ChunkEntry, Residence]]) -> None:
        """Record copies in the catalog. The caller holds the catalog's lock. Raises `lmdb.Error`; then
        nothing changed."""
        self.catalog.apply([(entry.address, _record_of(entry, residence)) for entry, residence in copies])
        with self._lock:
            self._recorded.update((entry.address, residence) for entry, residence in copies)

    def _forget_records(self, addresses: Sequence[Address]) -> None:
        """Delete recorded copies from the catalog. The caller holds the catalog's lock. Raises `lmdb.Error`;
        then nothing changed."""
        if not addresses:
            return  # a commit costs a sync
        self.catalog.apply((), [catalog_key(address) for address in addresses])
        with self._lock:
            for address in addresses:
                del self._recorded[address]

    def _forget_unlinked(self) -> None:
        """Delete the records of dropped copies from the catalog. The caller holds the catalog's lock. Raises
        `lmdb.Error`; then nothing changed."""
        with self._lock:
            unlinked, self._unlinked = self._unlinked, []
            named = [r.address for r in unlinked if self._recorded.get(r.address) is r]
        try:
            self._forget_records(named)
        except BaseException:
            with self._lock:
                self._unlinked += unlinked
            raise

    # Restarts

    def recover(self, is_unwanted: Callable[[ChunkManifest], bool]) -> tuple[list[ChunkEntry], int]:
        """Read the catalog before anything else uses the tier. Returns the chunks, and the number of damaged
        records (a wrong checksum, or frames that cannot lie where the record says). These records, and chunks
        for which `is_unwanted` is true, are deleted. The order of eviction starts empty: earlier uses do not
        count. Raises `VersionMismatch`; then nothing changed."""
        kept: list[ChunkEntry] = []
        doomed: list[bytes] = []
        damaged = 0
        for key, record in self.catalog.records():
            entry = None if record is None else self._entry_of(record)
            if entry is None:
                damaged += 1
                doomed.append(key)
            elif is_unwanted(entry.manifest):
                doomed.append(key)
            else:
                kept.append(entry)
        overlapping = self._occupy(kept)
        damaged += len(overlapping)
        doomed += [catalog_key(entry.address) for entry in overlapping]
        kept = [entry for entry in kept if entry not in overlapping]
        if doomed:
            self.catalog.apply((), doomed)
        if damaged:
            log.error("%s: dropped %d damaged records of %d", self.name, damaged, damaged + len(kept))
        self._recorded.update((copy.address, copy) for entry in kept for copy in entry.copies)
        for entry in kept:
            self.admit(entry)
        return kept, damaged

    def _entry_of(self, record: pb.CatalogRecord) -> ChunkEntry | None:
        """The chunk of a record. None if its frames cannot lie where the record says. Raises
        `VersionMismatch` for a record of another version: its checksum is right, but not its content."""
        try:
            manifest = wire.manifest_from_wire(record.manifest)
        except InvalidField as error:
            raise VersionMismatch(
                f"{self.folder} holds a chunk that this version of kintsugi does not know ({error}). "
                "No chunk was deleted: use the version that wrote it, or name another folder"
            ) from error
        strides = Strides.of(manifest.frame_runs)
        extents = tuple(Extent(extent.offset, extent.size_bytes) for extent in record.extents)
        is_aligned = all(size and not offset % BLOCK_BYTES for offset, size in extents)
        if not is_aligned or not strides.fill(extents) or record.charged_bytes < manifest.chunk_bytes:
            return None
        residence = Residence(self, (manifest.namespace, manifest.key), extents, strides)
        if not self._can_hold(residence):
            return None
        return ChunkEntry(
            manifest, record.expires_at_s, record.recompute_ms, record.charged_bytes, disk=residence
        )

    @abstractmethod
    def _can_hold(self, residence: Residence) -> bool:
        """Return whether a residence of a record lies within the tier."""

    @abstractmethod
    def _occupy(self, entries: Sequence[ChunkEntry]) -> Collection[ChunkEntry]:
        """Count the space of recovered chunks as used. Leaves out chunks whose frames overlap others', and
        returns them."""


def _record_of(entry: ChunkEntry, residence: Residence) -> pb.CatalogRecord:
    return pb.CatalogRecord(
        manifest=wire.manifest_to_wire(entry.manifest),
        extents=[pb.CatalogExtent(offset=offset, size_bytes=size) for offset, size in residence.extents],
        expires_at_s=entry.expires_at_s,
        recompute_ms=entry.recompute_ms,
        charged_bytes=entry.charged_bytes,
    )
