"""Decoders of files that lie on a disk: models, Parquet, the ledger, known texts, and what services keep.

As in `tests/decoders.py`, which lists these, too: a decoder takes any bytes and returns, or fails. Rows of a
database are fuzzed column by column, with SQLite's own checks passed: a flipped bit or another program may
leave any type in any column.
"""

from __future__ import annotations

import contextlib
import io
import json
import sqlite3
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from unittest.mock import patch

import docx
import pyarrow as pa
import pyarrow.parquet as pq
import pypdf

from kintsugi.cli.commands.backup import INDEX, read_index
from kintsugi.core.errors import Corrupted, InvalidField, KintsugiError, NotFound
from kintsugi.core.layout import TOKENS_MAX
from kintsugi.core.spaces import KEY_BYTES, ChunkKey, ChunkSpace, ModelFingerprint, token_bytes
from kintsugi.gateway.texts import known_chunks
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.models import checkpoint
from kintsugi.precompute.database import Database
from kintsugi.precompute.documents import DocumentRef
from kintsugi.precompute.ledger import Ledger, ScannedChunk, ScannedDocument
from kintsugi.precompute.ledger_chunks import pack_tokens
from kintsugi.precompute.sources.files import FileRange, Format
from kintsugi.precompute.sources.parser_process import ParserLimits
from kintsugi.precompute.sources.readers import Columns, Document, Failure
from kintsugi.precompute.sources.sandbox import read_confined
from kintsugi.quality.questions import read_questions
from kintsugi.store.client.directory import FileDirectory
from kintsugi.store.client.erasures import read_cursor, write_cursor
from kintsugi.store.shard.tiers.home import Home

SPACE = ChunkSpace(ModelFingerprint(bytes(32)), "acme", (1, 2), context_token_ids=(3,))
IDS = tuple(range(7, 47))
TEXT = "A text of a known chunk, which is long enough to be found inside a longer one. " * 2
T = TypeVar("T")
PARSER_LIMITS = ParserLimits(cpu_s_max=5.0, wait_s_max=8.0)


@cache
def scratch() -> Path:
    """A folder in memory where there is one."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    return Path(tempfile.mkdtemp(prefix="kintsugi-decoders-", dir=folder))


_BINARY = (Format.PARQUET, Format.PDF, Format.DOCX)


def binary_file(data: bytes) -> None:
    """A Parquet, PDF or DOCX file, which the first byte chooses, read as a job does: documents and failures,
    whatever becomes of the parser."""
    kind, data = _BINARY[data[0] % len(_BINARY)] if data else Format.PDF, data[1:]
    path = scratch() / f"corpus.{kind}"
    path.write_bytes(data)
    piece = FileRange(f"file://{path}", path.name, kind, "", len(data))
    for item in read_confined(piece, Columns(), limits=PARSER_LIMITS):
        assert isinstance(item, Document | Failure)
        assert item.url == piece.url


def safetensors_file(data: bytes) -> None:
    """The header of a safetensors file: names, types and shapes, or `Corrupted`."""
    path = scratch() / "model.safetensors"
    path.write_bytes(data)
    with contextlib.suppress(Corrupted):
        for name, dtype, shape in checkpoint._header.__wrapped__(path, len(data), 0):
            assert isinstance(name, str)
            assert isinstance(dtype, str)
            assert all(isinstance(extent, int) for extent in shape)


def model_files(data: bytes) -> None:
    """A model's configuration, and its index of weights, which names files of the folder alone."""
    folder = scratch() / "model"
    folder.mkdir(exist_ok=True)
    (folder / checkpoint._INDEX).write_bytes(data)
    with contextlib.suppress(Corrupted):
        assert isinstance(checkpoint._json(folder / checkpoint._INDEX), dict)
        for path in checkpoint._weight_files(folder):
            assert path.parent == folder
            assert path.name not in ("", "..")
            with contextlib.suppress(NotFound, Corrupted):
                checkpoint._stat(path)


