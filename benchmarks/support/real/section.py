"""The section `real`: KL, right answers and time to first token on a real model, in parts that are joined.

Kinds of questions and configurations are chosen on some prompts and judged on others. Every answer is a
record, and a run that is given the same folder goes on where the last one stopped.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.support import grid
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.musique import MUSIQUE
from benchmarks.support.real import figures as found
from benchmarks.support.real.calibration import calibrated, measure_calibration
from benchmarks.support.real.corpus import read_corpus
from benchmarks.support.real.engine import (
    Clock,
    RealBench,
    build_prompt,
    chunk_store,
    real_engine,
)
from benchmarks.support.real.questions import KINDS
from benchmarks.support.real.records import Records
from benchmarks.support.real.rows import (
    CHOOSING,
    JUDGED,
    OPEN,
    REUSE,
    SAMPLE,
    Choice,
    Configuration,
    Item,
    blend_items,
    candidates,
    choose,
    full_items,
    kinds_right,
    kinds_that_stay,
    open_answers,
    questions_per_kind,
)
from benchmarks.support.real.speed import measure_ttft
from kintsugi.core.errors import InvalidField, NotFound, Unavailable
from kintsugi.core.plan import FormName
from kintsugi.fusor.control.cost import PassWorkload
from kintsugi.models.context import BUNDLED, NONE, tokenize_context
from kintsugi.models.prompt_form import PromptForm, load_form
from kintsugi.models.reference import REFERENCE
from kintsugi.quality.measure import Case
from kintsugi.quality.questions import Question

MODEL = REFERENCE.name
NUM_LAYERS = ("num_layers",)
"""Key of a record about the model."""
MINUTES = 24 * 60.0
CONTEXTS = (NONE, SAMPLE, BUNDLED)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    kind_sets: int
    """Choosing prompts that decide which kinds of questions stay."""
    choosing_sets: int
    """Choosing prompts that configurations are compared on."""
    judged_sets: int
    uncached_sets: int
    """Prompts whose answers are repeated without the prefix cache."""
    ttft_sets: int
    calibration_sets: int
    """Prompts of choosing passages that calibration may use."""
    per_kind: int
    """Questions of each kind on each choosing prompt, and at most on each judged one."""


FULL = Size(20, 12, judged_sets=112, uncached_sets=4, ttft_sets=30, calibration_sets=400, per_kind=3)
QUICK = Size(2, 1, judged_sets=2, uncached_sets=1, ttft_sets=5, calibration_sets=0, per_kind=1)


@dataclass
class RealSetup:
    """The inputs of the section."""

    quick: bool = False
    model: str = MODEL
    records: Path | None = None
    """Folder of the records; None: a temporary one."""
    minutes: float = MINUTES
    """Time limit of this part of the run."""
    musique: Path = MUSIQUE
    """MuSiQue's file. Where it is missing, the passages that ship with Kintsugi serve."""
    contexts: Sequence[str] = CONTEXTS
    details: dict[str, Any] = field(default_factory=dict)
    """Tables, for the report's configuration."""

    def __post_init__(self) -> None:
        if NONE not in self.contexts or set(self.contexts) - set(CONTEXTS):
            raise InvalidField("contexts", f"must be {NONE} and any others of {', '.join(CONTEXTS)}")

    @property
    def size(self) -> Size:
        return QUICK if self.quick else FULL


def measure(setup: RealSetup) -> list[Figure]:
    """As far as the time allows. Figures that the records do not give yet are left out, and all of them where
    the model cannot be had."""
    try:
        form = load_form(setup.model, FormName.CHAT)
    except (NotFound, Unavailable) as error:
        say(f"the section real is left out: {error}")
        return []
    with ExitStack() as stack:
        folder = setup.records
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kintsugi-real-")))
        return stack.enter_context(Run(setup, folder, form)).measure()


