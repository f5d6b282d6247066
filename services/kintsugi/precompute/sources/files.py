"""Which files a source is: local paths and every URL that fsspec knows."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

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


_CHANGES = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "Last-Modified")
"""What file systems call that which changes with a file."""
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
class FileRange:
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


@dataclass(frozen=True)
class Listing:
    """What a source has."""

    pieces: list[FileRange]
    """In order of their names."""
    unlisted: dict[str, str]
    """URL -> why it is not among the pieces. That of a folder ends with a slash."""


def listed(source: str, only: Format | None = None) -> Listing:
    """The source's files; `only` names their format where suffixes do not.

    Links to files are followed, links to folders are not, unless the source is one itself. Raises `NotFound`
    where nothing is there, `InvalidField` where no file has a known format, `ResourceExhausted` beyond
    `FILES_MAX`, `Unavailable` where the file system does not answer.
    """
    system, root = _opened(source)
    found: dict[str, dict[str, Any]] = {}
    unlisted: dict[str, str] = {}
    try:
        for path, info in _files(system, root, unlisted):
            found[path] = info
            if len(found) > FILES_MAX:
                raise ResourceExhausted(
                    f"{source} has more than {FILES_MAX} files, and no more are listed: pack them into "
                    "Parquet or JSONL"
                )
    except FileNotFoundError as error:
        if isinstance(error.__cause__, OSError):  # what fsspec makes of a server that is not there
            raise Unavailable(f"{source} cannot be listed: {error.__cause__}") from error
        raise NotFound(f"{source} is not there; check the path") from None
    except OSError as error:
        raise Unavailable(f"{source} cannot be listed: {error}") from error
    pieces: list[FileRange] = []
    for path, info in sorted(found.items()):
        chosen = only or _format_of(path)
        url = system.unstrip_protocol(path)
        if chosen is None:
            continue
        if info["type"] != "file":
            unlisted[url] = "is neither a file nor a link to one"
            continue
        name = posixpath.relpath(path, root) if path != root else posixpath.basename(path)
        pieces += _cut(FileRange(url, name, chosen, _stamp(info), int(info.get("size") or 0)), info)
    if not found and not unlisted:
        raise NotFound(f"{source} has no files; check the path")
    if not pieces and not unlisted:
        raise InvalidField(
            "source",
            f"{source} has {len(found)} files, none with a known suffix ({', '.join(_SUFFIXES)}); "
            f"name their format: {', '.join(Format)}",
        )
    return Listing(pieces, unlisted)


def _opened(source: str) -> tuple[Any, str]:
    """The file system and the path in it."""
    if "::" in source:
        raise InvalidField("source", f"{source!r} is an archive or a chain of URLs; unpack it first")
    if urlsplit(source).password:
        raise InvalidField(
            "source",
            "holds a password, which would be kept with every document; let fsspec's configuration hold it",
        )
    try:
        system, root = fsspec.core.url_to_fs(source)
    except (ValueError, ImportError) as error:
        raise InvalidField("source", f"{source!r} cannot be opened: {error}") from None
    return system, root.rstrip("/") or "/"


def _files(system: Any, root: str, unlisted: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and facts of all that is no folder, in no order."""
    if not _is_tree(system):
        yield from system.find(root, detail=True).items()
        return
    # A web server calls everything a file: there the suffix decides.
    info = system.info(root)
    if info["type"] == "file" and ("http" not in system.protocol or _format_of(root) is not None):
        yield root, info
        return
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            entries = system.ls(f"{folder}/" if "http" in system.protocol else folder, detail=True)
        except OSError as error:
            if folder == root:
                raise
            unlisted[system.unstrip_protocol(folder) + "/"] = f"cannot be listed: {error}"
            continue
        for entry in entries:
            path = entry["name"].rstrip("/")
            if entry["type"] == "directory":
                waiting.append(path)
            elif entry.get("islink"):
                yield from _behind_link(system, path, unlisted)
            else:
                yield path, entry


def _is_tree(system: Any) -> bool:
    """Whether folders are listed one by one. Object stores bring a flat listing, which fails as a whole."""
    if isinstance(system, AsyncFileSystem):
        return type(system)._find is AsyncFileSystem._find
    return type(system).find is AbstractFileSystem.find


def _behind_link(system: Any, path: str, unlisted: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        info = system.info(path)
    except OSError:
        if _format_of(path) is not None:
            unlisted[system.unstrip_protocol(path)] = "is a link to nothing"
        return
    if info["type"] != "directory":
        yield path, info


def _format_of(path: str) -> Format | None:
    return _SUFFIXES.get(posixpath.splitext(path)[1].lower())


def _cut(piece: FileRange, info: dict[str, Any]) -> list[FileRange]:
    seekable = info.get("partial", True)  # a web server says whether it sends parts of a file
    if piece.format is not Format.JSONL or piece.size <= PIECE_BYTES or not seekable:
        return [piece]
    starts = range(0, piece.size, PIECE_BYTES)
    return [replace(piece, start=start, stop=min(start + PIECE_BYTES, piece.size)) for start in starts]


def _stamp(info: dict[str, Any]) -> str:
    """Empty where the file system knows nothing that would change: such a file is always read."""
    changed = next((info[name] for name in _CHANGES if name in info), "")
    return f"{info.get('size')}/{changed}" if changed else ""
