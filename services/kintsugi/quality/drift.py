"""A sequential test that detects when shadowed requests leave the bounds of the calibration. Pure.

Calibration bounds two means: the KL divergence, and the share of positions whose most likely token differs.
It also recorded the KL that one position in a hundred exceeded. If five times as many requests exceed that
KL, the traffic is not what was calibrated, even if answers do not suffer yet.

Each of the three is tested by betting against "the mean is within its bound". A wealth is multiplied by ``1 +
λ(x - bound)`` at every observation x in [0, 1] and restarts from 1 whenever it falls below 1. While the bound
holds, a wealth reaches 1/α only once in 1/α observations on average, whatever the distribution; when the
bound is broken, the wealth grows exponentially (e-detectors: Shin, Ramdas and Rinaldo, 2022). Several values
of λ detect both large drifts (fast) and small ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kintsugi.core.report import Noise, Thresholds

FALSE_ALARM = 1e-4
"""Rate of false alarms per shadowed request: at a share of 0.5 %, one in two million requests."""
BETS = (0.1, 0.3, 0.5)
"""λ times the bound: below 1, so that no single observation reduces the wealth to zero."""
KL_CAP = 10.0
"""Nats that count as 1: the test needs a bounded variable."""

UNUSUAL_MAX = 0.05
"""Share of requests that may exceed the KL that 1 % of positions exceeded in calibration."""
USUAL_KL_MIN = 0.005
"""Nats: a KL below this never counts as unusual, however rare it was in calibration."""


@dataclass(frozen=True)
class Observation:
    """The comparison of one shadowed request."""

    kl: float
    """Mean over the compared positions, in nats."""
    disagreement: float
    """Share of positions whose most likely token differs."""


class MeanBoundTest:
    """Bets on the mean of one variable in [0, 1] being above `bound`."""

    def __init__(self, bound: float, alarm: float) -> None:
        assert 0 < bound < 1
        self.bound = bound
        self._alarm = math.log(1 / alarm) + math.log(len(BETS))
        self._wealth = [0.0] * len(BETS)

    def observe(self, value: float) -> bool:
        """Add one observation. Returns whether the bound counts as broken."""
        assert 0 <= value <= 1
        for index, bet in enumerate(BETS):
            gain = math.log1p(bet / self.bound * (value - self.bound))
            self._wealth[index] = max(0.0, self._wealth[index]) + gain
        return max(self._wealth) >= self._alarm


class DriftDetector:
    """Watches KL and agreement of one model. `kl_usual`: the calibrated p99, None if it is not known."""

    def __init__(self, thresholds: Thresholds, noise: Noise, kl_usual: float | None = None) -> None:
        self._kl_usual = math.inf if kl_usual is None else max(kl_usual, 2 * noise.kl_p99, USUAL_KL_MIN)
        self._unusual = MeanBoundTest(UNUSUAL_MAX, FALSE_ALARM / 3)
        self._kl_bound = max(thresholds.kl_mean_max, 2 * noise.kl_mean)
        agreement = min(thresholds.top1_agreement_min, noise.top1_agreement)
        self._disagreement_bound = min(0.5, max(1 - agreement, 1e-3))
        self._kl = MeanBoundTest(min(0.5, self._kl_bound / KL_CAP), FALSE_ALARM / 3)
        self._disagreement = MeanBoundTest(self._disagreement_bound, FALSE_ALARM / 3)
        self.observations = 0

    def observe(self, observation: Observation) -> str | None:
        """Add one shadowed request. Returns a description of the drift, or None while there is none."""
        self.observations += 1
        kl = self._kl.observe(min(observation.kl, KL_CAP) / KL_CAP)
        disagreement = self._disagreement.observe(observation.disagreement)
        unusual = self._unusual.observe(float(observation.kl > self._kl_usual))
        if kl:
            return f"mean KL above {self._kl_bound:.3g} nats after {self.observations} shadowed requests"
        if disagreement:
            return (
                f"the most likely token differs at more than {self._disagreement_bound:.1%} of positions "
                f"after {self.observations} shadowed requests"
            )
        if unusual:
            return (
                f"KL is above {self._kl_usual:.3g} nats, the calibration's p99, in more than "
                f"{UNUSUAL_MAX:.0%} of {self.observations} shadowed requests"
            )
        return None