class Run:
    """One part of the measurement. A context manager: it keeps an engine while that is of use."""

    def __init__(self, setup: RealSetup, folder: Path, form: PromptForm) -> None:
        self._setup, self._size, self._folder, self._form = setup, setup.size, folder, form
        self._clock = Clock.start(setup.minutes)
        self._corpus = read_corpus(setup.musique)
        setup.details["passages"] = self._corpus.name
        setup.details["prompts_share_passages"] = self._corpus.is_small
        self._choosing = self._corpus.choosing_sets(self._size.kind_sets, self._size.per_kind)
        self._judged = self._corpus.judged_sets(self._size.judged_sets, self._size.per_kind)
        self._records = Records(
            folder / "records.jsonl", _header(setup, self._corpus.sample, self._choosing, self._judged)
        )
        self._engine = ExitStack()
        self._bench: RealBench | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_engine()

    def measure(self) -> list[Figure]:
        """Full prefill, choose, calibrate, judge, time; then the figures."""
        kinds = self._measure_full()
        choice = None if kinds is None else self._choose()
        if kinds is None or choice is None:
            say("not finished: nothing is chosen yet; run again with the same --records")
            return []
        served = choice.by_budget[found.SERVED_BUDGET]
        is_done = self._judge(choice, [served], kinds) and self._time(served) and self._calibrate(served)
        allowed = calibrated(self._records)
        if is_done and allowed is not None:
            is_done = self._judge(choice, [allowed], kinds) and self._time(allowed)
        if not is_done:
            say("not finished: run again with the same --records")
        return self._figures(choice, served, kinds)

    def _measure_full(self) -> list[str] | None:
        """Full prefill's answers. Returns the kinds of questions that stay; None if time was up."""
        every = [kind.name for kind in KINDS]
        if not self._measure(full_items(CHOOSING, self._choosing, every, self._size.per_kind)):
            return None
        kinds = kinds_that_stay(kinds_right(self._records))
        items = self._judged_items(kinds)
        some = {one.number for one in self._judged[: self._size.uncached_sets]}
        again = [item for item in items if item.question != OPEN and item.number in some]
        is_checked = all(("uncached", *item.key[1:]) in self._records for item in again)
        done = self._measure(items) and (
            is_checked or self._bench_of(NONE).check_prefix_cache(again, self._clock)
        )
        return kinds if done else None

    def _judged_items(self, kinds: Sequence[str]) -> list[Item]:
        per_kind = min(self._size.per_kind, questions_per_kind(len(self._judged), len(kinds)))
        return full_items(JUDGED, self._judged, kinds, per_kind)

    def _choose(self) -> Choice | None:
        """The configurations to judge; None if time was up before all were tried."""
        some = self._choosing[: self._size.choosing_sets]
        work = self._workload()
        tried = candidates(self._setup.contexts, work)
        if not self._measure(blend_items(full_items(CHOOSING, some, (), 0), tried)):
            return None
        choice = choose(self._records, tried, work)
        self._setup.details["chosen"] = [one.name for one in choice.configurations]
        return choice

    def _calibrate(self, served: Configuration) -> bool:
        """Calibrate as an operator does, only on the choosing passages, with the context that was best on
        them."""
        if not self._size.calibration_sets:
            return True
        if self._clock.is_over:
            return False
        self._stop_engine()
        sets = self._corpus.choosing_sets(self._size.calibration_sets, self._size.per_kind)
        context = served.context, self._context(served.context)
        measure_calibration(self._setup.model, sets, context, self._folder, self._records)
        return True

    def _judge(self, choice: Choice, asked_of: Sequence[Configuration], kinds: Sequence[str]) -> bool:
        """Open questions of what was chosen, and questions with known answers of full KV reuse and
        ``asked_of``."""
        items = self._judged_items(kinds)
        opened = [item for item in items if item.question == OPEN]
        asked = [item for item in items if item.question != OPEN]
        return self._measure(
            blend_items(opened, [*choice.configurations, *asked_of]) + blend_items(asked, [REUSE, *asked_of])
        )

    def _time(self, served: Configuration) -> bool:
        self._stop_engine()
        return measure_ttft(
            self._setup.model,
            served,
            self._context(served.context),
            self._judged[: self._size.ttft_sets],
            self._choosing[0],
            self._records,
            self._clock,
        )

    def _measure(self, items: Sequence[Item]) -> bool:
        """Add the missing records, context by context, the running engine's first. Returns whether all are
        complete."""
        left = [item for item in dict.fromkeys(items) if item.key not in self._records]
        running = self._bench and self._bench.context
        for context in sorted(self._setup.contexts, key=lambda one: one != running):
            mine = [item for item in left if item.context == context]
            if mine and (self._clock.is_over or not self._bench_of(context).measure(mine, self._clock)):
                return False
        return True

    def _bench_of(self, context: str) -> RealBench:
        """A bench on an engine whose chunks are prepared after the context."""
        if self._bench is None or self._bench.context != context:
            self._stop_engine()
            ids = tokenize_context(self._context(context), self._setup.model)
            say(f"starting {self._setup.model}, chunks prepared after {context} ({len(ids)} tokens)")
            store = self._engine.enter_context(chunk_store(self._folder / "store"))
            running = self._engine.enter_context(real_engine(self._setup.model, store, self._form, ids))
            if NUM_LAYERS not in self._records:
                self._records.add(NUM_LAYERS, {"count": running.num_layers})
            sets = {
                part: {one.number: one for one in some}
                for part, some in ((CHOOSING, self._choosing), (JUDGED, self._judged))
            }
            self._bench = RealBench(running, self._form, sets, self._records, context)
        return self._bench

    def _stop_engine(self) -> None:
        self._bench = None
        self._engine.close()

    def _context(self, name: str) -> str:
        """The setting `model.expert.context`: `none`, `bundled`, or the file of the corpus's sample."""
        if name != SAMPLE:
            return name
        path = self._folder / "sample.txt"
        path.write_text(self._corpus.sample)
        return str(path)

    def _workload(self) -> PassWorkload:
        """The mean choosing prompt's."""
        cases = [
            Case(Question(one.passages, one.open_question), build_prompt(self._form, one, OPEN))
            for one in self._choosing
        ]
        return grid.workload_of(cases, self._records[NUM_LAYERS]["count"])

    def _figures(self, choice: Choice, served: Configuration, kinds: Sequence[str]) -> list[Figure]:
        """Return the figures for which there are records."""
        records, bars = self._records, not self._setup.quick
        figures = [*found.kind_figures(kinds_right(records), kinds), found.cache_figure(records)]
        if all(open_answers(records, JUDGED, one) for one in choice.configurations):
            figures += found.kl_figures(records, choice, bars)
        allowed = calibrated(records)
        lengths = self._prompt_tokens()
        for one in dict.fromkeys([allowed or served, served]):
            suffix = "" if one == (allowed or served) else "_cost20"
            figures += found.task_figures(records, one, kinds, suffix, bars)
            figures += found.loss_figures(records, one, kinds, lengths, suffix, bars)
            figures += found.speed_figures(records, one, suffix, bars)
        return [*figures, *found.gap_figures(records, kinds), *found.calibration_figures(records, bars)]

    def _prompt_tokens(self) -> dict[int, int]:
        """Length of each judged set's open prompt."""
        return {one.number: len(build_prompt(self._form, one, OPEN).token_ids) for one in self._judged}


def _header(setup: RealSetup, *texts: object) -> Mapping[str, Any]:
    """Properties that records must share to be joined."""
    digest = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
    return {"model": setup.model, "texts": digest, "version": 3}
