"""The tiers below RAM: how an SSD tier and a bucket record their chunks in a catalog, and read it again.

A catalog names a chunk by its address, and a chunk may be deleted and put again while its old copy still
leaves. So a tier remembers which copy the catalog names, and forgets a record only together with its own
copy.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from kintsugi.core.errors import InvalidField, VersionMismatch
from kintsugi.core.layout import ChunkManifest
from kintsugi.rpc.v1 import catalog_pb2 as pb
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.durable_files import sync_folder
from kintsugi.store.shard.entry import Address, ChunkEntry, CopyTier, MakePolicy, Residence
from kintsugi.store.shard.tiers.catalog import Catalog, catalog_key, check_format
from kintsugi.store.shard.tiers.extents import BLOCK_BYTES, Extent, Strides
from kintsugi.store.shard.tiers.uses import UNKNOWN, Use

log = logging.getLogger(__name__)

READ_RATE_WEIGHT = 0.1
TOUCHES_REPLAYED_MAX = 3
"""Touches replayed for a chunk that was used before a restart: S3-FIFO counts no further."""


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
        sync_folder(self.folder)  # or a power loss takes the folder's files, however they were synced

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
        """Have the catalog forget a residence that no entry holds, at the next `bury`."""
        self.lingering.add(residence)
        with self._lock:
            self._unlinked.append(residence)

    def extend(self, entries: Iterable[ChunkEntry]) -> None:
        """Record how long chunks are kept. Chunks that are gone are left out: their addresses may name chunks
        that were put since. Raises `lmdb.Error`; then nothing changed."""
        with self._catalog_lock:  # a chunk that is being committed is recorded with its earlier lifetime
            with self._lock:
                named = [entry for entry in entries if not entry.gone and entry.address in self._recorded]
            if named:
                self.catalog.extend((entry.address, entry.expires_at_s) for entry in named)

    def _record(self, copies: Sequence[tuple[ChunkEntry, Residence]]) -> None:
        """Have the catalog name copies. The caller holds the catalog's lock. Raises `lmdb.Error`; then
        nothing changed."""
        self.catalog.apply([(entry.address, _record_of(entry, residence)) for entry, residence in copies])
        with self._lock:
            self._recorded.update((entry.address, residence) for entry, residence in copies)

    def _forget_records(self, addresses: Sequence[Address]) -> None:
        """Have the catalog forget what it names. The caller holds the catalog's lock. Raises `lmdb.Error`;
        then nothing changed."""
        if not addresses:
            return  # a commit costs a sync
        self.catalog.apply((), [catalog_key(address) for address in addresses])
        with self._lock:
            for address in addresses:
                del self._recorded[address]

    def _forget_unlinked(self) -> None:
        """Have the catalog forget the copies that left. The caller holds the catalog's lock. Raises
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

    def recover(
        self, is_unwanted: Callable[[ChunkManifest], bool], uses: Mapping[bytes, Use]
    ) -> tuple[list[ChunkEntry], int]:
        """Read the catalog before anything else uses the tier. Returns the chunks, and the number of damaged
        records (a wrong checksum, or frames that cannot lie where the record says). Those and chunks that
        `is_unwanted` names are forgotten. `uses`: by catalog key; the chunk used longest ago leaves first
        again. Raises `VersionMismatch`; then nothing changed."""
        kept: list[ChunkEntry] = []
        doomed: list[bytes] = []
        damaged = 0
        for key, record in self.catalog.records():
            entry = None if record is None else self._entry_of(record, uses.get(key, UNKNOWN))
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
        self._replay_uses(kept)
        return kept, damaged

    def _entry_of(self, record: pb.CatalogRecord, use: Use) -> ChunkEntry | None:
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
            manifest,
            record.expires_at_s,
            record.recompute_ms,
            record.charged_bytes,
            disk=residence,
            uses=use.times,
            used_at_s=use.last_s,
        )

    @abstractmethod
    def _can_hold(self, residence: Residence) -> bool:
        """Return whether a residence of a record lies within the tier."""

    @abstractmethod
    def _occupy(self, entries: Sequence[ChunkEntry]) -> Collection[ChunkEntry]:
        """Count the space of recovered chunks as used. Returns the chunks whose frames overlap others', and
        leaves those out."""

    def _replay_uses(self, entries: Iterable[ChunkEntry]) -> None:
        """Replay the past to the policy: oldest use first, a few touches for chunks that were used often."""
        for entry in sorted(entries, key=lambda entry: entry.used_at_s):
            self.admit(entry)
            for _ in range(min(entry.uses, TOUCHES_REPLAYED_MAX)):
                self.policy.touch(entry)


def _record_of(entry: ChunkEntry, residence: Residence) -> pb.CatalogRecord:
    return pb.CatalogRecord(
        manifest=wire.manifest_to_wire(entry.manifest),
        extents=[pb.CatalogExtent(offset=offset, size_bytes=size) for offset, size in residence.extents],
        expires_at_s=entry.expires_at_s,
        recompute_ms=entry.recompute_ms,
        charged_bytes=entry.charged_bytes,
    )
