"""The chunks that a gateway has seen: their tokens by key, and an index of their texts.

The store knows chunks by key and holds neither text nor tokens. But a request may name a chunk by its key
alone, and an unmodified RAG framework pastes chunk texts into a message.

This is a cache of the chunks that clients sent: a missing entry costs a hit, never an answer. It is bounded
in total and for each namespace, and evicts a namespace's least recently used chunks first. `ChunkTable` holds
tokens and texts by namespace and key, in one SQLite database: triggers count the chunks and tokens of each
namespace, and every change ends with the deletion of the least recently used chunks of the namespaces that
exceed a bound. An index in memory finds texts (`gateway.texts.known_texts`).
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from kintsugi.core.errors import Corrupted, KintsugiError
from kintsugi.core.held import Held
from kintsugi.core.namespaces import is_within
from kintsugi.core.spaces import ID_BYTES, ChunkKey, TokenIds
from kintsugi.gateway.texts.known_texts import WINDOW_CHARS, ChunkText, TextIndex, disjoint, window_hashes
from kintsugi.precompute.database import Database

log = logging.getLogger(__name__)

CHUNKS_MAX = 200_000
"""Maximum number of chunks. Their index needs up to 200 MB of memory, and their table 2 KiB for each chunk of
512 tokens: on disk, or in memory without a folder."""
TOKENS_MAX = 128 << 20
"""Maximum number of tokens of all chunks together, 512 MiB."""
RECENT_BYTES_MAX = 8 << 20
"""Memory for the times at which chunks were last remembered. Erasures are followed within seconds."""
TOUCHED_MAX = 10_000
"""Maximum number of uses that wait for the next write; further ones replace the oldest."""

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
"""A larger number in the column is damage, and would leave no numbers for later uses."""
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
                # Keys as stored in the file, so that the row of a damaged key is deleted, too.
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


class KnownChunks:
    """The known chunks of one gateway. Thread-safe.

    Lookups take microseconds and do not wait for writes to a folder. `remember`, `erase` and `close` write to
    it, so an event loop calls them in a thread.
    """

    def __init__(
        self, folder: Path | None = None, chunks_max: int = CHUNKS_MAX, tokens_max: int = TOKENS_MAX
    ) -> None:
        """Open or create the table in `folder`. Raises as `ChunkTable`."""
        self._chunks_max = chunks_max
        self._tokens_max = tokens_max
        self._writing = threading.Lock()
        """Held during a write and the following update of the index."""
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._indexes: dict[str, TextIndex] = {}
        """Indexes of the namespaces with texts."""
        self._text_users: Counter[tuple[str, ChunkText]] = Counter()
        """Number of chunks with a text: a text has another key for each model."""
        self._touched: OrderedDict[Address, None] = OrderedDict()
        """Chunks used since the last write, the oldest use first."""
        self.recent: Held[ChunkKey, float] = Held(RECENT_BYTES_MAX)
        """Time of each chunk's last `remember`, the latest last: an erasure spares chunks remembered after
        it."""
        self._table = ChunkTable(folder, chunks_max, tokens_max)
        for namespace, text in self._table.texts():
            self._add_text(namespace, text)

    def __len__(self) -> int:
        return self._table.num_chunks

    @property
    def room(self) -> int:
        """Number of chunks that fit without an eviction; 0 as soon as half of the tokens are in use."""
        is_half_full = 2 * self._table.num_tokens >= self._tokens_max
        return 0 if is_half_full else self._chunks_max - self._table.num_chunks

    def num_chunks(self, namespace: str) -> int:
        """Return the number of a namespace's chunks."""
        return self._table.share(namespace)[0]

    def has_room(self, namespace: str) -> bool:
        """Return whether another chunk of the namespace fits without an eviction; false as soon as the
        namespace uses half of its share of tokens."""
        chunks, tokens = self._table.share(namespace)
        few_tokens = 2 * tokens < NAMESPACE_SHARE_MAX * self._tokens_max
        return few_tokens and chunks + 1 <= NAMESPACE_SHARE_MAX * self._chunks_max

    def remember(
        self, namespace: str, key: ChunkKey, token_ids: Sequence[int], text: str | None = None
    ) -> None:
        """Remember a chunk, and the text that tokenises to it if there is one. A later text replaces it."""
        address, known = (namespace, key), None if text is None else ChunkText.of(text)
        with self._lock:
            self.recent.put(*address, time.time())
        before = self._get(address)
        if before is not None and known in (None, before.text):
            self._touch(address)
        else:
            self._write([(address, Record(TokenIds.of(token_ids).data, known))])

    def token_ids(self, namespace: str, key: ChunkKey) -> TokenIds | None:
        """Return the chunk's tokens; None if it is not known in this namespace."""
        record = self._get((namespace, key))
        if record is None:
            return None
        self._touch((namespace, key))
        return TokenIds(record.tokens)

    def knows(self, namespace: str, key: ChunkKey) -> bool:
        """Return whether `token_ids` would return tokens. Does not count as a use."""
        return self._get((namespace, key)) is not None

    def find(self, namespace: str, text: str) -> list[tuple[int, int]]:
        """Find known chunk texts inside `text`. Return `[start, end)` in characters, disjoint and in order;
        of overlapping texts, the choice that covers most."""
        if len(text) < WINDOW_CHARS or namespace not in self._indexes:
            return []
        windows = window_hashes(text)  # without the lock, because this takes most of the time
        with self._lock:
            index = self._indexes.get(namespace)
            found = [] if index is None else index.matches(text, windows)
        return disjoint(found)

    def erase(self, namespace: str, keys: Collection[ChunkKey] | None, asked_at_s: float) -> int:
        """Forget chunks, and overwrite them in files; None: all of the namespace and its parts.

        Chunks that were remembered after ``asked_at_s`` (Unix seconds) stay. Returns the number of erased
        chunks. Raises as `ChunkTable`; then some chunks may remain.
        """
        names = [namespace, *(self._table.parts(namespace) if keys is None else ())]
        return sum(self._erase(name, keys, asked_at_s) for name in names)

    def _erase(self, namespace: str, keys: Collection[ChunkKey] | None, asked_at_s: float) -> int:
        with self._writing:
            latest_s = time.time()  # a later time is that of a clock that was ahead
            with self._lock:
                spared = {key for key, at_s in self.recent.items(namespace) if asked_at_s < at_s <= latest_s}
                for address in [one for one in self._touched if one[0] == namespace]:
                    del self._touched[address]
            before = len(self)
            removed = self._table.erase(namespace, keys, spared)
            with self._lock:
                for name, text in removed:
                    self._remove_text(name, text)
            return before - len(self)

    @property
    def cursor(self) -> str:
        """Position in the store's erasures up to which they were followed; empty: none. Raises as
        `ChunkTable`."""
        return self._table.read_cursor()

    def set_cursor(self, cursor: str) -> None:
        self._table.write_cursor(cursor)

    def _get(self, address: Address) -> Record | None:
        try:
            return self._table.get(address)
        except KintsugiError as error:
            log.warning("a known chunk cannot be read: %s", error)
            return None

    def _touch(self, address: Address) -> None:
        with self._lock:
            self._touched[address] = None
            self._touched.move_to_end(address)
            if len(self._touched) > TOUCHED_MAX:
                self._touched.popitem(last=False)

    def _write(self, added: Sequence[tuple[Address, Record]]) -> None:
        """Write chunks, and all uses so far. If this fails, they are lost, with a warning."""
        with self._writing:
            with self._lock:
                touched, self._touched = self._touched, OrderedDict()
            try:
                removed = self._table.apply(touched, added)
            except KintsugiError as error:
                log.warning("%d known chunks cannot be written: %s", len(added), error)
                return
            with self._lock:
                for (namespace, _), record in added:
                    if record.text is not None:
                        self._add_text(namespace, record.text)
                for namespace, text in removed:
                    self._remove_text(namespace, text)

    def _add_text(self, namespace: str, text: ChunkText) -> None:
        self._text_users[namespace, text] += 1
        if self._text_users[namespace, text] == 1:
            self._indexes.setdefault(namespace, TextIndex()).add(text)

    def _remove_text(self, namespace: str, text: ChunkText) -> None:
        if (namespace, text) not in self._text_users:
            return  # another gateway wrote the chunk to the folder
        self._text_users[namespace, text] -= 1
        if not self._text_users[namespace, text]:
            del self._text_users[namespace, text]
            self._indexes[namespace].remove(text)
            if not len(self._indexes[namespace]):
                del self._indexes[namespace]

    def close(self) -> None:
        """Write the waiting uses. Idempotent."""
        if self._touched:
            self._write([])
        self._table.close()
