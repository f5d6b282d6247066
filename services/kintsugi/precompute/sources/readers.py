"""Reads documents from files. An unreadable document becomes a `Failure` with the reason; reading
continues."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from kintsugi.core.errors import InvalidField
from kintsugi.core.plan import end_line
from kintsugi.core.schema import STRICT
from kintsugi.precompute.documents import check_document_id
from kintsugi.precompute.sources.files import FileRange, Format
from kintsugi.precompute.sources.office import OFFICE_BYTES_MAX, extract_docx, extract_pdf

DOCUMENT_BYTES_MAX = 16 << 20
"""Longer documents fail, because each reading task holds a whole document in memory."""
HEAD_BYTES = 8_192
"""A file of unknown suffix is left out without reading further if its beginning has a zero byte."""
PARQUET_ROWS = 64
PARQUET_BUFFER_BYTES = 8 << 20
"""Columns are read in buffers of this size: a row group need not fit into memory."""
PARQUET_EXPANSION_MAX = 1_000
"""Maximum number of characters per byte of a file, beyond the size of one document: a kilobyte of Parquet
can expand to a billion rows."""
ROW_CHARS = 100
"""Characters that each row is charged against the limit, in addition to its text."""
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CHARSET = re.compile(rb"""charset=["']?([A-Za-z0-9_.:-]+)""")
_WEB_CHARSETS = frozenset(
    {
        *(
            "utf-8",
            "utf-16",
            "utf-16-le",
            "utf-16-be",
            "ascii",
            "koi8-r",
            "koi8-u",
            "mac-roman",
            "mac-cyrillic",
        ),
        *(f"iso8859-{part}" for part in range(1, 17)),
        *(f"cp{page}" for page in (437, 850, 866, 874, 932, 949, 950, *range(1250, 1259))),
        *("gb2312", "gbk", "gb18030", "big5", "big5hkscs", "shift_jis", "euc_jp", "iso2022_jp", "euc_kr"),
        "tis-620",
    }
)
"""Python's names of the charsets of web pages. Other charsets are refused: the time to decode punycode, for
instance, grows with the square of the length."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns with a document's parts. Other columns are ignored."""

    __pydantic_config__ = STRICT

    text: str = "text"
    """Column of the document's text."""
    id: str = "id"
    """Column of the document's id. Without it, the id consists of file and place."""
    version: str = "version"
    """Column of the document's version. Without it, the version is a digest of the text."""


@dataclass(frozen=True)
class Document:
    """A text with its id and version."""

    __pydantic_config__ = STRICT

    url: str
    place: int
    """Byte offset of the line, or number of the row, in the file at `url`."""
    document_id: str
    text: str
    version: str = ""
    """Empty means a digest of the text."""
    markdown: bool = False


@dataclass(frozen=True)
class Failure:
    """A document, or a whole file, that could not be read."""

    __pydantic_config__ = STRICT

    url: str
    place: int
    reason: str
    document_id: str = field(default="")
    left_out: bool = False
    """Whether a file of unknown suffix is left out because it is not text, or blank. That is not an error."""


def read(piece: FileRange, columns: Columns) -> Iterator[Document | Failure]:
    """Yield the piece's documents in order. Parses in this process; for untrusted files use
    `sandbox.read_confined`."""
    try:
        with fsspec.open(piece.url, "rb", compression="gzip" if piece.is_gzipped else None) as stream:
            if piece.format is Format.JSONL:
                # A remote file's own stream does not limit the length of a line.
                with io.BufferedReader(stream) as lines:
                    yield from _read_lines(piece, lines, columns)
            elif piece.format is Format.PARQUET:
                yield from _read_parquet(piece, stream, columns)
            elif piece.format is Format.CSV:
                yield from _read_csv(piece, stream, columns)
            else:
                # A remote file's own stream may return less than requested.
                with io.BufferedReader(stream) as whole:
                    yield _read_whole(piece, whole)
    except (OSError, EOFError, zlib.error, pa.ArrowException, ValueError, csv.Error) as error:
        yield Failure(piece.url, piece.start, f"the file cannot be read: {type(error).__name__}: {error}")


def row_to_document(
    row: Mapping[str, Any], piece: FileRange, place: int, columns: Columns
) -> Document | Failure:
    """Make a document from a row's named values."""

    def make_failure(reason: str) -> Failure:
        return Failure(piece.url, place, reason, str(row.get(columns.id) or ""))

    if columns.text not in row:
        names = ", ".join(map(repr, row)) or "none"
        return make_failure(
            f"no column {columns.text!r}; there are {names}: choose one (--columns text=NAME)"
        )
    text = row[columns.text]
    if not isinstance(text, str):
        return make_failure(f"column {columns.text!r} holds {type(text).__name__}, not text")
    given = row.get(columns.id)
    document_id = f"{piece.name}@{place}" if given is None else str(given)
    version = row.get(columns.version)
    return check_document(
        Document(piece.url, place, document_id, text, "" if version is None else str(version))
    )


def check_document(document: Document) -> Document | Failure:
    """Return the document, or a `Failure` with the reason if it cannot be used."""
    text = document.text
    try:
        check_document_id(document.document_id)
        problem = ""
        if not text.strip():
            problem = "has no text"
        elif len(text) > DOCUMENT_BYTES_MAX:
            problem = f"has {len(text)} characters; at most {DOCUMENT_BYTES_MAX} are read: split it"
        else:
            for part in (text, document.document_id, document.version):
                part.encode()
    except UnicodeEncodeError:
        problem = "is not UTF-8 text; convert it first"
    except InvalidField as error:
        problem = str(error)
    if problem:
        return Failure(document.url, document.place, problem, document.document_id[:200])
    return document


