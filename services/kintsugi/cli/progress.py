"""Progress without a terminal: a line every ten seconds says what a command is doing, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LINE_EVERY_S = 10.0
"""Time between two lines."""


@dataclass
class Activity:
    """What a command is doing. Activities can be nested."""

    text: str
    began_s: float
    part: str = ""
    """The current part of the activity; empty: unknown."""

    def name_part(self, part: str) -> None:
        self.part = part

    def describe(self, now_s: float) -> str:
        """Format as `Measuring 32 questions: hkvd, ratio 0.15 (70 s)`."""
        part = f": {self.part}" if self.part else ""
        return f"{self.text}{part} ({now_s - self.began_s:.0f} s)"


class ProgressLines:
    """Prints the innermost activity every `LINE_EVERY_S`, on a thread that runs as long as the outermost."""

    def __init__(
        self,
        write: Callable[[str], None],
        clock_s: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event], bool] = lambda ended: ended.wait(LINE_EVERY_S),
    ) -> None:
        """``wait`` returns false after `LINE_EVERY_S`, or true as soon as the event is set."""
        self._write = write
        self._clock_s = clock_s
        self._wait = wait
        self._activities: list[Activity] = []
        self._lock = threading.Lock()

    @contextmanager
    def track(self, text: str) -> Iterator[Activity]:
        """Print lines about this activity while the body runs."""
        activity = Activity(text, self._clock_s())
        with self._lock:
            self._activities.append(activity)
            is_outermost = len(self._activities) == 1
        try:
            if is_outermost:
                with self._print_on_thread():
                    yield activity
            else:
                yield activity
        finally:
            with self._lock:
                self._activities.remove(activity)

    @contextmanager
    def _print_on_thread(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._print_until, args=(ended,), name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _print_until(self, ended: threading.Event) -> None:
        while not self._wait(ended):
            with self._lock:
                line = self._activities[-1].describe(self._clock_s())
            self._write(line)
