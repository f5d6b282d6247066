"""Which free bytes of an arena or slab may still hold what was stored there.

Space is freed without touching it: an eviction costs nothing. An erasure wipes all free space that may hold
bytes of earlier chunks, so that what was evicted long ago is gone as well. Cost: a byte per `GRANULE_BYTES`.
"""

from __future__ import annotations

GRANULE_BYTES = 1 << 20
WINDOWS = 16


class Leftovers:
    """Marks by granule. Not thread-safe: its tier holds a lock."""

    def __init__(self, capacity_bytes: int, written_bytes: int = 0) -> None:
        """`written_bytes`: so many of the first bytes may hold something."""
        self._marks = bytearray(_granules(capacity_bytes))
        if written_bytes:
            self.note(0, min(written_bytes, capacity_bytes))

    def note(self, start: int, size: int) -> None:
        """The run is free from now on, and was written."""
        first, stop = start // GRANULE_BYTES, _granules(start + size)
        self._marks[first:stop] = b"\1" * (stop - first)

    def within(self, start: int, size: int) -> list[tuple[int, int]]:
        """The marked `(start, size)` runs of a free run, in order."""
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
        """Everything that is free now between two bounds of granules, or to the end, is being wiped; what is
        used is noted when it is freed."""
        assert not start % GRANULE_BYTES
        first, last = start // GRANULE_BYTES, min(_granules(stop), len(self._marks))
        self._marks[first:last] = bytes(last - first)


def windows_of(capacity_bytes: int) -> list[tuple[int, int]]:
    """`(start, stop)` windows to wipe one after the other, and then all at once for what came back meanwhile.
    Space that is being wiped is missing to those who look for room."""
    step = _granules(-(-capacity_bytes // WINDOWS)) * GRANULE_BYTES
    starts = range(0, capacity_bytes, step)
    return [*((start, min(start + step, capacity_bytes)) for start in starts), (0, capacity_bytes)]


def _granules(size_bytes: int) -> int:
    return -(-size_bytes // GRANULE_BYTES)
