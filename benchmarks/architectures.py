"""Tests on which architectures blending is exact, and with which reason the others are declined. Every class
of vLLM's registry that has a config here gets a tiny model with random weights, and is served with the plugin
and without: ratio 1 against vLLM alone, any ratio against an independent reference on transformers, mixed
batches, prefix caching, chunked prefill, two tensor-parallel ranks.

    python benchmarks/architectures.py [--quick] [--save] [--only NAME,NAME] [--records FOLDER] [--minutes N]

A row runs in a process of its own; all of them take hours. With `--records`, rows that are known for these
sources and versions are not run again. `--save` keeps all rows under benchmarks/results, with those of the
committed result that were not run; `make support` writes docs/SUPPORT.md from them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent))

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
from benchmarks.support.torchvision import python_path

os.environ["PYTHONPATH"] = python_path()

from benchmarks.support.architectures.catalogue import ALL, BLENDED, QUICK, Architecture
from benchmarks.support.architectures.matrix import Matrix, figures_of, make_table
from benchmarks.support.architectures.records import Records, Step
from benchmarks.support.figures import PACKAGES, RESULTS, commit, report

NAME = "architectures"


def main() -> None:
    arguments = _parse_arguments()
    names = arguments.only.split(",") if arguments.only else QUICK if arguments.quick else list(ALL)
    if unknown := [name for name in names if name not in ALL]:
        sys.exit(f"--only {','.join(unknown)}: the architectures are {', '.join(ALL)}")
    until_s = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as scratch:
        records = Records(arguments.records or Path(scratch), until_s)
        matrix = run_matrix(records, [ALL[name] for name in names], arguments.quick)
    Console(file=sys.stderr, width=200).print(make_table(matrix))
    for row in matrix.all_rows():
        row.commit = commit()
    committed, oldest = read_committed(), None
    if committed is not None:
        ours = matrix
        matrix = matrix.over(Matrix.of(committed["config"]["rows"], committed["commit"]))
        oldest = committed["commit"] if len(matrix.one_rank) > len(ours.one_rank) else None
    figures = figures_of(matrix, committed["config"]["rows"] if committed else [])
    config = {
        "weights": "random",
        "quick": arguments.quick,
        "compute_threads": os.environ["OMP_NUM_THREADS"],
        "rows": matrix.to_mapping(),
    }
    report(NAME, config, figures, NAME if arguments.save else None, oldest)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two architectures on one rank: 2 minutes")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    parser.add_argument("--only", help="comma-separated names of architectures")
    parser.add_argument("--records", type=Path, help="folder in which rows are kept, to go on from")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no row after this long")
    return parser.parse_args()


def run_matrix(records: Records, architectures: Sequence[Architecture], quick: bool) -> Matrix:
    """Run each architecture on one rank, and on two ranks if it is exact on one and its heads can be
    divided."""
    one_rank = records.rows(architectures, Step.ONE_RANK)
    matrix = Matrix(one_rank, {})
    able = [one for one in matrix.exact() if one.ranks and one in BLENDED]
    return matrix if quick else Matrix(one_rank, records.rows(able, Step.TWO_RANKS))


def read_committed() -> dict[str, Any] | None:
    """The committed result; None before the first, or if it was made with other versions than these."""
    path = RESULTS / f"{NAME}.json"
    if not path.is_file():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    are_these = all(result["config"][name] == version(name) for name in PACKAGES)
    return result if are_these else None


if __name__ == "__main__":
    main()
