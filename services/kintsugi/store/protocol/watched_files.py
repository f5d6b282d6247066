"""Files that a running process reads again when they change."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from kintsugi.core.errors import InvalidField

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""Minimum time between two checks for a change."""

Value = TypeVar("Value")
_Stamp = list[tuple[int, int, int]]


class WatchedFiles(Generic[Value]):
    """A value read from files, which is read again when one of them changes. Thread-safe."""

    def __init__(
        self, name: str, paths: Sequence[Path], read: Callable[[], Value], always_check: bool = False
    ) -> None:
        """`name` appears in the log. With `always_check`, every call of `current` checks for a change. Raises
        what `read` raises: `InvalidField` for an invalid file."""
        self._name = name
        self._paths = paths
        self._read = read
        self._always_check = always_check
        self._lock = threading.Lock()
        self._stamp = _stamp_of(paths)
        self._value = read()
        self._checked_s = time.monotonic()

    def current(self) -> Value:
        """Return the newest valid value. An invalid file is logged once, and the previous value stays."""
        with self._lock:
            if self._always_check or time.monotonic() - self._checked_s >= CHECK_S:
                self._checked_s = time.monotonic()
                stamp = _stamp_of(self._paths)
                if stamp != self._stamp:
                    self._stamp = stamp
                    try:
                        self._value = self._read()
                    except InvalidField as error:
                        log.warning(
                            "the %s is invalid; its previous content stays in use: %s", self._name, error
                        )
            return self._value

    def read_now(self) -> None:
        """Read the files without waiting for the next check. Raises what `read` raises."""
        with self._lock:
            self._stamp = _stamp_of(self._paths)
            self._value = self._read()


def _stamp_of(paths: Sequence[Path]) -> _Stamp:
    """Return a value that changes whenever a file or its mode does; zeros for a missing file."""
    return [_stamp_of_file(path) for path in paths]


def _stamp_of_file(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ctime_ns, found.st_ino, found.st_size
