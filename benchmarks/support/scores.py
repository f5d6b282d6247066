"""Computes statistics of scores for several benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.quality.measure import Scores
from kintsugi.quality.metrics import Interval, bootstrap


def join_scores(one: Scores, other: Scores) -> Scores:
    """Join the scores of one configuration on two sets of cases."""
    assert one.selection == other.selection
    return Scores(
        one.selection,
        [*one.cases, *other.cases],
        [*one.full, *other.full],
        [*one.blend, *other.blend],
    )


def ratio_bootstrap(tops: Sequence[float], bottoms: Sequence[float]) -> Interval:
    """95 % interval of mean(tops) ÷ mean(bottoms), with pairs resampled together; NaN if the bottom is 0."""

    def share(sample: Sequence[tuple[float, float]]) -> float:
        below = sum(bottom for _, bottom in sample)
        return sum(top for top, _ in sample) / below if below else float("nan")

    return bootstrap(list(zip(tops, bottoms, strict=True)), share)
