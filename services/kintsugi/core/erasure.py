"""What a receipt of an erasure says of one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ErasedPlace:
    """A place where something erased was."""

    place: str
    """Such as `shard 6f1c…/ssd0`, `known texts`, `ledger`, `caches`."""
    items: int
    """Copies of chunks that were there; 0 where nothing was, or where nobody counts."""
    size_bytes: int
    """0 where nobody counts."""
    gone_at_s: float
    """Unix seconds."""
