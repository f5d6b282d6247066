"""The command line of a benchmark that consists of independent sections."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.support.figures import Figure, report

Sections = Mapping[str, Callable[..., list[Figure]]]


def run(name: str, title: str, sections: Sections, weights: str = "random") -> None:
    """Measure what the command line asks for, all by default, and report it as the benchmark `name`.

    A section takes `quick`. ``weights``: those of the measured models, which the result states.
    """
    arguments = parser_of(title, sections, "smaller prompts, fewer repetitions, 2 minutes").parse_args()
    measure(name, arguments, sections, {"weights": weights}, quick=arguments.quick)


def parser_of(title: str, sections: Sections, quick: str) -> argparse.ArgumentParser:
    """Add the options of every such benchmark. ``quick``: the help text of `--quick`."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    parser.add_argument("--only", help=f"comma-separated sections of {', '.join(sections)}")
    return parser


def measure(
    name: str, arguments: argparse.Namespace, sections: Sections, config: Mapping[str, Any], **given: Any
) -> None:
    """Call the sections that were asked for with ``given``, and report with ``config`` as it is then.

    If a section fails, the earlier results are reported, and the process ends with its error."""
    chosen = arguments.only.split(",") if arguments.only else list(sections)
    if unknown := [section for section in chosen if section not in sections]:
        sys.exit(f"--only {','.join(unknown)}: the sections are {', '.join(sections)}")
    figures: list[Figure] = []
    failure: Exception | None = None
    for number, section in enumerate(chosen):
        try:
            figures += sections[section](**given)
        except Exception as error:
            if number == 0:
                raise
            failure, chosen = error, chosen[:number]
            break
    settings = {
        "quick": arguments.quick,
        "sections": chosen,
        "compute_threads": os.environ["OMP_NUM_THREADS"],
        **config,
    }
    part = "" if len(chosen) == len(sections) else "-" + "-".join(chosen)
    report(name, settings, figures, save_as=f"{name}{part}" if arguments.save else None)
    if failure is not None:
        raise failure
