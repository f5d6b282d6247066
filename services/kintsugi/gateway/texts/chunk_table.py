"""The table of a gateway's known chunks: tokens and text by namespace and key, in one SQLite database.

Triggers count the chunks and tokens of each namespace. Every change ends with the deletion of the least
recently used chunks of the namespaces that exceed a bound.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from kintsugi.core.errors import Corrupted
from kintsugi.core.namespaces import is_within
from kintsugi.core.spaces import ID_BYTES, ChunkKey
from kintsugi.gateway.texts.known_texts import ChunkText
from kintsugi.precompute.database import Database

SCHEMA_VERSION = 1
FILE_NAME = "chunks.sqlite"
NAMESPACE_SHARE_MAX = 0.5
"""Maximum share of all chunks, and of all tokens, that one namespace may hold, so that two tenants never
affect each other. If more namespaces fill the table, chunks of the largest one are evicted, so a namespace
with less than an even share loses none to others. Shares are even between namespaces, not callers: a caller
that may use a thousand namespaces has a thousand shares."""
_CHECKSUM_BYTES = 8
_REMEDY = "remove the folder, which costs hits but no answers, or name another gateway.expert.data_dir"

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS chunk (
    id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, key BLOB NOT NULL, used INTEGER NOT NULL,
    tokens BLOB NOT NULL, text BLOB, UNIQUE (namespace, key));
CREATE INDEX IF NOT EXISTS chunk_used ON chunk (namespace, used);
CREATE TABLE IF NOT EXISTS share (
    namespace TEXT PRIMARY KEY, chunks INTEGER NOT NULL, tokens INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS share_chunks ON share (chunks);
CREATE INDEX IF NOT EXISTS share_tokens ON share (tokens);
CREATE TABLE IF NOT EXISTS total (
    id INTEGER PRIMARY KEY CHECK (id = 0), chunks INTEGER NOT NULL, tokens INTEGER NOT NULL);
INSERT OR IGNORE INTO total VALUES (0, 0, 0);
CREATE TRIGGER IF NOT EXISTS chunk_added AFTER INSERT ON chunk BEGIN
    UPDATE total SET chunks = chunks + 1, tokens = tokens + (length(new.tokens) - {_CHECKSUM_BYTES}) / 4;
    INSERT INTO share VALUES (new.namespace, 1, (length(new.tokens) - {_CHECKSUM_BYTES}) / 4)
    ON CONFLICT DO UPDATE SET chunks = chunks + 1, tokens = tokens + excluded.tokens;
END;
CREATE TRIGGER IF NOT EXISTS chunk_removed AFTER DELETE ON chunk BEGIN
    UPDATE total SET chunks = chunks - 1, tokens = tokens - (length(old.tokens) - {_CHECKSUM_BYTES}) / 4;
    UPDATE share SET chunks = chunks - 1, tokens = tokens - (length(old.tokens) - {_CHECKSUM_BYTES}) / 4
    WHERE namespace = old.namespace;
    DELETE FROM share WHERE namespace = old.namespace AND chunks = 0;
END;
CREATE TABLE IF NOT EXISTS followed (id INTEGER PRIMARY KEY CHECK (id = 0), cursor TEXT NOT NULL);
"""
_TOTAL = "SELECT cast(chunks AS INTEGER), cast(tokens AS INTEGER) FROM total"
_SHARE = "SELECT cast(chunks AS INTEGER), cast(tokens AS INTEGER) FROM share WHERE namespace = ?"
_LARGEST = """
SELECT namespace, max(1.0 * chunks / ?, 1.0 * tokens / ?) AS held FROM (
    SELECT * FROM (SELECT * FROM share ORDER BY chunks DESC LIMIT 1)
    UNION SELECT * FROM (SELECT * FROM share ORDER BY tokens DESC LIMIT 1))
ORDER BY held DESC LIMIT 1
"""
_USED_MAX = 1 << 62
"""A larger number is damage, and would leave no numbers for later uses."""
_LAST_USED = "SELECT ifnull(max(used), 0) FROM chunk WHERE typeof(used) = 'integer' AND used < ?"
_DELETE_OLDEST = """
DELETE FROM chunk WHERE id = (SELECT id FROM chunk WHERE namespace = ? ORDER BY used LIMIT 1)
RETURNING text, length(tokens)
"""

