"""Passes cut into units of bounded cost, so that an engine can run a few between two decode steps.

The host launches work ahead of a GPU: its clock shows when work was launched, and timing events in the GPU's
queue (`Mark`) show when it was done. On a CPU nothing is queued, and the host's clock shows both.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

import torch
from torch import Tensor

from kintsugi.fusor.stack import DecoderStack, FreshKV, Hidden, LayerBatch

WAITING = -1.0
"""Yielded instead of a cost while requested data has not arrived, or while a GPU has not finished the
pass."""

T = TypeVar("T")
Units = Generator[float, None, T]
"""Yields the cost of each unit in token-layers, after the unit has run."""


@dataclass(frozen=True)
class Mark:
    """A position in the queue of a GPU's current stream."""

    event: torch.cuda.Event
    queued_s: float
    """When the host queued it, by `time.perf_counter`."""

    @staticmethod
    def of(device: torch.device) -> Mark:
        """Create a mark after all work queued so far."""
        queued_s = time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return Mark(event, queued_s)

    @property
    def is_reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds_until(self, later: Mark) -> float:
        """Return the device's time from this mark to `later`. Both must have been reached."""
        seconds: float = self.event.elapsed_time(later.event) / 1e3
        return seconds


def reached_s(marks: Sequence[Mark]) -> list[float]:
    """Return when the device reached each mark, by `time.perf_counter`. All must have been reached.

    Events show only the time between marks. A mark is reached after it is queued, and at once if the device
    is idle. So this returns the earliest times at which no mark is reached before it is queued. They are too
    early only if the device was busy at every mark.
    """
    since_first = [marks[0].seconds_until(mark) for mark in marks]
    first_s = max(mark.queued_s - since for mark, since in zip(marks, since_first, strict=True))
    return [first_s + since for since in since_first]


class Stopwatch:
    """Sums a GPU's time for the work that is queued while the watch runs. On a CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._began: Mark | None = None
        self._laps: deque[tuple[Mark, Mark]] = deque()
        """The laps that the device had not finished at the last `stop`."""
        self._seconds = 0.0

    def start(self) -> None:
        if self._device is not None:
            self._began = Mark.of(self._device)

    def stop(self) -> None:
        """Does nothing if the watch does not run."""
        if self._device is not None and self._began is not None:
            self._laps.append((self._began, Mark.of(self._device)))
            self._began = None
            self._add_finished()

    def seconds(self) -> float | None:
        """Return the sum of the laps that the device has finished; None on a CPU."""
        self._add_finished()
        return None if self._device is None else self._seconds

    def _add_finished(self) -> None:
        while self._laps and self._laps[0][1].is_reached:
            began, ended = self._laps.popleft()
            self._seconds += began.seconds_until(ended)


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

        Returns the cost spent, which exceeds the limit by at most one unit. Once all work is
        launched, the cost is 0.
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

    def join() -> None:
        residuals = [part.residual for part in outputs if part.residual is not None]
        hidden.states = torch.cat([part.states for part in outputs])
        hidden.residual = torch.cat(residuals) if residuals else None

    if outputs:
        stack.contain(join, lambda: None)
    return captured
