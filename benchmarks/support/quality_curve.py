"""Measures exact match of every selector at a given cost, chosen on some questions and judged on others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support import grid
from benchmarks.support import testbed_questions as testbed
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.scores import join_scores, ratio_bootstrap
from kintsugi.core.plan import Selection
from kintsugi.core.report import describe_selection
from kintsugi.core.request import SelectorName
from kintsugi.engine.local import LocalEngine
from kintsugi.fusor.control.cost import PassWorkload, configuration_cost
from kintsugi.quality import metrics
from kintsugi.quality.measure import Bench, Case, Scores, measure_selection
from kintsugi.quality.metrics import Interval
from kintsugi.quality.session import MeasuringEngineSpec, start_measuring_engine

BUDGETS = (0.25, 0.45)
SAFETY = 0.985
"""Share of a budget to aim for: prompts differ, and the mean cost must not exceed the budget."""
PROBED, CORRECTIONS = 12, 4
CORRECTION_MIN = 0.002
"""Smallest correction of a cost: a smaller one may not change a ratio of three digits."""
BATCH = 64
HKVD = (SelectorName.HKVD, SelectorName.HKVD_GRADUAL)


@dataclass
class Setup:
    """The inputs of every section."""

    model: Path
    quick: bool
    details: dict[str, Any] = field(default_factory=dict)
    """Curves and tables, for the report's configuration."""
    prompts_asked: int | None = None

    @property
    def prompts(self) -> int:
        """Judged prompts per task."""
        return self.prompts_asked or (12 if self.quick else 300)

    @property
    def chosen_on(self) -> int:
        """Prompts per task that configurations are chosen on."""
        return 6 if self.quick else 50


@contextmanager
def trained(
    setup: Setup, codec: str = "raw", url: str | None = None, **vllm_args: Any
) -> Iterator[LocalEngine]:
    say(f"starting the trained model, {codec}")
    with start_measuring_engine(
        MeasuringEngineSpec(str(setup.model), codec, url, vllm_args=vllm_args)
    ) as running:
        yield running


def bench_of(running: LocalEngine, cases: Sequence[Case]) -> Bench:
    """A prompt whose chunks are stored."""
    bench = Bench(running, cases, max_tokens=1, batch=BATCH)
    bench.store_chunks()
    return bench


def exact(scores: Scores, of_blend: bool = True) -> list[float]:
    return scores.score_cases(metrics.exact_match, of_blend)


def exact_mean(scores: Scores, of_blend: bool = True) -> float:
    """Share of right answers."""
    return metrics.mean(exact(scores, of_blend))


def share(scores: Scores) -> Interval:
    """Exact match ÷ full prefill's, over the same prompts."""
    return ratio_bootstrap(exact(scores), exact(scores, of_blend=False))


def fit_name(bench: Bench, family: Selection, work: PassWorkload, budget: float) -> Selection | None:
    """As `at_budget`, corrected by what a few prompts really cost: predictions take a typical projection."""
    allowed = budget
    some = range(min(PROBED, len(bench.cases)))
    for _ in range(CORRECTIONS):
        selection = at_budget(family, work, allowed)
        if selection is None:
            return None
        cost = measure_selection(bench, selection, some).cost
        if cost <= budget * SAFETY:
            return selection
        allowed -= max(cost - budget * SAFETY, CORRECTION_MIN)
    return None


