"""The chunks of a ledger: their packed tokens, and the plain copies of prepared chunks.

A ledger lists a prepared chunk once; the key of its plain copy is computed when it is needed.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from kintsugi.core.errors import Corrupted
from kintsugi.core.layout import TOKENS_MAX
from kintsugi.core.spaces import ID_BYTES, KEY_BYTES, ChunkKey

_TOKENS_BYTES_MAX = ID_BYTES * TOKENS_MAX


def pack_tokens(tokens: bytes) -> bytes:
    """Compress little-endian u32 tokens as the ledger stores them. Readers pack and workers unpack them; the
    driver passes them on unchanged."""
    return zlib.compress(tokens, 1)


@dataclass(frozen=True)
class PendingChunk:
    """A chunk to look up, and to prefill if the store lacks it."""

    key: ChunkKey
    tokens: bytes
    """Packed by `pack_tokens`."""
    num_tokens: int
    context: tuple[bytes, ...] = ()
    """Packed tokens of the passages that it is prefilled after, if they are not the space's context."""

    @property
    def token_ids(self) -> list[int]:
        return unpack_tokens(self.tokens)


def decompress_tokens(packed: object) -> bytes:
    """Return the little-endian u32 tokens of a packed column. Raises `Corrupted` for any other value, and for
    more tokens than a chunk may have: a packed kilobyte can expand to a megabyte."""
    tokens, is_whole = b"", False
    if isinstance(packed, bytes):
        inflater = zlib.decompressobj()
        with suppress(zlib.error):
            tokens = inflater.decompress(packed, _TOKENS_BYTES_MAX + 1)
            is_whole = inflater.eof
    if not is_whole or len(tokens) > _TOKENS_BYTES_MAX or len(tokens) % ID_BYTES:
        raise _corrupted("unreadable tokens")
    return tokens


def check_digest(value: object) -> bytes:
    """Return the digest in a column. Raises `Corrupted` if it does not hold one."""
    if not isinstance(value, bytes) or len(value) != KEY_BYTES:
        raise _corrupted("an invalid digest")
    return value


def _corrupted(found: str) -> Corrupted:
    return Corrupted(
        f"the ledger is damaged: it holds {found}; remove ledger.sqlite and run its corpora's jobs again"
    )


def parse_pending(key: object, tokens: object, num_tokens: object) -> PendingChunk:
    """Return the chunk of a row. Its tokens are decompressed later. Raises `Corrupted`."""
    if not isinstance(tokens, bytes) or not isinstance(num_tokens, int):
        raise _corrupted("unreadable tokens")
    return PendingChunk(ChunkKey(check_digest(key)), tokens, num_tokens)


def unpack_tokens(packed: object) -> list[int]:
    """Return the token ids of a packed column. Raises `Corrupted`."""
    ids: list[int] = np.frombuffer(decompress_tokens(packed), "<u4").tolist()
    return ids


def find_plain_space(db: sqlite3.Connection, edition: int) -> bytes | None:
    """Return the digest of the space of an edition's plain copies; None without plain copies. Raises
    `Corrupted`."""
    row = db.execute(
        "SELECT plain FROM prepared_space JOIN edition USING (space) WHERE edition.id=? AND plain_copies",
        (edition,),
    ).fetchone()
    return None if row is None else check_digest(row[0])


def add_copies(chunks: Sequence[PendingChunk], plain: bytes | None, name_key: bytes) -> list[PendingChunk]:
    """Return the chunks. If `plain` names a space, each is followed by its plain copy. Raises `Corrupted`."""
    if plain is None:
        return list(chunks)
    return [
        copy
        for chunk in chunks
        for copy in (
            chunk,
            replace(chunk, key=ChunkKey.in_space(plain, decompress_tokens(chunk.tokens), name_key)),
        )
    ]


def find_orphaned_copies(
    db: sqlite3.Connection,
    spaces: Sequence[tuple[bytes, bytes, int]],
    key: bytes,
    tokens: bytes,
    name_key: bytes,
) -> list[ChunkKey]:
    """Return the keys to delete with an orphan: its own key and the key of its plain copy, unless they are in
    use.

    An orphan may itself be the plain copy of a chunk in use. ``spaces``: the rows of `prepared_space`. Raises
    `Corrupted`, because an erasure must not skip a copy whose key it cannot compute."""
    text = decompress_tokens(tokens) if spaces else b""
    keys = [
        (
            ChunkKey.in_space(check_digest(space), text, name_key),
            ChunkKey.in_space(check_digest(plain), text, name_key),
            has,
        )
        for space, plain, has in spaces
    ]
    mine = ChunkKey(check_digest(key))
    candidates = [mine, *{plain for prepared, plain, _ in keys if prepared == mine}]

    def is_in_use(one: ChunkKey) -> bool:
        users = {one, *(prepared for prepared, plain, has in keys if plain == one and has)}
        query = "SELECT 1 FROM span WHERE key=? LIMIT 1"
        return any(db.execute(query, (user.digest,)).fetchone() for user in users)

    return [one for one in candidates if not is_in_use(one)]
