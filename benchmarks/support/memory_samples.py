"""Measures how a process's memory grows over minutes, despite bursts of messages of tens of MiB."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

PERIOD_S = 1.0


@dataclass
class MemorySamples:
    """Samples of `measure_bytes`, one a second."""

    measure_bytes: Callable[[], int]
    _samples: list[int] = field(default_factory=list)
    _due_s: float = 0.0

    def watch(self, elapsed_s: float) -> None:
        """Take a sample if one is due. Call it often; `elapsed_s` counts from the beginning."""
        if elapsed_s >= self._due_s:
            self._samples.append(self.measure_bytes())
            self._due_s = elapsed_s + PERIOD_S

    @property
    def growth_bytes(self) -> float:
        """From the median of the first tenth to that of the last."""
        tenth = max(1, len(self._samples) // 10)
        return statistics.median(self._samples[-tenth:]) - statistics.median(self._samples[:tenth])
