"""`kintsugi keys`: makes, rotates and destroys the keys of encrypted namespaces in a key file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kintsugi.cli.runner import command
from kintsugi.cli.screen import Screen
from kintsugi.store.client import key_file

app = typer.Typer(help="Manage the keys of encrypted namespaces.", no_args_is_help=True)

Namespace = Annotated[str, typer.Argument(help="Namespace that the keys encrypt.")]
File = Annotated[Path, typer.Option(help="The key file, as in ?keys=FILE of a store URL.")]


@command(app)
def create(screen: Screen, namespace: Namespace, file: File) -> None:
    """Create keys for a namespace, whose new chunks are then encrypted. A missing file is created."""
    keys = key_file.create_keys(file, namespace)
    _show(screen, namespace, keys.newest_id, ())
    screen.note(
        "chunks stored without these keys are no longer found; delete them, or wait for their eviction"
    )


@command(app)
def rotate(screen: Screen, namespace: Namespace, file: File) -> None:
    """Add a data key for new chunks. Chunks of older keys stay readable until `retire`."""
    keys = key_file.rotate_keys(file, namespace)
    _show(screen, namespace, keys.newest_id, ())


@command(app)
def retire(screen: Screen, namespace: Namespace, file: File) -> None:
    """Destroy all data keys but the newest. This erases the chunks that they encrypt."""
    retired, newest = key_file.retire_keys(file, namespace)
    _show(screen, namespace, newest, retired)


@command(app)
def destroy(
    screen: Screen,
    namespace: Namespace,
    file: File,
    yes: Annotated[bool, typer.Option("--yes", help="Destroy without confirmation.")] = False,
) -> None:
    """Destroy all keys of a namespace. This erases its chunks; its later requests are refused."""
    if not yes:
        typer.confirm(f"Erase all chunks of {namespace!r} irreversibly?", abort=True, err=True)
    destroyed, at = key_file.destroy_keys(file, namespace)
    _show(screen, namespace, "", destroyed, at)
    screen.note(
        "destroy copies of the key file, too, such as backups and Secrets: they still hold these keys"
    )


def _show(
    screen: Screen, namespace: str, newest: str, destroyed: tuple[str, ...], destroyed_at: str = ""
) -> None:
    """Print the ids of keys, but no key."""
    values = {"namespace": namespace, "key_id": newest, "destroyed": list(destroyed)}
    if destroyed_at:
        values["destroyed_at"] = destroyed_at
    lines = [f"encrypts with {newest}"] if newest else []
    lines += [f"destroyed {key_id}" for key_id in destroyed]
    screen.show(values, "\n".join(lines))
