"""The real model's figures, from the records. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.support.figures import Figure, spread
from benchmarks.support.real.calibration import CALIBRATED, calibrated
from benchmarks.support.real.records import Records
from benchmarks.support.real.rows import JUDGED, OPEN, REUSE, Choice, Configuration, KindRight, open_answers
from benchmarks.support.real.speed import BLEND, FULL
from benchmarks.support.scores import ratio_bootstrap
from kintsugi.quality.metrics import Interval

KL_BARS = {0.2: ("real_kl_share_cost20", 0.25), 0.1: ("real_kl_share_cost10", 0.42)}
NOTHING_BAR = ("real_kl_share_r0", 0.55)
TASK_BAR, TASK_LOW_BAR = 0.97, 0.93
LOSS_BAR, STRATUM_LOSS_BAR = 3.0, 6.0
"""Points."""
SPEED_BAR = 3.5
MINUTES_BAR = 15.0
SERVED_BUDGET = 0.2
"""The budget whose configuration answers the questions and is served."""

Rows = Mapping[int, Mapping[str, float]]
_Right = dict[int, dict[int, bool]]
"""Whether an answer is right, by set and question."""


def kl_share(records: Records, one: Configuration) -> tuple[Interval, str]:
    """KL to full prefill ÷ that of full reuse on the same judged prompts, and a detail with the cost."""
    mine, reuse = open_answers(records, JUDGED, one), open_answers(records, JUDGED, REUSE)
    common = sorted(set(mine) & set(reuse))
    interval = ratio_bootstrap(
        [mine[number]["kl"] for number in common], [reuse[number]["kl"] for number in common]
    )
    detail = f"{one.name}, cost {_mean(mine, common, 'cost'):.3f}, {interval}, n={len(common)}; "
    return interval, detail + f"{describe(mine, common)}; full reuse {describe(reuse, common)}"


def describe(rows: Rows, numbers: Sequence[int]) -> str:
    """Mean KL per position and top-1 agreement over all positions."""
    positions = sum(rows[number]["positions"] for number in numbers)
    kl = sum(rows[number]["kl"] for number in numbers) / positions
    top = sum(rows[number]["same_top"] for number in numbers) / positions
    return f"KL {kl:.4f}, top-1 {top:.3f} over {positions:.0f} positions"


def _mean(rows: Rows, numbers: Sequence[int], field: str) -> float:
    return statistics.mean(rows[number][field] for number in numbers)


def kl_figures(records: Records, choice: Choice, bars: bool) -> list[Figure]:
    figures = []
    for budget, (name, bar) in KL_BARS.items():
        interval, detail = kl_share(records, choice.by_budget[budget])
        figures.append(Figure.at_most(name, interval.mean, bar if bars else None, "", detail))
        if budget in choice.baselines:
            interval, detail = kl_share(records, choice.baselines[budget])
            figures.append(Figure(f"{name}_hkvd", interval.mean, "", detail=detail))
    interval, detail = kl_share(records, choice.nothing)
    name, bar = NOTHING_BAR
    return [*figures, Figure.at_most(name, interval.mean, bar if bars else None, "", detail)]


def task_figures(
    records: Records, blend: Configuration, kinds: Sequence[str], suffix: str, bars: bool
) -> list[Figure]:
    """Right answers of the blend ÷ those of full prefill; whole prompts are resampled. Empty if no prompt has
    all its questions answered."""
    full, mine = _right_of_both(records, blend, kinds)
    numbers = _answered(full, mine)
    if not numbers:
        return []
    share = ratio_bootstrap(_sums(mine, numbers), _sums(full, numbers))
    count = sum(len(full[number]) for number in numbers)
    cost = statistics.mean(values["cost"] for values in _of(records, blend).values())
    detail = f"{blend.name}, cost {cost:.3f}, {share}, {count} questions on {len(numbers)} prompts; "
    detail += f"full/blend by kind {_by_kind(records, blend, kinds)}"
    holds = share.mean >= TASK_BAR and share.low >= TASK_LOW_BAR
    bar = f"≥ {TASK_BAR}, lower bound ≥ {TASK_LOW_BAR}"
    name = f"real_task_share{suffix}"
    return [Figure(name, share.mean, "", bar if bars else None, holds if bars else None, detail)]


def loss_figures(
    records: Records,
    blend: Configuration,
    kinds: Sequence[str],
    prompt_tokens: Mapping[int, int],
    suffix: str,
    bars: bool,
) -> list[Figure]:
    """Upper bounds of the points that a blend loses on fresh questions: over all, and in the worse half of
    the prompts by length. Empty as `task_figures`."""
    full, mine = _right_of_both(records, blend, kinds)
    numbers = sorted(_answered(full, mine), key=lambda number: prompt_tokens[number])
    if len(numbers) < 2:
        return []
    middle = len(numbers) // 2
    pooled = _lost_points(full, mine, numbers)
    halves = {
        half: _lost_points(full, mine, half) for half in (tuple(numbers[:middle]), tuple(numbers[middle:]))
    }
    worst = max(halves, key=lambda half: halves[half].high)
    lengths = [prompt_tokens[number] for number in worst]
    where = f"prompts of {lengths[0]}-{lengths[-1]} tokens"
    name = f"calibrated_loss_fresh_real{suffix}"
    pooled_bar, stratum_bar = (LOSS_BAR, STRATUM_LOSS_BAR) if bars else (None, None)
    return [
        Figure.at_most(name, pooled.high, pooled_bar, "points", f"{pooled}, {blend.name}"),
        Figure.at_most(
            f"{name}_worst_length", halves[worst].high, stratum_bar, "points", f"{halves[worst]}, {where}"
        ),
    ]


def gap_figures(records: Records, kinds: Sequence[str]) -> list[Figure]:
    """The points that full KV reuse loses."""
    full, reuse = _right_of_both(records, REUSE, kinds)
    numbers = _answered(full, reuse)
    if not numbers:
        return []
    gap = _lost_points(full, reuse, numbers)
    count = sum(len(full[number]) for number in numbers)
    detail = f"{gap}, {count} questions; full/reuse by kind {_by_kind(records, REUSE, kinds)}"
    return [Figure("real_reuse_gap", gap.mean, "points", detail=detail)]


def _right_of_both(records: Records, one: Configuration, kinds: Sequence[str]) -> tuple[_Right, _Right]:
    """Right answers of full prefill and of the configuration on the judged prompts."""
    return _right(records.below("full", JUDGED), kinds), _right(_of(records, one), kinds)


def _answered(full: _Right, other: _Right) -> list[int]:
    """The sets whose questions both answered."""
    return sorted(number for number in full if _asked(full, number) == _asked(other, number))


def _lost_points(full: _Right, other: _Right, numbers: Sequence[int]) -> Interval:
    """How many fewer of a hundred questions are answered rightly; whole sets are resampled."""
    lost = [100 * (f - o) for f, o in zip(_sums(full, numbers), _sums(other, numbers), strict=True)]
    return ratio_bootstrap(lost, [float(len(full[number])) for number in numbers])


def _of(records: Records, one: Configuration) -> dict[Any, dict[str, Any]]:
    """A configuration's answers to questions with known wording, by set and question."""
    return {
        (number, question): values
        for (number, question, name), values in records.below("blend", JUDGED).items()
        if question != OPEN and name == one.name
    }


