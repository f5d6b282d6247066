"""Records what a corpus consists of: documents, their chunks, the chunks' tokens, and the files read.

All corpora of a state folder share one SQLite file, so the ledger knows which chunks several corpora share.
The ledger does not know which chunks are prefilled; the store does. A crash leaves the state of the last
transaction, and a job that runs again computes the same keys, because they are digests.

SQLite's cache bounds the memory. On disk, a chunk of 512 tokens takes about 1 KiB, a ten-thousandth of its
KV: its compressed token ids, which are needed for requests that name a document.

Terms: an *edition* is a corpus as chunked for one chunk space. A new model makes a new edition; the old one
stays until it is retired. A chunk is *checked* in a run when it has been looked up in the store.

In a space with a context the ledger lists a chunk once, by its prepared key, and returns the keys of both the
prepared chunk and its plain copy. A plain copy is deleted with the last prepared chunk that uses it (two
contexts share the plain copies of one text), unless a corpus without a context has the same chunk.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import blake3

from kintsugi.core.errors import Corrupted, InvalidField, NotFound
from kintsugi.core.namespaces import is_within
from kintsugi.core.spaces import ChunkKey, ChunkSpace, check_namespace
from kintsugi.precompute.database import Database, lock_state
from kintsugi.precompute.documents import (
    DocumentIndex,
    DocumentRef,
    IndexedChunk,
    KnownChunk,
    NameKey,
    no_name_key,
)
from kintsugi.precompute.ledger_chunks import (
    PendingChunk,
    add_copies,
    check_digest,
    decompress_tokens,
    find_orphaned_copies,
    find_plain_space,
    parse_pending,
    unpack_tokens,
)
from kintsugi.precompute.sources.readers import Failure

SCHEMA_VERSION = 1
PAGE = 512
"""Chunks per page: the number looked up, deleted or pinned in one call."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS edition (
    id INTEGER PRIMARY KEY, corpus TEXT NOT NULL, space BLOB NOT NULL, namespace TEXT NOT NULL,
    fingerprint TEXT NOT NULL, source TEXT NOT NULL, model TEXT NOT NULL, chunking TEXT NOT NULL,
    completed_s REAL, UNIQUE (corpus, space));
