"""Runs each row in a separate process and keeps its findings, so that an interrupted run can continue.

vLLM is imported once: a fork server holds it, and every row is a fork. A record counts for the sources, the
versions and the architecture that it was made with, and for no others; a commit that changes only documents
keeps it, and so does another architecture's change.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

import blake3

from benchmarks.support.architectures.catalogue import ALL, Architecture
from benchmarks.support.architectures.rows import Outcome, Row, without_paths
from benchmarks.support.engines import say
from benchmarks.support.figures import PACKAGES
from kintsugi.engine.plugin import end_with_parent

ROW_TIMEOUT_S = 600.0
UNFINISHED_EXIT = 75
"""EX_TEMPFAIL: run the same command again."""

ROOT = Path(__file__).parents[3]
SOURCES = (
    *(f"services/kintsugi/{room}" for room in ("core", "engine", "fusor", "models", "store")),
    "benchmarks/support/architectures",
    "benchmarks/support/engines.py",
    "tests/oracle.py",
)
"""Files and folders of Python code that a row depends on."""

ENTRIES = "benchmarks/support/architectures/catalogue.py"
"""Not in `SOURCES`, because a row depends only on its own entry of the catalogue."""

PRELOADED = ["vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "benchmarks.support.architectures.checks"]


class Step(StrEnum):
    """A part of a row that runs in a separate process."""

    ONE_RANK = "one-rank"
    TWO_RANKS = "two-ranks"


class Unfinished(SystemExit):
    """The time is over and rows are left."""

    def __init__(self, done: int, wanted: int) -> None:
        print(f"{done} of {wanted} rows are done; run the same command again", file=sys.stderr)
        super().__init__(UNFINISHED_EXIT)


@dataclass(frozen=True)
class Records:
    """A folder of records and logs."""

    folder: Path
    until_s: float
    """`time.monotonic()` after which no row begins."""
    made_with: Mapping[str, str] = field(default_factory=lambda: _made_with())
    """The digest of the sources, and the versions, that this process began with."""

    def rows(self, architectures: Sequence[Architecture], step: Step) -> dict[str, Row]:
        """Return the row of each architecture by name: from the records, or else measured now.

        Raises `Unfinished` where the time is over.
        """
        done: dict[str, Row] = {}
        for number, architecture in enumerate(architectures, 1):
            row = self._read(architecture, step)
            if row is None:
                if time.monotonic() > self.until_s:
                    raise Unfinished(number - 1, len(architectures))
                row = self._find_out(architecture, step)
                self._write(architecture, step, row)
            done[architecture.name] = row
            say(f"{step} {number}/{len(architectures)} {row.name}: {row.outcome} {row.reason}")
        return done

    def _path(self, architecture: Architecture, step: Step, ending: str) -> Path:
        return self.folder / step / f"{architecture.name.replace('/', '-')}.{ending}"

    def _read(self, architecture: Architecture, step: Step) -> Row | None:
        path = self._path(architecture, step, "json")
        if not path.is_file():
            return None
        record = json.loads(path.read_text())
        is_known = record["made_with"] == self.made_with and record["architecture"] == _describe(architecture)
        return Row.of(record["row"]) if is_known else None

    def _write(self, architecture: Architecture, step: Step, row: Row) -> None:
        document = {
            "made_with": self.made_with,
            "architecture": _describe(architecture),
            "row": row.to_mapping(),
        }
        draft = self._path(architecture, step, "draft")
        draft.write_text(json.dumps(document, indent=1) + "\n")
        draft.rename(self._path(architecture, step, "json"))

    def _find_out(self, architecture: Architecture, step: Step) -> Row:
        log, result = (self._path(architecture, step, ending) for ending in ("log", "result"))
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        result.unlink(missing_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        process = context.Process(target=_run_row, args=(architecture.name, step.value, log, result))
        process.start()
        process.join(ROW_TIMEOUT_S)
        if process.is_alive():
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        if result.is_file():
            return Row.of(json.loads(result.read_text()))
        ended = f"after {ROW_TIMEOUT_S:.0f} s" if process.exitcode == -signal.SIGKILL else "by itself"
        last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line), "")
        reason = (
            f"the process ended {ended} with {process.exitcode}; its last line: {without_paths(last)[:200]}"
        )
        return Row(architecture.name, Outcome.CRASHED, reason)


def _made_with() -> dict[str, str]:
    return {"sources": digest_sources(), **{name: version(name) for name in PACKAGES}}


def _describe(architecture: Architecture) -> str:
    return json.dumps(vars(architecture), default=sorted, sort_keys=True)


def digest_sources() -> str:
    """Digest of the names and the content of all files in `SOURCES`."""
    digest = blake3.blake3()
    for source in SOURCES:
        path = ROOT / source
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in [one for one in files if one != ROOT / ENTRIES]:
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest(8)


def _run_row(name: str, step: str, log: Path, result: Path) -> None:
    """In a process of its own, and a group of its own: two ranks have workers."""
    os.setsid()
    end_with_parent()
    with log.open("wb") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    from benchmarks.support.architectures.checks import check_one_rank, check_two_ranks

    check = check_one_rank if step == Step.ONE_RANK else check_two_ranks
    row = check(ALL[name]).to_mapping()
    draft = result.with_suffix(".part")
    draft.write_text(json.dumps(row))
    draft.rename(result)
    sys.stdout.flush()
    # vLLM leaves threads and exit handlers that must not run here.
    os._exit(0)
