"""How large an effect is shown to be, with its interval and what calibration saw."""

from __future__ import annotations

import random

import pytest

from kintsugi.core.baseline import Baseline, Deviation
from kintsugi.quality.effect import Effect
from kintsugi.quality.metrics import mean_interval, share_interval


def test_the_effect_stands_beside_calibrations_over_as_many_positions() -> None:
    baseline = Baseline.of([[0.0, 1.0]] * 4, [[False, True]] * 4)
    effect = Effect.of([Deviation(0.1, 0.0, 1)] * 50 + [Deviation(0.3, 0.5, 2)] * 50, baseline)
    assert effect.agreement["mean"] == pytest.approx(0.75)
    assert effect.agreement["low"] < 0.75 < effect.agreement["high"]
    assert effect.kl["mean"] == pytest.approx(0.2)
    assert effect.agreement["calibrated"] == pytest.approx((1.0 + 0.5) / 2)
    assert effect.kl["calibrated"] == pytest.approx((0.0 + 0.5) / 2)
    assert effect.requests == 100


def test_without_a_baseline_nothing_stands_beside_it() -> None:
    effect = Effect.of([Deviation(0.1, 0.0)], None)
    assert "calibrated" not in {**effect.agreement, **effect.kl}


def test_intervals_cover_the_truth() -> None:
    covered = {"share": 0, "mean": 0}
    for seed in range(300):
        picks = random.Random(seed)
        shares = share_interval([float(picks.random() < 0.03) for _ in range(200)])
        means = mean_interval([picks.expovariate(10) for _ in range(200)])
        covered["share"] += shares.low <= 0.03 <= shares.high
        covered["mean"] += means.low <= 0.1 <= means.high
    assert min(covered.values()) / 300 > 0.9


def test_agreement_in_all_of_few_requests_is_not_certain() -> None:
    assert share_interval([0.0] * 20).high > 0.1
