"""Coverage and power of the drift test, in seeded simulations against a calibrated baseline."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kintsugi.core.baseline import Baseline, Deviation
from kintsugi.core.report import Noise, Thresholds
from kintsugi.core.spaces import ChunkKey
from kintsugi.quality import drift
from kintsugi.quality.drift import (
    AUDITS_WINDOW,
    RECENT,
    Bounds,
    DamageDetector,
    DriftDetector,
    baseline_bounds,
    upper_mean,
    upper_share,
)

QUIET = Noise(0.0, 0.0, 1.0)
BARS = Thresholds()
Draw = Callable[[random.Random], Deviation]


def answer_of(picks: random.Random, differs: float, positions: int = 1, shift: float = 1.0) -> Deviation:
    """Most positions deviate a little, by a log-normal KL, and a share `differs` flips."""
    flips = [picks.random() < differs for _ in range(positions)]
    kl = [1.0 if flip else min(5.0, shift * picks.lognormvariate(-8.0, 2.0)) for flip in flips]
    return Deviation.of(kl, flips)


def baseline_of(seed: int, prompts: int, positions: int = 1, differs: float = 0.01) -> Baseline:
    picks = random.Random(f"baseline {seed}")
    rows = [[answer_of(picks, differs) for _ in range(positions)] for _ in range(prompts)]
    return Baseline.of(
        [[one.kl for one in row] for row in rows], [[one.disagreement > 0 for one in row] for row in rows]
    )


def detector_of(baseline: Baseline) -> DriftDetector:
    return DriftDetector(baseline, BARS, QUIET)


def first_alarm(detector: DriftDetector, draw: Draw, limit: int, seed: int) -> int | None:
    picks = random.Random(seed)
    for number in range(1, limit + 1):
        if detector.observe(draw(picks)):
            return number
    return None


@pytest.mark.parametrize(("prompts", "positions"), [(240, 1), (96, 32)])
def test_clean_requests_raise_no_alarm(prompts: int, positions: int) -> None:
    alarms = [
        first_alarm(
            detector_of(baseline_of(seed, prompts, positions)),
            lambda picks: answer_of(picks, 0.01, positions),
            6000 if positions == 1 else 1000,
            seed,
        )
        for seed in range(3)
    ]
    assert alarms == [None] * 3


def test_whole_answers_show_a_drop_of_agreement_from_99_to_95_percent() -> None:
    """First tokens alone would need a calibration of a thousand prompts for it."""
    for seed in range(10):
        detector = detector_of(baseline_of(seed, 96, 32))
        found = first_alarm(detector, lambda picks: answer_of(picks, 0.05, 32), 600, seed)
        assert found is not None, f"seed {seed}"


def test_what_was_served_well_for_long_shows_a_drop_in_first_tokens_too() -> None:
    caught = 0
    for seed in range(20):
        detector = detector_of(baseline_of(seed, 240))
        assert first_alarm(detector, lambda picks: answer_of(picks, 0.01), 3000, seed) is None, f"seed {seed}"
        caught += first_alarm(detector, lambda picks: answer_of(picks, 0.05), 600, seed + 100) is not None
    assert caught >= 15


def test_damage_that_changes_no_answer_yet_is_seen() -> None:
    """Every KL is ten times what it was."""
    for seed in range(10):
        detector = detector_of(baseline_of(seed, 96))
        found = first_alarm(detector, lambda picks: answer_of(picks, 0.01, 1, 10.0), 200, seed)
        assert found is not None, f"seed {seed}"


def test_the_first_token_is_compared_with_first_tokens() -> None:
    """Later positions of the calibration deviate a lot; a first token that does so is damage."""
    baseline = Baseline.of([[0.0001, 2.0, 2.0]] * 96, [[False, True, True]] * 96)
    assert baseline_bounds(baseline, 1, BARS, QUIET).tails[0].level < 0.01
    assert baseline_bounds(baseline, 3, BARS, QUIET).tails[0].level > 1.0
    assert first_alarm(detector_of(baseline), lambda picks: Deviation(0.5, 0.0), 30, 0) is not None


def test_a_larger_calibration_bounds_more_tightly() -> None:
    few, many = (baseline_bounds(baseline_of(0, count), 1, BARS, QUIET) for count in (96, 1000))
    assert many.disagreement < few.disagreement <= 0.05
    assert many.kl < few.kl


def test_requests_that_were_served_well_only_tighten_the_bounds() -> None:
    baseline = baseline_of(0, 96)
    plain = baseline_bounds(baseline, 1, BARS, QUIET)
    good = baseline_bounds(baseline, 1, BARS, QUIET, [Deviation(0.0, 0.0)] * 2000)
    bad = baseline_bounds(baseline, 1, BARS, QUIET, [Deviation(3.0, 1.0)] * 2000)
    other = baseline_bounds(baseline, 1, BARS, QUIET, [Deviation(0.0, 0.0, 5)] * 2000)
    assert good.disagreement < plain.disagreement
    assert good.kl < plain.kl
    assert bad == other == plain


def test_a_drift_is_not_part_of_its_own_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is from before it, as long as a drift may take to be detected."""
    seen: list[int] = []

    def record_bounds(*calibrated: Any) -> Bounds:
        seen.append(len(calibrated[-1]))
        return baseline_bounds(*calibrated)

    monkeypatch.setattr(drift, "baseline_bounds", record_bounds)
    detector = detector_of(baseline_of(0, 96))
    for _ in range(RECENT + 400):
        detector.observe(Deviation(0.0, 0.0))
    assert max(seen) == 400
    assert seen[:3] == [0, 0, 0]


