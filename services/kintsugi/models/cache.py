"""The folder where checkpoints made here are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$KINTSUGI_CACHE`, or `kintsugi` in the user's XDG cache folder."""
    if explicit := os.environ.get("KINTSUGI_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kintsugi"
