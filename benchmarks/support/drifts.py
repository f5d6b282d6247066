"""False alarms of shadowing and the smallest drift it has to see, simulated on recorded clean requests.

The calibrated default is compared with full prefill on fresh questions, and each request's deviation is
recorded. The detector then draws from the records: 20,000 clean requests, and requests after a drop of
agreement from 99 % to 95 %. The baseline is the calibration report's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from benchmarks.support import testbed_questions as testbed
from benchmarks.support.calibrated import default_of
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.quality_curve import Setup, bench_of, trained
from kintsugi.core.baseline import Deviation
from kintsugi.core.report import CalibrationReport
from kintsugi.quality import metrics, reports
from kintsugi.quality.drift import DriftDetector
from kintsugi.quality.measure import Scores, make_baseline, measure_selection

RECORDED_FROM = 400_000
RECORDED, RECORDED_QUICK = 1800, 120
SLICE = 300
"""Questions whose chunks are stored together."""
CLEAN = 20_000
SERVED_WELL = 3000
"""Clean requests before the drop."""
CAUGHT_MAX = 600
SEEDS = 20


def measure(setup: Setup) -> list[Figure]:
    default_of(setup)
    assert setup.report is not None
    report = reports.read(setup.report)
    assert report.baseline is not None
    clean = _record(setup)
    alarms = [_count_alarms(report, clean, seed) for seed in range(SEEDS // 4)]
    at_once = [_caught_after(report, clean, 0, seed) for seed in range(SEEDS)]
    later = [_caught_after(report, clean, SERVED_WELL, seed) for seed in range(SEEDS)]
    differing = metrics.mean([one.disagreement for one in clean])
    source = (
        f"resampled from {len(clean)} recorded requests (agreement {1 - differing:.4f}); the baseline has "
        f"{len(report.baseline.kl)} prompts and {report.baseline.positions} positions"
    )
    return [
        Figure.at_most(
            "shadow_false_alarms",
            metrics.mean(alarms),
            1,
            unit=f"in {CLEAN}",
            detail=f"mean of {len(alarms)} runs, most {max(alarms)}; {source}",
        ),
        Figure.at_most(
            "drift_05_caught",
            metrics.percentile(later, 0.5),
            CAUGHT_MAX,
            unit="requests",
            detail=f"{_spread(later)} after {SERVED_WELL} clean requests, {_spread(at_once)} right after "
            f"calibration; {source}",
        ),
    ]


def _spread(found: Sequence[int]) -> str:
    middle, most = (metrics.percentile(found, share) for share in (0.5, 0.9))
    return f"median of {len(found)} runs {middle:.0f}, 9 of 10 within {most:.0f},"


def _record(setup: Setup) -> list[Deviation]:
    """Every request's deviation along its answer."""
    default, count = default_of(setup), RECORDED_QUICK if setup.quick else RECORDED
    found: list[Deviation] = []
    with trained(setup) as running:
        for first in range(0, count, SLICE):
            each = min(SLICE, count - first) // len(testbed.TASKS)
            asked = testbed.questions(testbed.TASKS, RECORDED_FROM + first, each)
            bench = bench_of(running, testbed.cases(running, asked))
            found += _deviations(measure_selection(bench, default, range(len(bench.cases))))
            say(f"recorded {len(found)} clean requests")
    return found


def _deviations(scores: Scores) -> list[Deviation]:
    baseline = make_baseline(scores.by_prompt)
    return baseline.deviations(baseline.positions)


def _detector_of(report: CalibrationReport) -> DriftDetector:
    assert report.baseline is not None
    return DriftDetector(report.baseline, report.thresholds, report.noise)


def _count_alarms(report: CalibrationReport, clean: Sequence[Deviation], seed: int) -> int:
    """Alarms in `CLEAN` requests; each starts a new detector, as a new calibration does."""
    picks, alarms, detector = random.Random(seed), 0, _detector_of(report)
    for _ in range(CLEAN):
        if detector.observe(picks.choice(clean)):
            alarms, detector = alarms + 1, _detector_of(report)
    return alarms


def _caught_after(report: CalibrationReport, clean: Sequence[Deviation], before: int, seed: int) -> int:
    """Requests until a drop of agreement to 95 % is noticed, `before` clean ones after calibration."""
    picks, detector = random.Random(seed), _detector_of(report)
    good, bad = _mixed(clean, 0.01), _mixed(clean, 0.05)
    while any(detector.observe(good(picks)) for _ in range(before)):
        detector = _detector_of(report)
    for number in range(1, 10 * CAUGHT_MAX):
        if detector.observe(bad(picks)):
            return number
    return 10 * CAUGHT_MAX


def _mixed(clean: Sequence[Deviation], differing: float) -> Callable[[random.Random], Deviation]:
    """Draws recorded requests so that a share `differing` of them disagrees."""
    same = [one for one in clean if not one.disagreement]
    other = [one for one in clean if one.disagreement] or [Deviation(1.0, 1.0)]
    return lambda picks: picks.choice(other if picks.random() < differing else same)
