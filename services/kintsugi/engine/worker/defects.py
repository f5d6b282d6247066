"""A defect of the plugin ends one pass, and never the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from vllm.logger import init_logger

from kintsugi.engine.worker.stack import rank_and_size
from kintsugi.fusor.loader import describe_shortage

logger = init_logger(__name__)


@contextmanager
def contain_defects(task: str, give_up: Callable[[str], None]) -> Iterator[None]:
    """Log an exception raised inside and hand its reason to `give_up`, so that the engine lives on. A device
    without memory is no defect: it is told in one line, without a traceback.

    With several tensor-parallel ranks it is raised: ranks that do not stay in step would wait for each other.
    """
    try:
        yield
    except Exception as defect:
        if rank_and_size()[1] > 1:
            raise
        if isinstance(defect, torch.OutOfMemoryError):
            reason = describe_shortage(defect)
            logger.warning("Failed to %s: %s", task, reason)
        else:
            reason = f"defect: {type(defect).__name__}: {defect}"
            logger.exception("Failed to %s", task)
        give_up(reason)