def ledger_row(data: bytes) -> None:
    """A row of a ledger with any value in one column: what is found is right, or an error of ours."""
    ledger, sound = _ledger()
    db = ledger._database._db
    db.deserialize(sound)
    if not _change_column(db, _LEDGER_COLUMNS, data):
        return
    refs = [DocumentRef("document", 0), DocumentRef("document", 0, "1")]
    for known in _attempt(lambda: ledger.resolve("corpus", refs)) or ():
        assert known is None or (known.token_ids == IDS and isinstance(known.version, str))
    for chunk in _attempt(lambda: ledger.chunks(SPACE.fingerprint.hex, 0, 10)) or ():
        assert len(chunk.token_ids) <= TOKENS_MAX
    for page in _attempt(lambda: list(ledger.keys(1))) or ():
        assert all(len(key.digest) == KEY_BYTES for key in page)
    for chunks in _attempt(lambda: list(ledger.claim_unchecked(1, 2))) or ():
        assert sum(chunk.num_tokens for chunk in chunks) is not None
        _attempt(lambda: [chunk.token_ids for chunk in chunks])  # noqa: B023
    _attempt(lambda: _forget_orphans(ledger))


def _forget_orphans(ledger: Ledger) -> None:
    ledger.empty(1)
    with ledger.orphans("acme") as keys:
        assert all(len(key.digest) == KEY_BYTES for key in keys)


@cache
def _ledger() -> tuple[Ledger, bytes]:
    """A ledger with one document, and what its database holds."""
    ledger = Ledger(scratch() / "ledger")
    edition = ledger.open_edition("corpus", SPACE, "source", "model", "chunking")
    run = ledger.begin_run(edition)
    chunk = ScannedChunk(ChunkKey.of(SPACE, IDS).digest, pack_tokens(token_bytes(IDS)), len(IDS))
    document = ScannedDocument("file", 0, "document", "1", bytes(16), 40, (chunk,))
    ledger.record(edition, run, "acme", [document])
    ledger.end_run(run, 0, 0.0, complete=True)
    return ledger, _serialize(ledger._database._db)


def known_texts_row(data: bytes) -> None:
    """A row of a gateway's known chunks with any value in one column: the chunk's tokens, or none. Whoever
    computes the checksum, too, has written a row."""
    database, sound = _known_texts()
    database._db.deserialize(sound)
    if not _change_column(database._db, _TEXTS_COLUMNS, data):
        return
    with patch.object(known_chunks, "Database", lambda *arguments: database):
        known = _attempt(KnownChunks)
    if known is None:
        return
    key = ChunkKey.of(SPACE, IDS)
    ids = known.token_ids("acme", key)
    assert ids is None or tuple(ids) == IDS or _is_checksummed(key, _value(data[1:]), ids.data)
    found = known.find("acme", f"x{TEXT}y")
    assert all(0 <= start < stop <= len(TEXT) + 2 for start, stop in found)
    known.has_room("acme")
    known.remember("acme", key, IDS, TEXT + "other")
    _attempt(lambda: known.erase("acme", None, 0.0))


def _is_checksummed(key: ChunkKey, value: Any, tokens: bytes) -> bool:
    return bool(tokens) and value == known_chunks._checksum(("acme", key), tokens) + tokens


@cache
def _known_texts() -> tuple[Database, bytes]:
    """The database of a gateway that knows one chunk, and what it holds."""
    known = KnownChunks()
    known.remember("acme", ChunkKey.of(SPACE, IDS), IDS, TEXT)
    return known._table._writes, _serialize(known._table._writes._db)


def _serialize(db: sqlite3.Connection) -> bytes:
    """The database's bytes, marked as having no log beside it."""
    content = bytearray(db.serialize())
    content[18:20] = b"\1\1"
    return bytes(content)


def kept_document(data: bytes) -> None:
    """A document that services keep or a user gives, read in each way that there is one."""
    path = scratch() / "kept"
    path.mkdir(exist_ok=True)
    for name in ("kintsugi.json", INDEX, "shards.json", "lines.jsonl"):
        (path / name).write_bytes(data)
    with contextlib.suppress(KintsugiError):
        Home(path).close()
    with contextlib.suppress(KintsugiError):
        read_index(path)
    with contextlib.suppress(InvalidField):
        FileDirectory(path / "shards.json")
    with contextlib.suppress(KintsugiError):
        read_questions(path / "lines.jsonl")
    with contextlib.suppress(InvalidField):
        seen = read_cursor(data.decode(errors="replace"))
        assert read_cursor(write_cursor(seen)) == seen


def _attempt(act: Callable[[], T]) -> T | None:
    """The result; None for an error of ours."""
    try:
        return act()
    except KintsugiError:
        return None


Column = tuple[str, str]
"""A table and its column."""

