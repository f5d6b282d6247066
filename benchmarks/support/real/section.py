"""The section `real`: KL, right answers and time to first token on a real model, in parts that are joined.

Kinds of questions and configurations are chosen on some prompts and judged on others. Every answer is a
record, and a run that is given the same folder goes on where the last one stopped.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.musique import MUSIQUE
from benchmarks.support.real import figures as found
from benchmarks.support.real.corpus import PassageSet, bundled_context, read_corpus
from benchmarks.support.real.engine import Clock, RealBench, chunk_store, context_ids, real_engine
from benchmarks.support.real.form import ChatForm
from benchmarks.support.real.questions import KINDS
from benchmarks.support.real.records import Records
from benchmarks.support.real.rows import (
    BUNDLED,
    CHOOSING,
    JUDGED,
    OPEN,
    PLAIN,
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
    questions_per_kind,
)
from benchmarks.support.real.speed import measure_ttft, write_context
from kintsugi.fusor.control.cost import PassWorkload
from kintsugi.quality import grid
from kintsugi.quality.measure import Case
from kintsugi.quality.questions import Question
from kintsugi.quality.session import load_tokenizer

MODEL = "smollm2-135m"
"""The reference model: SmolLM2-135M-Instruct, dequantised Q4_1."""
MINUTES = 24 * 60.0
CONTEXTS = (PLAIN, SAMPLE, BUNDLED)


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
    per_kind: int
    """Questions of each kind on each choosing prompt, and at most on each judged one."""


FULL = Size(kind_sets=20, choosing_sets=12, judged_sets=112, uncached_sets=4, ttft_sets=30, per_kind=3)
QUICK = Size(kind_sets=2, choosing_sets=1, judged_sets=2, uncached_sets=1, ttft_sets=5, per_kind=1)


@dataclass
class RealSetup:
    """What the section measures with."""

    quick: bool = False
    model: str = MODEL
    records: Path | None = None
    """Folder of the records; None: a temporary one."""
    minutes: float = MINUTES
    """This part of the run stops after so many."""
    musique: Path = MUSIQUE
    """MuSiQue's file. Where it is missing, the passages that ship with Kintsugi serve."""
    contexts: Sequence[str] = CONTEXTS
    details: dict[str, Any] = field(default_factory=dict)
    """Tables, for the report's configuration."""

    @property
    def size(self) -> Size:
        return QUICK if self.quick else FULL


def measure(setup: RealSetup) -> list[Figure]:
    """As far as the time allows. Figures that the records do not give yet are left out."""
    with tempfile.TemporaryDirectory(prefix="kintsugi-real-") as temporary:
        return Run(setup, setup.records or Path(temporary)).measure()


