"""Which chunks are prefilled together, and what is done with those that were not: pure decisions."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kintsugi.precompute.ledger import PendingChunk
from kintsugi.precompute.worker import FILLED, PRESENT

DEATHS_MAX = 2
"""A chunk that was alone in its batch when so many workers died is not tried again."""


class OutcomeVerdict(Enum):
    """What an outcome means for the job."""

    FILLED = "filled"
    PRESENT = "present"
    RETRY = "retry"
    """The store did not answer: the chunk is sent again once it does."""
    FULL = "full"
    """The store takes no more: so it would be with every other chunk."""
    FOREIGN = "foreign"
    """The engine computes for another chunk space: so with every other chunk."""
    FAILED = "failed"
    """This chunk only."""


_REASONS = (
    (("Unavailable", "DeadlineExceeded"), OutcomeVerdict.RETRY),
    (("ResourceExhausted",), OutcomeVerdict.FULL),
    (("ForeignChunkKey",), OutcomeVerdict.FOREIGN),
)


def verdict_on(outcome: str) -> OutcomeVerdict:
    """By the outcome's first word, the error class that the engine names."""
    if outcome in (FILLED, PRESENT):
        return OutcomeVerdict(outcome)
    return next((verdict for words, verdict in _REASONS if outcome.startswith(words)), OutcomeVerdict.FAILED)


@dataclass
class ChunkBatch:
    """What a worker gets at a time."""

    chunks: list[PendingChunk]
    deaths: int = 0
    """Workers that died with it while it had one chunk."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass
class Settled:
    """A finished batch, taken apart."""

    filled: list[PendingChunk] = field(default_factory=list)
    present: list[PendingChunk] = field(default_factory=list)
    failed: list[tuple[PendingChunk, str]] = field(default_factory=list)
    full: str = ""
    foreign: str = ""
    retried: int = 0


class Batches:
    """Chunks that wait for a worker. Bounded by whoever adds: see `num_tokens`."""

    def __init__(self, batch_tokens: int) -> None:
        self._batch_tokens = batch_tokens
        self._waiting: deque[PendingChunk] = deque()
        self._again: deque[ChunkBatch] = deque()
        self.num_tokens = 0
        """Waiting now."""

    def add(self, chunks: Sequence[PendingChunk]) -> None:
        self._waiting.extend(chunks)
        self.num_tokens += sum(chunk.num_tokens for chunk in chunks)

    def take(self, flush: bool) -> ChunkBatch | None:
        """The next batch: one that has to be sent again, else a full one, with ``flush`` whatever is left."""
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

    def finished(self, batch: ChunkBatch, outcomes: Sequence[str]) -> Settled:
        """Sort the outcomes; chunks that the store could not take now wait again."""
        settled = Settled()
        again = []
        for chunk, outcome in zip(batch.chunks, outcomes, strict=True):
            verdict = verdict_on(outcome)
            if verdict is OutcomeVerdict.FILLED:
                settled.filled.append(chunk)
            elif verdict is OutcomeVerdict.PRESENT:
                settled.present.append(chunk)
            elif verdict is OutcomeVerdict.FAILED:
                settled.failed.append((chunk, outcome))
            else:
                again.append(chunk)
                settled.full = outcome if verdict is OutcomeVerdict.FULL else settled.full
                settled.foreign = outcome if verdict is OutcomeVerdict.FOREIGN else settled.foreign
        if again:
            self._put_back(ChunkBatch(again, batch.deaths))
        settled.retried = len(again)
        return settled

    def returned(self, batch: ChunkBatch) -> None:
        """The batch was not tried: it waits again, as it is."""
        self._put_back(batch)

    def split_after_death(self, batch: ChunkBatch) -> list[tuple[PendingChunk, str]]:
        """The worker died with it. Halves wait again, so that one deadly chunk is found in log2 deaths and
        costs only itself; what is given up."""
        if len(batch.chunks) > 1:
            middle = len(batch.chunks) // 2
            self._put_back(ChunkBatch(batch.chunks[:middle]))
            self._put_back(ChunkBatch(batch.chunks[middle:]))
            return []
        batch.deaths += 1
        if batch.deaths < DEATHS_MAX:
            self._put_back(batch)
            return []
        return [(batch.chunks[0], f"{batch.deaths} workers died while they prefilled it")]

    def _put_back(self, batch: ChunkBatch) -> None:
        self._again.append(batch)
        self.num_tokens += batch.num_tokens
