"""Free space of an arena or slab, handed out as runs of whole frames.

A chunk takes one run if one is long enough, else several. So chunks of different sizes can share the space,
and only holes smaller than one frame are wasted. Cost: constant in the common case, a bounded scan of one
size class for the best fit, a walk over the largest holes when a chunk is split.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kintsugi.store.shard.tiers.leftovers import Leftovers

BLOCK_BYTES = 4096
"""Alignment that O_DIRECT needs for offsets, sizes and memory."""

_SCAN_MAX = 32
"""Maximum number of holes of one size class that a search for the best fit looks at."""


class Extent(NamedTuple):
    """`frames` frames in a row, the first at byte `offset`."""

    offset: int
    frames: int


def stride_of(frame_bytes: int) -> int:
    """Bytes from one frame to the next: the frame, padded to whole blocks."""
    return -(-frame_bytes // BLOCK_BYTES) * BLOCK_BYTES


def offsets_of(extents: Iterable[Extent], stride: int) -> tuple[int, ...]:
    """Byte offset of every frame, in order."""
    return tuple(offset + i * stride for offset, frames in extents for i in range(frames))


class ExtentAllocator:
    """Knows which bytes of `[0, capacity_bytes)` are free. Not thread-safe: its tier holds a lock."""

    def __init__(
        self, capacity_bytes: int, used: Iterable[tuple[int, int]] = (), written_bytes: int = 0
    ) -> None:
        """`used`: `(start, size)` runs in ascending order that do not overlap. `written_bytes`: so many of
        the first bytes may have been written before, whether they are used or free."""
        self.capacity_bytes = capacity_bytes // BLOCK_BYTES * BLOCK_BYTES
        self._leftovers = Leftovers(self.capacity_bytes, written_bytes)
        self.free_bytes = 0
        self._start_to_size: dict[int, int] = {}
        self._end_to_start: dict[int, int] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(64)]
        """`_bins[n]`: starts of the holes whose size has n bits, which make a size class. Dicts as ordered
        sets."""
        position = 0
        for start, size in (*used, (self.capacity_bytes, 0)):
            assert start >= position
            if start > position:
                self._add(position, start - position)
            position = start + size

    @property
    def used_bytes(self) -> int:
        return self.capacity_bytes - self.free_bytes

    def allocate(self, stride: int, frames: int) -> tuple[Extent, ...] | None:
        """Room for `frames` frames; None if they do not fit now."""
        assert stride > 0
        assert stride % BLOCK_BYTES == 0
        assert frames > 0
        if stride * frames > self.free_bytes:
            return None
        start = self._best_fit(stride * frames)
        if start is None:
            return self._allocate_scattered(stride, frames)
        self._take(start, stride * frames)
        return (Extent(start, frames),)

    def _best_fit(self, size: int) -> int | None:
        """Start of a hole of at least `size`: the smallest that a bounded scan of its size class finds, else
        any of a larger class. None if there is none."""
        same_class = self._bins[size.bit_length()]
        scanned = [start for start, _ in zip(same_class, range(_SCAN_MAX), strict=False)]
        fitting = [start for start in scanned if self._start_to_size[start] >= size]
        if fitting:
            return min(fitting, key=self._start_to_size.__getitem__)
        for larger in self._bins[size.bit_length() + 1 :]:
            if larger:
                return next(iter(larger))
        return None

    def _allocate_scattered(self, stride: int, frames: int) -> tuple[Extent, ...] | None:
        """Split the frames over several holes, the largest first. None if they do not fit."""
        plan: list[Extent] = []
        for holes in reversed(self._bins[stride.bit_length() :]):
            for start in sorted(holes, key=self._start_to_size.__getitem__, reverse=True):
                count = min(self._start_to_size[start] // stride, frames)
                if count:
                    plan.append(Extent(start, count))
                    frames -= count
                if not frames:
                    for extent in plan:
                        self._take(extent.offset, extent.frames * stride)
                    return tuple(plan)
        return None

    def free(self, extents: Iterable[Extent], stride: int) -> None:
        """Give extents back. Each joins the holes beside it."""
        for extent in extents:
            size = extent.frames * stride
            self._leftovers.note(extent.offset, size)
            self._give(extent.offset, size)

    def take_leftovers(self) -> list[tuple[int, int]]:
        """Take every free `(start, size)` run that may hold bytes of earlier chunks. End each with
        `return_wiped` or `return_unwiped`."""
        taken: list[tuple[int, int]] = []
        for hole, hole_size in sorted(self._start_to_size.items()):
            runs = self._leftovers.within(hole, hole_size)
            if not runs:
                continue
            self._remove(hole)
            position = hole
            for start, size in (*runs, (hole + hole_size, 0)):
                if start > position:
                    self._add(position, start - position)
                position = start + size
            taken += runs
        self._leftovers.clear()
        return taken

    def return_wiped(self, start: int, size: int) -> None:
        """Free a run from `take_leftovers` that holds zeros now."""
        self._give(start, size)

    def return_unwiped(self, start: int, size: int) -> None:
        """Free a run from `take_leftovers` that still holds what it held."""
        self._leftovers.note(start, size)
        self._give(start, size)

    def _give(self, start: int, size: int) -> None:
        before = self._end_to_start.get(start)
        if before is not None:
            size += self._remove(before)
            start = before
        if start + size in self._start_to_size:
            size += self._remove(start + size)
        self._add(start, size)

    def _take(self, hole: int, size: int) -> None:
        """Use the first `size` bytes of the hole that starts at `hole`."""
        hole_size = self._remove(hole)
        assert hole_size >= size
        if hole_size > size:
            self._add(hole + size, hole_size - size)

    def _add(self, start: int, size: int) -> None:
        assert start not in self._start_to_size, f"byte {start} was freed twice"
        self._start_to_size[start] = size
        self._end_to_start[start + size] = start
        self._bins[size.bit_length()][start] = None
        self.free_bytes += size

    def _remove(self, start: int) -> int:
        size = self._start_to_size.pop(start)
        del self._end_to_start[start + size]
        del self._bins[size.bit_length()][start]
        self.free_bytes -= size
        return size
