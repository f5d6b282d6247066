"""Backs up and restores what cannot be computed again: a ledger, known texts of a gateway, shards' reports.

Files are copied while their owners run: SQLite and LMDB provide consistent copies. Chunk KV is not part of a
backup. It is a cache, and a precompute job fills it again from the ledger's sources.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb

from kintsugi.cli.replaying import replay
from kintsugi.core.errors import Corrupted, InvalidField, NotFound, Unavailable, VersionMismatch
from kintsugi.store.protocol.durable_files import make_folder, sync_folder, sync_path
from kintsugi.store.protocol.interface import Erasure

BACKUP_VERSION = 1
INDEX = "backup.json"
_LEDGER = "state/ledger.sqlite"
_TEXTS = "gateway/chunks.sqlite"


@dataclass(frozen=True)
class BackupPart:
    """One file of a backup."""

    name: str
    """Path relative to the backup's folder."""
    path: Path
    """Path of the file in use."""


@dataclass(frozen=True)
class Restored:
    """The result of a restore."""

    names: Sequence[str]
    erased: int
    """Number of erasures since the backup that were repeated in the restored files."""


@dataclass(frozen=True)
class _Index:
    digests: Mapping[str, str]
    made_at_s: float
    """Unix seconds."""


def parts_of(state: Path | None, gateway_data: Path | None, shards: Sequence[Path]) -> list[BackupPart]:
    """Return every file that a backup may contain, from a precompute state folder, a gateway's data folder
    and shards' data folders. Raises `InvalidField` if no folder is given."""
    parts = []
    if state is not None:
        parts.append(BackupPart(_LEDGER, state / Path(_LEDGER).name))
    if gateway_data is not None:
        parts.append(BackupPart(_TEXTS, gateway_data / "known_chunks/chunks.sqlite"))
    parts += [BackupPart(f"shard-{n}/data.mdb", data / "reports/data.mdb") for n, data in enumerate(shards)]
    if not parts:
        raise InvalidField("state", "name at least one of --state, --gateway-data and --shard-data")
    return parts


def back_up(parts: Sequence[BackupPart], target: Path) -> list[str]:
    """Copy the parts that exist into the new folder `target` atomically. Returns their names.

    Raises `InvalidField` if the target exists, `NotFound` if no part exists, `Corrupted` if a part cannot be
    read, and `Unavailable` if the copy cannot be written.
    """
    if target.exists():
        raise InvalidField("target", f"{target} exists; name a new folder")
    present = [part for part in parts if part.path.exists()]
    if not present:
        raise NotFound(f"none of {', '.join(str(part.path) for part in parts)} is there")
    made_at_s = time.time()
    with _translate_errors(target):
        make_folder(target.parent)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            digests = {}
            for part in present:
                copy = work / part.name
                copy.parent.mkdir(exist_ok=True)
                _copy_database(part.path, copy)
                digests[part.name] = _digest(copy)
            index = {"version": BACKUP_VERSION, "made_at_s": made_at_s, "sha256": digests}
            (work / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
            for path in (*work.rglob("*"), work):
                sync_path(path)
            work.rename(target)
            sync_folder(target.parent)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    return [part.name for part in present]


def restore(
    parts: Sequence[BackupPart], source: Path, find_erasures: Callable[[float], Sequence[Erasure]]
) -> Restored:
    """Restore a backup's files to paths where no file exists, and repeat the erasures that were made since
    the backup.

    The backup is verified first. `find_erasures` returns the erasures requested since a time in Unix seconds.
    Raises its errors, `NotFound` for a folder without a backup, `VersionMismatch` and `Corrupted` for an
    unusable backup, and `InvalidField` if a file exists already or has no destination. After an error nothing
    is restored.
    """
    index = _read_index(source)
    digests = index.digests
    places = {part.name: part.path for part in parts}
    for name, digest in digests.items():
        if name not in places:
            raise InvalidField("source", f"{name} has no place; name its folder, too")
        if places[name].exists():
            raise InvalidField("source", f"{places[name]} is in the way; stop its owner and move it away")
        if not (source / name).is_file() or _digest(source / name) != digest:
            raise Corrupted(f"{source / name} is not what was backed up; use another backup")
    erasures = find_erasures(index.made_at_s)
    try:
        with _translate_errors(source):
            for name in digests:
                _put_in_place(source / name, places[name])
            folders = [places[name].parent if name in digests else None for name in (_LEDGER, _TEXTS)]
            replay(erasures, *folders)
    except BaseException:
        for name in digests:
            places[name].unlink(missing_ok=True)
        raise
    return Restored(list(digests), len(erasures))


def _put_in_place(source: Path, path: Path) -> None:
    """Copy a file atomically, readable only by its owner. Raises `OSError`."""
    make_folder(path.parent)
    fresh = path.with_name(path.name + ".restored")
    shutil.copyfile(source, fresh)
    fresh.chmod(0o600)
    sync_path(fresh)
    fresh.rename(path)
    sync_folder(path.parent)


def _read_index(source: Path) -> _Index:
    try:
        document = json.loads((source / INDEX).read_text(encoding="utf-8"))
        version, digests = document["version"], dict(document["sha256"])
        made_at_s = float(document["made_at_s"])
    except FileNotFoundError:
        raise NotFound(f"{source} holds no {INDEX}; name a folder that kintsugi backup wrote") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Corrupted(f"{source / INDEX} cannot be read ({error}); use another backup") from error
    if version != BACKUP_VERSION:
        raise VersionMismatch(
            f"{source} has backup version {version}; this version of kintsugi reads {BACKUP_VERSION}"
        )
    return _Index(digests, made_at_s)


def _copy_database(source: Path, copy: Path) -> None:
    """Make a consistent copy of a SQLite or LMDB file that may be in use."""
    os.close(os.open(copy, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    if source.suffix == ".mdb":
        with (
            lmdb.open(str(source.parent), readonly=True, create=False) as environment,
            copy.open("wb") as file,
        ):
            environment.copyfd(file.fileno(), compact=True)
        return
    with (
        contextlib.closing(sqlite3.connect(f"file:{source}?mode=rw", uri=True, timeout=60.0)) as original,
        contextlib.closing(sqlite3.connect(copy)) as written,
    ):
        original.backup(written)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _translate_errors(where: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, lmdb.Error) as error:
        raise Corrupted(f"a database cannot be copied ({error}); check it with its owner's logs") from error
    except OSError as error:
        raise Unavailable(f"{where} cannot be written ({error}); free some space, or name another") from error
