"""Finds the texts of known chunks inside a longer text.

A window is `WINDOW_CHARS` consecutive characters. The hashes of all windows of a text are computed together,
in five numpy passes. The index holds the hashes of a chunk's first and last window, its length and its
xxh3-128. Digests are compared only where a known first window occurs and the matching last window follows.

Documents of a corpus often begin alike (a path, a title, a licence). Up to `ALIKE_TRIED_MAX` chunks that
begin alike are compared one by one. If there are more, the text is searched once for their last windows, and
each range from a first to a last window is looked up by its length: the cost depends on the text, not on the
corpus.

The cost of a search is linear in the length of the text, with at most `COMPARISONS_MAX` bisections and at
most `COMPARED_CHARS_MAX` digested characters. Measured with 100,000 known chunks: 0.3 to 0.8 ms for 16,000
characters with 25 chunks, whether or not they begin alike; 2 to 8 ms for 100,000 adversarial characters.
Adding or removing a chunk takes 2 to 7 us, or 10 to 40 us among 100,000 that begin alike. Chunks with texts
shorter than a window are found only by key.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import xxhash
from numpy.typing import NDArray

from kintsugi.core.errors import Corrupted
from kintsugi.core.request import FOUND_CHARS_MIN

WINDOW_CHARS = FOUND_CHARS_MIN
"""A power of two, because the hash of a window is computed from the hashes of its halves."""
ALIKE_TRIED_MAX = 16
"""Maximum number of chunks that begin alike and are compared one by one."""
COMPARISONS_MAX = 4096
"""Maximum number of comparisons in one text. An adversarial text loses hits but costs bounded time."""
COMPARED_CHARS_MAX = 1 << 21
"""Maximum number of digested characters of one text."""

_MULTIPLIERS = (
    *(0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB),
)
"""Odd numbers: one for characters, and one for each doubling of the width. Stored hashes depend on them."""
_FILTER_SLOTS_MIN = 1 << 10
_SLOTS_PER_WINDOW = 16
"""Slots of the filter per window: about one offset in sixteen is a false positive."""

_STORED = struct.Struct("<QI16sQ")

_Known = tuple[int, int, bytes]
"""A chunk's number of characters, the hash of its last window, and its digest."""


@dataclass(frozen=True)
class ChunkText:
    """Identity of a chunk's text."""

    window: int
    """Hash of its first `WINDOW_CHARS` characters."""
    chars: int
    digest: bytes
    """xxh3-128 of its UTF-8."""
    last_window: int
    """Hash of its last `WINDOW_CHARS` characters."""

    @staticmethod
    def from_bytes(data: object) -> ChunkText:
        """Inverse of `to_bytes`. Raises `Corrupted`."""
        if not isinstance(data, bytes) or len(data) != _STORED.size:
            raise Corrupted("a known text is damaged; it is found again once a client sends it")
        return ChunkText(*_STORED.unpack(data))

    def to_bytes(self) -> bytes:
        """Return 36 bytes for the table of chunks."""
        return _STORED.pack(self.window, self.chars, self.digest, self.last_window)

    @staticmethod
    def of(text: str) -> ChunkText | None:
        """Return a text's identity; None if it is shorter than a window."""
        if len(text) < WINDOW_CHARS:
            return None
        hashes = window_hashes(text[:WINDOW_CHARS] + text[-WINDOW_CHARS:])
        return ChunkText(int(hashes[0]), len(text), _digest(text), int(hashes[-1]))


def _digest(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))


def window_hashes(text: str) -> NDArray[np.uint64]:
    """Return the hash of each window of a text: `[len(text) - WINDOW_CHARS + 1]`, or empty."""
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


