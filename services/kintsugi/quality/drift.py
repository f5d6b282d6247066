"""A sequential test that detects when shadowed requests leave the bounds of the calibration. Pure.

Every request's deviation from full prefill is compared with `Bounds`. A report with a baseline
(`core.baseline`) bounds three kinds of means, each over as many positions as the request compares:

- the share of positions whose most likely token differs;
- the KL divergence, capped at `KL_CAP` nats;
- for some quantiles of the calibrated KL, the share of requests above the quantile: most damage moves the
  whole distribution long before an answer changes.

A bound is an upper confidence limit, because a calibration of few prompts knows its own means only roughly.
Requests that were shadowed long ago without an alarm join the calibration's prompts. They tighten the limits
and never loosen them, so that a small drop from a good level is detected after a while, too, and a slow drift
never becomes the norm. A report without a baseline bounds what its thresholds name.

Each mean is tested by betting against "it is within its bound". A wealth is multiplied by
``1 + λ(x - bound)`` at every observation x in [0, 1] and restarts from 1 whenever it falls below 1. While the
bound holds, a wealth reaches 1/α only once in 1/α observations on average, whatever the distribution; when
the bound is broken, the wealth grows exponentially (e-detectors: Shin, Ramdas and Rinaldo, 2022). Several
values of λ detect both large drifts (fast) and small ones. Observations may come from any number of engines
in any order: the test only needs that their order does not depend on their values.

Audits of stored chunks need no statistics: a chunk beyond its tolerance (`fusor.audit`) is damaged. One
damaged chunk may be a bad disk, and dropping it is enough. `DAMAGED_MIN` different ones mean that what writes
chunks, or keeps them, is wrong.
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
"""Rate of false alarms per shadowed request while every mean is at its bound; within the bounds it is far
lower."""
BETS = (0.01, 0.03, 0.1, 0.4)
"""λ times the bound: below 1, so that no single observation reduces the wealth to zero. A bet gains most on a
mean that exceeds its bound by about this much."""
KL_CAP = 1.0
"""Nats that count as 1 in a comparison with a baseline: the test needs a bounded variable, and beyond this a
larger divergence says little more."""
QUANTILES = (0.5, 0.1, 0.02)
"""Shares of the calibration's prompts that exceed the watched levels of KL."""
ODDS_MAX = 3.0
"""The odds of exceeding a level may be this many times the calibrated ones: served prompts are never quite
those of the calibration."""
CONFIDENCE = 0.85
"""One-sided, of a bound that is estimated from a baseline."""
_Z = 1.036
"""The normal quantile of `CONFIDENCE`."""
TAIL_MAX = 0.9
"""More requests than this may never be required to exceed a level: the test needs some room to bet."""
USUAL_KL_MIN = 0.0005
"""Nats: a KL below this never counts as unusual, however rare it was in calibration."""
DISAGREEMENT_MIN = 0.01
"""A smaller share of differing tokens is never a drift."""
KL_MEAN_MIN = 0.002
"""Nats: nor is a smaller mean of the capped KL."""


RECENT = 600
"""Observations that do not tighten the bounds yet: a drift must be detected before it is part of them."""
SETTLED_MAX = 4000
"""Older observations that tighten the bounds."""
SETTLED_STEP = 200
"""Observations between two updates of the bounds."""

AUDITS_WINDOW = 300
"""Latest audits in which damaged chunks are counted: five hours, at one shadowed request a minute."""
DAMAGED_MIN = 2
"""Different damaged chunks among them that are a reason to stop blending."""


@dataclass(frozen=True)
class Tail:
    """A level of KL, and how many requests may exceed it."""

    level: float
    """Nats."""
    share_max: float


@dataclass(frozen=True)
class Bounds:
    """What the means over requests of one number of positions are held to."""

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
    """The bounds for requests that compare `positions` positions. `settled`: requests that were served
    without an alarm; those of other lengths do not count."""
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
    """How many requests may exceed a level of KL, given how many of these do."""
    count, total = sum(one.kl > level for one in deviations), len(deviations)
    odds = ODDS_MAX * count / (total - count)
    return min(TAIL_MAX, max(upper_share(count, total), odds / (1 + odds)))


def upper_mean(values: Sequence[float], least: float) -> float:
    """An upper confidence limit of a mean, as if there had been one more value as bad as the worst.

    That one keeps the limit honest where the sample is small and its variance is that of a few rare values.
    The worst value counts as at least `least`.
    """
    sample = [*values, max(*values, least)]
    mean = sum(sample) / len(sample)
    variance = sum((value - mean) ** 2 for value in sample) / len(sample)
    return mean + _Z * math.sqrt(variance / len(sample))


@lru_cache(maxsize=1024)
def upper_share(count: int, total: int) -> float:
    """The upper confidence limit of a share of which `count` of `total` were seen (Clopper and Pearson)."""
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
    """Bets on the mean of one variable in [0, 1] being above its bound."""

    def __init__(self, alarm: float) -> None:
        self._alarm = math.log(1 / alarm) + math.log(len(BETS))
        self._wealth = [0.0] * len(BETS)

    def observe(self, value: float, bound: float) -> bool:
        """Add one observation, and what its mean is held to. Returns whether the bound counts as broken."""
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
        """Add one shadowed request. Returns a description of the drift, or None while there is none."""
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
        """Add an audit of the chunk; `damage` is None for a sound one. Returns a description of what is
        wrong with the store, or None."""
        self._latest.append(None if damage is None else (key, damage))
        damaged = dict(one for one in self._latest if one is not None)
        if len(damaged) < DAMAGED_MIN:
            return None
        examples = "; ".join(f"{key}: {damage}" for key, damage in [*damaged.items()][-DAMAGED_MIN:])
        return (
            f"{len(damaged)} of the latest {len(self._latest)} audited chunks are not what this model "
            f"computes ({examples})"
        )