def test_noise_between_kernels_is_not_unusual() -> None:
    baseline = Baseline.of([[0.0]] * 500, [[False]] * 500)
    assert first_alarm(detector_of(baseline), lambda picks: Deviation(0.0003, 0.0), 2000, 0) is None
    loud = DriftDetector(baseline, BARS, Noise(0.02, 0.5, 0.95))
    assert first_alarm(loud, lambda picks: Deviation(picks.random() * 0.04, 0.0), 2000, 0) is None


def test_limits_by_hand() -> None:
    assert upper_share(0, 100) == pytest.approx(1 - 0.15 ** (1 / 100), abs=1e-6)
    assert upper_share(5, 5) == 1.0
    assert upper_share(50, 100) == pytest.approx(0.557, abs=0.005)
    assert upper_mean([0.0] * 99, 1.0) == pytest.approx(0.01 + 1.036 * 0.0995 / 10, abs=1e-4)
    picks = random.Random(1)
    covered = sum(
        upper_mean([float(picks.random() < 0.02) for _ in range(300)], 1.0) >= 0.02 for _ in range(400)
    )
    assert covered / 400 > 0.8


KEYS = [ChunkKey(bytes([number] * 32)) for number in range(3)]


def test_one_damaged_chunk_is_no_reason_to_stop() -> None:
    detector = DamageDetector()
    assert [detector.observe(KEYS[0], "zero") for _ in range(5)] == [None] * 5, "the same one"
    assert not any(detector.observe(KEYS[1], None) for _ in range(AUDITS_WINDOW))


def test_two_damaged_chunks_are_one_within_the_window() -> None:
    detector = DamageDetector()
    detector.observe(KEYS[0], "zero")
    assert not any(detector.observe(KEYS[1], None) for _ in range(AUDITS_WINDOW - 2))
    reason = detector.observe(KEYS[2], "half")
    assert reason is not None
    assert f"2 of the latest {AUDITS_WINDOW} audited chunks" in reason
    assert f"{KEYS[0]}: zero; {KEYS[2]}: half" in reason
    assert detector.observe(KEYS[1], None) is None, "the first has left the window"


def test_a_store_that_did_not_take_the_trip_is_told_again() -> None:
    detector = DamageDetector()
    reasons = [detector.observe(KEYS[number % 2], "zero") for number in range(2)]
    assert [reason is not None for reason in reasons] == [False, True]
    assert detector.observe(KEYS[2], None) is not None
