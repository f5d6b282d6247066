"""`kintsugi backup` and `kintsugi restore`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kintsugi.cli.backup import BackupPart, back_up, parts_of
from kintsugi.cli.backup import restore as restore_parts
from kintsugi.cli.replaying import find_erasures
from kintsugi.cli.screen import Screen


@dataclass(frozen=True, kw_only=True)
class BackedUpFolders:
    """The folders that are backed up or restored."""

    state: Annotated[Path | None, typer.Option(help="State folder of precompute, with its ledger.")] = None
    gateway_data: Annotated[Path | None, typer.Option(help="The gateway's data_dir: known texts.")] = None
    shard_data: Annotated[
        list[Path] | None, typer.Option(help="A shard's data folder: reports; repeat, in the same order.")
    ] = None

    def parts(self) -> list[BackupPart]:
        """Return the files of these folders. Raises `InvalidField` if no folder is given."""
        return parts_of(self.state, self.gateway_data, self.shard_data or [])


def backup(
    screen: Screen,
    target: Annotated[Path, typer.Argument(help="New folder for the backup.")],
    *,
    folders: BackedUpFolders,
) -> None:
    """Back up ledger, known texts and reports while their owners run; chunk KV is left out."""
    with screen.step("Backing up"):
        names = back_up(folders.parts(), target)
    text = f"{len(names)} files backed up to {target}"
    screen.show({"target": str(target), "files": names}, lambda console: console.print(text, highlight=False))


def restore(
    screen: Screen,
    source: Annotated[Path, typer.Argument(help="Folder that `kintsugi backup` wrote.")],
    store: Annotated[
        str | None,
        typer.Option(help="URL of a running store: erase again what it was asked to erase since the backup."),
    ] = None,
    *,
    folders: BackedUpFolders,
) -> None:
    """Verify a backup and put its files in their places, which must be free.

    What shards have erased since the backup is erased from it again: shards of --store, and those whose
    --shard-data still holds their record of erasures.
    """
    shards = folders.shard_data or []
    with screen.step("Restoring"):
        done = restore_parts(folders.parts(), source, lambda since_s: find_erasures(store, shards, since_s))
    if store is None and not any((folder / "erasures").is_dir() for folder in shards):
        screen.note("nothing says what was erased since the backup; name the store with --store")
    text = f"{len(done.names)} files restored from {source}, {done.erased} erasures made again"
    document = {"source": str(source), "files": done.names, "erasures": done.erased}
    screen.show(document, lambda console: console.print(text, highlight=False))
