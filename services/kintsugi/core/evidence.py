"""Evidence about blends: the loss of one answer, and what many losses prove about their mean. Pure.

A pair is one prompt that was answered by full prefill and by a blend; one of the two is forced to generate
the other's tokens. Its loss is a number in [0, 1] (`loss_of`). Two hypotheses about the mean loss are tested
by betting:

- "The mean is at least the limit" (`log_wealth`), for the loss and for the share of lost answers. A wealth
  starts at 1 and is multiplied by ``1 + bet * (limit - loss)`` for each pair. While the hypothesis is true,
  the wealth is a non-negative supermartingale, so it reaches ``1 / error`` with a probability of at most
  `error`, however often it is checked and whenever the test stops (Ville's inequality; Waudby-Smith and
  Ramdas, "Estimating means of bounded random variables by betting", 2024). Bets are fixed and the wealth is
  their weighted mean, so the order of the pairs does not matter, and `Tally`, a histogram of losses, holds
  everything. Tallies of several engines are added.
- "The mean is at most the limit" (`TripTest`), for each of the `Levels`. Its wealth restarts from 1 whenever
  it falls below 1, so old good answers do not hide a later drift (e-detectors: Shin, Ramdas and Rinaldo,
  2022).

Pairs must be independent. Positions within an answer need not be, because an answer is one number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, NamedTuple

from pydantic import Field

from kintsugi.core.errors import InvalidField
from kintsugi.core.schema import STRICT

KL_CAP = 0.04
"""In nats: an answer with this mean KL or more has a loss of 1."""
CHANGED_MAX = 0.25
"""An answer with a larger share of changed tokens has a loss of 1."""
STEPS = 128
"""Losses are rounded up to multiples of ``1 / STEPS``, which makes every test slightly stricter."""
POSITIONS_MAX = 32
"""Maximum number of leading answer tokens that are compared."""

BETS: Mapping[float, float] = {0.95: 0.6, 0.8: 0.15, 0.6: 0.1, 0.4: 0.08, 0.2: 0.07}
"""Shares of the largest bet, and their weights. The best share for a mean p is about 1 - p / limit. The
weights favour small losses, because the first configuration to try is nearly exact."""
SEVERE_KL = 2.0
"""In nats: a lost answer with at least this mean KL is a different answer; with less, the model was
uncertain."""
TRIP_BETS = (0.03, 0.1)
"""Bets of `TripTest`, multiplied by the limit. A bet gains most if the share of lost pairs exceeds the limit
by about this much."""
FALSE_TRIP = 5e-4
"""Rate of false trips per pair while the mean loss is exactly at the limit; far lower below it."""
TRIP_LIMIT_MIN = 0.01
TRIP_LIMIT_ERRORS = (0.3, 0.15, 0.4)
"""For each of the `Levels`: probability that its mean already exceeded the limit that `trip_limits` returns
when the evidence was measured."""
TRIP_WEIGHTS = (0.25, 0.25, 0.5)
"""Weights of the bets on each of the `Levels`. Severity is rarely above 0 and so tells the most: it has the
largest weight and the sharpest limit."""
_BISECTIONS = 40
_WEALTH_MAX = 100.0
"""Maximum logarithm of a wealth: far beyond any verdict, while its exponential is still a finite float."""


class Quality(StrEnum):
    """How much a blend may lose."""

    STRICT = "strict"
    """The mean KL is below 0.0033 nats (each answer counts at most 0.04), and in fewer than 1 answer in 24
    the KL exceeds 0.04 or more than a quarter of its tokens changed. Exact match falls by less than 1
    point."""
    BALANCED = "balanced"
    """The mean KL is below 0.01 nats (each answer counts at most 0.04), and in fewer than 1 answer in 8 the
    KL exceeds 0.04 or more than a quarter of its tokens changed. Exact match falls by less than 3 points."""
    OFF = "off"
    """Nothing is tested, and blends run as configured. Answers may be wrong without notice."""

    @property
    def loss_max(self) -> float:
        """Limit of the mean loss."""
        return 1 / 12 if self is Quality.STRICT else 1 / 4

    @property
    def lost_max(self) -> float:
        """Limit of the share of answers with a loss of 1. The mean alone would allow twice as many."""
        return 1 / 24 if self is Quality.STRICT else 1 / 8

    @property
    def wrong_max(self) -> float:
        """Limit of the share of right answers that become wrong, less those that become right."""
        return 0.01 if self is Quality.STRICT else 0.03


@dataclass(frozen=True)
class Deviation:
    """The deviation of one answer from full prefill, over its leading positions."""

    kl: float
    """Mean KL divergence over the positions, full prefill's distribution against the blend's, in nats."""
    changed: float
    """Share of positions whose most likely token differs by more than a near tie."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.kl) and self.kl >= 0 and 0 <= self.changed <= 1):
            raise InvalidField("deviation", f"{self.kl} nats and {self.changed} are not a KL and a share")

    @staticmethod
    def of(kl: Sequence[float], differs: Sequence[bool]) -> Deviation:
        """Return the deviation over all these positions. Raises `InvalidField` if there are none."""
        if not kl or len(kl) != len(differs):
            raise InvalidField("deviation", f"{len(kl)} divergences and {len(differs)} comparisons")
        return Deviation(sum(kl) / len(kl), sum(differs) / len(differs))


