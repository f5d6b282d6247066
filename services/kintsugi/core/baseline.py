"""The deviation of the chosen configuration's answers from full prefill at calibration. Pure.

Shadowing compares served answers with it. The values are kept by prompt and by position, so that an engine
that compares the first k positions of an answer uses calibration's values at the same k positions: early
positions differ from late ones, and the mean over whole answers says little about first tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField
from kintsugi.core.schema import STRICT

PROMPTS_MAX = 1024
POSITIONS_MAX = 32
"""Positions kept of an answer. 1024 prompts of 32 positions take half of the largest report."""
COVERED_MIN = 0.5
"""A position is compared only if the answers of this share of the prompts reach it."""
_DIGITS = 6


@dataclass(frozen=True)
class Deviation:
    """The deviation of one answer from full prefill, over its first positions."""

    kl: float
    """Mean over the positions, in nats."""
    disagreement: float
    """Share of positions whose most likely token differs."""
    positions: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.kl) and self.kl >= 0 and 0 <= self.disagreement <= 1):
            raise InvalidField("deviation", f"{self.kl} nats and {self.disagreement} are no KL and no share")
        if self.positions < 1:
            raise InvalidField("deviation.positions", f"{self.positions} must be at least 1")

    @staticmethod
    def of(kl: Sequence[float], differs: Sequence[bool]) -> Deviation:
        """The deviation over all of these positions. Raises `InvalidField` for none."""
        if not kl or len(kl) != len(differs):
            raise InvalidField("deviation", f"{len(kl)} divergences and {len(differs)} comparisons")
        return Deviation(sum(kl) / len(kl), sum(differs) / len(differs), len(kl))


@dataclass(frozen=True)
class Baseline:
    """Calibration's measurements of the chosen configuration, by prompt and by position in its answer."""

    __pydantic_config__ = STRICT

    kl: tuple[tuple[float, ...], ...]
    """Nats at each position; one row per prompt."""
    differing: tuple[tuple[int, ...], ...]
    """Positions, from 0, at which the most likely token differs; one row per prompt."""

    def __post_init__(self) -> None:
        if not 0 < len(self.kl) <= PROMPTS_MAX or len(self.differing) != len(self.kl):
            raise InvalidField(
                "baseline", f"holds {len(self.kl)} and {len(self.differing)} rows, not 1 to {PROMPTS_MAX}"
            )
        for row, differing in zip(self.kl, self.differing, strict=True):
            if not 0 < len(row) <= POSITIONS_MAX:
                raise InvalidField("baseline.kl", f"a row has {len(row)} positions, not 1 to {POSITIONS_MAX}")
            if not all(math.isfinite(value) and value >= 0 for value in row):
                raise InvalidField("baseline.kl", "holds a value that is no divergence")
            if not all(0 <= position < len(row) for position in differing):
                raise InvalidField("baseline.differing", "names a position that its row does not have")

    @staticmethod
    def of(kl: Sequence[Sequence[float]], differs: Sequence[Sequence[bool]]) -> Baseline:
        """The baseline of these prompts: at each position, the KL and whether the most likely token differs.

        Keeps the first `PROMPTS_MAX` prompts and the first `POSITIONS_MAX` positions of each. Raises
        `InvalidField` for no prompt, and for a prompt without positions.
        """
        rows = [tuple(round(value, _DIGITS) for value in row[:POSITIONS_MAX]) for row in kl[:PROMPTS_MAX]]
        differing = [
            tuple(index for index, differ in enumerate(row[:POSITIONS_MAX]) if differ)
            for row in differs[:PROMPTS_MAX]
        ]
        return Baseline(tuple(rows), tuple(differing))

    @property
    def positions(self) -> int:
        """The largest number of positions that can be compared: `COVERED_MIN` of the prompts reach it."""
        lengths = sorted((len(row) for row in self.kl), reverse=True)
        return lengths[math.ceil(COVERED_MIN * len(lengths)) - 1]

    def deviations(self, positions: int) -> list[Deviation]:
        """Each prompt's deviation over at most its first `positions` positions."""
        return [
            Deviation(
                sum(row[:positions]) / len(row[:positions]),
                sum(one < positions for one in differing) / len(row[:positions]),
                len(row[:positions]),
            )
            for row, differing in zip(self.kl, self.differing, strict=True)
        ]
