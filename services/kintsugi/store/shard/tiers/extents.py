"""Free space of an arena or slab, allocated as extents of whole frames.

A chunk takes one extent if a hole is long enough, else several. Chunks of different sizes can therefore share
the space, and only holes smaller than a frame are wasted. Cost: constant in the common case; a bounded scan
of one size class for the best fit; a walk over the largest holes if a chunk is split.

Freeing space leaves its bytes: an eviction costs nothing. An erasure wipes all free space that may hold bytes
of earlier chunks (`Leftovers`), so that chunks evicted long ago are wiped, too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, repeat
from typing import NamedTuple

BLOCK_BYTES = 4096
"""Alignment that O_DIRECT needs for offsets, sizes and memory."""

GRANULE_BYTES = 1 << 20
WINDOWS = 16
_SCAN_MAX = 32
"""Maximum number of holes of one size class that the search for the best fit examines."""


class Extent(NamedTuple):
    """`size_bytes` bytes from `offset` on: adjacent frames, each padded to whole blocks."""

    offset: int
    size_bytes: int


class Run(NamedTuple):
    """`frames` adjacent frames, `stride` bytes from one to the next."""

    stride: int
    frames: int


def stride_of(frame_bytes: int) -> int:
    """Return the bytes of a frame padded to whole blocks."""
    return -(-frame_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True)
class Strides:
    """The padded sizes of a chunk's frames, in order."""

    runs: tuple[Run, ...]

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(frame_runs: tuple[tuple[int, int], ...]) -> Strides:
        """Return the strides of `ChunkManifest.frame_runs`. Chunks of one length and model share the
        result."""
        return Strides(tuple(Run(stride_of(size), frames) for size, frames in frame_runs))

    @cached_property
    def each(self) -> tuple[int, ...]:
        """The stride of every frame."""
        return tuple(chain.from_iterable(repeat(stride, frames) for stride, frames in self.runs))

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Bytes before each frame, and the bytes of all frames."""
        return tuple(accumulate(self.each, initial=0))

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all frames."""
        return sum(stride * frames for stride, frames in self.runs)

    def stop_within(self, start: int, limit_bytes: int) -> int:
        """Return the end of the frames from `start` on that fit `limit_bytes`; at least one frame."""
        return max(bisect_right(self._starts, self._starts[start] + limit_bytes) - 1, start + 1)

    def offsets_in(self, extents: Iterable[Extent]) -> tuple[int, ...]:
        """Return the byte offset of every frame in extents that hold the frames in order."""
        offsets: list[int] = []
        strides = iter(self.each)
        for offset, size_bytes in extents:
            end = offset + size_bytes
            while offset < end:
                offsets.append(offset)
                offset += next(strides)
        return tuple(offsets)

    def fill(self, extents: Iterable[Extent]) -> bool:
        """Return whether the frames fill the extents in order, and no frame is cut."""
        left: Sequence[Run] = self.runs
        for extent in extents:
            taken, left = _cut(left, extent.size_bytes)
            if taken != extent.size_bytes:
                return False
        return not left


