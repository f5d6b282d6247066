"""Which free bytes of an arena or slab may still hold what was stored there.

Space is freed without touching it: an eviction costs nothing. An erasure wipes all free space that may hold
bytes of earlier chunks, so that what was evicted long ago is gone as well. Cost: a byte per `GRANULE_BYTES`.
"""

from __future__ import annotations

GRANULE_BYTES = 1 << 20


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

    def clear(self) -> None:
        """Everything that is free now is being wiped; what is used is noted when it is freed."""
        self._marks = bytearray(len(self._marks))


def _granules(size_bytes: int) -> int:
    return -(-size_bytes // GRANULE_BYTES)
