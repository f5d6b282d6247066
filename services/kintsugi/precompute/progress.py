"""The state and counts of a job."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from kintsugi.precompute.sources.readers import Failure


class State(StrEnum):
    """The state of a job."""

    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    """Stopped on request; a new run of the same job continues it."""
    FAILED = "failed"


@dataclass
class Progress:
    """Counts of one run."""

    corpus: str = ""
    fingerprint: str = ""
    state: State = State.RUNNING
    dry: bool = False
    documents: int = 0
    documents_unchanged: int = 0
    documents_failed: int = 0
    documents_vanished: int = 0
    files_left_out: int = 0
    """Files that are not documents: hidden, blank, or of unknown suffix and not text."""
    chunks_listed: int = 0
    """Chunks of the documents that this run read, including duplicates."""
    chunks: int = 0
    """Distinct chunks that were looked up in the store."""
    chunks_resident: int = 0
    """Chunks that are skipped because the store has them."""
    chunks_missing: int = 0
    chunks_filled: int = 0
    chunks_failed: int = 0
    chunks_evicted: int = 0
    """Resident or filled chunks that were missing at the end: the store or the namespace's limit is too
    small."""
    chunks_invalidated: int = 0
    tokens: int = 0
    tokens_missing: int = 0
    tokens_filled: int = 0
    bytes_total: int = 0
    """KV bytes of the distinct chunks."""
    bytes_missing: int = 0
    bytes_filled: int = 0
    bytes_free: int = 0
    """Free bytes of the store at the start."""
    tiers: dict[str, int] = field(default_factory=dict)
    """Resident chunks by the fastest tier that holds them."""
    worker_deaths: int = 0
    share_read: float = 0.0
    """Share of the source that was read, estimated from the length of its texts; 1 at the end."""
    elapsed_s: float = 0.0
    engine_start_s: float = 0.0
    fill_s: float = 0.0
    """Seconds since the first batch was sent, without the start of the engines."""
    failures: list[Failure] = field(default_factory=list)
    """The first failures; `documents_failed` counts all."""
    left_out: list[Failure] = field(default_factory=list)
    """The first left-out files with the reasons; `files_left_out` counts all."""
    error: str = ""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_filled / self.fill_s if self.fill_s > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds that are left; None before an estimate is possible."""
        waiting = self.tokens_missing - self.tokens_filled
        if self.state is not State.RUNNING or self.tokens_per_s <= 0 or self.share_read <= 0:
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
        return {
            **asdict(self),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "seconds_left": self.seconds_left,
            "coverage": self.coverage,
            "fits": self.fits,
        }