def at_budget(family: Selection, work: PassWorkload, budget: float) -> Selection | None:
    """Find by bisection the largest ratio whose predicted cost fits; None if even a small one does not
    fit."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if configuration_cost(_with_ratio(family, middle), work) <= budget:
            low = middle
        else:
            high = middle
    return _with_ratio(family, round(low, 3)) if low > 0.01 else None


def _with_ratio(family: Selection, ratio: float) -> Selection:
    return Selection(ratio, family.selector, family.check_layer, family.query_layers)


def families(num_layers: int, quick: bool) -> list[Selection]:
    """Every selector at every check layer of the first two thirds; `query` at pairs of middle layers too."""
    if quick:
        return [
            Selection(0.5, SelectorName.HKVD),
            Selection(0.5, SelectorName.QUERY),
            Selection(0.5, SelectorName.HYBRID, 3),
        ]
    deep = range(1, max(2, 2 * num_layers // 3))
    names = [name for name in SelectorName if name is not SelectorName.RANDOM]
    found = grid.selections(names, [0.5], num_layers, deep)
    middle = num_layers // 2
    pairs = [(middle - 2, middle - 1), (middle, middle + 1), (middle - 1,), (middle,)]
    return found + [Selection(0.5, SelectorName.QUERY, 1, pair) for pair in pairs if pair[0] >= 0]


def choose(setup: Setup, bench: Bench, num_layers: int, budget: float) -> tuple[Selection, Selection]:
    """(best of all, best `hkvd` variant) at the budget; on the choosing questions."""
    fitting = measure_curve(setup, bench, num_layers, budget)
    fitting.sort(key=lambda one: (-exact_mean(one), one.kl_mean))
    of_hkvd = [one.selection for one in fitting if one.selection.selector in HKVD]
    return fitting[0].selection, of_hkvd[0]


def measure_curve(setup: Setup, bench: Bench, num_layers: int, budget: float) -> list[Scores]:
    """Every configuration of `families` within the budget, each at the largest ratio that fits."""
    work = grid.workload_of(bench.cases, num_layers)
    curve = []
    for family in families(num_layers, setup.quick):
        selection = fit_name(bench, family, work, budget)
        if selection is None:
            continue
        scores = measure_selection(bench, selection, range(len(bench.cases)))
        right = exact_mean(scores)
        say(f"cost ≤ {budget}: {describe_selection(selection)}: EM {right:.3f} at {scores.cost:.3f}")
        curve.append(scores)
        setup.details.setdefault("chosen_on", []).append(
            [describe_selection(selection), scores.cost, right, scores.kl_mean]
        )
    return [scores for scores in curve if scores.cost <= budget]


def measure(setup: Setup) -> list[Figure]:
    with trained(setup) as running:
        chosen_on = testbed.questions(testbed.TASKS, testbed.CHOSEN_FROM, setup.chosen_on)
        choosing = bench_of(running, testbed.cases(running, chosen_on))
        picks = {budget: choose(setup, choosing, running.num_layers, budget) for budget in BUDGETS}
        wanted = {Selection(0.0), *(one for pair in picks.values() for one in pair)}
        scores = judged(setup, running, sorted(wanted, key=describe_selection), testbed.TASKS)
        control = judged(setup, running, [Selection(0.0)], (testbed.CONTROL,))[Selection(0.0)]
        mismatches = count_mismatches(setup, running)
    figures = _full_and_reuse(scores[Selection(0.0)], control)
    bars = {0.25: ("em_share_cost25", 0.95), 0.45: ("em_share_cost45", 0.98)}
    for budget, (best, _) in picks.items():
        name, bar = bars[budget]
        interval = share(scores[best])
        cost = f"cost {scores[best].cost:.3f}"
        detail = f"{describe_selection(best)}, {cost}, {interval}, n={len(scores[best].cases)}"
        figures.append(Figure.at_least(name, interval.mean, bar, unit="", detail=detail))
    figures.append(_over_hkvd(scores, *picks[0.25]))
    figures.append(mismatches)
    return figures


def judged(
    setup: Setup, running: LocalEngine, selections: Sequence[Selection], tasks: Sequence[str]
) -> dict[Selection, Scores]:
    """Fresh prompts, task by task: one task's chunks fit in memory."""
    found: dict[Selection, Scores] = {}
    for task in tasks:
        asked = testbed.questions([task], testbed.JUDGED_FROM, setup.prompts)
        bench = bench_of(running, testbed.cases(running, asked))
        for selection in selections:
            scores = measure_selection(bench, selection, range(len(bench.cases)))
            found[selection] = join_scores(found[selection], scores) if selection in found else scores
            row = [task, describe_selection(selection), *summary_of(scores)]
            setup.details.setdefault("judged_by_task", []).append(row)
        say(f"judged {task}: " + ", ".join(f"{exact_mean(s):.3f}" for s in found.values()))
    return found


def summary_of(scores: Scores) -> list[float]:
    """Cost, exact match of the blend and of full prefill, and mean KL: a row of a table in the result."""
    return [scores.cost, exact_mean(scores), exact_mean(scores, of_blend=False), scores.kl_mean]


def _full_and_reuse(reuse: Scores, control: Scores) -> list[Figure]:
    full = metrics.bootstrap(exact(reuse, of_blend=False))
    losses = [
        100 * (before - after)
        for before, after in zip(exact(reuse, of_blend=False), exact(reuse), strict=True)
    ]
    gap = metrics.bootstrap(losses)
    tasks = sorted({case.question.task for case in reuse.cases})
    by_task = {
        task: f"{exact_mean(part, of_blend=False):.3f}/{exact_mean(part):.3f}"
        for task, part in ((task, reuse.of_task(task)) for task in tasks)
    }
    alone = f"{exact_mean(control, of_blend=False):.3f}/{exact_mean(control):.3f}"
    detail = f"full/reuse by task {by_task}, control {alone}"
    return [
        Figure.at_least("full_em", full.mean, 0.95, unit="", detail=f"{full}; {detail}"),
        Figure.at_least(
            "reuse_gap_points", gap.mean, 25, unit="points", detail=f"{gap}, n={len(reuse.cases)}"
        ),
    ]


def _over_hkvd(scores: dict[Selection, Scores], best: Selection, hkvd: Selection) -> Figure:
    gains = [100 * (a - b) for a, b in zip(exact(scores[best]), exact(scores[hkvd]), strict=True)]
    interval = metrics.bootstrap(gains)
    pair = f"{describe_selection(best)} over {describe_selection(hkvd)}"
    detail = f"{pair} (cost {scores[hkvd].cost:.3f}), {interval}"
    return Figure.at_least("em_over_hkvd_cost25", interval.mean, 0.0, unit="points", detail=detail)


def count_mismatches(setup: Setup, running: LocalEngine) -> Figure:
    """Answers of r = 1 that differ from full prefill's."""
    asked = testbed.questions(testbed.TASKS, testbed.JUDGED_FROM, max(1, setup.prompts // len(testbed.TASKS)))
    bench = bench_of(running, testbed.cases(running, asked))
    scores = measure_selection(bench, Selection(1.0), range(len(bench.cases)))
    different = sum(a.token_ids != b.token_ids for a, b in zip(scores.full, scores.blend, strict=True))
    worst = max(value for one in scores.by_prompt for value in one.divergences)
    detail = f"{len(bench.cases)} prompts, worst KL {worst:.2g}"
    return Figure.at_most("r1_mismatches", different, 0, unit="", detail=detail)
