"""Reads the LMDB folder in which earlier versions kept the chunks that a gateway knows."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import xxhash

from kintsugi.core.errors import Corrupted, Unavailable
from kintsugi.core.spaces import KEY_BYTES, ChunkKey
from kintsugi.gateway.texts.known_texts import ChunkText
from kintsugi.precompute.ledger_chunks import decompress_tokens

_HEADERS = (struct.Struct("<8sQBQI16s"), struct.Struct("<8sQBQI16sQ"))
"""By version: xxh3-64 of name and value, seeded with the version; sequence number; whether there is a text,
and its `ChunkText`. The compressed tokens follow. Version 0 kept no last window."""


def read_lmdb_folder(folder: Path) -> Iterator[tuple[str, ChunkKey, bytes, ChunkText | None]]:
    """Namespace, key, tokens (little-endian u32) and text of every undamaged chunk, the oldest first.

    The folder is only read. Raises `Unavailable` without the package lmdb, `Corrupted` for another file.
    """
    try:
        import lmdb  # of the extra `store`
    except ImportError as error:
        raise Unavailable(f"{folder} cannot be read without lmdb; install kintsugi-kv[store]") from error
    try:
        with lmdb.open(str(folder), readonly=True) as environment, environment.begin() as view:
            numbered = sorted(
                (record[0], bytes(name))
                for name, value in view.cursor()
                if (record := _decode_record(name, value)) is not None
            )
            for _, name in numbered:
                record = _decode_record(name, view.get(name, b""))
                assert record is not None
                yield (
                    name[: -KEY_BYTES - 1].decode("ascii"),
                    ChunkKey(name[-KEY_BYTES:]),
                    record[2],
                    record[1],
                )
    except lmdb.Error as error:
        raise Corrupted(f"{folder} holds no index of chunks ({error}); remove its data.mdb") from error


def remove_lmdb_folder(folder: Path) -> None:
    """Delete the files, which hold the tokens of chunks and have been imported."""
    for name in ("data.mdb", "lock.mdb"):
        (folder / name).unlink(missing_ok=True)


def _decode_record(name: bytes, value: bytes) -> tuple[int, ChunkText | None, bytes] | None:
    """Sequence number, text and tokens; None for a record that is damaged or of another program."""
    checked = name + value[8:]
    for version, header in enumerate(_HEADERS):
        if len(value) >= header.size and xxhash.xxh3_64_digest(checked, version) == value[:8]:
            break
    else:
        return None
    if len(name) <= KEY_BYTES or not name[: -KEY_BYTES - 1].isascii():
        return None
    _, sequence, has_text, *text = header.unpack_from(value)
    try:
        return sequence, ChunkText(*text) if has_text else None, decompress_tokens(value[header.size :])
    except Corrupted:
        return None