def _cut(runs: Sequence[Run], room_bytes: int) -> tuple[int, Sequence[Run]]:
    """Return the bytes of the first frames that fit, and the remaining runs."""
    taken = 0
    for index, (stride, frames) in enumerate(runs):
        count = min(frames, (room_bytes - taken) // stride)
        taken += count * stride
        if count < frames:
            return taken, (Run(stride, frames - count), *runs[index + 1 :])
    return taken, ()


class Leftovers:
    """Which free bytes may still hold earlier chunks: a mark per `GRANULE_BYTES`. Not thread-safe."""

    def __init__(self, capacity_bytes: int, written_bytes: int = 0) -> None:
        """`written_bytes`: how many of the first bytes may have been written before."""
        self._marks = bytearray(_granules(capacity_bytes))
        if written_bytes:
            self.note(0, min(written_bytes, capacity_bytes))

    def note(self, start: int, size: int) -> None:
        """Note that a run that was written is free from now on."""
        first, stop = start // GRANULE_BYTES, _granules(start + size)
        self._marks[first:stop] = b"\1" * (stop - first)

    def within(self, start: int, size: int) -> list[tuple[int, int]]:
        """Return the marked `(start, size)` runs of a free run, in order."""
        runs: list[tuple[int, int]] = []
        end = start + size
        last = _granules(end)
        first = self._marks.find(1, start // GRANULE_BYTES, last)
        while first >= 0:
            stop = self._marks.find(0, first, last)
            stop = last if stop < 0 else stop
            begin = max(start, first * GRANULE_BYTES)
            runs.append((begin, min(end, stop * GRANULE_BYTES) - begin))
            first = self._marks.find(1, stop, last)
        return runs

    def clear(self, start: int, stop: int) -> None:
        """Clear the marks between two granule bounds, or to the end: the free space there is being wiped.
        Used space is marked when it is freed."""
        assert not start % GRANULE_BYTES
        first, last = start // GRANULE_BYTES, min(_granules(stop), len(self._marks))
        self._marks[first:last] = bytes(last - first)


def windows_of(capacity_bytes: int) -> list[tuple[int, int]]:
    """Return `(start, stop)` windows to wipe one after the other. The last one is the whole range, for space
    that was freed meanwhile. The others are small, because space cannot be allocated while it is wiped."""
    step = _granules(-(-capacity_bytes // WINDOWS)) * GRANULE_BYTES
    starts = range(0, capacity_bytes, step)
    return [*((start, min(start + step, capacity_bytes)) for start in starts), (0, capacity_bytes)]


def _granules(size_bytes: int) -> int:
    return -(-size_bytes // GRANULE_BYTES)


class ExtentAllocator:
    """Allocates `[0, capacity_bytes)`. Not thread-safe: its tier holds a lock."""

    def __init__(
        self, capacity_bytes: int, used: Iterable[tuple[int, int]] = (), written_bytes: int = 0
    ) -> None:
        """`used`: `(start, size)` runs in ascending order that do not overlap. `written_bytes`: how many of
        the first bytes may have been written before, used or free."""
        self.capacity_bytes = capacity_bytes // BLOCK_BYTES * BLOCK_BYTES
        self._leftovers = Leftovers(self.capacity_bytes, written_bytes)
        self.free_bytes = 0
        self._start_to_size: dict[int, int] = {}
        self._end_to_start: dict[int, int] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(64)]
        """`_bins[n]`: starts of the holes whose size has n bits (a size class). Dicts serve as ordered
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

    def allocate(self, strides: Strides) -> tuple[Extent, ...] | None:
        """Allocate room for frames; None if they do not fit now."""
        size = strides.size_bytes
        assert size > 0
        assert size % BLOCK_BYTES == 0
        if size > self.free_bytes:
            return None
        start = self._best_fit(size)
        if start is None:
            return self._allocate_scattered(strides)
        self._take(start, size)
        return (Extent(start, size),)

    def _best_fit(self, size: int) -> int | None:
        """Find the start of a hole of at least `size`: the smallest in a bounded scan of its size class, else
        any of a larger class. None if there is no such hole."""
        same_class = self._bins[size.bit_length()]
        scanned = [start for start, _ in zip(same_class, range(_SCAN_MAX), strict=False)]
        fitting = [start for start in scanned if self._start_to_size[start] >= size]
        if fitting:
            return min(fitting, key=self._start_to_size.__getitem__)
        for larger in self._bins[size.bit_length() + 1 :]:
            if larger:
                return next(iter(larger))
        return None

    def _allocate_scattered(self, strides: Strides) -> tuple[Extent, ...] | None:
        """Split the frames over several holes, largest first. None if they do not fit."""
        plan: list[Extent] = []
        left: Sequence[Run] = strides.runs
        smallest = min(stride for stride, _ in left)
        for holes in reversed(self._bins[smallest.bit_length() :]):
            for start in sorted(holes, key=self._start_to_size.__getitem__, reverse=True):
                taken, left = _cut(left, self._start_to_size[start])
                if taken:
                    plan.append(Extent(start, taken))
                if not left:
                    for extent in plan:
                        self._take(*extent)
                    return tuple(plan)
        return None

    def free(self, extents: Iterable[Extent]) -> None:
        """Free extents. Each joins the adjacent holes."""
        for extent in extents:
            self._leftovers.note(*extent)
            self._give(*extent)

    def take_leftovers(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Take every free `(start, size)` run in a window of `windows_of` that may hold bytes of earlier
        chunks. Return each with `return_wiped` or `return_unwiped`."""
        taken: list[tuple[int, int]] = []
        for hole, hole_size in sorted(self._start_to_size.items()):
            first, last = max(hole, start), min(hole + hole_size, stop)
            runs = self._leftovers.within(first, last - first) if first < last else []
            if not runs:
                continue
            self._remove(hole)
            position = hole
            for begin, size in (*runs, (hole + hole_size, 0)):
                if begin > position:
                    self._add(position, begin - position)
                position = begin + size
            taken += runs
        self._leftovers.clear(start, stop)
        return taken

    def return_wiped(self, start: int, size: int) -> None:
        """Free a run from `take_leftovers` that now holds zeros."""
        self._give(start, size)

    def return_unwiped(self, start: int, size: int) -> None:
        """Free a run from `take_leftovers` that was not wiped."""
        self.note_unwiped(start, size)
        self._give(start, size)

    def note_unwiped(self, start: int, size: int) -> None:
        """Note that the free parts of a run given to `return_wiped` may hold old bytes after all."""
        self._leftovers.note(start, size)

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
