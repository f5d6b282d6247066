"""The chunks of a ledger: their packed tokens, and the plain copies beside prepared chunks.

A ledger lists a prepared chunk once; the key of its plain copy is computed where it is needed.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kintsugi.core.spaces import ChunkKey


def pack_tokens(tokens: bytes) -> bytes:
    """Compress little-endian u32 tokens as the ledger stores them. Readers pack and workers unpack, so that
    the driver, of which there is only one, just passes them on."""
    return zlib.compress(tokens, 1)


@dataclass(frozen=True)
class PendingChunk:
    """A chunk to look up, and to prefill if the store lacks it."""

    key: ChunkKey
    tokens: bytes
    """See `pack_tokens`."""
    num_tokens: int

    @property
    def token_ids(self) -> list[int]:
        return unpack_tokens(self.tokens)


def unpack_tokens(tokens: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(zlib.decompress(tokens), "<u4").tolist()
    return ids


def find_plain_space(db: sqlite3.Connection, edition: int) -> bytes | None:
    """The digest of the space of an edition's plain copies; None if it has none."""
    row = db.execute(
        "SELECT plain FROM prepared_space JOIN edition USING (space) WHERE edition.id=? AND plain_copies",
        (edition,),
    ).fetchone()
    return None if row is None else bytes(row[0])


def add_copies(chunks: Sequence[PendingChunk], plain: bytes | None, name_key: bytes) -> list[PendingChunk]:
    """The chunks, each with its plain copy behind it where there is a space for them."""
    if plain is None:
        return list(chunks)
    return [
        copy
        for chunk in chunks
        for copy in (
            chunk,
            replace(chunk, key=ChunkKey.in_space(plain, zlib.decompress(chunk.tokens), name_key)),
        )
    ]


def find_orphaned_copies(
    db: sqlite3.Connection,
    spaces: Sequence[tuple[bytes, bytes, int]],
    key: bytes,
    tokens: bytes,
    name_key: bytes,
) -> list[ChunkKey]:
    """The keys to delete with an orphan: its own, and that of its plain copy, except what is in use.

    An orphan may itself be the plain copy of a chunk in use. ``spaces``: the rows of `prepared_space`."""
    text = zlib.decompress(tokens) if spaces else b""
    keys = [
        (ChunkKey.in_space(space, text, name_key), ChunkKey.in_space(plain, text, name_key), has)
        for space, plain, has in spaces
    ]
    mine = ChunkKey(key)
    candidates = [mine, *{plain for prepared, plain, _ in keys if prepared == mine}]

    def is_in_use(one: ChunkKey) -> bool:
        users = {one, *(prepared for prepared, plain, has in keys if plain == one and has)}
        query = "SELECT 1 FROM span WHERE key=? LIMIT 1"
        return any(db.execute(query, (user.digest,)).fetchone() for user in users)

    return [one for one in candidates if not is_in_use(one)]
