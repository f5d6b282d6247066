"""Runs the rounds of a section and keeps their outcomes in a file, so that an interrupted run can continue.

A file belongs to one section, size, seed and commit: outcomes of other code are never counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.support.figures import commit

FOLDER = "KINTSUGI_TRUST_STATE"
"""Environment variable: the folder of outcomes. Unset: nothing is kept."""
MINUTES = "KINTSUGI_TRUST_MINUTES"
"""Environment variable: how long rounds are begun for. Unset: until all are done."""
UNFINISHED_EXIT = 75
"""EX_TEMPFAIL: run the same command again."""

Outcome = dict[str, Any]

_began_s = time.monotonic()


class Unfinished(SystemExit):
    """The time is over and rounds are left. The same command, run again, continues."""

    def __init__(self, section: str, done: int, rounds: int) -> None:
        print(f"{section}: {done} of {rounds} rounds are done; run it again", file=sys.stderr)
        super().__init__(UNFINISHED_EXIT)


def run_rounds(
    section: str, names: Iterable[str], one: Callable[[str], Outcome], *, quick: bool, seed: int
) -> dict[str, Outcome]:
    """The outcome of every round by its name: read where it is known, else measured by `one`.

    A name says all that the round depends on besides the seed. Outcomes are JSON objects.
    Raises `Unfinished` where the time that `KINTSUGI_TRUST_MINUTES` gives is over.
    """
    wanted = list(names)
    file = _file(section, quick, seed)
    done = {name: outcome for name, outcome in _read(file).items() if name in set(wanted)}
    for name in wanted:
        if name in done:
            continue
        if _is_time_over():
            raise Unfinished(section, len(done), len(wanted))
        done[name] = one(name)
        _append(file, name, done[name])
        print(f"{section} {len(done)}/{len(wanted)} {name}: {done[name]}", file=sys.stderr, flush=True)
    return {name: done[name] for name in wanted}


def _is_time_over() -> bool:
    minutes = os.environ.get(MINUTES)
    return minutes is not None and time.monotonic() - _began_s >= 60 * float(minutes)


def _file(section: str, quick: bool, seed: int) -> Path | None:
    folder = os.environ.get(FOLDER)
    if folder is None:
        return None
    return Path(folder) / f"{section}-{'quick' if quick else 'full'}-{seed}-{commit()}.jsonl"


def _read(file: Path | None) -> dict[str, Outcome]:
    """Known outcomes. A line that was cut by an interruption is no outcome."""
    known: dict[str, Outcome] = {}
    if file is not None and file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):
                entry = json.loads(line)
                known[entry["round"]] = entry["outcome"]
    return known


def _append(file: Path | None, name: str, outcome: Outcome) -> None:
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as handle:
        # The line before may have been cut: begin a new one.
        handle.write("\n" + json.dumps({"round": name, "outcome": outcome}) + "\n")
