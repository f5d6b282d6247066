"""A chunk as a shard knows it, and its bytes in one tier. The shard's lock guards every field."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from kintsugi.core.layout import ChunkManifest
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.shard.tiers.extents import Extent, offsets_of

Address = tuple[str, ChunkKey]
"""Namespace and key: there is no way to name a chunk without its tenant."""


class TierRef(Protocol):
    """Where a residence lies."""

    @property
    def name(self) -> str:
        """`ram`, `ssd0`, `ssd1` …"""
        ...

    def free(self, residence: Residence) -> None:
        """Nobody reads the residence any more, and its entry has let go of it."""
        ...


@dataclass(eq=False)
class Residence:
    """The bytes of one chunk in one tier. Whoever uses them holds a reader count."""

    tier: TierRef
    address: Address
    extents: tuple[Extent, ...]
    stride: int
    readers: int = 0
    condemned: bool = False
    """Its entry has let go of it: no new readers."""
    unloaded: set[int] = field(default_factory=set)
    """Layers that a promotion has not read yet."""
    lost: str = ""
    """Why the promotion failed; empty: it did not."""
    waiters: list[Callable[[], None]] = field(default_factory=list)
    """Called once, under the lock, after the next progress of a promotion."""

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Of every frame. Only made for chunks that are read or written: a catalog names many more."""
        return offsets_of(self.extents, self.stride)

    @property
    def size_bytes(self) -> int:
        return self.stride * sum(extent.frames for extent in self.extents)

    def acquire(self) -> None:
        assert not self.condemned
        self.readers += 1

    def release(self) -> None:
        assert self.readers > 0
        self.readers -= 1
        self._free_if_unused()

    def condemn(self) -> None:
        """No longer part of its entry; the space is free as soon as the last reader is done."""
        assert not self.condemned
        self.condemned = True
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self.condemned and not self.readers:
            self.tier.free(self)

    def wake(self) -> None:
        """Tell everyone who waits for a layer to look again."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter()


@dataclass(eq=False)
class ChunkEntry:
    """One chunk."""

    manifest: ChunkManifest
    expires_at_s: float = math.inf
    """Unix seconds."""
    recompute_ms: float = 0.0
    ram: Residence | None = None
    disk: Residence | None = None
    writing: Future[None] | None = None
    """Done when the write-back on its way has ended, one way or the other."""
    leaving: bool = False
    """Its RAM copy goes as soon as the write-back has ended."""
    gone: bool = False
    """Forgotten; what still works on it throws its result away."""
    pins: int = 0
    uses: int = 0
    used_at_s: float = 0.0
    """Unix seconds: when it was put or last used."""

    @property
    def address(self) -> Address:
        return self.manifest.namespace, self.manifest.key

    @property
    def tier_name(self) -> str:
        """The fastest tier that holds it."""
        residence = self.ram or self.disk
        return residence.tier.name if residence is not None else ""
