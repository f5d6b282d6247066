"""Documents out of files. What cannot be read is a `Failure` that says why; the rest goes on."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from kintsugi.core.errors import InvalidField
from kintsugi.core.schema import STRICT
from kintsugi.precompute.documents import check_document_id
from kintsugi.precompute.sources.files import FileRange, Format

DOCUMENT_BYTES_MAX = 16 << 20
"""Longer documents fail: each is held in memory whole, by every task that reads."""
METADATA_BYTES_MAX = 64 << 10
PARQUET_ROWS = 64
_CHARSET = re.compile(rb"""charset=["']?([A-Za-z0-9_.:-]+)""")


@dataclass(frozen=True)
class Columns:
    """Where a document's parts lie in files that have columns. All other columns are its metadata."""

    __pydantic_config__ = STRICT

    text: str = "text"
    id: str = "id"
    """Where it is missing, a document is called by its file and place."""
    version: str = "version"
    """Where it is missing, the version is a digest of the text."""


@dataclass(frozen=True)
class Document:
    """One text with what is known of it."""

    url: str
    place: int
    """Line's offset in bytes, or row, in the file at `url`."""
    document_id: str
    text: str
    version: str = ""
    """Empty: a digest of the text."""
    metadata: str = "{}"
    """JSON."""
    markdown: bool = False


@dataclass(frozen=True)
class Failure:
    """A document, or a whole file, that could not be read."""

    __pydantic_config__ = STRICT

    url: str
    place: int
    reason: str
    document_id: str = field(default="")


def read(piece: FileRange, columns: Columns) -> Iterator[Document | Failure]:
    """The piece's documents in order. Never raises for what is in the file."""
    try:
        with fsspec.open(piece.url, "rb") as stream:
            if piece.format is Format.JSONL:
                # Streams of remote files know no bound for a line.
                with io.BufferedReader(stream) as lines:
                    yield from _lines(piece, lines, columns)
            elif piece.format is Format.PARQUET:
                yield from _parquet(piece, stream, columns)
            elif piece.format is Format.CSV:
                yield from _csv(piece, stream, columns)
            else:
                yield _whole(piece, stream)
    except (OSError, pa.ArrowException, ValueError, csv.Error) as error:
        yield Failure(piece.url, piece.start, f"the file cannot be read: {type(error).__name__}: {error}")


def from_row(row: Mapping[str, Any], piece: FileRange, place: int, columns: Columns) -> Document | Failure:
    """A document from named values."""

    def failed(reason: str) -> Failure:
        return Failure(piece.url, place, reason, str(row.get(columns.id) or ""))

    if columns.text not in row:
        return failed(f"no column {columns.text!r}; there are {', '.join(map(repr, row)) or 'none'}")
    text = row[columns.text]
    if not isinstance(text, str):
        return failed(f"column {columns.text!r} holds {type(text).__name__}, not text")
    given = row.get(columns.id)
    document_id = f"{piece.name}@{place}" if given is None else str(given)
    version = row.get(columns.version)
    others = {
        name: value for name, value in row.items() if name not in (columns.text, columns.id, columns.version)
    }
    metadata = json.dumps(others, ensure_ascii=False, default=str, sort_keys=True)
    if len(metadata) > METADATA_BYTES_MAX:
        return failed(f"{len(metadata)} characters of metadata; at most {METADATA_BYTES_MAX} are kept")
    document = Document(
        piece.url, place, document_id, text, "" if version is None else str(version), metadata
    )
    return checked(document)


def checked(document: Document) -> Document | Failure:
    """The document, or why it is none."""
    text = document.text
    try:
        check_document_id(document.document_id)
        problem = ""
        if not text.strip():
            problem = "has no text"
        elif len(text) > DOCUMENT_BYTES_MAX:
            problem = f"has {len(text)} characters; at most {DOCUMENT_BYTES_MAX} are read: split it"
        else:
            text.encode()
    except UnicodeEncodeError:
        problem = "is not UTF-8 text; convert it first"
    except InvalidField as error:
        problem = str(error)
    if problem:
        return Failure(document.url, document.place, problem, document.document_id[:200])
    return document


def _lines(piece: FileRange, stream: Any, columns: Columns) -> Iterator[Document | Failure]:
    place = piece.start
    if place:
        # The line that the piece before began is that one's: it ends here, or right before this piece.
        stream.seek(place - 1)
        place += len(_line(stream)[0]) - 1
    while piece.stop is None or place < piece.stop:
        line, size = _line(stream)
        if not size:
            return
        if size > DOCUMENT_BYTES_MAX:
            yield Failure(piece.url, place, f"a line of {size} bytes; at most {DOCUMENT_BYTES_MAX} are read")
        elif line.strip():
            yield _from_json(line, piece, place, columns)
        place += size


def _line(stream: Any) -> tuple[bytes, int]:
    """The next line and its length; of one that is too long, only the length counts."""
    line: bytes = stream.readline(DOCUMENT_BYTES_MAX + 1)
    size, part = len(line), line
    while len(part) > DOCUMENT_BYTES_MAX and not part.endswith(b"\n"):
        part = stream.readline(DOCUMENT_BYTES_MAX + 1)
        size += len(part)
    return line, size


def _from_json(line: bytes, piece: FileRange, place: int, columns: Columns) -> Document | Failure:
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())
    except UnicodeDecodeError as error:
        return Failure(piece.url, place, f"is not UTF-8 text ({error.reason}); convert it first")
    except (ValueError, RecursionError) as error:
        return Failure(piece.url, place, f"is no JSON: {error}")
    if not isinstance(row, dict):
        return Failure(piece.url, place, f"holds {type(row).__name__}, not an object with columns")
    return from_row(row, piece, place, columns)


def _parquet(piece: FileRange, stream: Any, columns: Columns) -> Iterator[Document | Failure]:
    table = pq.ParquetFile(stream)
    if columns.text not in table.schema_arrow.names:
        yield from_row(dict.fromkeys(table.schema_arrow.names), piece, 0, columns)
        return
    place = 0
    for batch in table.iter_batches(PARQUET_ROWS):
        for row in batch.to_pylist():
            yield from_row(row, piece, place, columns)
            place += 1


def _csv(piece: FileRange, stream: Any, columns: Columns) -> Iterator[Document | Failure]:
    csv.field_size_limit(DOCUMENT_BYTES_MAX + 1)
    # Bytes that are not UTF-8 become surrogates, which `checked` finds: one row fails, not the file.
    with io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="") as text:
        for place, row in enumerate(csv.DictReader(text)):
            yield from_row({str(name): value for name, value in row.items()}, piece, place, columns)


def _whole(piece: FileRange, stream: Any) -> Document | Failure:
    data: bytes = stream.read(DOCUMENT_BYTES_MAX + 1)
    if len(data) > DOCUMENT_BYTES_MAX:
        return Failure(piece.url, 0, f"exceeds {DOCUMENT_BYTES_MAX} bytes; split it", piece.name)
    try:
        text = _decoded(data, piece.format)
    except (UnicodeDecodeError, LookupError):
        return Failure(piece.url, 0, "is not UTF-8 text; convert it first", piece.name)
    if piece.format is Format.HTML:
        from inscriptis import get_text

        text = get_text(text).strip() if text.strip() else text
    return checked(Document(piece.url, 0, piece.name, text, markdown=piece.format is Format.MARKDOWN))


def _decoded(data: bytes, kind: Format) -> str:
    """UTF-8, or what an HTML page says that it is."""
    declared = _CHARSET.search(data[:2048]) if kind is Format.HTML else None
    return data.decode(declared[1].decode("ascii") if declared else "utf-8-sig")
