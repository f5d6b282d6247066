"""Lists the files of a source: a local path or any URL that fsspec supports."""

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
"""Maximum number of files. The listing is in memory and takes about 0.5 KiB per file."""
PIECE_BYTES = 32 << 20
"""Larger files of JSON lines are read by several tasks."""


class Format(StrEnum):
    """The format of a file with documents."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    CSV = "csv"
    TEXT = "text"
    MARKDOWN = "markdown"
    HTML = "html"
    PDF = "pdf"
    DOCX = "docx"


_CHANGES = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "Last-Modified")
"""Names of the values, reported by file systems, that change when the file changes."""
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
    ".pdf": Format.PDF,
    ".docx": Format.DOCX,
}
_GZIP = ".gz"
_HIDDEN = "is hidden: its name begins with a dot"


@dataclass(frozen=True)
class FileRange:
    """A file, or a range of a JSON lines file."""

    url: str
    name: str
    """Path below the source. It is part of the ids of documents that have no id of their own."""
    format: Format
    stamp: str
    """Changes when the file does: size and modification time, or the object store's equivalent."""
    size: int = 0
    """Bytes of the whole file; 0 if the file system does not know."""
    start: int = 0
    stop: int | None = None
    """The range has the lines that begin at byte offsets `[start, stop)`; None: up to the end."""
    guessed: bool = False
    """Whether the suffix is unknown. The file is then a text document, or is left out if it is not text."""

    @property
    def is_gzipped(self) -> bool:
        return self.name.lower().endswith(_GZIP)


@dataclass(frozen=True)
class Listing:
    """The files of a source."""

    pieces: list[FileRange]
    """Sorted by path."""
    unlisted: dict[str, str]
    """For each URL that cannot be read, the reason. A folder's URL ends with a slash."""
    left_out: dict[str, str]
    """For each URL that is left out, which is not an error, the reason."""

    def refuse(self, url: str, reason: str, known: Format | None) -> None:
        """Add a URL that cannot be read: an error only if its format is known."""
        (self.left_out if known is None else self.unlisted)[url] = reason


def list_source(source: str, only: Format | None = None) -> Listing:
    """List the source's files; `only` sets their format instead of their suffixes.

    Follows links to files, but not to folders unless the source itself is one. Leaves out hidden files and
    folders, whose names begin with a dot. Raises `NotFound` if there are no files, `InvalidField` if all are
    left out, `ResourceExhausted` beyond `FILES_MAX`, `Unavailable` if the file system does not answer.
    """
    system, root = _open_filesystem(source)
    found: dict[str, dict[str, Any]] = {}
    listing = Listing([], {}, {})
    try:
        for path, info in _walk_files(system, root, listing):
            found[path] = info
            if len(found) > FILES_MAX:
                raise ResourceExhausted(
                    f"{source} has more than {FILES_MAX} files; pack them into Parquet or JSONL"
                )
    except FileNotFoundError as error:
        if isinstance(error.__cause__, OSError):  # fsspec reports an unreachable server this way
            raise Unavailable(f"{source} cannot be listed: {error.__cause__}") from error
        raise NotFound(f"{source} does not exist; check the path") from None
    except OSError as error:
        raise Unavailable(f"{source} cannot be listed: {error}") from error
    for path, info in sorted(found.items()):
        known = only or _format_of(path)
        url = system.unstrip_protocol(path)
        if info["type"] != "file":
            listing.refuse(url, "is neither a file nor a link to one", known)
        elif known is None and "http" in system.protocol:
            listing.left_out[url] = "is linked from a web page and has no known suffix"
        else:
            name = posixpath.relpath(path, root) if path != root else posixpath.basename(path)
            size = int(info.get("size") or 0)
            piece = FileRange(url, name, known or Format.TEXT, _stamp(info), size, guessed=known is None)
            listing.pieces.extend(_cut_file(piece, info))
    if not listing.pieces and not listing.unlisted:
        if not listing.left_out:
            raise NotFound(f"{source} has no files; check the path")
        url, reason = next(iter(listing.left_out.items()))
        count = len(listing.left_out)
        raise InvalidField("source", f"{source} has no file to read; {count} are left out ({url}: {reason})")
    return listing


def _open_filesystem(source: str) -> tuple[Any, str]:
    """Return the file system of a source and the path in it."""
    if "::" in source:
        raise InvalidField("source", f"{source!r} is an archive or a chain of URLs; unpack it first")
    if urlsplit(source).password:
        raise InvalidField(
            "source",
            "contains a password, which would be stored with every document; configure it in fsspec instead",
        )
    try:
        system, root = fsspec.core.url_to_fs(source)
    except (ValueError, ImportError) as error:
        raise InvalidField("source", f"{source!r} cannot be opened: {error}") from None
    return system, root.rstrip("/") or "/"


def _walk_files(system: Any, root: str, listing: Listing) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and info of every entry that is neither a folder nor hidden, in no particular order."""
    if not _is_tree(system):
        for path, info in system.find(root, detail=True).items():
            if any(part.startswith(".") for part in path.removeprefix(root).split("/")):
                listing.left_out[system.unstrip_protocol(path)] = _HIDDEN
            else:
                yield path, info
        return
    # A web server reports everything as a file, so the suffix decides.
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
            listing.unlisted[f"{system.unstrip_protocol(folder)}/"] = f"cannot be listed: {error}"
            continue
        for entry in entries:
            path = entry["name"].rstrip("/")
            if posixpath.basename(path).startswith("."):
                slash = "/" if entry["type"] == "directory" else ""
                listing.left_out[f"{system.unstrip_protocol(path)}{slash}"] = _HIDDEN
            elif entry["type"] == "directory":
                waiting.append(path)
            elif entry.get("islink"):
                yield from _follow_link(system, path, listing)
            else:
                yield path, entry


def _is_tree(system: Any) -> bool:
    """Whether folders are listed one by one. An object store has one flat listing, which fails as a whole."""
    if isinstance(system, AsyncFileSystem):
        return type(system)._find is AsyncFileSystem._find
    return type(system).find is AbstractFileSystem.find


def _follow_link(system: Any, path: str, listing: Listing) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        info = system.info(path)
    except OSError:
        listing.refuse(system.unstrip_protocol(path), "is a broken link", _format_of(path))
        return
    if info["type"] != "directory":
        yield path, info


def _format_of(path: str) -> Format | None:
    """Return the format that the suffix names, before `.gz` if there is one."""
    return _SUFFIXES.get(posixpath.splitext(path.lower().removesuffix(_GZIP))[1])


def _cut_file(piece: FileRange, info: dict[str, Any]) -> list[FileRange]:
    seekable = info.get("partial", True)  # a web server reports whether it can send parts of a file
    if piece.format is not Format.JSONL or piece.size <= PIECE_BYTES or not seekable or piece.is_gzipped:
        return [piece]
    starts = range(0, piece.size, PIECE_BYTES)
    return [replace(piece, start=start, stop=min(start + PIECE_BYTES, piece.size)) for start in starts]


def _stamp(info: dict[str, Any]) -> str:
    """Return the file's stamp. If the file system reports no value that changes with the file, the stamp is
    empty, and the file is always read."""
    changed = next((info[name] for name in _CHANGES if name in info), "")
    return f"{info.get('size')}/{changed}" if changed else ""
