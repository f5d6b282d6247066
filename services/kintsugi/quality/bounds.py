"""Confidence bounds for mean losses, valid for small samples, for rates near zero and at any time. Pure.

A loss is a number of at most 1: a disagreement (0 or 1), a share, a capped divergence, or a paired difference
in [-1, 1]. The hypothesis "the mean loss is at least m" is tested by betting against it: a wealth starts at 1
and is multiplied by ``1 + bet * (m - loss)`` for each prompt. Bets are so small that the wealth stays
positive. While the hypothesis is true, the wealth is a non-negative supermartingale. So it reaches ``1 /
error`` with a probability of at most `error`, however often it is checked and whenever the test stops
(Ville's inequality; Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting",
2024). No other assumption about the distribution is needed. A bootstrap or a normal approximation, by
contrast, reports certainty as long as no loss has occurred.

Bets are fixed shares of the largest bet, and the wealth is their weighted mean, so the order of the prompts
does not matter. Prompts must be independent; positions within a prompt need not be, because a prompt is one
number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

BETS = {0.95: 0.35, 0.8: 0.2, 0.65: 0.15, 0.5: 0.1, 0.35: 0.08, 0.2: 0.06, 0.1: 0.03, 0.05: 0.03}
"""Shares of the largest bet, and their weights. The best share for a rate p is 1 - p / m, so these shares
suit rates up to 0.95 m. The weights favour rates near 0, which need the fewest prompts."""
STEPS = 40
"""Bisection steps of a bound; its error is then below 1e-11."""


class BelowTest:
    """Collects evidence that a mean loss is below `threshold`."""

    def __init__(self, threshold: float) -> None:
        assert -1 < threshold < 1
        self.threshold = threshold
        self.count = 0
        self._sum = 0.0
        self._sum_of_squares = 0.0
        self._bets = [share / (1 - threshold) for share in BETS]
        self._log_wealths = [0.0] * len(BETS)

    def add(self, losses: Iterable[float]) -> None:
        """Add one loss of at most 1 per prompt."""
        for loss, times in Counter(losses).items():
            assert loss <= 1
            self.count += times
            self._sum += times * loss
            self._sum_of_squares += times * loss * loss
            gain = self.threshold - loss
            for index, bet in enumerate(self._bets):
                self._log_wealths[index] += times * math.log1p(bet * gain)

    @property
    def mean(self) -> float:
        return self._sum / self.count

    @property
    def log_wealth(self) -> float:
        """Natural logarithm of the wealth. If it is at least ``log(1 / error)``, the mean is below the
        threshold, except with probability `error`."""
        highest = max(self._log_wealths)
        parts = zip(BETS.values(), self._log_wealths, strict=True)
        return highest + math.log(sum(weight * math.exp(wealth - highest) for weight, wealth in parts))

    @property
    def is_above(self) -> bool:
        """Whether the mean is probably above the threshold, so that more prompts would be wasted. This is an
        approximation: two standard errors, where the variance of a loss is increased by the threshold."""
        variance = self._sum_of_squares / self.count - self.mean**2
        return self.mean - 2 * math.sqrt((variance + self.threshold) / self.count) > self.threshold

    def prompts_missing(self, error: float) -> int | None:
        """Estimate how many more prompts, similar to the previous ones, bring the wealth to ``1 / error``;
        None if more prompts do not help."""
        missing = math.log(1 / error) - self.log_wealth
        growth = max(self._log_wealths) / self.count if self.count else 0.0
        if missing <= 0:
            return 0
        return math.ceil(missing / growth) if growth > 0 else None


def upper_bound(losses: Sequence[float], error: float) -> float:
    """Return the highest mean that the losses do not rule out: the mean loss is below it, except with
    probability `error`. Without losses it is 1."""
    enough, low, high = math.log(1 / error), -1.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        test = BelowTest(middle)
        test.add(losses)
        low, high = (low, middle) if test.log_wealth >= enough else (middle, high)
    return high


def prompts_needed(threshold: float, error: float) -> int:
    """Return the number of prompts without any loss that shows that the mean is below `threshold`."""
    test = BelowTest(threshold)
    while test.log_wealth < math.log(1 / error):
        test.add([0.0])
    return test.count
