"""`kintsugi backup` and `kintsugi restore`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kintsugi.cli.backup import BackupPart, back_up, parts_of
from kintsugi.cli.backup import restore as restore_parts
from kintsugi.cli.screen import Screen


@dataclass(frozen=True, kw_only=True)
class BackedUpFolders:
    """Where the files are in use."""

    state: Annotated[Path | None, typer.Option(help="State folder of precompute: ledger and jobs.")] = None
    gateway_data: Annotated[Path | None, typer.Option(help="The gateway's data_dir: known texts.")] = None
    shard_data: Annotated[
        list[Path] | None, typer.Option(help="A shard's data folder: reports; repeat, in the same order.")
    ] = None

    def parts(self) -> list[BackupPart]:
        """Raises `InvalidField` where no folder is given."""
        return parts_of(self.state, self.gateway_data, self.shard_data or [])


def backup(
    screen: Screen,
    target: Annotated[Path, typer.Argument(help="New folder for the backup.")],
    *,
    folders: BackedUpFolders,
) -> None:
    """Back up ledger, jobs, known texts and reports while their owners run; chunk KV is left out."""
    with screen.step("Backing up"):
        names = back_up(folders.parts(), target)
    text = f"{len(names)} files backed up to {target}"
    screen.show({"target": str(target), "files": names}, lambda console: console.print(text, highlight=False))


def restore(
    screen: Screen,
    source: Annotated[Path, typer.Argument(help="Folder that `kintsugi backup` wrote.")],
    *,
    folders: BackedUpFolders,
) -> None:
    """Verify a backup and put its files in their places, which must be free."""
    with screen.step("Restoring"):
        names = restore_parts(folders.parts(), source)
    text = f"{len(names)} files restored from {source}"
    screen.show({"source": str(source), "files": names}, lambda console: console.print(text, highlight=False))
