"""The three pictures of an evaluation: quality against cost, quality against TTFT, TTFT against rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kintsugi.quality.evaluate import FULL, REUSE, EvaluationRow, RateRow
from kintsugi.quality.figures import figure_and_axes, prepare, save
from kintsugi.quality.metrics import Interval

COLOURS = ("#b8860b", "#1f5f8b", "#7a3b69", "#3b7a57", "#c0563b", "#6b6b6b", "#4b4bb3", "#a0a020")
MARKERS = "osD^vPXh"
STYLES = ("-", "--", ":", "-.")
SPAN_MIN = 0.1
"""Of the quality axis: a smaller one would make noise look like a difference."""


def draw(folder: Path, rows: Sequence[EvaluationRow], rates: Sequence[RateRow]) -> list[Path]:
    """Write every picture that the rows allow; their paths."""
    prepare(folder)
    paths = []
    if any(row.selection is not None for row in rows):
        paths += save(folder / "quality-cost", _quality(rows, against_cost=True))
        paths += save(folder / "quality-ttft", _quality(rows, against_cost=False))
    if rates:
        paths += save(folder / "ttft-rate", _rates(rates))
    return paths


def quality_of(row: EvaluationRow) -> tuple[Interval, str]:
    """What is drawn upwards: F1 or exact match where answers are known, else agreement."""
    if row.f1 is None or row.exact_match is None:
        return Interval(row.top1_agreement, row.top1_agreement, row.top1_agreement), "top-1 agreement"
    if row.exact_match.mean == row.f1.mean:
        return row.exact_match, "exact match"
    return row.f1, "F1"


def _quality(rows: Sequence[EvaluationRow], against_cost: bool) -> Any:
    """One line per family of configurations, in the first setting; baselines as dashed lines and a star."""
    figure, axes = figure_and_axes()
    first = rows[0].setting
    here = [row for row in rows if row.setting == first]
    looks = _Looks()
    for name, family in _families(here).items():
        points = sorted(family, key=lambda row: row.cost if against_cost else row.ttft.mean)
        across = [row.cost if against_cost else row.ttft.mean * 1e3 for row in points]
        up = [quality_of(row)[0] for row in points]
        axes.errorbar(
            across,
            [one.mean for one in up],
            yerr=[[one.mean - one.low for one in up], [one.high - one.mean for one in up]],
            label=name,
            **looks.of(name),
            markersize=4.5,
            linewidth=1.3,
            capsize=2,
            elinewidth=0.7,
        )
    for row in here:
        quality, label = quality_of(row)
        if row.method == FULL:
            axes.axhline(quality.mean, color="#222222", linestyle="--", linewidth=1, label=FULL)
            axes.set_ylabel(label)
            if not against_cost:
                axes.axvline(row.ttft.mean * 1e3, color="#222222", linestyle="--", linewidth=1)
        elif row.method == REUSE:
            across_reuse = row.cost if against_cost else row.ttft.mean * 1e3
            axes.plot([across_reuse], [quality.mean], "*", color="#aa0000", markersize=11, label=REUSE)
    bounds = [bound for row in here for bound in (quality_of(row)[0].low, quality_of(row)[0].high)]
    slack = max(0.0, SPAN_MIN - (max(bounds) - min(bounds))) / 2 + 0.02
    axes.set_ylim(min(bounds) - slack, max(bounds) + slack)
    axes.set_xlabel(
        "cost: share of a full prefill's token-layers" if against_cost else "time to first token, ms"
    )
    axes.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title(f"{rows[0].num_prompts} prompts, {first.codec}, 95 % intervals", fontsize=9)
    return figure


class _Looks:
    """A colour and a marker per selector, a line style per check layer of it."""

    def __init__(self) -> None:
        self._families: dict[str, list[str]] = {}

    def of(self, name: str) -> dict[str, str]:
        selector = name.split(" ", 1)[0]
        families = self._families.setdefault(selector, [])
        if name not in families:
            families.append(name)
        number = list(self._families).index(selector)
        return {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": STYLES[families.index(name) % len(STYLES)],
        }


def _families(rows: Sequence[EvaluationRow]) -> dict[str, list[EvaluationRow]]:
    """Rows of selectors by what they share but the ratio, in order of appearance."""
    families: dict[str, list[EvaluationRow]] = {}
    for row in rows:
        if row.selection is not None and row.method != REUSE:
            one = row.selection
            families.setdefault(f"{one.selector.value} @{one.check_layer}", []).append(row)
    return families


def _look_of(method: str, looks: _Looks) -> dict[str, str]:
    baselines = {
        FULL: {"color": "#222222", "linestyle": "--", "marker": "."},
        REUSE: {"color": "#aa0000", "linestyle": "--", "marker": "*"},
    }
    return baselines.get(method) or looks.of(method)


def _rates(rates: Sequence[RateRow]) -> Any:
    figure, axes = figure_and_axes()
    looks = _Looks()
    for method in dict.fromkeys(row.method for row in rates):
        points = sorted((row for row in rates if row.method == method), key=lambda row: row.rate_per_s)
        axes.errorbar(
            [row.rate_per_s for row in points],
            [row.ttft.mean * 1e3 for row in points],
            yerr=[
                [(row.ttft.mean - row.ttft.low) * 1e3 for row in points],
                [(row.ttft.high - row.ttft.mean) * 1e3 for row in points],
            ],
            label=method,
            **_look_of(method, looks),
            markersize=4.5,
            capsize=2,
        )
    axes.set_xlabel("requests per second (Poisson)")
    axes.set_ylabel("mean time to first token, ms")
    axes.set_yscale("log")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title(f"{rates[0].num_prompts} requests each, 95 % intervals", fontsize=9)
    return figure
