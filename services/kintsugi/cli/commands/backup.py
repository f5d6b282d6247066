"""`kintsugi backup` and `kintsugi restore`: copy and restore the data that cannot be recomputed.

This is the ledger of precompute, a gateway's chunk texts, and the reports of shards. Files are copied
while their owners run: SQLite and LMDB provide consistent copies. Chunk KV is not part of a backup. It is a
cache, and a precompute job fills it again from the ledger's sources. Erasures made since the backup are
repeated in the restored files.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import lmdb
import typer

from kintsugi.cli.screen import Screen
from kintsugi.core.errors import Corrupted, InvalidField, NotFound, Unavailable, VersionMismatch
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import options_of
from kintsugi.store.client.registry import open_directory
from kintsugi.store.protocol.files import make_folder, sync_path
from kintsugi.store.protocol.interface import Erasure
from kintsugi.store.shard.erasure import Erasures, scopes_of

BACKUP_VERSION = 1
INDEX = "backup.json"
UNSURE_S = 600.0
"""An erasure requested less than this before a backup may have reached the files only after the backup."""
_LEDGER = "state/ledger.sqlite"
_TEXTS = "gateway/chunks.sqlite"


@dataclass(frozen=True, kw_only=True)
class BackedUpFolders:
    """The folders that are backed up or restored."""

    state: Annotated[Path | None, typer.Option(help="State folder of precompute, with its ledger.")] = None
    gateway_data: Annotated[
        Path | None, typer.Option(help="The gateway's data_dir, with its chunk texts.")
    ] = None
    shard_data: Annotated[
        list[Path] | None,
        typer.Option(
            help="A shard's data folder, with its reports; repeat. Restore with the backup's order."
        ),
    ] = None

    @property
    def shards(self) -> list[Path]:
        """Data folders of shards."""
        return self.shard_data or []

    def files(self) -> dict[str, Path]:
        """Return the files that a backup may contain: their names in the backup, and their own paths. Raises
        `InvalidField` if no folder is given."""
        files = {}
        if self.state is not None:
            files[_LEDGER] = self.state / Path(_LEDGER).name
        if self.gateway_data is not None:
            files[_TEXTS] = self.gateway_data / "known_chunks/chunks.sqlite"
        files |= {f"shard-{n}/data.mdb": data / "reports/data.mdb" for n, data in enumerate(self.shards)}
        if not files:
            raise InvalidField("state", "name at least one of --state, --gateway-data and --shard-data")
        return files


def backup(
    screen: Screen,
    target: Annotated[Path, typer.Argument(help="New folder for the backup.")],
    *,
    folders: BackedUpFolders,
) -> None:
    """Back up ledger, chunk texts and reports while their processes run, without chunk KV."""
    with screen.step("Backing up"):
        names = back_up(folders.files(), target)
    document = {"target": str(target), "files": names}
    screen.show(document, f"{len(names)} files backed up to {target}")


def restore(
    screen: Screen,
    source: Annotated[Path, typer.Argument(help="Folder that `kintsugi backup` wrote.")],
    store: Annotated[
        str | None,
        typer.Option(help="URL of a running store whose erasures since the backup are repeated."),
    ] = None,
    *,
    folders: BackedUpFolders,
) -> None:
    """Verify a backup and copy its files to their paths, where no file may exist.

    Erasures made since the backup are repeated. They are read from the shards of --store, and from each
    --shard-data that has a record of erasures.
    """
    with screen.step("Restoring"):
        names, erased = restore_files(folders, source, store)
    if store is None and not any((folder / "erasures").is_dir() for folder in folders.shards):
        screen.note("erasures since the backup that only shards recorded were not repeated; pass --store URL")
    document = {"source": str(source), "files": names, "erasures": erased}
    screen.show(document, f"{len(names)} files restored from {source}, {erased} erasures repeated")


def back_up(files: Mapping[str, Path], target: Path) -> list[str]:
    """Copy the files that exist into the new folder `target` atomically. Returns their names.

    Raises `InvalidField` if the target exists, `NotFound` if no file exists, `Corrupted` if a file cannot be
    read, and `Unavailable` if the copy cannot be written.
    """
    if target.exists():
        raise InvalidField("target", f"{target} exists; name a new folder")
    present = {name: path for name, path in files.items() if path.exists()}
    if not present:
        raise NotFound(f"no file to back up; none of {', '.join(map(str, files.values()))} exists")
    made_at_s = time.time()
    with _translate_errors(target):
        make_folder(target.parent)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            digests = {}
            for name, path in present.items():
                copy = work / name
                copy.parent.mkdir(exist_ok=True)
                _copy_database(path, copy)
                digests[name] = _digest(copy)
            index = {"version": BACKUP_VERSION, "made_at_s": made_at_s, "sha256": digests}
            (work / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
            for path in (*work.rglob("*"), work):
                sync_path(path)
            work.rename(target)
            sync_path(target.parent)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    return list(present)


def restore_files(folders: BackedUpFolders, source: Path, store: str | None) -> tuple[list[str], int]:
    """Restore a backup's files, and repeat the erasures that were made since the backup. Returns the files'
    names and the number of erasures.

    The backup is verified first. Raises the errors of `find_erasures`, `NotFound` for a folder without a
    backup, `VersionMismatch` and `Corrupted` for an unusable backup, and `InvalidField` if a file exists
    already or has no destination. After an error nothing is restored.
    """
    digests, made_at_s = read_index(source)
    paths = folders.files()
    for name, digest in digests.items():
        if name not in paths:
            raise InvalidField("source", f"{name} has no destination; pass its folder, too")
        if paths[name].exists():
            raise InvalidField(
                "source", f"{paths[name]} exists; stop the process that uses it, and move the file away"
            )
        if not (source / name).is_file() or _digest(source / name) != digest:
            raise Corrupted(f"{source / name} does not match its digest; use another backup")
    erasures = find_erasures(store, folders.shards, made_at_s)
    try:
        with _translate_errors(source):
            for name in digests:
                _put_in_place(source / name, paths[name])
            restored = {name: paths[name] for name in digests}
            _repeat_erasures(erasures, restored.get(_LEDGER), restored.get(_TEXTS))
    except BaseException:
        for name in digests:
            paths[name].unlink(missing_ok=True)
        raise
    return list(digests), len(erasures)


def find_erasures(store_url: str | None, shard_folders: Sequence[Path], since_s: float) -> list[Erasure]:
    """Return the recorded erasures that were requested after `since_s` (Unix seconds) less `UNSURE_S`. Reads
    the records of running shards and of the given data folders.

    Raises `Unavailable` if a shard of the store does not answer, `InvalidField` for a URL that names no
    shards.
    """
    logs = [folder / "erasures" for folder in shard_folders]
    found = [one for log in logs if log.is_dir() for one in _read_log(log)]
    if store_url is not None:
        found += _ask_shards(store_url)
    return [erasure for erasure in dict.fromkeys(found) if erasure.at_s >= since_s - UNSURE_S]


def _read_log(folder: Path) -> Sequence[Erasure]:
    with closing(Erasures(folder)) as log:
        return log.after(0, max(1, len(log))).erasures


def _ask_shards(url: str) -> Iterator[Erasure]:
    parts = urlsplit(url)
    if parts.scheme == "grpc":
        addresses, options = [parts.netloc], options_of(parts.query)
    else:
        directory, options = open_directory(url)
        with closing(directory):
            addresses = [shard.address for shard in directory.current().shards]
    for address in addresses:
        with closing(GrpcStore(address, options)) as store:
            seen, shard_id = -1, ""
            while seen != (page := store.list_erasures(shard_id, max(seen, 0))).next:
                yield from page.erasures
                seen, shard_id = page.next, page.shard_id


def _repeat_erasures(erasures: Sequence[Erasure], ledger_file: Path | None, texts_file: Path | None) -> None:
    """Repeat the erasures in a ledger and in a gateway's known texts. Raises the errors of both."""
    if not erasures:
        return
    if ledger_file is not None:
        # Only the extra `precompute` installs what this module imports.
        from kintsugi.precompute.ledger import Ledger

        with closing(Ledger(ledger_file.parent)) as ledger:
            for scope in scopes_of(erasures):
                if scope.keys is None:
                    ledger.erase_namespace(scope.namespace)
                else:
                    ledger.erase_chunks(scope.namespace, sorted(scope.keys))
    if texts_file is not None:
        with closing(KnownChunks(texts_file.parent)) as known:
            for scope in scopes_of(erasures):
                known.erase(scope.namespace, scope.keys, scope.until_s)


def _put_in_place(source: Path, path: Path) -> None:
    """Copy a file atomically, readable only by its owner. Raises `OSError`."""
    make_folder(path.parent)
    fresh = path.with_name(path.name + ".restored")
    shutil.copyfile(source, fresh)
    fresh.chmod(0o600)
    sync_path(fresh)
    fresh.rename(path)
    sync_path(path.parent)


def read_index(source: Path) -> tuple[Mapping[str, str], float]:
    """Return the SHA-256 digests of a backup's files by name, and its time in Unix seconds."""
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
    return digests, made_at_s


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
        closing(sqlite3.connect(f"file:{source}?mode=rw", uri=True, timeout=60.0)) as original,
        closing(sqlite3.connect(copy)) as written,
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
        raise Corrupted(f"a database cannot be copied ({error}); see the log of its owner") from error
    except OSError as error:
        raise Unavailable(
            f"{where} cannot be written ({error}); free some space, or name another folder"
        ) from error
