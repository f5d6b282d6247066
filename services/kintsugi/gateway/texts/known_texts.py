"""Texts of chunks that are known, and where they are inside a longer text.

Windows of `WINDOW_CHARS` characters hash to numbers that can be computed for every offset of a text at once
(numpy, five passes). Kept are the hashes of a chunk's first and last window, its length and xxh3-128. Where a
known first window stands, a chunk that ends with its own last window is compared by its digest.

Documents of a corpus often begin alike (a path, a title, a licence). Up to `ALIKE_TRIED_MAX` such chunks are
each tried. Where there are more, the text is looked through once for their last windows, and what lies
between a first and a last one is looked up by length: that costs what the text holds, not what the corpus
has.

Cost of a text, however many chunks are known and however many of them begin or end alike: linear in its
length, at most `COMPARISONS_MAX` look-ups, each a bisection, and at most `COMPARED_CHARS_MAX` characters
digested. Measured with 100,000 known chunks: 0.3 to 0.8 ms for 16,000 characters with 25 of them, whether all
begin alike or none do; 2 to 8 ms for 100,000 characters made to cost. Adding or removing one bisects a list
of those that begin alike and moves what stands behind it: 10 to 40 us among 100,000, else 2 to 7. Chunks
with shorter texts are found by key alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import xxhash
from numpy.typing import NDArray

from kintsugi.core.request import FOUND_CHARS_MIN

WINDOW_CHARS = FOUND_CHARS_MIN
"""A power of two: the hash of a window is made of those of its halves."""
ALIKE_TRIED_MAX = 16
"""Chunks that begin alike, up to which each of them is tried."""
COMPARISONS_MAX = 4096
"""Per text. A text made to match everywhere loses hits, not our time."""
COMPARED_CHARS_MAX = 1 << 21

_MULTIPLIERS = (
    *(0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB),
)
"""Odd; one for characters and one for each doubling. Hashes on disk depend on them."""
_FILTER_SLOTS_MIN = 1 << 10
_SLOTS_PER_WINDOW = 16
"""One offset in sixteen is looked at in vain."""
_UNKNOWN = 0
"""In place of the last window's hash, for what an older version kept: it is found while few begin alike."""

_Known = tuple[int, int, bytes]
"""Of a chunk: characters, hash of the last window, digest."""


@dataclass(frozen=True)
class ChunkText:
    """What is kept of a chunk's text."""

    window: int
    """Hash of its first `WINDOW_CHARS` characters."""
    chars: int
    digest: bytes
    """xxh3-128 of its UTF-8."""
    last_window: int = _UNKNOWN
    """Hash of its last `WINDOW_CHARS` characters."""

    @staticmethod
    def of(text: str) -> ChunkText | None:
        """None for a text that is too short to be found."""
        if len(text) < WINDOW_CHARS:
            return None
        hashes = window_hashes(text[:WINDOW_CHARS] + text[-WINDOW_CHARS:])
        return ChunkText(int(hashes[0]), len(text), _digest(text), int(hashes[-1]))


def _digest(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))


def window_hashes(text: str) -> NDArray[np.uint64]:
    """The hash of each window of `WINDOW_CHARS` characters: `[len(text) - WINDOW_CHARS + 1]`, or empty."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    hashes: NDArray[np.uint64] = points * np.uint64(_MULTIPLIERS[0])
    width = 1
    for multiplier in _MULTIPLIERS[1:]:
        if len(hashes) <= width:
            return np.zeros(0, np.uint64)
        hashes = hashes[:-width] * np.uint64(multiplier) + hashes[width:]
        width *= 2
    assert width == WINDOW_CHARS
    return hashes


class _Places:
    """Where windows of a set stand in a text. It does not hold the set."""

    def __init__(self) -> None:
        self._slots = np.zeros(0, np.bool_)

    def add(self, window: int, all_windows: Collection[int]) -> None:
        """One of a set comes; ``all_windows`` is the set, with it."""
        if len(all_windows) * _SLOTS_PER_WINDOW > len(self._slots):
            self._slots = np.zeros(max(_FILTER_SLOTS_MIN, 2 * len(self._slots)), np.bool_)
            added = np.fromiter(all_windows, np.uint64, len(all_windows))
        else:
            added = np.array([window], np.uint64)
        self._slots[self._slot(added)] = True

    def _slot(self, windows: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return windows >> np.uint64(65 - len(self._slots).bit_length())

    def of(self, windows: NDArray[np.uint64], all_windows: Container[int]) -> Iterator[tuple[int, int]]:
        """Offset and hash of each in a text's `window_hashes`, in order."""
        if not len(self._slots):
            return
        offsets = np.flatnonzero(self._slots[self._slot(windows)])
        for first in range(0, len(offsets), COMPARISONS_MAX):  # who asks for some does not pay for all
            some = offsets[first : first + COMPARISONS_MAX]
            for offset, window in zip(some.tolist(), windows[some].tolist(), strict=True):
                if window in all_windows:
                    yield offset, window


