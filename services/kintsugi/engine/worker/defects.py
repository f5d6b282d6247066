"""A defect of the plugin ends one pass, and never the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm.logger import init_logger

from kintsugi.engine.worker.stack import rank_and_size

logger = init_logger(__name__)


@contextmanager
def contain_defects(task: str, give_up: Callable[[str], None]) -> Iterator[None]:
    """Log an exception raised inside and hand its reason to `give_up`, so that the engine lives on.

    With several tensor-parallel ranks it is raised: ranks that do not stay in step would wait for each other.
    """
    try:
        yield
    except Exception as defect:
        if rank_and_size()[1] > 1:
            raise
        logger.exception("Failed to %s", task)
        give_up(f"defect: {type(defect).__name__}: {defect}")
