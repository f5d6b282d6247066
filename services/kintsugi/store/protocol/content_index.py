"""The index of a store's chunks by their anchors: which chunks may a prompt contain?"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from kintsugi.core.layout import ChunkManifest
from kintsugi.core.spaces import ChunkKey, anchored_at
from kintsugi.store.protocol.interface import ANCHORED_KEYS_MAX, Anchored

SLICE = 4096
"""Anchors that `ContentIndex.find` takes at a time. A store with a lock holds it for one slice."""

_Alike = list[tuple[int, bytes]]
"""Length and key of the chunks with the same first and last anchor, ascending."""


class ContentIndex:
    """The chunks by space, first anchor and last anchor. Not thread-safe.

    A lookup costs one probe for each of the prompt's anchors and, for each chunk head that the prompt
    contains, a probe for each of the head's last anchors or of the prompt's anchors, whichever are fewer. So
    it stays cheap even if all chunks have the same first or last anchor: it returns lengths, and searches or
    sorts no list. A chunk takes about half a kilobyte."""

    def __init__(self) -> None:
        self._spaces: dict[tuple[str, bytes], dict[int, dict[int, _Alike]]] = {}

    def add(self, manifest: ChunkManifest) -> None:
        """Add a chunk. A chunk without anchors is ignored, because only spans can name it."""
        if manifest.anchors:
            first, last = anchored_at(manifest.anchors)
            heads = self._spaces.setdefault((manifest.namespace, manifest.space_digest), {})
            insort(heads.setdefault(first, {}).setdefault(last, []), _entry_of(manifest))

    def remove(self, manifest: ChunkManifest) -> None:
        """Remove a chunk that was added."""
        if not manifest.anchors:
            return
        first, last = anchored_at(manifest.anchors)
        space = (manifest.namespace, manifest.space_digest)
        heads = self._spaces[space]
        tails = heads[first]
        alike = tails[last]
        del alike[bisect_left(alike, _entry_of(manifest))]
        if not alike:
            del tails[last]
        if not tails:
            del heads[first]
        if not heads:
            del self._spaces[space]

    def find(
        self, namespace: str, space_digest: bytes, firsts: Sequence[int], anchors: Collection[int]
    ) -> Iterator[Anchored]:
        """Yield the chunks of a space whose first anchor is among `firsts` and whose last anchor is among
        `anchors`, a set."""
        heads = self._spaces.get((namespace, space_digest), {})
        for first in dict.fromkeys(firsts):
            tails = heads.get(first)
            if tails is None:
                continue
            few, many = (tails, anchors) if len(tails) < len(anchors) else (anchors, tails)
            for last in few:
                if last in many:
                    yield from (Anchored(first, last, *some) for some in _lengths(tails[last]))


def _entry_of(manifest: ChunkManifest) -> tuple[int, bytes]:
    return manifest.num_tokens, manifest.key.digest


def _lengths(alike: _Alike) -> Iterator[tuple[int, tuple[ChunkKey, ...]]]:
    """Yield each length with some of its keys, in one step per length."""
    stop = len(alike)
    while stop:
        length = alike[stop - 1][0]
        start = bisect_left(alike, (length, b""))
        yield (
            length,
            tuple(ChunkKey(key) for _, key in islice(alike, start, min(stop, start + ANCHORED_KEYS_MAX))),
        )
        stop = start
