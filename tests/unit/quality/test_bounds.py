"""Confidence bounds: they hold as often as they say, at every look, and are tight enough to be of use."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from kintsugi.quality.bounds import BelowTest, prompts_needed, upper_bound

ERROR = 0.05
RUNS = 300
LOOK = 20
"""Prompts between two looks."""

Draw = Callable[[random.Random], float]
LOSSES: dict[str, tuple[Draw, float]] = {
    "rare": (lambda picks: float(picks.random() < 0.03), 0.03),
    "half": (lambda picks: float(picks.random() < 0.5), 0.5),
    "paired": (lambda picks: picks.choices((1.0, 0.0, -1.0), (0.06, 0.91, 0.03))[0], 0.03),
    "shares": (lambda picks: picks.choices((0.0, 0.125, 1.0), (0.7, 0.28, 0.02))[0], 0.055),
    "skewed": (lambda picks: min(1.0, picks.expovariate(20.0)), (1 - math.exp(-20.0)) / 20),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_at_the_threshold_seldom_counts_as_below_it_however_often_one_looks(name: str) -> None:
    draw, mean = LOSSES[name]
    wrong = 0
    for seed in range(RUNS):
        picks, test = random.Random(seed), BelowTest(mean)
        for _ in range(600 // LOOK):
            test.add([draw(picks) for _ in range(LOOK)])
            if test.log_wealth >= math.log(1 / ERROR):
                wrong += 1
                break
    assert wrong / RUNS <= ERROR + 0.01


@pytest.mark.parametrize("count", [5, 30, 200])
@pytest.mark.parametrize("name", LOSSES)
def test_an_upper_bound_covers_the_mean_in_small_samples_too(name: str, count: int) -> None:
    draw, mean = LOSSES[name]
    missed = 0
    for seed in range(RUNS // 3):
        picks = random.Random(seed)
        missed += upper_bound([draw(picks) for _ in range(count)], ERROR) < mean
    assert missed / (RUNS // 3) <= ERROR + 0.03


def test_an_ordinary_interval_would_not_hold() -> None:
    """The same coverage by mean and standard error: the test above can fail."""
    missed = 0
    for seed in range(RUNS):
        picks = random.Random(seed)
        losses = [float(picks.random() < 0.03) for _ in range(30)]
        mean = sum(losses) / 30
        missed += mean + 1.645 * math.sqrt(mean * (1 - mean) / 30) < 0.03
    assert missed / RUNS > 0.3


def test_a_bound_is_the_mean_that_a_test_just_rules_out() -> None:
    losses = [0.0] * 180 + [1.0, 0.5, -1.0]
    bound = upper_bound(losses, ERROR)
    for mean, is_ruled_out in ((bound + 1e-6, True), (bound - 1e-6, False)):
        test = BelowTest(mean)
        test.add(losses)
        assert (test.log_wealth >= math.log(1 / ERROR)) is is_ruled_out


def test_bounds_do_not_depend_on_the_order_and_shrink_with_prompts_and_error() -> None:
    losses = [0.0] * 90 + [1.0] * 2 + [0.3] * 8
    assert upper_bound(losses, ERROR) == pytest.approx(upper_bound(losses[::-1], ERROR))
    assert upper_bound(losses * 4, ERROR) < upper_bound(losses, ERROR) < upper_bound(losses, ERROR / 10)
    assert upper_bound([], ERROR) == 1.0


def test_no_loss_at_all_is_enough_after_so_many_prompts() -> None:
    assert prompts_needed(0.03, ERROR) < 1.4 * math.log(1 / ERROR) / 0.03, "close to what any test needs"
    needed = prompts_needed(0.05, ERROR)
    assert upper_bound([0.0] * needed, ERROR) <= 0.05 < upper_bound([0.0] * (needed - 1), ERROR)


def test_how_many_more_prompts_it_takes() -> None:
    test = BelowTest(0.05)
    assert test.prompts_missing(ERROR) is None, "nothing is known"
    test.add([0.0] * 40)
    missing = test.prompts_missing(ERROR)
    assert missing is not None
    test.add([0.0] * missing)
    assert (test.prompts_missing(ERROR) or 0) < 0.2 * missing, "an estimate"
    test.add([0.0] * missing)
    assert test.prompts_missing(ERROR) == 0
    bad = BelowTest(0.05)
    bad.add([0.0, 1.0] * 10)
    assert bad.prompts_missing(ERROR) is None
    assert bad.is_above
    assert not test.is_above