def loss_of(deviation: Deviation) -> float:
    """Return the loss: 1 if more than `CHANGED_MAX` of the tokens changed, else the KL as a share of
    `KL_CAP`, at most 1."""
    return 1.0 if deviation.changed > CHANGED_MAX else min(1.0, deviation.kl / KL_CAP)


_Pairs = Annotated[int, Field(ge=1)]
_Steps = tuple[tuple[Annotated[int, Field(ge=0, le=STEPS)], _Pairs], ...]
_Octaves = tuple[tuple[Annotated[int, Field(ge=0, le=32)], _Pairs], ...]
_Sum = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Tally:
    """Losses of one configuration over many pairs, as sums that can be added."""

    __pydantic_config__ = STRICT

    losses: _Steps = ()
    """Number of pairs by loss: rows of (loss * `STEPS`, rounded up; pairs), ascending."""
    answers: tuple[tuple[Annotated[int, Field(ge=-1, le=1)], _Pairs], ...] = ()
    """Pairs with a known answer, as rows of (full prefill's exact match minus the blend's; pairs)."""
    cost: _Sum = 0.0
    """Sum of the blends' shares of a full prefill's work."""
    kl: _Sum = 0.0
    """Sum of the mean KL of each pair, in nats."""
    changes: _Steps = ()
    """Number of pairs by share of changed tokens: rows of (share * `STEPS`, rounded up; pairs)."""
    severities: _Steps = ()
    """Number of pairs by `Levels.severity`: rows of (severity * `STEPS`, rounded up; pairs)."""
    sizes: _Octaves = ()
    """Number of pairs by size of their chunks: rows of (`size_of`, pairs)."""
    chunks: _Octaves = ()
    """Number of pairs by number of chunks: rows of (`size_of`, pairs)."""

    @staticmethod
    def of(deviation: Deviation, cost: float, chunk_tokens: Sequence[int], wrong: int | None = None) -> Tally:
        """The tally of one pair. ``wrong``: full prefill's exact match minus the blend's; None: unknown."""
        mean = sum(chunk_tokens) / max(1, len(chunk_tokens))
        levels = Levels.of(deviation)
        return Tally(
            losses=((_round_up(levels.loss), 1),),
            changes=((_round_up(levels.changed), 1),),
            severities=((_round_up(levels.severity), 1),),
            answers=() if wrong is None else ((wrong, 1),),
            cost=cost,
            kl=deviation.kl,
            sizes=((size_of(mean), 1),),
            chunks=((size_of(len(chunk_tokens)), 1),),
        )

    def __add__(self, other: Tally) -> Tally:
        rows = {
            name: _add_rows(getattr(self, name), getattr(other, name))
            for name in ("losses", "changes", "severities", "answers", "sizes", "chunks")
        }
        return Tally(**rows, cost=self.cost + other.cost, kl=self.kl + other.kl)

    @property
    def pairs(self) -> int:
        return sum(pairs for _, pairs in self.losses)

    @property
    def loss(self) -> float:
        """Mean loss; 0 without pairs."""
        return _mean(self.losses)

    @property
    def changed(self) -> float:
        """Mean share of changed tokens; 0 without pairs."""
        return _mean(self.changes)

    @property
    def lost(self) -> int:
        """Number of pairs with a loss of 1."""
        return dict(self.losses).get(STEPS, 0)

    def log_wealth(self, quality: Quality) -> float:
        """Return the natural logarithm of the lowest wealth. One bets that the mean loss is below its limit,
        one that the share of lost answers is below its own, and one, if answers are known, that the share of
        those that become wrong is below its own; ``quality`` sets the limits. All must win, so each may err
        with the whole probability."""
        return min(_log_wealth(rows, limit) for rows, limit in self._tested(quality))

    def _tested(self, quality: Quality) -> list[tuple[Sequence[tuple[float, int]], float]]:
        """Return for each test rows of (value, pairs) and the limit of their mean."""
        counts = (1.0, self.lost), (0.0, self.pairs - self.lost)
        lost = [row for row in counts if row[1]]
        answers = [(self.answers, quality.wrong_max)] if self.answers else []
        return [(_scaled(self.losses), quality.loss_max), (lost, quality.lost_max), *answers]

    def loss_upper(self, error: float) -> float:
        """Return the highest mean loss that the pairs do not rule out: the mean is below it, except with
        probability ``error``. 1 without pairs."""
        return _upper(self.losses, error)

    def pairs_missing(self, quality: Quality, enough: float) -> int | None:
        """Estimate how many more pairs, similar to these, bring the logarithm of the wealth to ``enough``;
        None if more pairs do not help. Without pairs: as if nothing was lost."""
        most = 0
        for rows, limit in self._tested(quality):
            missing = _pairs_missing(rows, limit, enough)
            if missing is None:
                return None
            known = sum(pairs for _, pairs in rows) or 1
            most = max(most, math.ceil(missing * max(1, self.pairs) / known))
        return most


