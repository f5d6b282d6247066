"""Saves how often and when each chunk was used, for eviction after a restart.

One file holds a snapshot and is replaced as a whole. It is only a hint, so it may be a minute old, and a
damaged file is logged and ignored. Cost: about 60 bytes per chunk and a sync, once a minute.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import xxhash

from kintsugi.store.protocol.durable_files import write_durably
from kintsugi.store.shard.entry import ChunkEntry
from kintsugi.store.shard.tiers.catalog import catalog_key

log = logging.getLogger(__name__)

SAVE_PERIOD_S = 60.0
COUNT_MAX = 0xFFFFFFFF
"""The largest number of uses that a row can hold."""
_CHECKSUM_BYTES = 16
_ROW = struct.Struct("<HId")
"""Bytes of the catalog key, number of uses, time of the last use. The key itself follows."""


class Use(NamedTuple):
    """How often and when a chunk was used."""

    times: int
    last_s: float
    """Unix seconds."""


UNKNOWN = Use(0, math.inf)
"""The use of a chunk that the snapshot lacks. It counts as the last use, because such a chunk is usually
newer than the snapshot."""


def load_uses(file: Path | None) -> Mapping[bytes, Use]:
    """Return uses by catalog key; empty if the snapshot is missing or damaged."""
    if file is None or not file.exists():
        return {}
    try:
        return decode_uses(file.read_bytes())
    except (OSError, ValueError) as error:
        log.warning("%s: %s; chunks count as unused", file, error)
        return {}


def save_uses(file: Path, entries: Iterable[ChunkEntry]) -> None:
    """Replace the snapshot. A failed write is logged, not raised: the next one may succeed."""
    try:
        write_durably(file, encode_uses(entries))
    except OSError as error:
        log.warning("%s: %s; uses are lost at a restart", file, error)


def encode_uses(entries: Iterable[ChunkEntry]) -> bytes:
    """Encode a checksum and one row per chunk. The caller need not hold the table's lock."""
    rows = []
    for entry in entries:
        key = catalog_key(entry.address)
        rows += [_ROW.pack(len(key), min(entry.uses, COUNT_MAX), entry.used_at_s), key]
    body = b"".join(rows)
    return xxhash.xxh3_128_digest(body) + body


def decode_uses(data: bytes) -> dict[bytes, Use]:
    """Decode the bytes of a snapshot. Raises `ValueError` for invalid bytes."""
    body = data[_CHECKSUM_BYTES:]
    if xxhash.xxh3_128_digest(body) != data[:_CHECKSUM_BYTES]:
        raise ValueError("its checksum is wrong")
    found: dict[bytes, Use] = {}
    position = 0
    while position < len(body):
        start = position + _ROW.size
        if start > len(body):
            raise ValueError(f"is cut at byte {position}")
        key_bytes, times, last_s = _ROW.unpack_from(body, position)
        position = start + key_bytes
        if position > len(body) or math.isnan(last_s):
            raise ValueError(f"has a malformed row before byte {position}")
        found[body[start:position]] = Use(times, last_s)
    return found
