"""Sequential tests that detect when shadowed requests leave the bounds of the calibration. Pure.

Every request's deviation from full prefill is compared with `Bounds`. They follow from the report's baseline
(`core.baseline`) and bound three kinds of means, each over the request's number of positions:

- the share of positions whose most likely token differs;
- the KL divergence, capped at `KL_CAP` nats;
- for some quantiles of the calibrated KL, the share of requests above the quantile: most damage moves the
  whole distribution long before an answer changes.

A bound is an upper confidence limit, because a calibration on few prompts estimates its means only roughly.
Requests that were shadowed long ago without an alarm are added to the calibration's prompts. They tighten the
bounds and never loosen them: a small drop from a good level is then detected, too, and a slow drift never
becomes normal.

Each mean is tested by betting against "it is within its bound". A wealth is multiplied by
``1 + λ(x - bound)`` at every observation x in [0, 1] and restarts from 1 whenever it falls below 1. While the
bound holds, a wealth reaches 1/α at most once in 1/α observations on average, for any distribution. When
the bound is broken, the wealth grows exponentially (e-detectors: Shin, Ramdas and Rinaldo, 2022). Several
values of λ detect large drifts fast, and also small ones. Observations may come from any number of engines
in any order, as long as their order does not depend on their values.

Audits of stored chunks need no statistics: a chunk beyond its tolerance (`fusor.audit`) is damaged. A single
damaged chunk may come from a bad disk and is only dropped. `DAMAGED_MIN` different ones show that writing or
storing chunks is faulty.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kintsugi.core.baseline import Baseline, Deviation
from kintsugi.core.report import Noise, Thresholds
from kintsugi.core.spaces import ChunkKey

FALSE_ALARM = 5e-4
"""Rate of false alarms per shadowed request while every mean is exactly at its bound. Below the bounds the
rate is much lower."""
BETS = (0.01, 0.03, 0.1, 0.4)
"""Values of λ times the bound. They are below 1, so that no single observation reduces the wealth to zero. A
bet gains most if the mean exceeds its bound by about this share."""
KL_CAP = 1.0
"""Cap of the KL in nats. The test needs a bounded variable, and larger values add little information."""
QUANTILES = (0.5, 0.1, 0.02)
"""Shares of the calibration's prompts above each tested level of KL."""
ODDS_MAX = 3.0
"""Maximum ratio of the odds of exceeding a level to the calibrated odds: served prompts always differ a
little from those of the calibration."""
CONFIDENCE = 0.85
"""One-sided confidence of a bound."""
_Z = 1.036
"""The normal quantile of `CONFIDENCE`."""
TAIL_MAX = 0.9
"""Largest bound of a share above a level: the test cannot bet against a bound near 1."""
USUAL_KL_MIN = 0.0005
"""Nats: a KL below this never counts as unusual, however rare it was in calibration."""
DISAGREEMENT_MIN = 0.01
"""A smaller share of differing tokens is never a drift."""
KL_MEAN_MIN = 0.002
"""Nats. A smaller mean of the capped KL is never a drift."""


RECENT = 600
"""Number of the latest observations that do not tighten the bounds, so that a drift is detected before it
becomes part of them."""
SETTLED_MAX = 4000
"""Maximum number of older observations that tighten the bounds."""
SETTLED_STEP = 200
"""Observations between two updates of the bounds."""

AUDITS_WINDOW = 300
"""Number of the latest audits in which damaged chunks are counted: five hours at one request a minute."""
DAMAGED_MIN = 2
"""Number of different damaged chunks among them that stops blending."""


@dataclass(frozen=True)
class Tail:
    """A level of KL, and the largest share of requests that may exceed it."""

    level: float
    """Nats."""
    share_max: float


@dataclass(frozen=True)
class Bounds:
    """Bounds of the means over requests with one number of positions."""

    disagreement: float
    kl: float
    """Nats, for the mean of the KL capped at `KL_CAP`."""
    tails: tuple[Tail, ...]


def baseline_bounds(
    baseline: Baseline,
    positions: int,
    thresholds: Thresholds,
    noise: Noise,
    settled: Sequence[Deviation] = (),
) -> Bounds:
    """Return the bounds for requests that compare `positions` positions. ``settled``: requests that were
    shadowed without an alarm; those with other numbers of positions do not count."""
    calibrated = baseline.deviations(positions)
    alike = [one for one in settled if one.positions == positions]
    disagreement_max = min(0.5, max(1 - min(thresholds.top1_agreement_min, noise.top1_agreement), 1e-3))
    level_min = max(2 * noise.kl_p99, USUAL_KL_MIN)
    ordered = sorted((one.kl for one in calibrated), reverse=True)
    levels = [max(ordered[int(share * len(ordered))], level_min) for share in QUANTILES]

    def least(limit: Callable[[Sequence[Deviation]], float]) -> float:
        return min(limit(calibrated), limit([*calibrated, *alike]))

    disagreement = least(lambda some: upper_mean([one.disagreement for one in some], 1 / positions))
    kl = least(lambda some: upper_mean([min(one.kl, KL_CAP) for one in some], KL_CAP / positions))
    return Bounds(
        disagreement=min(max(disagreement, DISAGREEMENT_MIN), disagreement_max),
        kl=min(max(kl, 2 * noise.kl_mean, KL_MEAN_MIN), KL_CAP / 2),
        tails=tuple(
            Tail(level, least(lambda some, level=level: _tail_share(some, level)))  # type: ignore[misc]
            for level in levels
        ),
    )


