"""The names that one model answers to."""

from __future__ import annotations

import json
from pathlib import Path

from kintsugi.models.hub import is_hub_name, name_of

NAME_CHARS_MAX = 256


def find_aliases(name: str, given: str, folder: str | Path) -> tuple[str, ...]:
    """The names besides `name` by which clients ask for a model: the folder or hub name `given` in the
    configuration, the checkpoint's own `folder`, and the hub name in its config. Each once, the folder's
    absolute path last."""
    known = (_hub_name(Path(folder)), given, given.rstrip("/"), str(folder), str(Path(folder).resolve()))
    return tuple(dict.fromkeys(alias for alias in known if alias and alias != name))


def _hub_name(folder: Path) -> str:
    """The model's name on the hub, by the hub's cache or the checkpoint's config; empty if neither has it."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return name_of(folder)
    try:
        named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        return ""  # vLLM says what is wrong with a config
    # It may also be a folder of the machine that wrote the config, which is nobody's business here.
    return named if isinstance(named, str) and len(named) <= NAME_CHARS_MAX and is_hub_name(named) else ""
