"""The picture of a load: time to first token against request rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kintsugi.bench.report import Summary
from kintsugi.quality.figures import create_figure, prepare_folder, save_figure

COLOURS = ("#b8860b", "#222222", "#1f5f8b", "#7a3b69", "#3b7a57", "#c0563b")
MARKERS = "os^Dv*"


def draw(path: Path, series: Mapping[str, Sequence[Summary]], slo_s: float | None = None) -> list[Path]:
    """Write the picture as `figures.save_figure` does; where. ``series`` are loads by endpoint.

    Medians as lines, up to the 95th percentile shaded. Raises `Unavailable` without matplotlib.
    """
    prepare_folder(path.parent)
    figure, axes = create_figure()
    for number, (name, summaries) in enumerate(series.items()):
        points = sorted((one for one in summaries if one.ttft_s), key=lambda one: one.rate_per_s)
        rates = [one.rate_per_s for one in points]
        medians = [one.ttft_s["p50"] * 1e3 for one in points]
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(
            rates, medians, color=colour, marker=MARKERS[number % len(MARKERS)], markersize=4.5, label=name
        )
        axes.fill_between(
            rates, medians, [one.ttft_s["p95"] * 1e3 for one in points], color=colour, alpha=0.15, linewidth=0
        )
    if slo_s is not None:
        axes.axhline(slo_s * 1e3, color="#aa0000", linestyle="--", linewidth=1, label="SLO")
    axes.set_xlabel("requests per second")
    axes.set_ylabel("time to first token, ms (median to 95th percentile)")
    axes.set_yscale("log")
    axes.legend(fontsize=8, frameon=False)
    return save_figure(path, figure)
