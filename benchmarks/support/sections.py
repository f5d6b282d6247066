"""The command line of a benchmark that consists of sections, each of them a measurement of its own."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping

from benchmarks.support.figures import Figure, report


def run(name: str, title: str, sections: Mapping[str, Callable[..., list[Figure]]]) -> None:
    """Measure what the command line asks for, all by default, and report it as the benchmark `name`.

    A section takes `quick`. The models behind them have random weights, and the figures say so.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--quick", action="store_true", help="smaller prompts, fewer repetitions, 2 minutes")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    parser.add_argument("--only", help=f"comma-separated sections of {', '.join(sections)}")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else list(sections)
    figures: list[Figure] = []
    for section in chosen:
        figures += sections[section](quick=arguments.quick)
    config = {
        "quick": arguments.quick,
        "sections": chosen,
        "compute_threads": os.environ["OMP_NUM_THREADS"],
        "weights": "random",
    }
    part = "" if len(chosen) == len(sections) else "-" + "-".join(chosen)
    report(name, config, figures, save_as=f"{name}{part}" if arguments.save else None)
