"""The output of a command: results on stdout, progress on stderr, the engine's output in a log file."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kintsugi.core.errors import Unavailable

COLUMNS_MAX = 10_000
"""Width of output that is not a terminal; wider than any table."""
LINE_EVERY_S = 10.0
"""Time between two lines of a step, without a terminal."""


class Screen:
    """The output of one command."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._progress = Console(stderr=True, highlight=False, emoji=False)
        self._lock = threading.Lock()
        """Held to replace `_progress`, and by the thread that prints lines on it."""

    def _print_line(self, line: str) -> None:
        with self._lock:
            self._progress.print(f"  {line}", soft_wrap=True, markup=False)

    @contextmanager
    def step(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show `text`, a spinner and the elapsed time while the body runs, and a tick afterwards.

        Yields a function with which the body can name its current part. Without a terminal, prints lines.
        """
        if not self._progress.is_terminal:
            with self._step_lines(text) as name_part:
                yield name_part
            return
        columns = (
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
        )
        # With redirection, the engine's log handlers would keep writing to this display.
        with Progress(
            *columns, console=self._progress, redirect_stdout=False, redirect_stderr=False
        ) as progress:
            task = progress.add_task(text, total=1)
            yield lambda part: progress.update(task, description=f"{text}: {part}")
            progress.update(task, description=text, completed=1)

    @contextmanager
    def _step_lines(self, text: str) -> Iterator[Callable[[str], None]]:
        """Print a line when the body starts, every `LINE_EVERY_S` while it runs, and when it ends."""
        began_s, shown, ended = time.monotonic(), [text], threading.Event()

        def print_until_ended() -> None:
            while not ended.wait(LINE_EVERY_S):
                self._print_line(f"{shown[0]} ({time.monotonic() - began_s:.0f} s)")

        self._progress.print(f"{text} …", markup=False)
        thread = threading.Thread(target=print_until_ended, name="progress", daemon=True)
        thread.start()
        try:
            yield lambda part: shown.__setitem__(0, f"{text}: {part}")
        finally:
            ended.set()
            thread.join()
        self._print_line(f"done in {time.monotonic() - began_s:.1f} s")

    def show(self, document: Any, shown: str | Table | Callable[[Console], None]) -> None:
        """Print the command's result: `document` as JSON with `--json`; otherwise `shown`, which is a text, a
        table or a function that prints."""
        if self.as_json:
            print(json.dumps(document, indent=2, ensure_ascii=False))
        elif callable(shown):
            shown(_make_console())
        elif shown:
            _make_console().print(shown, soft_wrap=isinstance(shown, str), markup=False)

    def show_event(self, event: str, text: str, **details: Any) -> None:
        """Print one of several results immediately: `text`, or one line of JSON with `--json`."""
        if self.as_json:
            print(json.dumps({"event": event, **details}, ensure_ascii=False))
        else:
            _make_console().print(text, soft_wrap=True, markup=False)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Print a remark on stderr."""
        self._progress.print(text, soft_wrap=True, markup=False)

    @contextmanager
    def engine_log(self) -> Iterator[None]:
        """Redirect everything written to stdout and stderr, also by C libraries, to a log file.

        vLLM logs to stdout, which is reserved for the result, and libraries draw their own progress bars.
        This screen's progress stays visible. The log is deleted unless the body fails; an `Unavailable` then
        names it.
        """
        descriptor, name = tempfile.mkstemp(prefix="kintsugi-engine-", suffix=".log")
        with os.fdopen(descriptor, "w", encoding="utf-8") as log, _redirect_output(log) as terminal:
            outer = self._progress
            self._print_on(Console(file=terminal, highlight=False, emoji=False))
            try:
                yield
                os.unlink(name)
            except Unavailable as error:
                raise Unavailable(f"{error}; the engine's log is {name}") from error
            finally:
                self._print_on(outer)

    def _print_on(self, console: Console) -> None:
        with self._lock:
            self._progress = console


def _make_console() -> Console:
    """Return the console for results. Without a terminal and without `COLUMNS`, the width is not limited:
    tables are as wide as their cells, and text is not wrapped."""
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = COLUMNS_MAX
    return console


@contextmanager
def _redirect_output(log: TextIO) -> Iterator[TextIO]:
    """Point file descriptors 1 and 2 to `log`; yields a stream to the previous descriptor 2."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with os.fdopen(os.dup(saved[1]), "w", encoding="utf-8", errors="replace") as terminal:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield terminal
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, original in zip((1, 2), saved, strict=True):
                os.dup2(original, descriptor)
                os.close(original)
