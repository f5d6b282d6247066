"""Texts of chunks that are known, and where they are inside a longer text.

The first `WINDOW_CHARS` characters of a chunk hash to a number that can be computed for every offset of a
text at once (numpy, five passes). Offsets whose number is known are compared by length and
xxh3-128 of the whole chunk. Cost for 20,000 characters and 100,000 known chunks: below a millisecond (0.5 ms
measured). Chunks with shorter texts are found by key alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from kintsugi.core.request import FOUND_CHARS_MIN

WINDOW_CHARS = FOUND_CHARS_MIN
"""A power of two: the hash of a window is made of those of its halves."""
CANDIDATES_MAX = 16
"""Chunks that begin alike, the longest first: a bound on what a hostile corpus can make us try."""
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


@dataclass(frozen=True)
class ChunkText:
    """What is kept of a chunk's text."""

    window: int
    """Hash of its first `WINDOW_CHARS` characters."""
    chars: int
    digest: bytes
    """xxh3-128 of its UTF-8."""

    @staticmethod
    def of(text: str) -> ChunkText | None:
        """None for a text that is too short to be found."""
        if len(text) < WINDOW_CHARS:
            return None
        return ChunkText(int(window_hashes(text[:WINDOW_CHARS])[0]), len(text), _digest(text))


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


class TextIndex:
    """Known texts of one namespace. Not thread-safe."""

    def __init__(self) -> None:
        self._windows: dict[int, list[tuple[int, bytes]]] = {}
        self._slots = np.zeros(_FILTER_SLOTS_MIN, np.bool_)

    def __len__(self) -> int:
        return len(self._windows)

    def add(self, text: ChunkText) -> None:
        entries = self._windows.setdefault(text.window, [])
        if (text.chars, text.digest) not in entries:
            entries.append((text.chars, text.digest))
            entries.sort(reverse=True)
        if len(self._windows) * _SLOTS_PER_WINDOW > len(self._slots):
            self._slots = np.zeros(2 * len(self._slots), np.bool_)
            self._slots[self._slot(np.fromiter(self._windows, np.uint64, len(self._windows)))] = True
        else:
            self._slots[self._slot(np.array([text.window], np.uint64))] = True

    def remove(self, text: ChunkText) -> None:
        """Its slot stays set until the filter is made anew: one more offset is looked at in vain."""
        entries = self._windows.get(text.window, [])
        if (text.chars, text.digest) in entries:
            entries.remove((text.chars, text.digest))
        if not entries:
            self._windows.pop(text.window, None)

    def _slot(self, windows: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return windows >> np.uint64(65 - len(self._slots).bit_length())

    def matches(self, text: str, windows: NDArray[np.uint64]) -> list[tuple[int, int]]:
        """Every known text inside `text`, whose `window_hashes` are given, that the bounds allow to be
        compared, by start."""
        starts = np.flatnonzero(self._slots[self._slot(windows)])
        found: list[tuple[int, int]] = []
        comparisons = compared_chars = 0
        for start, window in zip(starts.tolist(), windows[starts].tolist(), strict=True):
            for chars, digest in self._windows.get(window, ())[:CANDIDATES_MAX]:
                if start + chars > len(text):
                    continue
                comparisons, compared_chars = comparisons + 1, compared_chars + chars
                if comparisons > COMPARISONS_MAX or compared_chars > COMPARED_CHARS_MAX:
                    return found
                if _digest(text[start : start + chars]) == digest:
                    found.append((start, start + chars))
        return found


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