EMPTY = Tally()


def size_of(number: float) -> int:
    """Return the octave of a length or count: 0 for 1, 1 for 2 and 3, 2 for 4 to 7."""
    return int(math.log2(max(1.0, number)))


def _round_up(share: float) -> int:
    return math.ceil(share * STEPS - 1e-9)


def _scaled(rows: Sequence[tuple[int, int]]) -> list[tuple[float, int]]:
    return [(value / STEPS, pairs) for value, pairs in rows]


def _mean(rows: Sequence[tuple[int, int]]) -> float:
    return sum(value * pairs for value, pairs in rows) / STEPS / max(1, sum(pairs for _, pairs in rows))


def _upper(rows: Sequence[tuple[int, int]], error: float) -> float:
    scaled, enough, low, high = _scaled(rows), math.log(1 / error), 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _log_wealth(scaled, middle) >= enough else (middle, high)
    return high


def _add_rows(
    one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    total = Counter(dict(one))
    total.update(dict(other))
    return tuple(sorted(total.items()))


def _log_wealths(losses: Sequence[tuple[float, int]], limit: float) -> list[float]:
    """Return the logarithm of the wealth of each bet. Bets are shares of the largest that keeps the wealth
    positive at a loss of 1."""
    return [
        sum(pairs * math.log1p(share / (1 - limit) * (limit - loss)) for loss, pairs in losses)
        for share in BETS
    ]


def _log_wealth(losses: Sequence[tuple[float, int]], limit: float) -> float:
    wealths = _log_wealths(losses, min(limit, 1 - 1e-9))
    highest = max(wealths)
    parts = zip(BETS.values(), wealths, strict=True)
    return highest + math.log(sum(weight * math.exp(wealth - highest) for weight, wealth in parts))


def _pairs_missing(losses: Sequence[tuple[float, int]], limit: float, enough: float) -> int | None:
    pairs = sum(count for _, count in losses)
    growth = max(_log_wealths(losses or [(0.0, 1)], limit)) / max(1, pairs)
    missing = enough - _log_wealth(losses, limit)
    if missing <= 0:
        return 0
    return math.ceil(missing / growth) if growth > 0 else None


class Levels(NamedTuple):
    """The watched measures of a served blend, each in [0, 1], or their limits."""

    loss: float
    changed: float
    """Share of changed tokens. Many small changes hardly add to the loss."""
    severity: float
    """KL as a share of `SEVERE_KL`, times the changed tokens as a share of `CHANGED_MAX`, each at most 1.
    It is low where sound blends lose answers because the model is uncertain, and high in damaged blends."""

    @staticmethod
    def of(deviation: Deviation) -> Levels:
        severity = min(1.0, deviation.kl / SEVERE_KL) * min(1.0, deviation.changed / CHANGED_MAX)
        return Levels(loss_of(deviation), deviation.changed, severity)

    @staticmethod
    def limits(loss_max: float) -> Levels:
        """Return the limits that apply before there is evidence."""
        return Levels(loss_max, CHANGED_MAX, CHANGED_MAX)

    def lowest(self, other: Levels) -> Levels:
        """Return the lower limit of each measure."""
        return Levels(*map(min, self, other))


def trip_limits(tally: Tally, loss_max: float) -> Levels:
    """Return the limits of a `TripTest` on blends with this evidence: the highest means that the evidence
    does not rule out, at least `TRIP_LIMIT_MIN`, and at most `Levels.limits`. So a blend that becomes worse
    is noticed while it is still within `Levels.limits`."""
    watched = zip((tally.losses, tally.changes, tally.severities), TRIP_LIMIT_ERRORS, strict=True)
    upper = Levels(*(max(TRIP_LIMIT_MIN, _upper(rows, error)) for rows, error in watched))
    return upper.lowest(Levels.limits(loss_max))


@dataclass
class TripTest:
    """Bets that the mean of one of the `Levels` is above its limit."""

    _wealths: dict[tuple[str, float], float] = field(default_factory=dict)

    def observe(self, levels: Levels, limits: Levels) -> str | None:
        """Add one pair and its limits. Return a description of the measure that is probably above its limit;
        None if there is none."""
        mean = 0.0
        for name, level, limit, weight in zip(Levels._fields, levels, limits, TRIP_WEIGHTS, strict=True):
            for bet in TRIP_BETS:
                wealth = max(0.0, self._wealths.get((name, bet), 0.0))
                wealth += math.log1p(bet / limit * (level - limit))
                self._wealths[name, bet] = min(wealth, _WEALTH_MAX)
                mean += weight * math.exp(self._wealths[name, bet]) / len(TRIP_BETS)
        if mean < 1 / FALSE_TRIP:
            return None
        name, _ = max(self._wealths, key=self._wealths.__getitem__)
        return f"{_WATCHED[name]} is above {getattr(limits, name):.3f}"


_WATCHED = {
    "loss": "the mean loss of served blends",
    "changed": "the share of changed tokens of served blends",
    "severity": "the severity of served blends' errors",
}
