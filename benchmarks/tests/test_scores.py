"""Statistics that benchmarks share."""

from __future__ import annotations

import math

from benchmarks.support.scores import join_scores, ratio_bootstrap
from kintsugi.core.plan import PromptChunk, RagPrompt, Selection
from kintsugi.quality.measure import Case, CaseAnswer, Scores
from kintsugi.quality.metrics import Interval
from kintsugi.quality.questions import Question


def test_a_share_is_resampled_in_pairs() -> None:
    same = ratio_bootstrap([0.0, 1.0, 1.0] * 20, [0.0, 1.0, 1.0] * 20)
    assert same == Interval(1, 1, 1)
    half = ratio_bootstrap([1.0, 0.0] * 50, [1.0, 1.0] * 50)
    assert half.low < half.mean == 0.5 < half.high
    assert math.isnan(ratio_bootstrap([0.0], [0.0]).mean)


def test_two_halves_are_the_whole() -> None:
    case = Case(Question(("a chunk",), "Which?"), RagPrompt((0,), (PromptChunk("", (1, 2)),), (3,)))
    full, blend = (CaseAnswer("w", (token,), ({token: -0.1, 7: -3.0},), 0.5, 0.1) for token in (4, 5))
    cases, fulls, blends = [case] * 3, [full] * 3, [blend, full, blend]
    first, rest = (
        Scores(Selection(0.1), cases[part], fulls[part], blends[part]) for part in (slice(1), slice(1, 3))
    )
    assert join_scores(first, rest) == Scores(Selection(0.1), cases, fulls, blends)
