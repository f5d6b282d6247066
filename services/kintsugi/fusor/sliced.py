"""Work cut into units of bounded cost, so that an engine can run a few between two decode steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from enum import Enum, auto
from typing import TypeVar

WAITING = -1.0
"""Yielded instead of a cost where something that is on its way has not arrived."""

T = TypeVar("T")
Units = Generator[float, None, T]
"""Yields the cost of each unit in token-layers, once it is done."""


class PassStatus(Enum):
    RUNNING = auto()
    DONE = auto()
    FAILED = auto()


class SlicedWork(ABC):
    """Call `advance` until `status` is no longer RUNNING, then `close`."""

    status: PassStatus

    def advance(self, token_layers_max: float) -> float:
        """Run units until their cost reaches `token_layers_max`, something is awaited, or all is done.

        Returns the cost spent, which overshoots by at most one unit.
        """
        spent = 0.0
        while self.status is PassStatus.RUNNING and spent < token_layers_max:
            cost = self.next_unit()
            if cost == WAITING:
                break
            spent += cost
        return spent

    @abstractmethod
    def next_unit(self) -> float:
        """Run one unit; its cost, or `WAITING`. Sets `status` when it was the last."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; idempotent."""
