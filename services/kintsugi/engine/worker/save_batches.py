"""Which chunks are saved together, and what a save took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kintsugi.engine.protocol import SaveJob
from kintsugi.fusor.save import SaveItem, SavePass


@dataclass
class SaveBatch:
    """Saves that requests wait for, in hand."""

    jobs: list[SaveJob]
    work: SavePass
    cancelled: set[str]
    advanced_s: float = 0.0
    """Time in slices. What the engine computes between them is not what a save costs."""

    @property
    def computed_s(self) -> float:
        device_s = self.work.watch.seconds()
        return self.advanced_s if device_s is None else device_s


def num_saves_together(waiting: Sequence[SaveJob], unit_tokens_max: int) -> int:
    """How many of the waiting chunks make the next batch, at least one; saves and audits go apart.

    As many as fit in one unit of every layer.
    """
    tokens = 0
    for index, job in enumerate(waiting):
        tokens += len(job.tokens.token_ids)
        if index and (tokens > unit_tokens_max or job.is_audit != waiting[0].is_audit):
            return index
    return len(waiting)


def first_items(jobs: Sequence[SaveJob]) -> list[SaveItem]:
    """The chunks behind the prefix, or behind prefix and context."""
    return [
        SaveItem(
            torch.tensor(job.tokens.token_ids, dtype=torch.int64),
            job.tokens.start,
            job.chunk_start,
            job.chunk_end,
        )
        for job in jobs
    ]
