"""Measures when a GPU executes the work that the host has queued.

The host launches work ahead of the device: its clock shows when work was launched, and timing events in the
device's queue show when it was done. On a CPU nothing is queued, and the host's clock shows both.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch


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