Address = tuple[str, ChunkKey]
Removed = tuple[str, ChunkText]
"""Namespace and text of a removed chunk."""


@dataclass(frozen=True)
class Record:
    """A known chunk."""

    tokens: bytes
    """Little-endian u32."""
    text: ChunkText | None


class ChunkTable:
    """The table. Thread-safe; reads do not wait for commits to a file.

    Raises `Unavailable`, `ResourceExhausted`, `Corrupted`, and `VersionMismatch` if a newer version has
    written the file.
    """

    def __init__(self, folder: Path | None, chunks_max: int, tokens_max: int) -> None:
        """Open or create the file in `folder`; without a folder the table lives in memory."""
        path = None if folder is None else folder / FILE_NAME
        self._folder = folder
        self._chunks_max = chunks_max
        self._tokens_max = tokens_max
        self._writes = Database(path, _SCHEMA, SCHEMA_VERSION, _REMEDY)
        self._reads = self._writes if path is None else Database(path, _SCHEMA, SCHEMA_VERSION, _REMEDY)
        self.num_chunks = self.num_tokens = 0
        """Totals after the last change."""
        with self._writes.transaction() as db:
            (self._used,) = db.execute(_LAST_USED, (_USED_MAX,)).fetchone()
            self._evict(db)

    def texts(self) -> Iterator[Removed]:
        """Yield the namespace and text of every chunk whose text is known and undamaged."""
        with self._reads.open_read() as db:
            for namespace, text in db.execute("SELECT namespace, text FROM chunk WHERE text IS NOT NULL"):
                yield from _parse_texts(namespace, [text])

    def get(self, address: Address) -> Record | None:
        """Return the chunk's record; None if it is absent or damaged."""
        namespace, key = address
        with self._reads.open_read() as db:
            row = db.execute(
                "SELECT tokens, text FROM chunk WHERE namespace = ? AND key = ?", (namespace, key.digest)
            ).fetchone()
        return None if row is None else _parse_record(address, *row)

    def share(self, namespace: str) -> tuple[int, int]:
        """Return the number of the namespace's chunks, and of their tokens."""
        with self._reads.open_read() as db:
            row = db.execute(_SHARE, (namespace,)).fetchone()
        return (0, 0) if row is None else row

    def parts(self, namespace: str) -> list[str]:
        """Return the parts of a namespace that hold chunks."""
        with self._reads.open_read() as db:
            names = [
                name for (name,) in db.execute("SELECT namespace FROM share WHERE typeof(namespace) = 'text'")
            ]
        return [name for name in names if name != namespace and is_within(name, namespace)]

    def apply(self, touched: Iterable[Address], added: Iterable[tuple[Address, Record]]) -> list[Removed]:
        """Move touched chunks to the end of the eviction order, add or replace chunks, and evict, in one
        transaction. Return the texts of removed chunks."""
        removed: list[Removed] = []
        with self._writes.transaction() as db:
            for namespace, key in touched:
                self._used += 1
                moved = (self._used, namespace, key.digest)
                db.execute("UPDATE chunk SET used = ? WHERE namespace = ? AND key = ?", moved)
            for address, record in added:
                removed += self._delete(db, address[0], address[1].digest)
                self._used += 1
                tokens = _checksum(address, record.tokens) + record.tokens
                text = None if record.text is None else record.text.to_bytes()
                db.execute(
                    "INSERT INTO chunk (namespace, key, used, tokens, text) VALUES (?, ?, ?, ?, ?)",
                    (address[0], address[1].digest, self._used, tokens, text),
                )
            return removed + self._evict(db)

    def erase(
        self, namespace: str, keys: Collection[ChunkKey] | None, spared: Collection[ChunkKey]
    ) -> list[Removed]:
        """Delete chunks except the spared ones, and overwrite all deleted chunks in files; ``keys`` None: all
        of the namespace. Return the texts of removed chunks."""
        removed: list[Removed] = []
        with self._writes.transaction() as db:
            if keys is None:
                # As the file has them: the row of a damaged key is deleted, too.
                rows = db.execute("SELECT key FROM chunk WHERE namespace = ?", (namespace,)).fetchall()
                digests = {digest for (digest,) in rows}
            else:
                digests = {key.digest for key in keys}
            for digest in digests - {key.digest for key in spared}:
                removed += self._delete(db, namespace, digest)
            self._evict(db)
        self._writes.scrub()
        return removed

    def read_cursor(self) -> str:
        """Return the position up to which erasures were followed; empty: none."""
        with self._reads.open_read() as db:
            row = db.execute("SELECT cursor FROM followed").fetchone()
        return "" if row is None else str(row[0])

    def write_cursor(self, cursor: str) -> None:
        with self._writes.transaction() as db:
            db.execute("INSERT OR REPLACE INTO followed VALUES (0, ?)", (cursor,))

    def _delete(self, db: sqlite3.Connection, namespace: str, digest: bytes) -> list[Removed]:
        gone = db.execute(
            "DELETE FROM chunk WHERE namespace = ? AND key = ? RETURNING text", (namespace, digest)
        ).fetchall()
        return _parse_texts(namespace, [text for (text,) in gone])

    def _evict(self, db: sqlite3.Connection) -> list[Removed]:
        """Delete the oldest chunks of the largest namespace until every bound holds."""
        removed: list[Removed] = []
        bounds = (self._chunks_max, self._tokens_max)
        chunks, tokens = self._read_total(db)
        while chunks:
            namespace, held = self._expect_row(db.execute(_LARGEST, bounds).fetchone())
            if held <= NAMESPACE_SHARE_MAX and chunks <= self._chunks_max and tokens <= self._tokens_max:
                break
            text, size = self._expect_row(db.execute(_DELETE_OLDEST, (namespace,)).fetchone())
            chunks, tokens = chunks - 1, tokens - (size - _CHECKSUM_BYTES) // 4
            removed += _parse_texts(namespace, [text])
        self.num_chunks, self.num_tokens = chunks, tokens
        return removed

    def _read_total(self, db: sqlite3.Connection) -> tuple[int, int]:
        """Return the number of chunks and tokens in the table. Raises `Corrupted`."""
        chunks, tokens = self._expect_row(db.execute(_TOTAL).fetchone())
        return self._expect_row((chunks, tokens) if chunks >= 0 and tokens >= 0 else None)

    def _expect_row(self, row: tuple[Any, Any] | None) -> tuple[Any, Any]:
        """Return the row, which exists if the counts are right. Raises `Corrupted`."""
        if row is None:
            raise Corrupted(f"{self._folder} counts chunks that it does not hold; {_REMEDY}")
        return row

    def close(self) -> None:
        """Idempotent."""
        self._reads.close()
        self._writes.close()


def _parse_texts(namespace: object, texts: Iterable[object]) -> list[Removed]:
    """Return the undamaged texts of a column. The column is empty for chunks without a text."""
    found: list[Removed] = []
    for text in texts:
        with suppress(Corrupted):
            found += [(namespace, ChunkText.from_bytes(text))] if isinstance(namespace, str) else []
    return found


def _parse_record(address: Address, tokens: object, text: object) -> Record | None:
    """Return the record, without its text if that is damaged; None if the tokens are damaged."""
    if not isinstance(tokens, bytes) or len(tokens) % ID_BYTES:
        return None
    ids = tokens[_CHECKSUM_BYTES:]
    if not ids or tokens[:_CHECKSUM_BYTES] != _checksum(address, ids):
        return None
    known = _parse_texts(address[0], [text])
    return Record(ids, known[0][1] if known else None)


def _checksum(address: Address, tokens: bytes) -> bytes:
    """Return xxh3-64 of key and tokens, with which a damaged row becomes a miss and not a wrong prompt."""
    return xxhash.xxh3_64_digest(address[1].digest + tokens)