def _tail_share(deviations: Sequence[Deviation], level: float) -> float:
    """Return the bound of the share of requests above a level of KL, from the share of `deviations` above
    it."""
    count, total = sum(one.kl > level for one in deviations), len(deviations)
    odds = ODDS_MAX * count / (total - count)
    return min(TAIL_MAX, max(upper_share(count, total), odds / (1 + odds)))


def upper_mean(values: Sequence[float], least: float) -> float:
    """Return an upper confidence limit of a mean, with the worst value counted once more.

    The extra value keeps the limit valid if the sample is small and its variance comes from a few rare
    values. It is at least `least`.
    """
    sample = [*values, max(*values, least)]
    mean = sum(sample) / len(sample)
    variance = sum((value - mean) ** 2 for value in sample) / len(sample)
    return mean + _Z * math.sqrt(variance / len(sample))


@lru_cache(maxsize=1024)
def upper_share(count: int, total: int) -> float:
    """Return the upper confidence limit of a share that was `count` of `total` (Clopper and Pearson)."""
    if count >= total:
        return 1.0
    low, high = count / total, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if _binomial_cdf(count, total, middle) > 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def _binomial_cdf(count: int, total: int, share: float) -> float:
    log_total = math.lgamma(total + 1)
    return sum(
        math.exp(
            log_total
            - math.lgamma(hits + 1)
            - math.lgamma(total - hits + 1)
            + hits * math.log(share)
            + (total - hits) * math.log1p(-share)
        )
        for hits in range(count + 1)
        if 0 < share < 1
    )


class MeanBoundTest:
    """Bets that the mean of one variable in [0, 1] is above its bound."""

    def __init__(self, alarm: float) -> None:
        self._alarm = math.log(1 / alarm) + math.log(len(BETS))
        self._wealth = [0.0] * len(BETS)

    def observe(self, value: float, bound: float) -> bool:
        """Add one observation with the bound of its mean. Return whether the bound is probably broken."""
        assert 0 <= value <= 1
        assert 0 < bound < 1
        for index, bet in enumerate(BETS):
            gain = math.log1p(bet / bound * (value - bound))
            self._wealth[index] = max(0.0, self._wealth[index]) + gain
        return max(self._wealth) >= self._alarm


class DriftDetector:
    """Watches the requests that are served by one calibration. Bounds depend on a request's number of
    positions."""

    def __init__(self, baseline: Baseline, thresholds: Thresholds, noise: Noise) -> None:
        self._calibrated = baseline, thresholds, noise
        self._bounds: dict[int, Bounds] = {}
        self._tests: dict[str, MeanBoundTest] = {}
        self._alarm = FALSE_ALARM / (2 + len(QUANTILES))
        self._recent: deque[Deviation] = deque()
        self._settled: deque[Deviation] = deque(maxlen=SETTLED_MAX)
        self.observations = 0

    def observe(self, observation: Deviation) -> str | None:
        """Add one shadowed request. Return a description of the drift; None without a drift."""
        self.observations += 1
        self._settle(observation)
        bounds = self._bounds_for(observation.positions)
        capped = min(observation.kl, KL_CAP)
        reasons = [
            self._test("kl", capped / KL_CAP, bounds.kl / KL_CAP)
            and f"the mean KL is above {bounds.kl:.3g} nats",
            self._test("top", observation.disagreement, bounds.disagreement)
            and f"the most likely token differs at more than {bounds.disagreement:.1%} of positions",
            *(
                self._test(f"tail {index}", float(observation.kl > tail.level), tail.share_max)
                and f"KL is above {tail.level:.3g} nats in more than {tail.share_max:.0%} of requests"
                for index, tail in enumerate(bounds.tails)
            ),
        ]
        found = next((reason for reason in reasons if reason), None)
        return f"{found}, after {self.observations} shadowed requests" if found else None

    def _settle(self, observation: Deviation) -> None:
        self._recent.append(observation)
        if len(self._recent) > RECENT:
            self._settled.append(self._recent.popleft())
        if self.observations % SETTLED_STEP == 0:
            self._bounds.clear()

    def _bounds_for(self, positions: int) -> Bounds:
        if positions not in self._bounds:
            baseline, thresholds, noise = self._calibrated
            self._bounds[positions] = baseline_bounds(baseline, positions, thresholds, noise, self._settled)
        return self._bounds[positions]

    def _test(self, name: str, value: float, bound: float) -> bool:
        test = self._tests.setdefault(name, MeanBoundTest(self._alarm))
        return test.observe(value, bound)


class DamageDetector:
    """Counts the damaged chunks among the latest audits of one engine."""

    def __init__(self) -> None:
        self._latest: deque[tuple[ChunkKey, str] | None] = deque(maxlen=AUDITS_WINDOW)

    def observe(self, key: ChunkKey, damage: str | None) -> str | None:
        """Add an audit of a chunk; `damage` is None if the chunk is intact. Return a description of the fault
        if too many chunks are damaged, or None."""
        self._latest.append(None if damage is None else (key, damage))
        damaged = dict(one for one in self._latest if one is not None)
        if len(damaged) < DAMAGED_MIN:
            return None
        examples = "; ".join(f"{key}: {damage}" for key, damage in [*damaged.items()][-DAMAGED_MIN:])
        return (
            f"{len(damaged)} of the latest {len(self._latest)} audited chunks differ from what this model "
            f"computes ({examples})"
        )
