"""The three plots of an evaluation: quality against cost, quality against TTFT, TTFT against rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kintsugi.quality.evaluate import FULL, REUSE, EvaluationRow, RateRow
from kintsugi.quality.figures import create_figure, prepare_folder, save_figure
from kintsugi.quality.metrics import Interval

COLOURS = ("#b8860b", "#1f5f8b", "#7a3b69", "#3b7a57", "#c0563b", "#6b6b6b", "#4b4bb3", "#a0a020")
MARKERS = "osD^vPXh"
STYLES = ("-", "--", ":", "-.")
BASELINE_STYLES = {
    FULL: {"color": "#222222", "linestyle": "--", "marker": "."},
    REUSE: {"color": "#aa0000", "linestyle": "--", "marker": "*"},
}
SPAN_MIN = 0.1
"""Smallest range of the quality axis: on a smaller one, noise would look like a difference."""


def draw(folder: Path, rows: Sequence[EvaluationRow], rates: Sequence[RateRow]) -> list[Path]:
    """Write every plot that the rows have data for. Returns the paths."""
    prepare_folder(folder)
    paths = []
    if any(row.selection is not None for row in rows):
        paths += save_figure(folder / "quality-cost", _plot_quality(rows, against_cost=True))
        paths += save_figure(folder / "quality-ttft", _plot_quality(rows, against_cost=False))
    if rates:
        paths += save_figure(folder / "ttft-rate", _plot_rates(rates))
    return paths


def quality_of(row: EvaluationRow) -> tuple[Interval, str]:
    """The value on the quality axis and its label: F1 or exact match if answers are known, else agreement."""
    if row.f1 is None or row.exact_match is None:
        return Interval(row.top1_agreement, row.top1_agreement, row.top1_agreement), "top-1 agreement"
    if row.exact_match.mean == row.f1.mean:
        return row.exact_match, "exact match"
    return row.f1, "F1"


def _plot_quality(rows: Sequence[EvaluationRow], against_cost: bool) -> Any:
    """Draw one line per family of configurations in the first setting; baselines are dashed lines and a
    star."""
    figure, axes = create_figure()
    first = rows[0].setting
    here = [row for row in rows if row.setting == first]

    def across(row: EvaluationRow) -> float:
        return row.cost if against_cost else row.ttft.mean * 1e3

    families = _group_by_family(here)
    styles = _choose_styles(families)
    for name, family in families.items():
        points = sorted(family, key=across)
        up = [quality_of(row)[0] for row in points]
        _draw_line(axes, name, list(map(across, points)), up, **styles[name], linewidth=1.3, elinewidth=0.7)
    for row in here:
        quality, label = quality_of(row)
        if row.method == FULL:
            axes.axhline(quality.mean, color="#222222", linestyle="--", linewidth=1, label=FULL)
            axes.set_ylabel(label)
            if not against_cost:
                axes.axvline(across(row), color="#222222", linestyle="--", linewidth=1)
        elif row.method == REUSE:
            axes.plot([across(row)], [quality.mean], "*", color="#aa0000", markersize=11, label=REUSE)
    bounds = [bound for row in here for bound in (quality_of(row)[0].low, quality_of(row)[0].high)]
    slack = max(0.0, SPAN_MIN - (max(bounds) - min(bounds))) / 2 + 0.02
    axes.set_ylim(min(bounds) - slack, max(bounds) + slack)
    axes.set_xlabel(
        "cost: share of a full prefill's token-layers" if against_cost else "time to first token, ms"
    )
    axes.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title(f"{rows[0].num_prompts} prompts, {first.codec}, 95 % intervals", fontsize=9)
    return figure


def _draw_line(axes: Any, name: str, across: list[float], up: list[Interval], **options: Any) -> None:
    """Draw a line through the means, with error bars."""
    errors = [[one.mean - one.low for one in up], [one.high - one.mean for one in up]]
    means = [one.mean for one in up]
    axes.errorbar(across, means, yerr=errors, label=name, markersize=4.5, capsize=2, **options)


def _choose_styles(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Matplotlib's arguments for each distinct baseline or family, `selector @check_layer`: one colour and
    marker per selector, one line style per check layer of a selector."""
    styles, families = {}, dict[str, list[str]]()
    for name in dict.fromkeys(names):
        if name in BASELINE_STYLES:
            styles[name] = BASELINE_STYLES[name]
            continue
        selector = name.split(" ", 1)[0]
        families.setdefault(selector, []).append(name)
        number = list(families).index(selector)
        styles[name] = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": STYLES[(len(families[selector]) - 1) % len(STYLES)],
        }
    return styles


def _group_by_family(rows: Sequence[EvaluationRow]) -> dict[str, list[EvaluationRow]]:
    """Group the rows of selectors that differ only in their ratio, in order of appearance."""
    families: dict[str, list[EvaluationRow]] = {}
    for row in rows:
        if row.selection is not None and row.method != REUSE:
            one = row.selection
            families.setdefault(f"{one.selector.value} @{one.check_layer}", []).append(row)
    return families


def _plot_rates(rates: Sequence[RateRow]) -> Any:
    figure, axes = create_figure()
    styles = _choose_styles(row.method for row in rates)
    for method, style in styles.items():
        points = sorted((row for row in rates if row.method == method), key=lambda row: row.rate_per_s)
        up = [Interval(one.mean * 1e3, one.low * 1e3, one.high * 1e3) for one in (row.ttft for row in points)]
        _draw_line(axes, method, [row.rate_per_s for row in points], up, **style)
    axes.set_xlabel("requests per second (Poisson)")
    axes.set_ylabel("mean time to first token, ms")
    axes.set_yscale("log")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title(f"{rates[0].num_prompts} requests each, 95 % intervals", fontsize=9)
    return figure