def _right(answers: Mapping[Any, Mapping[str, Any]], kinds: Sequence[str]) -> _Right:
    found: _Right = defaultdict(dict)
    for (number, question), values in answers.items():
        if question != OPEN and values["kind"] in kinds:
            found[number][question] = bool(values["right"])
    return found


def _asked(right: _Right, number: int) -> set[int]:
    return set(right.get(number, ()))


def _sums(right: _Right, numbers: Sequence[int]) -> list[float]:
    return [float(sum(right[number].values())) for number in numbers]


def _by_kind(records: Records, one: Configuration, kinds: Sequence[str]) -> str:
    """Right answers of full prefill and of a configuration to the questions that both answered."""
    parts = []
    for kind in kinds:
        full, mine = records.below("full", JUDGED), _of(records, one)
        both = [key for key, values in mine.items() if values["kind"] == kind and key in full]
        counts = (sum(bool(answers[key]["right"]) for key in both) for answers in (full, mine))
        parts.append(f"{kind} {'/'.join(map(str, counts))} of {len(both)}")
    return ", ".join(parts)


def kind_figures(right: Mapping[str, KindRight], kept: Sequence[str]) -> list[Figure]:
    """How well full prefill answers each kind on the choosing prompts."""
    return [
        Figure(
            f"real_full_right_{kind}",
            one.share,
            "",
            detail=f"{one.right} of {one.asked}, {'stays' if kind in kept else 'is left out'}",
        )
        for kind, one in right.items()
    ]


def speed_figures(records: Records, one: Configuration, suffix: str, bars: bool) -> list[Figure]:
    """Full prefill's median time to first token ÷ the blend's; empty if nothing was measured."""
    found = list(records.below("ttft", one.name).values())
    if not found:
        return []
    full, blend = [values[FULL] for values in found], [values[BLEND] for values in found]
    cost = statistics.mean(values["cost"] for values in found)
    speedup = statistics.median(full) / statistics.median(blend)
    detail = f"{spread(full)} ÷ {spread(blend)}, {len(found)} prompts, {one.name}, cost {cost:.3f}"
    detail += ", one compute thread"
    name = f"real_ttft_speedup{suffix}"
    return [Figure.at_least(name, speedup, SPEED_BAR if bars else None, detail=detail)]


def calibration_figures(records: Records, bars: bool) -> list[Figure]:
    """How long calibration took, and what passed."""
    if CALIBRATED not in records:
        return []
    found, allowed = records[CALIBRATED], calibrated(records)
    decision = "nothing passes" if allowed is None else f"{allowed.name} passes"
    detail = "; ".join([decision, *map(_describe_cell, found["cells"])])
    bar = MINUTES_BAR if bars else None
    return [Figure.at_most("calibrate_minutes_real", found["minutes"], bar, "min", detail)]


def _describe_cell(cell: Mapping[str, Any]) -> str:
    rows = [f"{row['configuration']} loses {row['loss']} in {row['pairs']}" for row in cell["configurations"]]
    return f"{cell['prompts']}: {', '.join(rows)}"


def cache_figure(records: Records) -> Figure:
    """Greedy answers of full prefill that are right or wrong only without the prefix cache."""
    found = list(records.below("uncached").values())
    changed = sum(not values["same_right"] for values in found)
    other = sum(not values["same"] for values in found)
    detail = f"of {len(found)} answers; {other} differ in some token"
    return Figure("real_prefix_cache_changes", changed, "", detail=detail)