CREATE TABLE IF NOT EXISTS file (
    edition INTEGER NOT NULL, url TEXT NOT NULL, stamp TEXT NOT NULL, PRIMARY KEY (edition, url)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS document (
    id INTEGER PRIMARY KEY, edition INTEGER NOT NULL, document_id TEXT NOT NULL, version TEXT NOT NULL,
    digest BLOB NOT NULL, url TEXT NOT NULL, place INTEGER NOT NULL, seen INTEGER NOT NULL,
    UNIQUE (edition, document_id));
CREATE INDEX IF NOT EXISTS document_url ON document (edition, url);
CREATE TABLE IF NOT EXISTS span (
    document INTEGER NOT NULL, number INTEGER NOT NULL, edition INTEGER NOT NULL, key BLOB NOT NULL,
    PRIMARY KEY (document, number)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS span_key ON span (key, edition);
CREATE TABLE IF NOT EXISTS chunk (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, namespace TEXT NOT NULL, tokens BLOB NOT NULL,
    num_tokens INTEGER NOT NULL, checked INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS run (
    id INTEGER PRIMARY KEY, edition INTEGER NOT NULL, started_s REAL NOT NULL, ended_s REAL,
    tokens_filled INTEGER NOT NULL DEFAULT 0, fill_s REAL NOT NULL DEFAULT 0,
    workers INTEGER NOT NULL DEFAULT 1);
CREATE TABLE IF NOT EXISTS prepared_space (
    space BLOB PRIMARY KEY, plain BLOB NOT NULL, plain_copies INTEGER NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class ScannedChunk:
    """One chunk of a document, from the scan."""

    key: bytes
    tokens: bytes
    """Packed by `pack_tokens`."""
    num_tokens: int


@dataclass(frozen=True)
class ScannedDocument:
    """A document that was read and chunked."""

    url: str
    place: int
    document_id: str
    version: str
    digest: bytes
    num_chars: int
    """Length of its text."""
    chunks: tuple[ScannedChunk, ...]


@dataclass(frozen=True)
class Recorded:
    """The result of recording a batch of documents."""

    fresh: list[PendingChunk]
    """Distinct chunks that this run has not checked yet, each with its plain copy."""
    duplicates: list[Failure]
    unchanged: int
    chunks: int


@dataclass(frozen=True)
class Edition:
    """A corpus as chunked for one chunk space."""

    id: int
    corpus: str
    namespace: str
    fingerprint: str
    source: str
    model: str
    documents: int
    chunks: int
    completed: bool


class Ledger(DocumentIndex):
    """The ledger of a state folder. Thread-safe. Several processes may open it; writers take turns."""

    def __init__(self, folder: Path) -> None:
        """Open or create ``ledger.sqlite`` in `folder`. Every method raises what `Database` raises."""
        self.folder = folder
        self._database = Database(folder / "ledger.sqlite", _SCHEMA, SCHEMA_VERSION)

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def exclusive(self, corpus: str) -> Iterator[None]:
        """Lock the corpus against jobs in other processes; the lock ends with the process. Raises
        `Unavailable` if another process holds it."""
        path = self.folder / f"{blake3.blake3(corpus.encode()).hexdigest()[:16]}.lock"
        with lock_state(path, f"another job is running on corpus {corpus!r}; wait for it"):
            yield

    def open_edition(
        self,
        corpus: str,
        space: ChunkSpace,
        source: str,
        model: str,
        chunking: str,
        plain_copies: bool = True,
    ) -> int:
        """Return the edition's number. Create the edition if it does not exist.

        ``plain_copies``: whether its chunks have plain copies from now on, if the space has a context."""
        with self._database.transaction() as db:
            if space.context_token_ids:
                row = (space.digest, space.plain.digest, plain_copies)
                db.execute("INSERT OR REPLACE INTO prepared_space VALUES (?,?,?)", row)
            db.execute(
                "INSERT INTO edition (corpus, space, namespace, fingerprint, source, model, chunking)"
                " VALUES (?,?,?,?,?,?,?) ON CONFLICT (corpus, space) DO UPDATE SET source=excluded.source,"
                " model=excluded.model",
                (corpus, space.digest, space.namespace, space.fingerprint.hex, source, model, chunking),
            )
            key = (corpus, space.digest)
            number, before = db.execute(
                "SELECT id, chunking FROM edition WHERE corpus=? AND space=?", key
            ).fetchone()
            if before != chunking:
                # Every document now has other chunks: read all files again.
                db.execute("UPDATE edition SET chunking=?, completed_s=NULL WHERE id=?", (chunking, number))
                db.execute("DELETE FROM file WHERE edition=?", (number,))
        return int(number)

    def begin_run(self, edition: int, workers: int = 1) -> int:
        with self._database.transaction() as db:
            row = (edition, time.time(), workers)
            run = db.execute("INSERT INTO run (edition, started_s, workers) VALUES (?,?,?)", row).lastrowid
        assert run is not None
        return run

    def end_run(self, run: int, tokens_filled: int, fill_s: float, complete: bool) -> None:
        with self._database.transaction() as db:
            db.execute(
                "UPDATE run SET ended_s=?, tokens_filled=?, fill_s=? WHERE id=?",
                (time.time(), tokens_filled, fill_s, run),
            )
            if complete:
                db.execute(
                    "UPDATE edition SET completed_s=? WHERE id=(SELECT edition FROM run WHERE id=?)",
                    (time.time(), run),
                )

    def tokens_per_s(self, fingerprint: str) -> float | None:
        """Return the speed of one worker in the newest run with this model that prefilled for at least a
        second."""
        with self._database.open_read() as db:
            row = db.execute(
                "SELECT run.tokens_filled / run.fill_s / run.workers FROM run"
                " JOIN edition ON edition.id=run.edition"
                " WHERE edition.fingerprint=? AND run.fill_s>=1 AND run.tokens_filled>0 ORDER BY run.id DESC",
                (fingerprint,),
            ).fetchone()
        return None if row is None else float(row[0])

    def stamps(self, edition: int) -> dict[str, str]:
        """Return the stamps of the files that were read without a failure, by URL."""
        with self._database.open_read() as db:
            return dict(db.execute("SELECT url, stamp FROM file WHERE edition=?", (edition,)).fetchall())

    def keep_files(self, edition: int, run: int, urls: Sequence[str]) -> int:
        """Mark the documents of unchanged files as seen in this run. Returns their number."""
        kept = 0
        with self._database.transaction() as db:
            for url in urls:
                kept += db.execute(
                    "UPDATE document SET seen=? WHERE edition=? AND url=?", (run, edition, url)
                ).rowcount
        return kept

    def record(
        self,
        edition: int,
        run: int,
        namespace: str,
        documents: Sequence[ScannedDocument],
        name_key: bytes = b"",
    ) -> Recorded:
        """Record documents. If two have the same id, only the one that comes first in the source is recorded.

        ``name_key``, here and below: the name key of the edition's chunk space. The ledger does not store
        it."""
        fresh: list[PendingChunk] = []
        duplicates: list[Failure] = []
        unchanged = chunks = 0
        with self._database.transaction() as db:
            plain = find_plain_space(db, edition)
            for document in documents:
                failure, same = self._record_one(db, edition, run, document)
                duplicates += [failure] if failure else []
                unchanged += same
                if failure is None or failure.url != document.url or failure.place != document.place:
                    chunks += len(document.chunks)
                    fresh += _claim_document_chunks(db, run, namespace, document)
        return Recorded(add_copies(fresh, plain, name_key), duplicates, unchanged, chunks)

    def _record_one(
        self, db: sqlite3.Connection, edition: int, run: int, document: ScannedDocument
    ) -> tuple[Failure | None, bool]:
        row = db.execute(
            "SELECT id, digest, version, url, place, seen FROM document WHERE edition=? AND document_id=?",
            (edition, document.document_id),
        ).fetchone()
        failure = None
        if row is not None and row[5] == run:
            here, there = (document.url, document.place), (row[3], row[4])
            if here == there:
                return None, True
            later = max(here, there)
            failure = Failure(*later, "another document has the same id", document.document_id)
            if later == here:
                return failure, False
        if row is not None and (row[1], row[2]) == (document.digest, document.version):
            update = "UPDATE document SET seen=?, url=?, place=? WHERE id=?"
            db.execute(update, (run, document.url, document.place, row[0]))
            return failure, True
        if row is not None:
            db.execute("DELETE FROM span WHERE document=?", (row[0],))
            db.execute("DELETE FROM document WHERE id=?", (row[0],))
        number = db.execute(
            "INSERT INTO document (edition, document_id, version, digest, url, place, seen)"
            " VALUES (?,?,?,?,?,?,?)",
            (
                *(edition, document.document_id, document.version, document.digest),
                *(document.url, document.place, run),
            ),
        ).lastrowid
        db.executemany(
            "INSERT INTO span VALUES (?,?,?,?)",
            [(number, n, edition, chunk.key) for n, chunk in enumerate(document.chunks)],
        )
        return failure, False

    def end_scan(self, edition: int, run: int, clean: dict[str, str], failed_urls: Sequence[str]) -> int:
        """Delete documents that the source no longer has. Return their number.

        ``clean``: stamps of the files that were read without a failure. Documents of files and folders in
        ``failed_urls`` (a folder's URL ends with a slash) stay, because an unreadable file is not deleted.
        """
        with self._database.transaction() as db:
            db.execute("CREATE TEMP TABLE IF NOT EXISTS spared (url TEXT PRIMARY KEY)")
            db.execute("DELETE FROM spared")
            db.executemany("INSERT OR IGNORE INTO spared VALUES (?)", [(url,) for url in failed_urls])
            db.executemany(
                "INSERT OR IGNORE INTO spared SELECT url FROM document WHERE edition=?1"
                " AND substr(url, 1, length(?2))=?2",
                [(edition, url) for url in failed_urls if url.endswith("/")],
            )
            gone = "edition=? AND seen!=? AND url NOT IN (SELECT url FROM spared)"
            db.execute(
                f"DELETE FROM span WHERE document IN (SELECT id FROM document WHERE {gone})", (edition, run)
            )
            vanished = db.execute(f"DELETE FROM document WHERE {gone}", (edition, run)).rowcount
            db.execute("DELETE FROM file WHERE edition=?", (edition,))
            rows = [(edition, url, stamp) for url, stamp in clean.items() if stamp]
            db.executemany("INSERT OR REPLACE INTO file VALUES (?,?,?)", rows)
        return int(vanished)

    def claim_unchecked(self, edition: int, run: int, name_key: bytes = b"") -> Iterator[list[PendingChunk]]:
        """Yield pages of the edition's chunks that the run has not checked yet, each with its plain copy, and
        mark them as checked."""
        last = 0
        while True:
            with self._database.transaction() as db:
                plain = find_plain_space(db, edition)
                rows = db.execute(
                    "SELECT id, key, tokens, num_tokens FROM chunk WHERE id>? AND checked!=? AND EXISTS"
                    " (SELECT 1 FROM span WHERE span.key=chunk.key AND span.edition=?) ORDER BY id LIMIT ?",
                    (last, run, edition, PAGE),
                ).fetchall()
                db.executemany("UPDATE chunk SET checked=? WHERE id=?", [(run, row[0]) for row in rows])
            if not rows:
                return
            last = rows[-1][0]
            chunks = [parse_pending(*row[1:]) for row in rows]
            yield add_copies(chunks, plain, name_key)

    def chunks_of(
        self, edition: int, name_key: bytes = b""
    ) -> Iterator[list[tuple[int, list[PendingChunk]]]]:
        """Yield pages of the edition's distinct chunks: each one's number, and the chunk with its plain
        copy."""
        for plain, rows in self._pages(edition, "id"):
            yield [(row[0], add_copies([parse_pending(*row[1:])], plain, name_key)) for row in rows]

    def keys(self, edition: int, name_key: bytes = b"") -> Iterator[list[ChunkKey]]:
        """Yield pages of the keys of the edition's distinct chunks and of their plain copies."""
        for plain, rows in self._pages(edition, "key"):
            chunks = [parse_pending(*row[1:]) for row in rows]
            yield [chunk.key for chunk in add_copies(chunks, plain, name_key)]

    def _pages(
        self, edition: int, order: Literal["id", "key"]
    ) -> Iterator[tuple[bytes | None, list[tuple[int, bytes, bytes, int]]]]:
        """Yield pages of the edition's distinct chunks, each with the space of plain copies: rows of id, key,
        tokens and number of tokens."""
        last: int | bytes = 0  # SQLite sorts blobs after numbers
        while True:
            with self._database.open_read() as db:
                plain = find_plain_space(db, edition)
                rows = db.execute(
                    f"SELECT id, key, tokens, num_tokens FROM chunk WHERE {order}>? AND EXISTS"
                    " (SELECT 1 FROM span WHERE span.key=chunk.key AND span.edition=?)"
                    f" ORDER BY {order} LIMIT ?",
                    (last, edition, PAGE),
                ).fetchall()
            if not rows:
                return
            last = rows[-1][0 if order == "id" else 1]
            yield plain, rows

    @contextmanager
    def orphans(self, namespace: str, name_key: bytes = b"") -> Iterator[list[ChunkKey]]:
        """Yield a page of keys: chunks that belong to no document of any corpus, and their plain copies.

        They are deleted when the body ends without an error. The page is empty only if no orphans are left.

        The transaction blocks other writers. If a document gets one of these chunks meanwhile, it is recorded
        after the store has deleted the chunk, and the chunk is found to be missing.
        """
        with self._database.transaction() as db:
            spaces = db.execute("SELECT space, plain, plain_copies FROM prepared_space").fetchall()
            while True:
                rows = db.execute(
                    "SELECT key, tokens FROM chunk WHERE namespace=? AND NOT EXISTS"
                    " (SELECT 1 FROM span WHERE span.key=chunk.key) LIMIT ?",
                    (namespace, PAGE),
                ).fetchall()
                orphans = [
                    one
                    for key, tokens in rows
                    for one in find_orphaned_copies(db, spaces, key, tokens, name_key)
                ]
                if orphans or not rows:
                    yield orphans
                db.executemany("DELETE FROM chunk WHERE key=?", [(key,) for key, _ in rows])
                if orphans or not rows:
                    return

    def erase_chunks(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        with self._database.transaction() as db:
            erased = sum(
                db.execute("DELETE FROM chunk WHERE namespace=? AND key=?", (namespace, key.digest)).rowcount
                for key in keys
            )
        self._database.scrub()
        return erased

    def erase_document(
        self,
        namespace: str,
        corpus: str,
        document_id: str,
        erase: Callable[[Sequence[ChunkKey]], None],
        name_key: bytes = b"",
    ) -> bool:
        with self._database.transaction() as db:
            editions = "(SELECT id FROM edition WHERE namespace=? AND corpus=?)"
            which = (document_id, namespace, corpus)
            numbers = db.execute(
                f"SELECT id FROM document WHERE document_id=? AND edition IN {editions}", which
            ).fetchall()
            db.executemany("DELETE FROM span WHERE document=?", numbers)
            db.executemany("DELETE FROM document WHERE id=?", numbers)
        has_orphans = True
        while has_orphans:
            with self.orphans(namespace, name_key) as keys:
                has_orphans = bool(keys)
                if keys:
                    erase(keys)
        self._database.scrub()
        return bool(numbers)

    def erase_namespace(self, namespace: str) -> int:
        with self._database.transaction() as db:
            held = db.execute("SELECT namespace FROM edition UNION SELECT namespace FROM chunk").fetchall()
            erased = sum(_erase_one(db, name) for (name,) in held if is_within(name, namespace))
        self._database.scrub()
        return erased

    def empty(self, edition: int) -> None:
        """Delete an edition's documents. Chunks that belong to no other edition become orphans."""
        with self._database.transaction() as db:
            for table in ("span", "document", "file", "run"):
                db.execute(f"DELETE FROM {table} WHERE edition=?", (edition,))
            db.execute("UPDATE edition SET completed_s=NULL WHERE id=?", (edition,))

    def retire(self, edition: int) -> None:
        """Delete an edition after `empty`."""
        with self._database.transaction() as db:
            db.execute("DELETE FROM edition WHERE id=?", (edition,))

    def find_replaced_editions(self, corpus: str, edition: int) -> list[Edition]:
        """Return all editions except this one and the one that was completed last. The list is empty while no
        edition is complete."""
        with self._database.open_read() as db:
            row = db.execute(
                "SELECT id FROM edition WHERE corpus=? AND completed_s IS NOT NULL"
                " ORDER BY completed_s DESC LIMIT 1",
                (corpus,),
            ).fetchone()
        if row is None:
            return []
        return [one for one in self.editions(corpus) if one.id not in (edition, row[0])]

    def editions(self, corpus: str | None = None) -> list[Edition]:
        """Return all editions, newest last."""
        with self._database.open_read() as db:
            rows = db.execute(
                "SELECT id, corpus, namespace, fingerprint, source, model,"
                " (SELECT count(*) FROM document WHERE edition=edition.id),"
                " (SELECT count(DISTINCT key) FROM span WHERE edition=edition.id), completed_s IS NOT NULL"
                " FROM edition WHERE ?1 IS NULL OR corpus=?1 ORDER BY id",
                (corpus,),
            ).fetchall()
        return [Edition(*(*row[:8], bool(row[8]))) for row in rows]

    def fingerprints(self, corpus: str) -> set[str]:
        """Return the fingerprints of the models for which the corpus has editions."""
        with self._database.open_read() as db:
            rows = db.execute("SELECT DISTINCT fingerprint FROM edition WHERE corpus=?", (corpus,))
            return {fingerprint for (fingerprint,) in rows.fetchall()}

    def resolve(
        self, corpus: str, refs: Sequence[DocumentRef], name_key: NameKey = no_name_key
    ) -> list[KnownChunk | None]:
        """Resolve references within the serving edition, which is the newest complete one. Raises `NotFound`
        if the corpus has none."""
        with self._database.open_read() as db:
            row = db.execute(
                "SELECT id, namespace FROM edition WHERE corpus=? AND completed_s IS NOT NULL"
                " ORDER BY id DESC LIMIT 1",
                (corpus,),
            ).fetchone()
            if row is None:
                raise NotFound(f"corpus {corpus!r} is not complete in this ledger; run kintsugi precompute")
            edition, secret = row[0], name_key(row[1])
            return [_resolve_document(db, edition, ref, secret) for ref in refs]

    def chunks(self, fingerprint: str, after: int, limit: int) -> list[IndexedChunk]:
        """Return up to `limit` chunks, as in `DocumentIndex`. Damaged rows are left out."""
        while True:
            with self._database.open_read() as db:
                rows = db.execute(
                    "SELECT id, namespace, key, tokens FROM chunk WHERE id>? AND EXISTS"
                    " (SELECT 1 FROM span JOIN edition ON edition.id=span.edition"
                    " WHERE span.key=chunk.key AND edition.fingerprint=?) ORDER BY id LIMIT ?",
                    (after, fingerprint, limit),
                ).fetchall()
            found = [chunk for row in rows if (chunk := _index_chunk(*row)) is not None]
            if found or not rows:
                return found
            after = rows[-1][0]


def _resolve_document(
    db: sqlite3.Connection, edition: int, ref: DocumentRef, name_key: bytes
) -> KnownChunk | None:
    row = db.execute(
        "SELECT document.id, document.version, chunk.key, chunk.tokens, edition.space FROM document"
        " JOIN span ON span.document=document.id AND span.number=? JOIN chunk ON chunk.key=span.key"
        " JOIN edition ON edition.id=document.edition"
        " WHERE document.edition=? AND document.document_id=?",
        (ref.index, edition, ref.document_id),
    ).fetchone()
    if row is None or ref.version not in (None, row[1]):
        return None
    document, version, key, tokens, space = row
    if not (_is_named(db, document, edition, ref) and _is_listed(db, document, edition, ref.index, key)):
        return None
    try:
        found = ChunkKey.in_space(check_digest(space), decompress_tokens(tokens), name_key)
    except Corrupted:
        return None
    if found.digest != key or not isinstance(version, str):
        return None
    return KnownChunk(ref, version, found, tuple(unpack_tokens(tokens)))


def _index_chunk(number: int, namespace: object, key: object, tokens: object) -> IndexedChunk | None:
    """Return the chunk of a row; None for a damaged row."""
    try:
        ids = tuple(unpack_tokens(tokens))
        return IndexedChunk(number, check_namespace(str(namespace)), ChunkKey(check_digest(key)), ids)
    except (Corrupted, InvalidField):
        return None


def _is_named(db: sqlite3.Connection, document: int, edition: int, ref: DocumentRef) -> bool:
    """Whether the document's row agrees with the index that found it. SQLite has no checksums, so a flipped
    bit in the row or the index would name another document."""
    row = db.execute(
        "SELECT edition, document_id FROM document NOT INDEXED WHERE id=?", (document,)
    ).fetchone()
    return bool(row == (edition, ref.document_id))


def _is_listed(db: sqlite3.Connection, document: int, edition: int, number: int, key: bytes) -> bool:
    """Whether the index of spans agrees with the row that maps a document's chunk to the key."""
    query = "SELECT 1 FROM span INDEXED BY span_key WHERE key=? AND edition=? AND document=? AND number=?"
    return db.execute(query, (key, edition, document, number)).fetchone() is not None


def _claim_document_chunks(
    db: sqlite3.Connection, run: int, namespace: str, document: ScannedDocument
) -> list[PendingChunk]:
    """Return the document's chunks that this run has not checked, and mark them as checked."""
    fresh = []
    for chunk in document.chunks:
        changed = db.execute(
            "INSERT INTO chunk (key, namespace, tokens, num_tokens, checked) VALUES (?,?,?,?,?)"
            " ON CONFLICT (key) DO UPDATE SET checked=excluded.checked WHERE checked!=excluded.checked",
            (chunk.key, namespace, chunk.tokens, chunk.num_tokens, run),
        ).rowcount
        if changed:
            fresh.append(PendingChunk(ChunkKey(chunk.key), chunk.tokens, chunk.num_tokens))
    return fresh


def _erase_one(db: sqlite3.Connection, namespace: str) -> int:
    """Delete every corpus of the namespace, without its parts. Return the number of chunks."""
    numbers = db.execute("SELECT id FROM edition WHERE namespace=?", (namespace,)).fetchall()
    for table in ("span", "document", "file", "run"):
        db.executemany(f"DELETE FROM {table} WHERE edition=?", numbers)
    db.executemany("DELETE FROM edition WHERE id=?", numbers)
    return int(db.execute("DELETE FROM chunk WHERE namespace=?", (namespace,)).rowcount)
