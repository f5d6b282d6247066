"""Contains the failure of one pass, so that the engine continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kintsugi.engine.worker.ranks import log_defect
from kintsugi.engine.worker.stack import rank_and_size


@contextmanager
def contain_defects(task: str, give_up: Callable[[str], None], in_layers: bool = True) -> Iterator[None]:
    """Log an exception of the block and pass its reason to ``give_up``, so that a defect ends one pass and
    not the engine. If the device has no memory left, the log gets one line without a traceback.

    ``in_layers``: the block runs layers, and `worker.ranks` contains the failures of layer calls.
    Any other exception is raised if there are several tensor-parallel ranks: ranks that do not stay in step
    would wait for each other.
    """
    try:
        yield
    except Exception as defect:
        if in_layers and rank_and_size()[1] > 1:
            raise
        give_up(log_defect(task, defect))
