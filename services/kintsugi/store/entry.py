"""A chunk as a shard knows it, and its bytes in one tier."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kintsugi.core.layout import ChunkManifest
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.extents import Extent, offsets_of

Address = tuple[str, ChunkKey]
"""Namespace and key: there is no way to name a chunk without its tenant."""


@dataclass(eq=False)
class Residence:
    """The bytes of one chunk in one tier. Whoever reads them holds a reader count; the shard's lock
    guards every field."""

    extents: tuple[Extent, ...]
    stride: int
    give_back: Callable[[Residence], None]
    """Frees the extents; called once, when the residence is condemned and nobody reads it."""
    readers: int = 0
    condemned: bool = False
    """Unlinked from its entry: no new readers."""
    offsets: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.offsets = offsets_of(self.extents, self.stride)

    @property
    def size_bytes(self) -> int:
        return self.stride * len(self.offsets)

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
            self.give_back(self)


@dataclass(eq=False)
class Entry:
    """One visible chunk."""

    manifest: ChunkManifest
    expires_at_s: float = math.inf
    """Unix seconds."""
    recompute_ms: float = 0.0
    ram: Residence | None = None
    pins: int = 0

    @property
    def address(self) -> Address:
        return self.manifest.namespace, self.manifest.key
