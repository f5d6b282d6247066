"""Names by which clients may ask for a model."""

from __future__ import annotations

import json
from pathlib import Path

from kintsugi.models.hub import is_hub_name, name_of

NAME_CHARS_MAX = 256


def find_aliases(name: str, given: str, folder: str | Path) -> tuple[str, ...]:
    """Return the names, other than `name`, by which clients may ask for a model: the hub name in the
    checkpoint's config, the folder or hub name `given` in the configuration, and the checkpoint's `folder`.
    Each appears once, the folder's absolute path last."""
    known = (_hub_name(Path(folder)), given, given.rstrip("/"), str(folder), str(Path(folder).resolve()))
    return tuple(dict.fromkeys(alias for alias in known if alias and alias != name))


def _hub_name(folder: Path) -> str:
    """Return the model's name on the hub, from the hub's cache or the checkpoint's config; empty if
    unknown."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return name_of(folder)
    try:
        named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        return ""  # vLLM reports the error in the config
    # It may also be a folder of the machine that wrote the config, which must not be published.
    return named if isinstance(named, str) and len(named) <= NAME_CHARS_MAX and is_hub_name(named) else ""
