"""Records how much each configuration of the ladder loses, prompt by prompt, for the replays of `gate.py`.

    python -m benchmarks.support.outcomes --model smollm2-135m --prompts own --count 96 --minutes 8

Prompts: `testbed`, questions of the testbed (for the bundled model); `own`, MuSiQue questions, each with its
own passages, cut to `PASSAGE_CHARS`; `mixed`, MuSiQue questions with passages of other questions. Answers are
full prefill's own; blends are forced along them. No text is recorded. A further call extends the records.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.support import testbed_questions as testbed
from benchmarks.support.engines import say
from benchmarks.support.figures import RESULTS
from benchmarks.support.musique import MUSIQUE
from kintsugi.core.evidence import POSITIONS_MAX
from kintsugi.core.plan import FormName, Selection
from kintsugi.core.report import LADDER, describe_selection
from kintsugi.core.schema import STRICT, load
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.models.prompt_form import load_form
from kintsugi.quality.measure import Bench, Case, measure_selection, tokenize_questions
from kintsugi.quality.questions import Question
from kintsugi.quality.session import MeasuringEngineSpec, start_measuring_engine

TESTBED_FROM = 600_000
"""First question of the testbed: nothing else uses these."""
PASSAGES = 6
PASSAGE_CHARS = 800
"""About 200 tokens."""
BATCH = 8
RECORDED = (*LADDER, Selection(0.0))
"""The ladder, and full KV reuse."""


@dataclass(frozen=True)
class Outcome:
    """The outcomes of one configuration, one value per prompt."""

    __pydantic_config__ = STRICT

    selection: Selection
    cost: list[float]
    kl: list[float]
    changed: list[float]


@dataclass(frozen=True)
class Records:
    """Outcomes of every configuration on the same prompts."""

    __pydantic_config__ = STRICT

    model: str
    prompts: str
    tokens: list[int]
    """Length of each prompt."""
    chunk_tokens: list[int]
    """Mean length of each prompt's chunks."""
    num_chunks: list[int]
    outcomes: list[Outcome]


def path_of(model: str, prompts: str) -> Path:
    """Return the file of a model's records on one kind of prompts."""
    return RESULTS / f"outcomes-{model}-{prompts}.json.gz"


def read_records(path: Path) -> Records:
    with gzip.open(path) as file:
        return load(Records, json.load(file), "records")


def write_records(records: Records, path: Path) -> None:
    document = json.dumps(asdict(records), separators=(",", ":"))
    with path.open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed:
        packed.write(document.encode())


def musique_questions(
    kind: str, count: int, skip: int, passages: int = PASSAGES, chars: int = PASSAGE_CHARS
) -> list[Question]:
    """Questions with their own passages, or with passages of other questions, in a fixed order."""
    rows = json.loads(MUSIQUE.read_text())
    generator = random.Random(7)
    generator.shuffle(rows)
    found: list[Question] = []
    while len(found) < skip + count:
        for row in rows:
            own = list(row["ctxs"])
            if kind == "mixed":
                own = [generator.choice(other["ctxs"]) for other in generator.sample(rows, passages)]
            picked = generator.sample(own, min(passages, len(own)))
            texts = tuple(f"{one['title']}\n{one['text'][:chars]}\n\n" for one in picked)
            found.append(Question(texts, row["question"], (), "musique", bare=True))
    return found[skip : skip + count]


def record(model: str, prompts: str, count: int, minutes: float, dtype: str = "auto") -> None:
    path = path_of(model, prompts)
    records = read_records(path) if path.exists() else _empty(model, prompts)
    skip, until_s = len(records.tokens), time.monotonic() + 60 * minutes
    name = str(bundled_checkpoint()) if model == "bundled" else model
    form = load_form(name) if prompts == "testbed" else load_form(name, FormName.CHAT)
    if prompts == "testbed":
        each = -(-count // len(testbed.TASKS))
        asked = testbed.questions(testbed.TASKS, TESTBED_FROM + skip, each)[:count]
    else:
        asked = musique_questions(prompts, count, skip)
    with start_measuring_engine(MeasuringEngineSpec(name, form=form, vllm_args={"dtype": dtype})) as engine:
        cases, _ = tokenize_questions(asked, form, engine.max_model_len, POSITIONS_MAX)
        for start in range(0, len(cases), BATCH):
            if time.monotonic() > until_s:
                break
            some = cases[start : start + BATCH]
            bench = Bench(engine, some, POSITIONS_MAX, BATCH)
            bench.store_chunks()
            _measure(bench, some, records)
            write_records(records, path)
            say(f"{model}, {prompts}: {len(records.tokens)} prompts")


def _measure(bench: Bench, cases: Sequence[Case], records: Records) -> None:
    for outcome in records.outcomes:
        scores = measure_selection(bench, outcome.selection, range(len(cases)), is_free=False)
        for one in scores.by_prompt:
            outcome.cost.append(round(one.cost, 4))
            outcome.kl.append(round(one.deviation.kl, 6))
            outcome.changed.append(round(one.deviation.changed, 4))
    for case in cases:
        lengths = [len(chunk.token_ids) for chunk in case.prompt.chunks]
        records.tokens.append(len(case.prompt.token_ids))
        records.chunk_tokens.append(sum(lengths) // len(lengths))
        records.num_chunks.append(len(lengths))


def _empty(model: str, prompts: str) -> Records:
    return Records(model, prompts, [], [], [], [Outcome(one, [], [], []) for one in RECORDED])


def describe(records: Records) -> list[str]:
    """Mean figures of each configuration, for a log."""
    count = max(1, len(records.tokens))
    return [
        f"{describe_selection(one.selection)}: cost {sum(one.cost) / count:.3f}, "
        f"KL {sum(one.kl) / count:.4f}, changed {sum(one.changed) / count:.4f}"
        for one in records.outcomes
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--prompts", choices=["testbed", "own", "mixed"], default="testbed")
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--dtype", default="auto", help="float32 where the CPU does not multiply in bfloat16")
    arguments = parser.parse_args()
    record(arguments.model, arguments.prompts, arguments.count, arguments.minutes, arguments.dtype)
    for line in describe(read_records(path_of(arguments.model, arguments.prompts))):
        say(line)


if __name__ == "__main__":
    main()
