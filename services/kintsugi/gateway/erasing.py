"""Erases chunks, documents and namespaces from all places of a service, and writes the receipt.

The steps are: drop waiting saves; let the store delete the chunks and record the erasure, so that it refuses
earlier saves; delete the chunks from the ledger and from this gateway's known chunks. Other gateways and
engines follow the store's record within `FOLLOWED_S`: they forget, and never erase. A failed call returns no
receipt, and can be repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from kintsugi.core.errors import NotFound, PermissionDenied
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway.chunks import Copies, Saver
from kintsugi.gateway.fill import Filler
from kintsugi.gateway.repeating import Repeating
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.gateway.texts.learning import Learner
from kintsugi.gateway.texts.segments import SegmentResolver
from kintsugi.gateway.threaded_store import ThreadedStore
from kintsugi.precompute.documents import DocumentIndex, check_document_id
from kintsugi.store.protocol.interface import DATA_KEYS, ErasedPlace, Erasure

FOLLOW_PERIOD_S = 1.0
FOLLOWED_S = 3.0
"""Time after which gateways and engines that reach the store have followed an erasure."""


@dataclass(frozen=True)
class Receipt:
    """The places of erased data, and the times of its erasure in Unix seconds."""

    namespace: str
    asked_at_s: float
    """Time of the request."""
    gone_at_s: float
    places: Sequence[ErasedPlace]

    @property
    def was_there(self) -> bool:
        """Whether the store held any of the data."""
        return any(place.items for place in self.places if place.place not in (TEXTS, LEDGER, DATA_KEYS))


TEXTS, LEDGER, CACHES = "known texts", "ledger", "caches"


class Eraser(Repeating):
    """Erases, and after `start` also follows the erasures of others. For one event loop."""

    def __init__(
        self,
        store: ThreadedStore,
        copies: Copies,
        known: KnownChunks,
        resolver: SegmentResolver,
        saver: Saver,
        *,
        filler: Filler | None = None,
        documents: DocumentIndex | None = None,
        learner: Learner | None = None,
    ) -> None:
        super().__init__("kintsugi-follow", self.follow_once, FOLLOW_PERIOD_S)
        self._store = store
        self._copies = copies
        self._known = known
        self._resolver = resolver
        self._saver = saver
        self._filler = filler
        self._documents = documents
        self._unlearning = nullcontext() if learner is None else learner.pause
        """Held while chunks are erased from the ledger."""

    async def erase_chunk(self, namespace: str, key: ChunkKey, within: str) -> Receipt:
        """Erase every copy of a chunk, without waiting for `FOLLOWED_S`. ``within``: the pattern of
        namespaces that the caller may use, here and in the other methods. Raises `Unavailable` if a shard
        that may hold a copy does not answer."""
        asked_at_s = self._begin(namespace, [key])
        keys = [key]
        places: list[ErasedPlace] = []
        try:
            tokens = await asyncio.to_thread(self._known.token_ids, namespace, key)
            keys, places = await self._copies.erase(namespace, key, tokens, asked_at_s, within)
        finally:  # after an error, too: the chunk must not be found or filled meanwhile
            places = [*places, *await self._forget(namespace, keys, asked_at_s)]
        return _seal(namespace, asked_at_s, places)

    async def erase_document(
        self, namespace: str, corpus: str, document_id: str, within: str
    ) -> tuple[bool, Receipt]:
        """Erase a document and the chunks that no other document has. Return whether it existed, and the
        receipt. Raises `NotFound` without a ledger, `InvalidField` and `Unavailable`."""
        check_document_id(document_id)
        documents = self._documents
        if documents is None:
            raise NotFound("this gateway knows no corpora; start it with a precompute ledger")
        asked_at_s = self._begin(namespace, ())
        erased: list[ChunkKey] = []
        places: list[ErasedPlace] = []

        def erase(keys: Sequence[ChunkKey]) -> None:
            places.extend(
                self._store.run_here(lambda store: store.erase(namespace, keys, asked_at_s, within))
            )
            erased.extend(keys)

        async with self._unlearning:
            try:
                name_key = await self._store.run(lambda store: store.name_key(namespace))
            except PermissionDenied:  # the namespace's keys were destroyed, so no plain copy can be named
                name_key = b""
            was_there = await asyncio.to_thread(
                documents.erase_document, namespace, corpus, document_id, erase, name_key
            )
            places.append(ErasedPlace(LEDGER, int(was_there), 0, time.time()))
            places += await self._forget_texts(namespace, erased, asked_at_s)
        await asyncio.sleep(FOLLOWED_S)
        return was_there, _seal(namespace, asked_at_s, places)

    async def erase_namespace(self, namespace: str, within: str) -> Receipt:
        """Erase all data of a namespace, and replace its data keys by a new one if the gateway has them.
        Raises `Unavailable` if a shard does not answer."""
        asked_at_s = self._begin(namespace, None)
        places: list[ErasedPlace] = []
        try:
            places += await self._store.run(lambda store: store.erase(namespace, None, asked_at_s, within))
            places += await self._store.run(lambda store: store.destroy_keys(namespace))
        finally:
            places += await self._forget(namespace, None, asked_at_s)
        await asyncio.sleep(FOLLOWED_S)
        return _seal(namespace, asked_at_s, places)

    def _begin(self, namespace: str, keys: Collection[ChunkKey] | None) -> float:
        """Drop waiting saves, and return the time of the erasure. Requests from now on count as later."""
        asked_at_s = time.time()
        self._drop_waiting(namespace, keys, asked_at_s)
        return asked_at_s

    def _drop_waiting(self, namespace: str, keys: Collection[ChunkKey] | None, erased_at_s: float) -> None:
        """Forget chunks that only memory holds, and waiting saves that were requested before or at
        ``erased_at_s``."""
        self._saver.times.note(namespace, erased_at_s)
        self._saver.drop_erased(namespace, keys, erased_at_s)
        self._resolver.forget(namespace, keys)
        if self._filler is not None:
            self._filler.forget(namespace, keys)

    async def _forget(
        self, namespace: str, keys: Sequence[ChunkKey] | None, asked_at_s: float
    ) -> list[ErasedPlace]:
        """Delete chunks from the ledger and from the known chunks."""
        places: list[ErasedPlace] = []
        async with self._unlearning:
            if self._documents is not None:
                if keys is None:
                    count = await asyncio.to_thread(self._documents.erase_namespace, namespace)
                else:
                    count = await asyncio.to_thread(self._documents.erase_chunks, namespace, keys)
                places.append(ErasedPlace(LEDGER, count, 0, time.time()))
            return places + await self._forget_texts(namespace, keys, asked_at_s)

    async def _forget_texts(
        self, namespace: str, keys: Sequence[ChunkKey] | None, asked_at_s: float
    ) -> list[ErasedPlace]:
        self._drop_waiting(namespace, keys, asked_at_s)
        count = await asyncio.to_thread(self._known.erase, namespace, keys, asked_at_s)
        return [ErasedPlace(TEXTS, count, 0, time.time())]

    async def follow_once(self) -> bool:
        """Forget the chunks in the next page of the store's erasures. Return whether there may be more.
        Raises `Unavailable`."""
        cursor = await asyncio.to_thread(lambda: self._known.cursor)
        page = await self._store.run(lambda store: store.erasures(cursor))
        if page.cursor == cursor:
            return False
        for scope in _group(page.erasures):
            await self._forget_texts(*scope)
        await asyncio.to_thread(self._known.set_cursor, page.cursor)
        return bool(page.erasures)


def _group(erasures: Iterable[Erasure]) -> Iterator[tuple[str, list[ChunkKey] | None, float]]:
    """Group erasures by namespace, with the latest time, so that the known chunks are rewritten once."""
    by_namespace: dict[str, list[Erasure]] = {}
    for erasure in erasures:
        by_namespace.setdefault(erasure.namespace, []).append(erasure)
    for namespace, some in by_namespace.items():
        keys = [erasure.key for erasure in some if erasure.key is not None]
        yield namespace, keys if len(keys) == len(some) else None, max(erasure.at_s for erasure in some)


def _seal(namespace: str, asked_at_s: float, places: Sequence[ErasedPlace]) -> Receipt:
    """Return the receipt. Caches have followed the store's erasure after `FOLLOWED_S`."""
    stored_s = max(place.gone_at_s for place in places)
    all_places = [*places, ErasedPlace(CACHES, 0, 0, stored_s + FOLLOWED_S)]
    return Receipt(namespace, asked_at_s, all_places[-1].gone_at_s, all_places)
