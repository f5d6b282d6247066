"""The records of a tier's chunks, in LMDB. A chunk is durable when its record is committed here.

A value is an xxh3-128 digest of key and body, then the body, a `CatalogRecord`: a flipped bit is found when
the record is read, and costs one chunk. Values have a few kilobytes. Cost: one transaction (a sync of some
pages) per batch of puts or deletes; reading 100,000 records takes seconds.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import lmdb
import xxhash
from google.protobuf.message import DecodeError

from kintsugi.core.errors import VersionMismatch
from kintsugi.core.layout import FORMAT
from kintsugi.core.spaces import KEY_BYTES, ChunkKey
from kintsugi.rpc.v1 import catalog_pb2 as pb
from kintsugi.store.protocol.durable_files import sync_folder
from kintsugi.store.protocol.private_files import PRIVATE_MODE
from kintsugi.store.shard.entry import Address

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

    Call it before opening the tier, which may take such records for damaged and drop them. It changes no file
    (except to pad one that was cut) and takes no LMDB lock, so the caller must own the folder. It reads every
    record, because only records name the format; this takes a tenth of the time of opening the tier. Raises
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


def _open_env(path: Path, map_size: int) -> lmdb.Environment:
    return lmdb.open(str(path), map_size=map_size, max_readers=_READERS_MAX, mode=PRIVATE_MODE)


class Catalog:
    """The records of a tier. Thread-safe. Writes are serialised, because the map may only grow between
    transactions. Methods raise `lmdb.Error` if LMDB cannot read the file."""

    def __init__(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        self._path = path
        shutil.rmtree(path / _REWRITTEN, ignore_errors=True)  # a crash may have left it
        self._write_lock = threading.Lock()
        self._env = _open_env(path, _MAP_BYTES_MIN)
        sync_folder(path)
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
                closing(_open_env(fresh, map_size)) as copy,
                self._env.begin() as source,
                copy.begin(write=True) as target,
            ):
                for key, value in source.cursor():
                    target.put(key, value, append=True)
            self._env.close()
            try:
                os.replace(fresh / _FILE, self._path / _FILE)
                sync_folder(self._path)
            finally:
                self._env = _open_env(self._path, map_size)
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
