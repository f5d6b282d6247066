"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], bool],
    missing: str = "it did not come true",
    *,
    within_s: float,
    pause_s: float = 0.01,
) -> None:
    """Ask until it is true. Fails with ``missing`` where that takes longer than ``within_s``."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, missing
        time.sleep(pause_s)
