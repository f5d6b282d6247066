"""Reads MuSiQue's passages from beside the repository, because the project may not redistribute it."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

MUSIQUE = Path(__file__).resolve().parents[3] / "shared/data/musique_s.json"


@functools.cache
def passages() -> list[str]:
    """The distinct passages."""
    questions = json.loads(MUSIQUE.read_text())
    return list(dict.fromkeys(ctx["text"] for question in questions for ctx in question["ctxs"]))


def measurable(names: Sequence[str], without: Sequence[str], path: Path = MUSIQUE) -> list[str]:
    """Return the names that can be measured here; those in `without` need no passages. Prints which are left
    out."""
    if path.exists():
        return list(names)
    left_out = [name for name in names if name not in without]
    if left_out:
        print(f"{path} is not here: {', '.join(left_out)} left out", file=sys.stderr)
    return [name for name in names if name in without]
