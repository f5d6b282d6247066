"""Contains the failure of one pass, so that the engine continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from kintsugi.engine.worker.ranks import is_so_on_any_rank, log_defect, rank_and_size
from kintsugi.fusor.sliced import SlicedWork


class HasPass(Protocol):
    """Something with a pass."""

    @property
    def work(self) -> SlicedWork: ...


T = TypeVar("T", bound=HasPass)


def begin_on_all_ranks(task: str, begin: Callable[[], T], give_up: Callable[[str], None]) -> T | None:
    """Return what ``begin`` returns, which must contain no collective operation. If it raises on some rank,
    give up on every rank and return None. All ranks must call it together."""
    begun: T | None = None
    with contain_defects(f"begin to {task}", give_up, in_layers=False):
        begun = begin()
    if not is_so_on_any_rank(begun is None):
        return begun
    if begun is not None:
        begun.work.close()
        give_up(f"other_rank: another tensor-parallel rank could not begin to {task}")
    return None


@contextmanager
def contain_defects(task: str, give_up: Callable[[str], None], in_layers: bool = True) -> Iterator[None]:
    """Log an exception of the block and pass its reason to ``give_up``, so that a defect ends one pass and
    not the engine. If the device has no memory left, the log gets one line without a traceback.

    ``in_layers``: the block runs layers. With several tensor-parallel ranks `DecoderStack.contain` keeps a
    rank that fails in step; any other exception is raised, because the ranks would wait for each other.
    """
    try:
        yield
    except Exception as defect:
        if in_layers and rank_and_size()[1] > 1:
            raise
        give_up(log_defect(task, defect))
