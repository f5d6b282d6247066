"""Records what many configurations do on fresh questions, prompt by prompt, for the figures of `evidence`.

    python -m benchmarks.support.outcomes measure --slice 0        # some minutes each, SLICES of them
    python -m benchmarks.support.outcomes join                     # writes RECORDS

A slice is `SLICE_QUESTIONS` questions of every task of the testbed. They come from a range of seeds that
nothing else uses. `evidence.py` replays the records through the code that decides a calibration.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.support import testbed_questions as testbed
from benchmarks.support.engines import say
from benchmarks.support.figures import RESULTS
from kintsugi.core.plan import Selection
from kintsugi.core.report import describe_selection
from kintsugi.core.request import SelectorName
from kintsugi.core.schema import STRICT, load
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.quality import metrics
from kintsugi.quality.measure import Bench, Scores, measure_selection
from kintsugi.quality.session import MeasuringEngineSpec, start_measuring_engine

RECORDS = RESULTS / "outcomes-bundled.json.gz"
RECORDED_FROM = 600_000
SLICES = 4
SLICE_QUESTIONS = 65
"""Questions of each task in a slice."""
QUERY, HYBRID = SelectorName.QUERY, SelectorName.HYBRID
HKVD, GRADUAL = SelectorName.HKVD, SelectorName.HKVD_GRADUAL
MIDDLE, EVERY = (2, 3, 4, 5), tuple(range(8))
SELECTIONS = (
    *(Selection(ratio, QUERY) for ratio in (0.1, 0.15, 0.25, 0.4)),
    *(Selection(ratio, QUERY, 1, EVERY) for ratio in (0.15, 0.25)),
    Selection(0.15, QUERY, 1, MIDDLE),
    Selection(0.4, QUERY, 1, (), 0.7),
    *(Selection(ratio, HYBRID, 2) for ratio in (0.05, 0.1, 0.15, 0.25)),
    *(Selection(ratio, HKVD, 2) for ratio in (0.05, 0.1, 0.15)),
    *(Selection(ratio, GRADUAL, 2) for ratio in (0.05, 0.1)),
    Selection(0.25, HKVD, 2),
    Selection(0.15, GRADUAL, 2),
    Selection(0.15, HKVD, 3),
)
"""From clearly too cheap to clearly safe."""


@dataclass(frozen=True)
class PromptRecord:
    """One prompt, and whether full prefill answers it right."""

    __pydantic_config__ = STRICT

    task: str
    tokens: int
    chunks: int
    right: bool


@dataclass(frozen=True)
class OutcomeRecord:
    """What one configuration did, one value a prompt."""

    __pydantic_config__ = STRICT

    selection: Selection
    cost: list[float]
    kl: list[float]
    disagreement: list[float]
    right: list[bool]


@dataclass(frozen=True)
class Records:
    """Outcomes of every configuration on the same prompts."""

    __pydantic_config__ = STRICT

    prompts: list[PromptRecord]
    outcomes: list[OutcomeRecord]


def read_records() -> Records:
    with gzip.open(RECORDS) as file:
        return load(Records, json.load(file), "records")


def measure_slice(number: int, part: Path) -> None:
    tasks = (*testbed.TASKS, testbed.CONTROL)
    asked = testbed.questions(tasks, RECORDED_FROM + number * SLICE_QUESTIONS, SLICE_QUESTIONS)
    with start_measuring_engine(MeasuringEngineSpec(str(bundled_checkpoint()))) as running:
        bench = Bench(running, testbed.cases(running, asked), max_tokens=1)
        bench.store_chunks()
        say(f"slice {number}: {len(bench.cases)} prompts")
        everything = range(len(bench.cases))
        full = bench.full(everything)
        prompts = [
            PromptRecord(
                case.question.task,
                len(case.prompt.token_ids),
                len(case.prompt.chunks),
                bool(metrics.exact_match(answer.text, case.question.answers)),
            )
            for case, answer in zip(bench.cases, full, strict=True)
        ]
        outcomes = []
        for selection in SELECTIONS:
            outcomes.append(_record(measure_selection(bench, selection, everything)))
            say(f"slice {number}: {describe_selection(selection)}")
    _write(part, Records(prompts, outcomes))


def _record(scores: Scores) -> OutcomeRecord:
    pairs = [(full.steps[0], blend.steps[0]) for full, blend in zip(scores.full, scores.blend, strict=True)]
    return OutcomeRecord(
        scores.selection,
        [round(answer.cost, 4) for answer in scores.blend],
        [round(metrics.kl_divergence(*pair), 4) for pair in pairs],
        [float(not metrics.same_top(*pair)) for pair in pairs],
        [bool(value) for value in scores.score_cases(metrics.exact_match)],
    )


def join(parts: Sequence[Records]) -> Records:
    outcomes = [
        OutcomeRecord(
            same[0].selection,
            *([value for one in same for value in getattr(one, name)] for name in _COLUMNS),
        )
        for same in zip(*(part.outcomes for part in parts), strict=True)
    ]
    return Records([prompt for part in parts for prompt in part.prompts], outcomes)


_COLUMNS = ("cost", "kl", "disagreement", "right")


def _write(path: Path, records: Records) -> None:
    document: dict[str, Any] = asdict(records)
    with path.open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed:
        packed.write(json.dumps(document, separators=(",", ":")).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["measure", "join"])
    parser.add_argument("--slice", type=int, choices=range(SLICES), default=0)
    parser.add_argument("--parts", type=Path, required=True, help="folder for the slices")
    arguments = parser.parse_args()
    parts = [arguments.parts / f"slice-{number}.json.gz" for number in range(SLICES)]
    if arguments.what == "measure":
        measure_slice(arguments.slice, parts[arguments.slice])
        return
    loaded = []
    for part in parts:
        with gzip.open(part) as file:
            loaded.append(load(Records, json.load(file), str(part)))
    _write(RECORDS, join(loaded))


if __name__ == "__main__":
    main()
