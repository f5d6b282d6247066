"""Groups chunks into batches and decides which of them are retried or given up. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kintsugi.precompute.ledger_chunks import PendingChunk
from kintsugi.precompute.worker import FILLED, PRESENT

DEATHS_MAX = 2
"""A chunk is given up after this many workers died while it was the only chunk in their batch."""


FULL, FOREIGN = "ResourceExhausted", "ForeignChunkKey"
"""Errors that every other chunk would cause as well: the store is full, or the engine uses another chunk
space."""
AGAIN = ("Unavailable", "DeadlineExceeded", FULL, FOREIGN)
"""Errors after which a chunk is queued again. An outcome begins with the name of an error class."""


@dataclass
class ChunkBatch:
    """The chunks that a worker gets in one call."""

    chunks: list[PendingChunk]
    deaths: int = 0
    """Number of workers that died while they prefilled this batch's only chunk."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass
class Settled:
    """The chunks of a finished batch, sorted by outcome."""

    filled: list[PendingChunk] = field(default_factory=list)
    present: list[PendingChunk] = field(default_factory=list)
    failed: list[tuple[PendingChunk, str]] = field(default_factory=list)
    full: str = ""
    """The last outcome of the error `FULL`."""
    foreign: str = ""
    """The last outcome of the error `FOREIGN`."""
    retried: int = 0


class Batches:
    """Chunks that wait for a worker. The caller of `add` bounds them by `num_tokens`."""

    def __init__(self, batch_tokens: int) -> None:
        self._batch_tokens = batch_tokens
        self._waiting: deque[PendingChunk] = deque()
        self._again: deque[ChunkBatch] = deque()
        self.num_tokens = 0
        """Number of waiting tokens."""

    def add(self, chunks: Sequence[PendingChunk]) -> None:
        self._waiting.extend(chunks)
        self.num_tokens += sum(chunk.num_tokens for chunk in chunks)

    def take(self, flush: bool) -> ChunkBatch | None:
        """Take the next batch: one that is sent again, else a full one. With ``flush``, the last batch may be
        smaller."""
        if self._again:
            batch = self._again.popleft()
            self.num_tokens -= batch.num_tokens
            return batch
        if not self._waiting or (self.num_tokens < self._batch_tokens and not flush):
            return None
        chunks = [self._waiting.popleft()]
        size = chunks[0].num_tokens
        while self._waiting and size + self._waiting[0].num_tokens <= self._batch_tokens:
            chunks.append(self._waiting.popleft())
            size += chunks[-1].num_tokens
        self.num_tokens -= size
        return ChunkBatch(chunks)

    def settle_batch(self, batch: ChunkBatch, outcomes: Sequence[str]) -> Settled:
        """Sort the chunks by outcome. Chunks that the store could not accept now are queued again."""
        settled = Settled()
        again = []
        for chunk, outcome in zip(batch.chunks, outcomes, strict=True):
            if outcome == FILLED:
                settled.filled.append(chunk)
            elif outcome == PRESENT:
                settled.present.append(chunk)
            elif outcome.startswith(AGAIN):
                again.append(chunk)
                settled.full = outcome if outcome.startswith(FULL) else settled.full
                settled.foreign = outcome if outcome.startswith(FOREIGN) else settled.foreign
            else:
                settled.failed.append((chunk, outcome))
        if again:
            self.requeue(ChunkBatch(again, batch.deaths))
        settled.retried = len(again)
        return settled

    def requeue(self, batch: ChunkBatch) -> None:
        """Queue the batch again, unchanged."""
        self._again.append(batch)
        self.num_tokens += batch.num_tokens

    def split_after_death(self, batch: ChunkBatch) -> list[tuple[PendingChunk, str]]:
        """Split a batch whose worker died, and queue both halves. If one chunk kills workers, it is found
        after log2(chunks) deaths, and only this chunk is given up. Return the chunks that are given up, with
        the reason."""
        if len(batch.chunks) > 1:
            middle = len(batch.chunks) // 2
            self.requeue(ChunkBatch(batch.chunks[:middle]))
            self.requeue(ChunkBatch(batch.chunks[middle:]))
            return []
        batch.deaths += 1
        if batch.deaths < DEATHS_MAX:
            self.requeue(batch)
            return []
        return [(batch.chunks[0], f"{batch.deaths} workers died while they prefilled it")]
