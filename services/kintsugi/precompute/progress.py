"""What a job has done so far."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from kintsugi.core.schema import STRICT
from kintsugi.precompute.sources.readers import Failure


class State(StrEnum):
    """Of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    CANCELLED = "cancelled"
    """Stopped on request; the same job again goes on."""
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self in (State.DONE, State.CANCELLED, State.FAILED)


@dataclass
class Progress:
    """Counts of one run. `chunks` are distinct; a document's own are `chunks_listed`."""

    __pydantic_config__ = STRICT

    corpus: str = ""
    fingerprint: str = ""
    state: State = State.QUEUED
    dry: bool = False
    documents: int = 0
    documents_unchanged: int = 0
    documents_failed: int = 0
    documents_vanished: int = 0
    chunks_listed: int = 0
    """With duplicates, of documents that were read in this run."""
    chunks: int = 0
    """Distinct ones asked of the store."""
    chunks_resident: int = 0
    """Found there, and so skipped."""
    chunks_missing: int = 0
    chunks_filled: int = 0
    chunks_failed: int = 0
    chunks_evicted: int = 0
    """Of those resident or filled, gone at the end: the store, or the namespace's quota, is too small."""
    chunks_invalidated: int = 0
    tokens: int = 0
    tokens_missing: int = 0
    tokens_filled: int = 0
    bytes_total: int = 0
    """KV of the distinct chunks."""
    bytes_missing: int = 0
    bytes_filled: int = 0
    bytes_free: int = 0
    """What the store says it has left, at the start."""
    tiers: dict[str, int] = field(default_factory=dict)
    """Resident chunks by the fastest tier that holds them."""
    worker_deaths: int = 0
    share_read: float = 0.0
    """Of the source, estimated from bytes of text; 1 once everything was read."""
    elapsed_s: float = 0.0
    engine_start_s: float = 0.0
    fill_s: float = 0.0
    """Since the first batch was sent, without the engines' start."""
    failures: list[Failure] = field(default_factory=list)
    """The first ones; `documents_failed` counts all."""
    error: str = ""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_filled / self.fill_s if self.fill_s > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """None as long as nothing says how long it takes."""
        waiting = self.tokens_missing - self.tokens_filled
        if self.state.is_final or self.tokens_per_s <= 0 or self.share_read <= 0:
            return None
        unread = self.tokens_missing * (1 - self.share_read) / self.share_read
        return (waiting + unread) / self.tokens_per_s

    @property
    def coverage(self) -> float:
        """Share of the distinct chunks that are in the store."""
        there = self.chunks_resident + self.chunks_filled - self.chunks_evicted
        return there / self.chunks if self.chunks else 1.0

    @property
    def fits(self) -> bool:
        return self.bytes_missing - self.bytes_filled <= self.bytes_free

    def to_mapping(self) -> dict[str, Any]:
        derived = {
            "tokens_per_s": round(self.tokens_per_s, 1),
            "seconds_left": self.seconds_left,
            "coverage": self.coverage,
            "fits": self.fits,
        }
        return {**asdict(self), "state": self.state.value, **derived}
