"""Calibration reports by model fingerprint and name: in memory, and in the data directory if there is one."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path

import lmdb
import xxhash

from kintsugi.core.documents import DOCUMENT_BYTES_MAX, replaces
from kintsugi.core.errors import InvalidField, ResourceExhausted, Unavailable
from kintsugi.core.spaces import ModelFingerprint
from kintsugi.store.protocol.files import make_folder, sync_path
from kintsugi.store.shard.tiers.lower_tier import open_private

REPORTS_MAX = 1024
NAME_CHARS_MAX = 128
_MAP_BYTES = 2 * REPORTS_MAX * DOCUMENT_BYTES_MAX
_CHECKSUM_BYTES = 16


class Reports:
    """The reports of one shard. Thread-safe. A damaged document counts as absent."""

    def __init__(self, folder: Path | None) -> None:
        self._lock = threading.Lock()
        self._documents: dict[bytes, bytes] = {}
        self._env = None
        if folder is not None:
            make_folder(folder)
            self._env = open_private(folder, _MAP_BYTES)
            sync_path(folder)
            with self._env.begin() as transaction:
                for key, value in transaction.cursor():
                    if xxhash.xxh3_128_digest(value[_CHECKSUM_BYTES:]) == value[:_CHECKSUM_BYTES]:
                        self._documents[key] = value[_CHECKSUM_BYTES:]

    def put(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
        """Store a document, unless the stored one supersedes it (`core.documents.replaces`). Durable on
        return. Raises `ResourceExhausted`, `InvalidField`, `Unavailable`."""
        if len(document) > DOCUMENT_BYTES_MAX:
            raise ResourceExhausted(
                f"the report has {len(document)} bytes; at most {DOCUMENT_BYTES_MAX} are allowed"
            )
        key = _key(fingerprint, name)
        with self._lock:
            held = self._documents.get(key)
            if not replaces(document, held, datetime.now(UTC)):
                return
            if len(self._documents) >= REPORTS_MAX and held is None:
                raise ResourceExhausted(f"this store keeps at most {REPORTS_MAX} reports; delete some first")
            if self._env is not None:
                try:
                    with self._env.begin(write=True) as transaction:
                        transaction.put(key, xxhash.xxh3_128_digest(document) + document)
                except lmdb.Error as error:
                    raise Unavailable(f"the report could not be written: {error}") from error
            self._documents[key] = bytes(document)

    def get(self, fingerprint: ModelFingerprint, name: str) -> bytes | None:
        # Takes no lock: a shard calls this on its event loop, and `put` holds the lock while it writes.
        return self._documents.get(_key(fingerprint, name))

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


def _key(fingerprint: ModelFingerprint, name: str) -> bytes:
    if not 0 < len(name) <= NAME_CHARS_MAX:
        raise InvalidField("name", f"has {len(name)} characters, not 1 to {NAME_CHARS_MAX}")
    return fingerprint.digest + name.encode()
