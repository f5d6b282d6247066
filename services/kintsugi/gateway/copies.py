"""The copies of a chunk. Clients know one key; the store holds a prepared chunk and its plain copy.

Without a context, a chunk has one copy. See docs/adr/0010.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kintsugi.core.errors import PermissionDenied
from kintsugi.core.layout import ChunkManifest
from kintsugi.core.spaces import ChunkKey, ChunkSpace, TokenIds
from kintsugi.gateway.recent_info import Spaces
from kintsugi.gateway.saves import ToSave
from kintsugi.gateway.threaded_store import ThreadedStore
from kintsugi.store.protocol.interface import ANCHOR_CANDIDATES_MAX, ChunkStore, ErasedPlace

PAGE = 1000
"""Chunks in one page of a namespace, which is searched if an anchor does not find a chunk's copies."""


class Copies:
    """Finds, retains and erases all copies of chunks. For one event loop."""

    def __init__(
        self, spaces: Spaces, store: ThreadedStore, shared_of: Callable[[str], str] = lambda namespace: ""
    ) -> None:
        """``shared_of`` returns the namespace whose chunks the given one may use, too; empty: none."""
        self._shared_of = shared_of
        self._spaces = spaces
        self._store = store

    async def find_missing(self, namespace: str, chunks: Sequence[ToSave]) -> list[ToSave]:
        """Return the chunks that lack a copy, both in the namespace and in the one that it shares. Raises
        `Unavailable`."""
        return await self._without_shared(namespace, await self._find_missing(namespace, chunks))

    async def _without_shared(self, namespace: str, missing: list[ToSave]) -> list[ToSave]:
        """Return the chunks that also lack a copy in the namespace that the given one shares."""
        shared = self._shared_of(namespace)
        if not (shared and missing):
            return missing
        space = await self._spaces.find(shared)
        theirs = {ChunkKey.of(space, tokens): (key, tokens) for key, tokens in missing}
        absent = await self._find_missing(shared, [(key, tokens) for key, (_, tokens) in theirs.items()])
        return [theirs[key] for key, _ in absent]

    async def retain(self, namespace: str, chunks: Sequence[ToSave], ttl_s: float | None) -> list[ToSave]:
        """Keep all stored copies of chunks for at least ``ttl_s`` more seconds; None: as if they were put
        now. Copies in the shared namespace are not changed. Return the missing chunks, as `find_missing`.
        Raises `Unavailable`."""
        keys = await self._keys_of(namespace, chunks)
        kept = await self._store.run(lambda store: store.retain(namespace, keys, ttl_s or 0.0))
        missing = [chunk for index, chunk in enumerate(chunks) if not all(kept[index :: len(chunks)])]
        return await self._without_shared(namespace, missing)

    async def _keys_of(self, namespace: str, chunks: Sequence[ToSave]) -> list[ChunkKey]:
        """Return the keys of all copies of the chunks: first all keys of one kind of copy, then of the
        next."""
        info, space = await self._spaces.info(), await self._spaces.find(namespace)
        copies = space.copies(info.plain_copies)
        return [
            key if copy is space else ChunkKey.of(copy, tokens) for copy in copies for key, tokens in chunks
        ]

    async def _find_missing(self, namespace: str, chunks: Sequence[ToSave]) -> list[ToSave]:
        keys = await self._keys_of(namespace, chunks)
        # Not `lookup`: the chunks of a shard that does not answer would look missing.
        tiers = await self._store.run(lambda store: store.tiers(namespace, keys))
        return [chunk for index, chunk in enumerate(chunks) if None in tiers[index :: len(chunks)]]

    async def erase(
        self, namespace: str, key: ChunkKey, tokens: TokenIds | None, asked_at_s: float
    ) -> tuple[list[ChunkKey], list[ErasedPlace]]:
        """Erase all copies of a chunk. ``key`` is the key of any copy. Return the copies' keys and places.

        Without ``tokens``, all chunks with the same anchor and length count as copies. Raises `Unavailable`.
        """
        try:
            space = await self._spaces.find(namespace)
        except PermissionDenied:  # the namespace's keys were destroyed, so the other copy's key is unknown
            space = None

        def erase(store: ChunkStore) -> tuple[list[ChunkKey], list[ErasedPlace]]:
            others = [] if space is None else _find_others(store, space, key, tokens)
            # The named copy last: as long as it is stored, a failed call can be repeated.
            places = list(store.erase(namespace, others, asked_at_s)) if others else []
            return [*others, key], [*places, *store.erase(namespace, [key], asked_at_s)]

        return await self._store.run(erase)


def _find_others(
    store: ChunkStore, space: ChunkSpace, key: ChunkKey, tokens: TokenIds | None
) -> list[ChunkKey]:
    """Return the keys of the chunks that may be the other copy of a chunk."""
    if not space.context_token_ids:
        return []
    if tokens is not None:
        return [other for copy in space.copies() if (other := ChunkKey.of(copy, tokens)) != key]
    (manifest,) = store.lookup(space.namespace, [key])
    spaces = {copy.digest for copy in space.copies()} - {manifest.space_digest if manifest else b""}
    if manifest is None or len(spaces) > 1:
        return []  # not stored, or of a space that is not served now
    (digest,) = spaces
    first = manifest.anchors[:1]
    found = [one for some in store.lookup_anchors(space.namespace, digest, first).values() for one in some]
    if not first or len(found) >= ANCHOR_CANDIDATES_MAX:
        found = [one for one in _list_all(store, space.namespace) if one.space_digest == digest]
    like = (manifest.num_tokens, manifest.anchors)
    return [one.key for one in found if (one.num_tokens, one.anchors) == like]


def _list_all(store: ChunkStore, namespace: str) -> Iterator[ChunkManifest]:
    page = store.list(namespace, PAGE)
    while page:
        yield from page
        page = store.list(namespace, PAGE, page[-1].key)