class _WindowFilter:
    """A bitmap over hashes, which finds the windows of a set in a text. The caller holds the set."""

    def __init__(self) -> None:
        self._slots = np.zeros(0, np.bool_)

    def add(self, window: int, all_windows: Collection[int]) -> None:
        """Add a window. ``all_windows`` is the set, which already contains the window."""
        if len(all_windows) * _SLOTS_PER_WINDOW > len(self._slots):
            self._slots = np.zeros(max(_FILTER_SLOTS_MIN, 2 * len(self._slots)), np.bool_)
            added = np.fromiter(all_windows, np.uint64, len(all_windows))
        else:
            added = np.array([window], np.uint64)
        self._slots[self._slot(added)] = True

    def _slot(self, windows: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return windows >> np.uint64(65 - len(self._slots).bit_length())

    def find(self, windows: NDArray[np.uint64], all_windows: Container[int]) -> Iterator[tuple[int, int]]:
        """Yield the offset and hash of each window of the set in a text's `window_hashes`, in order."""
        if not len(self._slots):
            return
        offsets = np.flatnonzero(self._slots[self._slot(windows)])
        # In batches, because a caller may stop early.
        for first in range(0, len(offsets), COMPARISONS_MAX):
            some = offsets[first : first + COMPARISONS_MAX]
            for offset, window in zip(some.tolist(), windows[some].tolist(), strict=True):
                if window in all_windows:
                    yield offset, window


class TextIndex:
    """The known texts of one namespace. Not thread-safe."""

    def __init__(self) -> None:
        self._alike: dict[int, list[_Known]] = {}
        """Texts by their first window, each list sorted."""
        self._starts = _WindowFilter()
        self._last_windows: dict[int, int] = {}
        """For lists in `_alike` longer than `ALIKE_TRIED_MAX`: number of texts by their last window."""
        self._ends = _WindowFilter()

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
        """Remove a text. Its slots stay set until the filter is rebuilt, as a false positive."""
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
        """Return `[start, end)` of every known text inside `text`, by start, until a bound is reached.
        ``windows`` are the text's `window_hashes`."""
        found: list[tuple[int, int]] = []
        ends: list[tuple[int, int]] | None = None
        comparisons = compared_chars = 0
        for start, window in self._starts.find(windows, self._alike):
            alike = self._alike[window]
            if len(alike) <= ALIKE_TRIED_MAX:
                comparisons += len(alike)
                likely = _find_endings(alike, start, windows)
            else:
                if ends is None:
                    ends = self._find_ends(windows)
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

    def _find_ends(self, windows: NDArray[np.uint64]) -> list[tuple[int, int]]:
        """Return the ends and hashes of last windows in a text; at most `COMPARISONS_MAX`."""
        places = self._ends.find(windows, self._last_windows)
        return [(offset + WINDOW_CHARS, last) for offset, last in islice(places, COMPARISONS_MAX)]


def _select_last_windows(alike: Sequence[_Known], known: _Known) -> Sequence[_Known]:
    """Return the texts of `alike` whose last windows join or leave the searched windows when `known`, one of
    them, is added or removed."""
    if len(alike) <= ALIKE_TRIED_MAX:
        return ()
    return tuple(alike) if len(alike) == ALIKE_TRIED_MAX + 1 else (known,)


def _find_endings(alike: Sequence[_Known], start: int, windows: NDArray[np.uint64]) -> set[tuple[int, int]]:
    """Return lengths and last windows of the texts whose last window is at its place after ``start``."""
    return {
        (chars, last)
        for chars, last, _ in alike
        if (at := start + chars - WINDOW_CHARS) < len(windows) and last == int(windows[at])
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
    """Choose disjoint spans that together cover most, in order; among equal choices, the fewest spans."""
    ordered = sorted(spans, key=lambda span: (span[1], -span[0]))
    ends = [end for _, end in ordered]
    best: list[tuple[int, int]] = [(0, 0)]
    """The best choice among the first n spans: its number of covered characters, and minus its number of
    spans."""
    taken: list[int] = []
    """For each span that is chosen: the number of spans that end before it; -1 for other spans."""
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