class TextIndex:
    """Known texts of one namespace. Not thread-safe."""

    def __init__(self) -> None:
        self._alike: dict[int, list[_Known]] = {}
        """By first window; in order."""
        self._starts = _Places()
        self._last_windows: dict[int, int] = {}
        """How many texts have it, of those that more than `ALIKE_TRIED_MAX` begin alike with."""
        self._ends = _Places()

    def __len__(self) -> int:
        return len(self._alike)

    def add(self, text: ChunkText) -> None:
        alike = self._alike.setdefault(text.window, [])
        known = (text.chars, text.last_window, text.digest)
        if _holds(alike, known):
            return
        insort(alike, known)
        self._starts.add(text.window, self._alike)
        for _, last, _ in _select_last_windows(alike, known):
            self._last_windows[last] = self._last_windows.get(last, 0) + 1
            self._ends.add(last, self._last_windows)

    def remove(self, text: ChunkText) -> None:
        """Its slots stay set until the filter is made anew: one more offset is looked at in vain."""
        alike = self._alike.get(text.window, [])
        known = (text.chars, text.last_window, text.digest)
        if not _holds(alike, known):
            return
        for _, last, _ in _select_last_windows(alike, known):
            self._last_windows[last] -= 1
            if not self._last_windows[last]:
                del self._last_windows[last]
        del alike[bisect_left(alike, known)]
        if not alike:
            del self._alike[text.window]

    def matches(self, text: str, windows: NDArray[np.uint64]) -> list[tuple[int, int]]:
        """Every known text inside `text`, whose `window_hashes` are given, that the bounds allow to be
        compared, by start."""
        found: list[tuple[int, int]] = []
        ends: list[tuple[int, int]] | None = None
        comparisons = compared_chars = 0
        for start, window in self._starts.of(windows, self._alike):
            alike = self._alike[window]
            if len(alike) <= ALIKE_TRIED_MAX:
                comparisons += len(alike)
                likely = _find_endings(alike, start, windows)
            else:
                if ends is None:
                    ends = self._ends_in(windows)
                near = _within(ends, start + alike[0][0], start + alike[-1][0])
                comparisons += 1 + len(near)
                likely = {(end - start, last) for end, last in near if _has(alike, end - start, last)}
            if comparisons > COMPARISONS_MAX:
                return found
            for chars, last in likely:
                compared_chars += chars
                if compared_chars > COMPARED_CHARS_MAX:
                    return found
                if _holds(alike, (chars, last, _digest(text[start : start + chars]))):
                    found.append((start, start + chars))
        return found

    def _ends_in(self, windows: NDArray[np.uint64]) -> list[tuple[int, int]]:
        """Where last windows that are looked for end in a text, and their hashes: so many as are compared."""
        places = self._ends.of(windows, self._last_windows)
        return [(offset + WINDOW_CHARS, last) for offset, last in islice(places, COMPARISONS_MAX)]


def _select_last_windows(alike: Sequence[_Known], known: _Known) -> Sequence[_Known]:
    """Those whose last windows are looked for from now on, or no more, as `known`, one of them, comes or
    goes."""
    if len(alike) <= ALIKE_TRIED_MAX:
        return ()
    return tuple(alike) if len(alike) == ALIKE_TRIED_MAX + 1 else (known,)


def _find_endings(alike: Sequence[_Known], start: int, windows: NDArray[np.uint64]) -> set[tuple[int, int]]:
    """Lengths and last windows of those that would end in a text as they do."""
    return {
        (chars, last)
        for chars, last, _ in alike
        if (at := start + chars - WINDOW_CHARS) < len(windows) and last in (_UNKNOWN, int(windows[at]))
    }


def _within(ends: Sequence[tuple[int, int]], first: int, last: int) -> Sequence[tuple[int, int]]:
    return ends[bisect_left(ends, (first, 0)) : bisect_left(ends, (last + 1, 0))]


def _has(alike: Sequence[_Known], chars: int, last: int) -> bool:
    at = bisect_left(alike, (chars, last, b""))
    return at < len(alike) and alike[at][:2] == (chars, last)


def _holds(alike: Sequence[_Known], known: _Known) -> bool:
    at = bisect_left(alike, known)
    return at < len(alike) and alike[at] == known


def disjoint(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of spans that may overlap, those that together cover most, in order; of equals the fewer."""
    ordered = sorted(spans, key=lambda span: (span[1], -span[0]))
    ends = [end for _, end in ordered]
    best: list[tuple[int, int]] = [(0, 0)]
    """Characters covered and minus the number of spans, by the first so many spans."""
    taken: list[int] = []
    """The span's predecessors count where it is taken, -1 where it is left out."""
    for index, (start, end) in enumerate(ordered):
        before = bisect_right(ends, start, 0, index)
        with_it = (best[before][0] + end - start, best[before][1] - 1)
        taken.append(before if with_it > best[index] else -1)
        best.append(max(with_it, best[index]))
    chosen, index = [], len(ordered)
    while index:
        if taken[index - 1] < 0:
            index -= 1
        else:
            chosen.append(ordered[index - 1])
            index = taken[index - 1]
    return chosen[::-1]