_LEDGER_COLUMNS: tuple[Column, ...] = (
    *(("chunk", name) for name in ("tokens", "key", "namespace", "num_tokens", "checked")),
    *(("span", name) for name in ("key", "number", "edition")),
    *(("document", name) for name in ("version", "document_id", "edition", "place")),
    *(("edition", name) for name in ("space", "corpus", "namespace", "fingerprint", "completed_s")),
    *(("prepared_space", name) for name in ("plain", "space", "plain_copies")),
)
_TEXTS_COLUMNS: tuple[Column, ...] = (
    *(("chunk", name) for name in ("tokens", "text", "key", "namespace", "used")),
    *(("share", name) for name in ("namespace", "chunks", "tokens")),
    *(("total", name) for name in ("chunks", "tokens")),
)


def _change_column(db: sqlite3.Connection, columns: tuple[Column, ...], data: bytes) -> bool:
    """Put a value into the column that the first byte chooses. Whether SQLite took it."""
    table, name = columns[data[0] % len(columns)] if data else columns[0]
    try:
        db.execute(f"UPDATE {table} SET {name}=?", (_value(data[1:]),))
    except sqlite3.IntegrityError:
        return False
    return True


def _value(data: bytes) -> Any:
    """A value of one of SQLite's types."""
    kind, body = (data[0] % 5, data[1:]) if data else (0, b"")
    if kind == 0:
        return body
    if kind == 1:
        return body.decode("utf-8", "replace")
    if kind == 2:
        return int.from_bytes(body[:8].ljust(8, b"\0"), "little", signed=True)
    if kind == 3:
        return struct.unpack("<d", body[:8].ljust(8, b"\0"))[0]
    return pack_tokens(body)


FILE_DECODERS: tuple[Callable[[bytes], None], ...] = (
    binary_file,
    safetensors_file,
    model_files,
    ledger_row,
    known_texts_row,
    kept_document,
)


def _parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def _parquet_seeds() -> list[bytes]:
    rows = [
        {"id": f"d{n}", "text": f"text {n}", "n": n, "tags": ["a", None], "at": {"x": 1.5}} for n in range(3)
    ]
    plain = pa.Table.from_pylist(rows)
    same = pa.table({"text": pa.array(["same"] * 50).dictionary_encode(), "id": pa.array(range(50))})
    return [
        _parquet(plain, compression="none"),
        _parquet(plain, compression="snappy", data_page_version="2.0"),
        _parquet(same, compression="zstd"),
        _parquet(pa.table({"text": pa.array([None, "a"])}), use_dictionary=False, compression="gzip"),
        _parquet(pa.table({"body": [1]})),
    ]


def _office_seeds() -> list[bytes]:
    pdf, word, document = io.BytesIO(), io.BytesIO(), docx.Document()
    writer = pypdf.PdfWriter()
    writer.add_blank_page(100, 100)
    writer.write(pdf)
    document.add_paragraph("A paragraph.")
    document.add_table(1, 2)
    document.save(word)
    return [bytes([1]) + pdf.getvalue(), bytes([2]) + word.getvalue()]


def _safetensors(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


_WEIGHT = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
_NESTED = b"[" * 5_000

FILE_SEEDS: MappingProxyType[str, list[bytes]] = MappingProxyType(
    {
        "binary_file": [bytes([0]) + seed for seed in _parquet_seeds()] + _office_seeds(),
        "safetensors_file": [
            _safetensors({"__metadata__": {"format": "pt"}, "w": _WEIGHT}),
            _safetensors({"w": {**_WEIGHT, "shape": []}}),
        ],
        "model_files": [b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}', _NESTED],
        "ledger_row": [
            bytes([column, kind]) + value
            for column in range(len(_LEDGER_COLUMNS))
            for kind, value in enumerate((bytes(32), b"text", b"\5", bytes(8), token_bytes(IDS)))
        ],
        "known_texts_row": [
            bytes([column, kind]) + value
            for column in range(len(_TEXTS_COLUMNS))
            for kind, value in enumerate((bytes(36), b"text", b"\5", bytes(8), token_bytes(IDS)))
        ],
        "kept_document": [
            b'{"format_version": 2, "shard_id": "a"}',
            b'{"version": 1, "made_at_s": 1.5, "sha256": {"ledger.sqlite": "0"}}',
            b'{"version": 1, "replicas": 1, "shards": [{"shard_id": "a", "address": "b:1"}]}',
            b'{"key": "a", "size": 2, "cost_ms": 1.5}\n{"hash_ids": [1, 2]}',
            b'{"timestamp": 5}',
            b'{"chunks": ["a"], "question": "q", "answers": ["b"]}',
            b'[{"context": "Passage 1:\\na", "input": "q", "answers": ["b"]}]',
            b'{"a": 3}',
            b'{"a": Infinity}',
            _NESTED,
        ],
    }
)
