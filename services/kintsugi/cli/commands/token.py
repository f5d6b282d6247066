"""`kintsugi token`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kintsugi.cli.screen import Screen
from kintsugi.gateway.access import add_grant, new_token


def run(screen: Screen, name: str, namespaces: Sequence[str], file: Path) -> None:
    """Raises `InvalidField`."""
    token, grant = new_token(name, namespaces)
    add_grant(file, grant)
    screen.show(
        {"token": token, "name": name, "namespaces": list(namespaces), "file": str(file)},
        lambda console: console.print(token, highlight=False, soft_wrap=True, markup=False),
    )
    screen.note(f"{file} has its hash; this is the only time that the token itself is shown")
