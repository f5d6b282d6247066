"""Keeps over a restart how often and when chunks were used; otherwise all would look equally old.

A snapshot in one file, replaced whole: hints for eviction that may be a minute old, so a damaged file is
worth a line in the log and nothing more. Cost: some 60 bytes per chunk and a sync, once a minute.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import xxhash

from kintsugi.store.shard.entry import ChunkEntry
from kintsugi.store.shard.tiers.catalog import catalog_key
from kintsugi.store.shard.tiers.home import write_durably

log = logging.getLogger(__name__)

SAVE_PERIOD_S = 60.0
COUNT_MAX = 0xFFFFFFFF
_CHECKSUM_BYTES = 16
_ROW = struct.Struct("<HId")


class Use(NamedTuple):
    """How a chunk was used."""

    times: int
    last_s: float
    """Unix seconds."""


UNKNOWN = Use(0, math.inf)
"""A chunk that the snapshot lacks is newer than all that it names."""


class Uses:
    """The snapshot at `file`; None keeps nothing."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def load(self) -> Mapping[bytes, Use]:
        """Uses by catalog key; empty where there is no snapshot or it is damaged."""
        if self._file is None or not self._file.exists():
            return {}
        try:
            return decode_uses(self._file.read_bytes())
        except (OSError, ValueError) as error:
            log.warning("%s: %s; chunks count as unused", self._file, error)
            return {}

    def save(self, entries: Iterable[ChunkEntry]) -> None:
        """Replace the snapshot. A disk that refuses is logged: the next one may succeed."""
        if self._file is None:
            return
        try:
            write_durably(self._file, encode_uses(entries))
        except OSError as error:
            log.warning("%s: %s; uses are not kept over a restart", self._file, error)


def encode_uses(entries: Iterable[ChunkEntry]) -> bytes:
    """A checksum and a row per chunk. Reads each entry once, without the table's lock."""
    rows = []
    for entry in entries:
        key = catalog_key(entry.address)
        rows += [_ROW.pack(len(key), min(entry.uses, COUNT_MAX), entry.used_at_s), key]
    body = b"".join(rows)
    return xxhash.xxh3_128_digest(body) + body


def decode_uses(data: bytes) -> dict[bytes, Use]:
    """Raises `ValueError` for bytes that are no snapshot."""
    body = data[_CHECKSUM_BYTES:]
    if xxhash.xxh3_128_digest(body) != data[:_CHECKSUM_BYTES]:
        raise ValueError("its checksum is wrong")
    found: dict[bytes, Use] = {}
    position = 0
    while position < len(body):
        start = position + _ROW.size
        if start > len(body):
            raise ValueError(f"is cut at byte {position}")
        size, count, last_s = _ROW.unpack_from(body, position)
        position = start + size
        if position > len(body) or math.isnan(last_s):
            raise ValueError(f"has a malformed row before byte {position}")
        found[body[start:position]] = Use(count, last_s)
    return found
