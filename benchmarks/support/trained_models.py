"""Models that benchmarks train once, and the command of a benchmark that measures one of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from sys import stderr

from benchmarks.support.engines import say
from benchmarks.support.figures import Figure, report
from benchmarks.support.quality_curve import Setup
from kintsugi.models.cache import cache_folder, make_folder_once


def checkpoint_once(name: str, title: str, make: Callable[[Path], None]) -> Path:
    """The checkpoint folder of a model that ``make`` writes. Trains it if the cache has none: some minutes on
    one core."""

    def train(draft: Path) -> None:
        say(f"training {title}")
        with redirect_stdout(stderr):
            make(draft)

    return make_folder_once(cache_folder() / "checkpoints" / f"testbed-{name}", train)


def run(
    name: str,
    description: str | None,
    model_once: Callable[[], Path],
    measure: Callable[[Setup], list[Figure]],
    quick_prompts: int,
) -> None:
    """The command of the benchmark ``name``. ``quick_prompts``: judged prompts per task with `--quick`."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few prompts, one configuration")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    parser.add_argument("--prompts", type=int, default=50, help="judged prompts per task")
    parser.add_argument("--model", type=Path, help=f"a folder that benchmarks/testbed/{name}.py wrote")
    arguments = parser.parse_args()
    prompts = quick_prompts if arguments.quick else arguments.prompts
    setup = Setup(arguments.model or model_once(), arguments.quick, prompts_asked=prompts)
    figures = measure(setup)
    config = {"quick": arguments.quick, "prompts_per_task": setup.prompts, **setup.details}
    report(name, config, figures, save_as=name if arguments.save else None)
