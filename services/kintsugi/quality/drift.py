"""Whether what shadowing sees is still within what calibration allowed: a sequential test. Pure.

Calibration bounds two means: KL and the share of different first choices. It also saw a KL that one position
in a hundred exceeded: where five times as many requests do, what is served is not what was calibrated, even
if answers do not suffer yet. Each is watched by bets against
"the mean is within its bound": a wealth is multiplied by ``1 + λ(x - bound)`` at every observation x in
[0, 1] and starts again from 1 whenever it falls below. While the bound holds, a wealth reaches 1/α only
once in 1/α observations on average, whatever the distribution; when it does not hold, wealth grows
exponentially (e-detectors: Shin, Ramdas and Rinaldo, 2022). Several λ find large drifts fast and small ones
at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kintsugi.core.report import Noise, Thresholds

FALSE_ALARM = 1e-4
"""One false alarm in so many shadowed requests: at a share of 0.5 %, in two million requests."""
BETS = (0.1, 0.3, 0.5)
"""λ times the bound: below 1, so that no observation ruins."""
KL_CAP = 10.0
"""Nats that count as 1: a bounded variable is what the test needs."""

UNUSUAL_MAX = 0.05
"""Share of requests that may exceed the KL which 1 % exceeded in calibration."""
USUAL_KL_MIN = 0.005
"""Nats: below it a KL is nobody's concern, however rare it was."""


@dataclass(frozen=True)
class Observation:
    """One shadowed request."""

    kl: float
    """Nats, mean over the compared positions."""
    disagreement: float
    """Share of positions whose best token differs."""


class MeanBoundTest:
    """Bets on the mean of one variable in [0, 1] being above `bound`."""

    def __init__(self, bound: float, alarm: float) -> None:
        assert 0 < bound < 1
        self.bound = bound
        self._alarm = math.log(1 / alarm) + math.log(len(BETS))
        self._wealth = [0.0] * len(BETS)

    def observe(self, value: float) -> bool:
        """Add one observation; whether the bound is taken to be broken."""
        assert 0 <= value <= 1
        for index, bet in enumerate(BETS):
            gain = math.log1p(bet / self.bound * (value - self.bound))
            self._wealth[index] = max(0.0, self._wealth[index]) + gain
        return max(self._wealth) >= self._alarm


class DriftDetector:
    """Watches KL and agreement of one model. `kl_usual`: the calibrated p99, None where it is not known."""

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
        """Add one shadowed request. What has drifted, in words; None while nothing has."""
        self.observations += 1
        kl = self._kl.observe(min(observation.kl, KL_CAP) / KL_CAP)
        disagreement = self._disagreement.observe(observation.disagreement)
        unusual = self._unusual.observe(float(observation.kl > self._kl_usual))
        if kl:
            return f"mean KL above {self._kl_bound:.3g} nats after {self.observations} shadowed requests"
        if disagreement:
            return (
                f"first choices differ in more than {self._disagreement_bound:.1%} "
                f"after {self.observations} shadowed requests"
            )
        if unusual:
            return (
                f"KL is above {self._kl_usual:.3g} nats, calibration's p99, in more than {UNUSUAL_MAX:.0%} "
                f"of {self.observations} shadowed requests"
            )
        return None
