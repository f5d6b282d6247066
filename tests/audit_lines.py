"""Reads audit logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_audit(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all files in a folder, in the order in which they were written."""
    lines = [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: str(line["time"]))
