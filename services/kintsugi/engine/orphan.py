"""Ends an engine core whose parent was killed. vLLM's own would keep its memory, and its GPU's."""

from __future__ import annotations

import multiprocessing
import os
import threading

_watching = threading.Event()


def end_with_parent() -> None:
    """Watch for the end of the process that started this one, if multiprocessing did. Once per process."""
    parent = multiprocessing.parent_process()
    if parent is None or _watching.is_set():
        return
    _watching.set()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="kintsugi-parent", daemon=True).start()