class Run:
    """One part of the measurement."""

    def __init__(self, setup: RealSetup, folder: Path) -> None:
        self._setup, self._size, self._folder = setup, setup.size, folder
        self._clock = Clock.start(setup.minutes)
        self._corpus = read_corpus(setup.musique)
        self._choosing = self._corpus.choosing_sets(self._size.kind_sets, self._size.per_kind)
        self._judged = self._corpus.judged_sets(self._size.judged_sets, self._size.per_kind)
        tokenizer, _ = load_tokenizer(setup.model)
        self._form = ChatForm.of(tokenizer)
        self._records = Records(folder / "records.jsonl", _header(setup, self._choosing, self._judged))
        self._sets = {
            part: {one.number: one for one in sets}
            for part, sets in ((CHOOSING, self._choosing), (JUDGED, self._judged))
        }

    def measure(self) -> list[Figure]:
        """Choose, judge, time; then the figures."""
        choice = self._choose()
        if choice is None:
            say("not finished: nothing is chosen yet; run again with the same --records")
            return []
        kinds = kinds_that_stay(kinds_right(self._records))
        served = choice.by_budget[found.SERVED_BUDGET]
        finished = self._judge(choice, served, kinds) and self._time(served)
        if not finished:
            say("not finished: run again with the same --records")
        return self._figures(choice, served, kinds)

    def _choose(self) -> Choice | None:
        """The configurations to judge; None if time was up before all were tried."""
        items = full_items(CHOOSING, self._choosing, [kind.name for kind in KINDS], self._size.per_kind)
        open_items = [item for item in items if item.question == OPEN][: self._size.choosing_sets]
        if not self._measure_full(items, []):
            return None
        work = self._workload()
        tried = candidates(self._setup.contexts, work)
        if not self._measure_blends(blend_items(open_items, tried)):
            return None
        choice = choose(self._records, tried, work)
        self._setup.details["chosen"] = [one.name for one in choice.configurations]
        return choice

    def _judge(self, choice: Choice, served: Configuration, kinds: Sequence[str]) -> bool:
        per_kind = min(self._size.per_kind, questions_per_kind(len(self._judged), len(kinds)))
        items = full_items(JUDGED, self._judged, kinds, per_kind)
        some = {one.number for one in self._judged[: self._size.uncached_sets]}
        uncached = [item for item in items if item.question != OPEN and item.number in some]
        if not self._measure_full(items, uncached):
            return False
        opened = [item for item in items if item.question == OPEN]
        asked = [item for item in items if item.question != OPEN]
        blends = blend_items(opened, choice.configurations) + blend_items(asked, [REUSE, served])
        return self._measure_blends(list(dict.fromkeys(blends)))

    def _time(self, served: Configuration) -> bool:
        passages = self._context(served.context)
        context = write_context(passages, self._folder, served.context)
        sets = self._judged[: self._size.ttft_sets]
        warm_up = self._choosing[0]
        return measure_ttft(
            Path(self._setup.model), served, context, sets, warm_up, self._records, self._clock
        )

    def _measure_full(self, items: Sequence[Item], uncached: Sequence[Item]) -> bool:
        left = [item for item in items if item.key not in self._records]
        if not left and all(("uncached", *item.key[1:]) in self._records for item in uncached):
            return True
        with self._bench(PLAIN) as bench:
            return bench.measure(left, self._clock) and bench.check_prefix_cache(uncached, self._clock)

    def _measure_blends(self, items: Sequence[Item]) -> bool:
        """Context by context: each has an engine of its own."""
        for context in self._setup.contexts:
            left = [
                item
                for item in items
                if item.configuration is not None
                and item.configuration.context == context
                and item.key not in self._records
            ]
            if not left:
                continue
            if self._clock.is_over:
                return False
            with self._bench(context) as bench:
                if not bench.measure(left, self._clock):
                    return False
        return True

    @contextmanager
    def _bench(self, context: str) -> Iterator[RealBench]:
        ids = context_ids(self._form, self._context(context))
        say(f"starting {self._setup.model}, chunks prepared behind {context} ({len(ids)} tokens)")
        with (
            chunk_store(self._folder / "store") as store,
            real_engine(self._setup.model, store, self._form, ids) as running,
        ):
            yield RealBench(running, self._form, self._sets, self._records, context)

    def _context(self, name: str) -> tuple[str, ...]:
        return {PLAIN: (), SAMPLE: self._corpus.context, BUNDLED: bundled_context()}[name]

    def _workload(self) -> PassWorkload:
        """The mean choosing prompt's."""
        bench = RealBench(None, self._form, self._sets, self._records)  # type: ignore[arg-type]
        cases = [
            Case(Question(one.passages, one.open_question), bench.prompt(Item(CHOOSING, one.number, OPEN)))
            for one in self._choosing
        ]
        return grid.workload_of(cases, _num_layers(self._setup.model))

    def _figures(self, choice: Choice, served: Configuration, kinds: Sequence[str]) -> list[Figure]:
        """Those that the records give."""
        records, bars = self._records, not self._setup.quick
        figures = found.kind_figures(kinds_right(records), kinds)
        if all(found.has_answers(records, one) for one in choice.configurations):
            figures += found.kl_figures(records, choice, bars)
            figures += found.task_figures(records, served, kinds, bars)
            figures.append(found.cache_figure(records))
        speed = found.speed_figure(records, served, bars)
        return figures if speed is None else [*figures, speed]


def _num_layers(model: str) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers)


def _header(setup: RealSetup, *parts: Sequence[PassageSet]) -> Mapping[str, Any]:
    """What records must have in common to be joined."""
    prompts = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return {"model": setup.model, "prompts": prompts, "version": 1}
