"""What a namespace may use."""

from __future__ import annotations

from dataclasses import dataclass

from kintsugi.core.settings import Settings, setting

GIB = 1 << 30


@dataclass(frozen=True)
class NamespaceLimits(Settings):
    """What a namespace may use. A limit that is not set is not enforced.

    Each gateway and each shard enforces its limits by itself.
    """

    weight: float = setting(1.0, minimum=0.01, maximum=1000)
    """Share of the engines where namespaces wait for them, relative to the weights of the others."""
    requests_per_s: float | None = setting(None, minimum=0.01)
    """Requests per second; a burst may have as many as two seconds allow."""
    tokens_per_s: float | None = setting(None, minimum=1)
    """Tokens per second, of prompts, answers and chunks that are put."""
    concurrent: int | None = setting(None, minimum=1)
    """Requests at a time, including those that wait for an engine."""
    ram_gib: float | None = setting(None, minimum=0)
    """Chunk KV in the RAM tier of each shard, in GiB."""
    ssd_gib: float | None = setting(None, minimum=0)
    """Chunk KV in the SSD tiers and the bucket of each shard, in GiB; 0: chunks are never written there."""
    together: bool = False
    """All namespaces that match the pattern share one set of these limits, instead of having one each."""


NO_LIMITS = NamespaceLimits()


def bytes_of(gib: float | None) -> float:
    """A limit in GiB as bytes; infinity where it is not set."""
    return float("inf") if gib is None else gib * GIB
