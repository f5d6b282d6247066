"""Passes cut into units of bounded cost, so that an engine can run a few between two decode steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

import torch
from torch import Tensor

from kintsugi.fusor.marks import Stopwatch
from kintsugi.fusor.stack import DecoderStack, FreshKV, Hidden, LayerBatch

WAITING = -1.0
"""Yielded instead of a cost while requested data has not arrived, or while a GPU has not finished the
pass."""

T = TypeVar("T")
Units = Generator[float, None, T]
"""Yields the cost of each unit in token-layers, after the unit has run."""


class PassStatus(Enum):
    RUNNING = auto()
    DONE = auto()
    FAILED = auto()


class SlicedWork(ABC):
    """Call `advance` until `status` is no longer RUNNING, then `close`."""

    status: PassStatus
    watch: Stopwatch
    """Runs on the device while the pass advances."""
    is_launched: bool = False
    """Whether only a GPU still has work for the pass. On a CPU, the pass then ends at once."""

    def advance(self, token_layers_max: float) -> float:
        """Run units until their cost reaches `token_layers_max`, one is `WAITING`, or the work has ended.

        Returns the cost spent, which exceeds the limit by at most one unit. A launched pass costs nothing
        more.
        """
        spent = 0.0
        if not self.is_launched:
            self.watch.start()
        try:
            while self.status is PassStatus.RUNNING and (self.is_launched or spent < token_layers_max):
                cost = self.next_unit()
                if cost == WAITING:
                    break
                spent += cost
        finally:
            self.watch.stop()
        return spent

    @abstractmethod
    def next_unit(self) -> float:
        """Run one unit. Returns its cost or `WAITING`; sets `status` after the last unit."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Idempotent."""

    def wait_for_device(self, stack: DecoderStack) -> Units[None]:
        """End the pass on `stack`: yields `WAITING` until the device has done all queued work of the pass."""
        self.is_launched = True
        self.watch.stop()
        is_done = stack.end_pass()
        while not is_done():
            yield WAITING


@dataclass(frozen=True)
class Cut:
    """Tokens cut into units and prepared for layer calls; reused across layers.

    Units ascend by position, so that a unit attends to the fresh K and V of earlier units.
    """

    units: tuple[tuple[slice, LayerBatch], ...]
    """The rows of each unit's tokens, and their batch."""

    @staticmethod
    def of(stack: DecoderStack, positions: Tensor, size: int, places: Tensor | None = None) -> Cut:
        """Cut int64 `positions` `[tokens]` of sequence 0 into units of at most `size` tokens. `places`: as
        in `DecoderStack.batch`."""
        units = [slice(start, start + size) for start in range(0, len(positions), size)]
        batches = (
            stack.batch(positions[rows], places=None if places is None else places[rows]) for rows in units
        )
        return Cut(tuple(zip(units, batches, strict=True)))


def run_in_units(
    stack: DecoderStack, layer: int, hidden: Hidden, cut: Cut, capture: bool = False
) -> Units[list[FreshKV]]:
    """Run one layer over all tokens; `hidden` becomes its output. With `capture`, return each unit's K and
    V."""
    outputs: list[Hidden] = []
    captured: list[FreshKV] = []
    for rows, batch in cut.units:
        part = hidden.take(rows)
        fresh = stack.run_layer(layer, part, batch, capture)
        outputs.append(part)
        if fresh is not None:
            captured.append(fresh)
        yield float(batch.num_tokens)
    if outputs:
        residuals = [part.residual for part in outputs if part.residual is not None]
        hidden.states = torch.cat([part.states for part in outputs])
        hidden.residual = torch.cat(residuals) if residuals else None
    return captured
