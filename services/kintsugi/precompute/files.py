"""Which files a source is: local paths and every URL that fsspec knows."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import fsspec

from kintsugi.core.errors import InvalidField, NotFound, ResourceExhausted, Unavailable

FILES_MAX = 250_000
"""The listing is held in memory, about 0.5 KiB a file. More documents belong into Parquet or JSON lines."""
PIECE_BYTES = 32 << 20
"""A larger file of JSON lines is read by several tasks."""


class Format(StrEnum):
    """How documents lie in a file."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    CSV = "csv"
    TEXT = "text"
    MARKDOWN = "markdown"
    HTML = "html"


_SUFFIXES = {
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".parquet": Format.PARQUET,
    ".csv": Format.CSV,
    ".txt": Format.TEXT,
    ".text": Format.TEXT,
    ".md": Format.MARKDOWN,
    ".markdown": Format.MARKDOWN,
    ".html": Format.HTML,
    ".htm": Format.HTML,
}


@dataclass(frozen=True)
class Piece:
    """A file, or a range of one that is JSON lines."""

    url: str
    name: str
    """Below the source: what documents without an id are called by."""
    format: Format
    stamp: str
    """Changes when the file does: size and time of change, or what the object store has for that."""
    size: int = 0
    """Bytes of the whole file, 0 where the file system does not know."""
    start: int = 0
    stop: int | None = None
    """Lines that begin in `[start, stop)` bytes; None: to the end."""


def pieces_of(source: str, only: Format | None = None) -> list[Piece]:
    """The source's files in order of their names; `only` names their format where suffixes do not.

    Raises `NotFound` where nothing is there, `InvalidField` where no file has a known format,
    `ResourceExhausted` beyond `FILES_MAX`, `Unavailable` where the file system does not answer.
    """
    try:
        system, root = fsspec.core.url_to_fs(source)
        root = root.rstrip("/") or "/"
        found: dict[str, dict[str, Any]] = system.find(root, detail=True)
    except (ValueError, ImportError) as error:
        raise InvalidField("source", f"{source!r} cannot be opened: {error}") from None
    except FileNotFoundError:
        found = {}
    except OSError as error:
        raise Unavailable(f"{source} cannot be listed: {error}") from error
    if not found:
        raise NotFound(f"{source} is no file, and no folder with files in it; check the path")
    if len(found) > FILES_MAX:
        raise ResourceExhausted(
            f"{source} has {len(found)} files; at most {FILES_MAX} are listed: "
            "pack them into Parquet or JSONL"
        )
    pieces: list[Piece] = []
    for path, info in sorted(found.items()):
        chosen = only or _SUFFIXES.get(posixpath.splitext(path)[1].lower())
        if chosen is not None:
            name = posixpath.relpath(path, root) if path != root else posixpath.basename(path)
            size = int(info.get("size") or 0)
            pieces += _cut(Piece(system.unstrip_protocol(path), name, chosen, _stamp(info), size))
    if not pieces:
        raise InvalidField(
            "source",
            f"{source} has {len(found)} files, none with a known suffix ({', '.join(_SUFFIXES)}); "
            f"name their format: {', '.join(Format)}",
        )
    return pieces


def _cut(piece: Piece) -> list[Piece]:
    if piece.format is not Format.JSONL or piece.size <= PIECE_BYTES:
        return [piece]
    starts = range(0, piece.size, PIECE_BYTES)
    return [replace(piece, start=start, stop=min(start + PIECE_BYTES, piece.size)) for start in starts]


def _stamp(info: dict[str, Any]) -> str:
    """Empty where the file system knows nothing that would change: such a file is always read."""
    changed = next(
        (info[name] for name in ("ETag", "etag", "md5Hash", "mtime", "LastModified") if name in info), ""
    )
    return f"{info.get('size')}/{changed}" if changed else ""