def _read_lines(piece: FileRange, stream: Any, columns: Columns) -> Iterator[Document | Failure]:
    place = piece.start
    if place:
        # Skip the rest of a line that began in the previous piece.
        stream.seek(place - 1)
        place += len(_read_line(stream)[0]) - 1
    while piece.stop is None or place < piece.stop:
        line, size = _read_line(stream)
        if not size:
            return
        if size > DOCUMENT_BYTES_MAX:
            yield Failure(piece.url, place, f"a line of {size} bytes; at most {DOCUMENT_BYTES_MAX} are read")
        elif line.strip():
            yield _parse_line(line, piece, place, columns)
        place += size


def _read_line(stream: Any) -> tuple[bytes, int]:
    """Read the next line. Return it, truncated if it is too long, and its full length."""
    line: bytes = stream.readline(DOCUMENT_BYTES_MAX + 1)
    size, part = len(line), line
    while len(part) > DOCUMENT_BYTES_MAX and not part.endswith(b"\n"):
        part = stream.readline(DOCUMENT_BYTES_MAX + 1)
        size += len(part)
    return line, size


def _parse_line(line: bytes, piece: FileRange, place: int, columns: Columns) -> Document | Failure:
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())
    except UnicodeDecodeError as error:
        return Failure(piece.url, place, f"is not UTF-8 text ({error.reason}); convert it first")
    except (ValueError, RecursionError) as error:
        return Failure(piece.url, place, f"is not JSON: {error}")
    if not isinstance(row, dict):
        return Failure(piece.url, place, f"holds {type(row).__name__}, not an object with columns")
    return row_to_document(row, piece, place, columns)


def _read_parquet(piece: FileRange, stream: Any, columns: Columns) -> Iterator[Document | Failure]:
    chars_left = PARQUET_EXPANSION_MAX * stream.seek(0, io.SEEK_END) + DOCUMENT_BYTES_MAX
    table = pq.ParquetFile(stream, buffer_size=PARQUET_BUFFER_BYTES)
    if columns.text not in table.schema_arrow.names:
        yield row_to_document(dict.fromkeys(table.schema_arrow.names), piece, 0, columns)
        return
    place = 0
    wanted = [
        name for name in (columns.text, columns.id, columns.version) if name in table.schema_arrow.names
    ]
    for batch in table.iter_batches(PARQUET_ROWS, columns=wanted, use_threads=False):
        for row in batch.to_pylist():
            chars_left -= ROW_CHARS + len(str(row[columns.text] or ""))
            if chars_left < 0:
                raise ValueError(f"more than {PARQUET_EXPANSION_MAX} times its size; write it uncompressed")
            yield row_to_document(row, piece, place, columns)
            place += 1


def _read_csv(piece: FileRange, stream: Any, columns: Columns) -> Iterator[Document | Failure]:
    csv.field_size_limit(DOCUMENT_BYTES_MAX + 1)
    # Bytes that are not UTF-8 become surrogates. `check_document` finds them, so only the row fails.
    with io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="") as text:
        rows = csv.DictReader(text)
        if columns.text not in (names := rows.fieldnames or ()):
            yield row_to_document(dict.fromkeys(map(str, names)), piece, 0, columns)
            return
        for place, row in enumerate(rows):
            yield row_to_document({str(name): value for name, value in row.items()}, piece, place, columns)


def _read_whole(piece: FileRange, stream: Any) -> Document | Failure:
    """Read a file that is one document."""
    data: bytes = stream.read(HEAD_BYTES)
    if piece.guessed and b"\0" in data and not data.startswith(_UTF16_MARKS):
        return Failure(piece.url, 0, "is not text", piece.name, left_out=True)
    bytes_max = OFFICE_BYTES_MAX if piece.format in (Format.PDF, Format.DOCX) else DOCUMENT_BYTES_MAX
    data += stream.read(bytes_max + 1 - len(data))
    if len(data) > bytes_max:
        return Failure(piece.url, 0, f"exceeds {bytes_max} bytes; split it", piece.name)
    problem = text = ""
    try:
        text = _read_text(data, piece.format)
    except LookupError as error:
        problem = f"declares a charset that is not read ({error}); convert it"
    except UnicodeDecodeError:
        problem = "is neither UTF-8 text nor UTF-16 text with a byte order mark; convert it first"
    if piece.format in (Format.TEXT, Format.MARKDOWN) and "\0" in text:
        problem = "is not text: it has a zero character"
    if problem:
        return Failure(piece.url, 0, problem, piece.name, left_out=piece.guessed)
    document = Document(piece.url, 0, piece.name, text, markdown=piece.format is Format.MARKDOWN)
    checked = check_document(document)
    return replace(checked, left_out=piece.guessed) if isinstance(checked, Failure) else checked


def _read_text(data: bytes, kind: Format) -> str:
    """Return the text of a file. Raises `LookupError`, `UnicodeDecodeError`, and anything for a broken PDF or
    DOCX file."""
    if kind is Format.PDF:
        return end_line(extract_pdf(data))
    if kind is Format.DOCX:
        return end_line(extract_docx(data))
    if kind is not Format.HTML:
        return data.decode("utf-16" if data.startswith(_UTF16_MARKS) else "utf-8-sig")
    from inscriptis import get_text

    page = _decode_page(data)
    return end_line(get_text(page).strip()) if page.strip() else page


def _decode_page(data: bytes) -> str:
    """Decode an HTML page as the charset that it declares, or else as UTF-8."""
    declared = _CHARSET.search(data[:2048])
    if declared is None:
        return data.decode("utf-8-sig")
    charset = codecs.lookup(declared[1].decode("ascii"))
    if charset.name not in _WEB_CHARSETS:
        raise LookupError(f"{charset.name} is not a charset of web pages")
    return data.decode(charset.name)
