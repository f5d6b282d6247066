"""The chunks of the served model: their spaces, their copies in the store, and their saves.

`Recent` caches answers that many requests need: an engine's description, from which `Spaces` makes chunk
spaces, and the store's stats. Clients know one key for each chunk; with a context, the store holds a prepared
chunk and its plain copy (docs/adr/0010). `Copies` finds, retains and erases both together. `Saver` has the
engines save missing chunks: concurrent requests for one chunk share one save, and the number of saves is
bounded.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Generic, TypeVar

from kintsugi.core.errors import KintsugiError, PermissionDenied, ResourceExhausted, Unavailable
from kintsugi.core.exchange import (
    EngineBackend,
    EngineInfo,
    SaveOutcome,
)
from kintsugi.core.held import Allotment
from kintsugi.core.layout import ChunkManifest
from kintsugi.core.namespaces import is_within
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, TokenIds
from kintsugi.gateway.shares import FairShares
from kintsugi.gateway.threaded_store import ThreadedStore
from kintsugi.store.protocol.interface import ANCHORED_KEYS_MAX, ChunkStore, ErasedPlace
from kintsugi.store.protocol.save_times import SaveTimes

log = logging.getLogger(__name__)

RECENT_S = 1.0
"""Default maximum age of a cached answer, and maximum age of a cached error."""
ANSWER_S = 5.0
"""Maximum time until an answer arrives."""
INFO_TTL_S = 5.0
"""Age at which an engine's description is renewed, so that a passed calibration takes effect soon."""
SPACES_MAX = 1024

WAITING_TOKENS_MAX = 4 << 20
"""Maximum number of tokens in a namespace's chunks that wait or are being saved: hours of work for a small
engine."""
WAITING_CHUNKS_MAX = 1 << 16
"""Maximum number of a namespace's chunks that wait or are being saved: each needs a kilobyte here, and a
request in an engine."""
RUNNING_MAX = 4
"""Maximum number of concurrent calls to the engines if the gateway has no engine places."""
BATCH_TOKENS = 16_384
"""Maximum number of tokens in one call to the engines, unless a single chunk has more."""

ToSave = tuple[ChunkKey, TokenIds]
"""A chunk's key and its tokens."""
_Address = tuple[str, ChunkKey, float | None]
"""Namespace, key and lifetime. Saves of a chunk with different lifetimes are not merged."""

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """A cached answer. Concurrent callers share one request for it. For one event loop."""

    def __init__(
        self, ask: Callable[[], Awaitable[Value]], silence: str, explain: Callable[[], str] = lambda: ""
    ) -> None:
        """``silence``: the error message, without the time, if no answer arrives within `ANSWER_S`;
        ``explain`` returns a suffix with the cause."""
        self._ask = ask
        self._silence = silence
        self._explain = explain
        self._last: Value | KintsugiError = Unavailable("no answer was requested yet")
        self._last_s = float("-inf")
        self.known: Value | None = None
        """The newest answer, whatever its age; None before the first."""
        self._asking: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def get(self, age_s_max: float | None = None) -> Value:
        """Return an answer at most ``age_s_max`` old; None: `RECENT_S`.

        Raises the error of the last request up to the same age, but at most `RECENT_S`, and `Unavailable` if
        no answer arrives within `ANSWER_S`.
        """
        if self._is_due(age_s_max):
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._renew())
            await asyncio.shield(self._asking)  # other callers wait for it, too
        if isinstance(self._last, KintsugiError):
            raise self._last.with_traceback(None)  # the traceback would grow with every caller
        return self._last

    def _is_due(self, age_s_max: float | None) -> bool:
        believed_s = RECENT_S if age_s_max is None else age_s_max
        if isinstance(self._last, KintsugiError):
            believed_s = min(believed_s, RECENT_S)
        return time.monotonic() - self._last_s >= believed_s

    async def _renew(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                self._last = self.known = await self._ask()
        except KintsugiError as error:
            self._last = error
        except TimeoutError:
            self._last = Unavailable(f"{self._silence} within {ANSWER_S:.0f} s{self._explain()}")
        self._last_s = time.monotonic()

    async def get_stale(self, age_s_max: float) -> Value:
        """Return the newest answer, even if later requests have failed. An answer older than ``age_s_max`` is
        renewed in the background, so that an engine that hangs does not delay requests. Before the first
        answer: as `get`."""
        if self.known is None:
            return await self.get(0.0)
        if self._is_due(age_s_max) and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.create_task(self._renew_beside(age_s_max))
        return self.known

    async def _renew_beside(self, age_s_max: float) -> None:
        try:
            await self.get(age_s_max)
        except KintsugiError as error:
            log.warning("%s: the last answer is used: %s", self._silence, error)
        except Exception:
            log.exception("%s: the last answer is used", self._silence)

    async def close(self) -> None:
        """Idempotent."""
        tasks = [task for task in (self._renewing, self._asking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Spaces:
    """The chunk spaces of the model that the engines serve. For one event loop."""

    def __init__(
        self,
        recent_info: Recent[EngineInfo],
        tokenizer: str = "",
        name_key: Callable[[str], bytes] = lambda namespace: b"",
    ) -> None:
        """``tokenizer``: digest of the gateway's tokenizer; engines with another one are ignored. Empty:
        every engine is accepted. ``name_key``: `ChunkStore.name_key`."""
        self._name_key = name_key
        self._recent_info = recent_info
        self._tokenizer = tokenizer
        self._own_info: EngineInfo | None = None

    @property
    def known_info(self) -> EngineInfo | None:
        """The newest description of an engine; None before an engine has answered."""
        return self._recent_info.known

    async def info(self) -> EngineInfo:
        """Return the newest description of an engine with the gateway's tokenizer: during a change of models,
        engines of both models answer. Raises `Unavailable` before the first such answer."""
        info = await self._recent_info.get_stale(INFO_TTL_S)
        if not self._tokenizer or info.tokenizer in ("", self._tokenizer):
            self._own_info = info
        if self._own_info is None:
            raise Unavailable("only engines of another model have answered so far; try again later")
        return self._own_info

    async def find(self, namespace: str) -> ChunkSpace:
        """Return the namespace's chunk space. Raises `Unavailable`."""
        info = await self.info()
        context = tuple(info.context_token_ids)
        return _make_space(
            info.fingerprint,
            namespace,
            tuple(info.prefix_token_ids),
            info.portable,
            context,
            self._name_key(namespace),
        )


@lru_cache(SPACES_MAX)
def _make_space(
    fingerprint: str,
    namespace: str,
    prefix_token_ids: tuple[int, ...],
    portable: bool,
    context_token_ids: tuple[int, ...],
    name_key: bytes,
) -> ChunkSpace:
    model = ModelFingerprint(bytes.fromhex(fingerprint))
    return ChunkSpace(model, namespace, prefix_token_ids, portable, context_token_ids, name_key)


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
        # Not `lookup`, which reports the chunks of a shard that does not answer as missing.
        tiers = await self._store.run(lambda store: store.tiers(namespace, keys))
        return [chunk for index, chunk in enumerate(chunks) if None in tiers[index :: len(chunks)]]

    async def erase(
        self, namespace: str, key: ChunkKey, tokens: TokenIds | None, asked_at_s: float, within: str
    ) -> tuple[list[ChunkKey], list[ErasedPlace]]:
        """Erase all copies of a chunk. ``key`` is the key of any copy. Return the copies' keys and places.

        Without ``tokens``, all chunks with the same length and anchors count as copies. Raises `Unavailable`.
        """
        try:
            space = await self._spaces.find(namespace)
        except PermissionDenied:  # the namespace's keys were destroyed, so the other copy's key is unknown
            space = None

        def erase(store: ChunkStore) -> tuple[list[ChunkKey], list[ErasedPlace]]:
            others = [] if space is None else _find_others(store, space, key, tokens)
            # The named copy last: as long as it is stored, a failed call can be repeated.
            places = list(store.erase(namespace, others, asked_at_s, within)) if others else []
            return [*others, key], [*places, *store.erase(namespace, [key], asked_at_s, within)]

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
        return []  # not stored, or in a chunk space that is not served now
    (digest,) = spaces
    near = store.lookup_anchors(space.namespace, digest, manifest.anchors)
    found: Iterable[ChunkManifest | None]
    if not manifest.anchors or any(len(one.keys) >= ANCHORED_KEYS_MAX for one in near):
        found = _list_all(store, space.namespace)
    else:
        found = store.lookup(space.namespace, [key for one in near for key in one.keys])
    like = (digest, manifest.num_tokens, manifest.anchors)
    return [one.key for one in found if one and (one.space_digest, one.num_tokens, one.anchors) == like]


def _list_all(store: ChunkStore, namespace: str) -> Iterator[ChunkManifest]:
    page = store.list(namespace, PAGE)
    while page:
        yield from page
        page = store.list(namespace, PAGE, page[-1].key)


@dataclass(eq=False)
class _Save:
    """A chunk that waits or is being saved."""

    address: _Address
    tokens: TokenIds
    asked_at_s: float
    """Time of the request, in Unix seconds (`SaveTimes`)."""
    future: asyncio.Future[SaveOutcome]
    is_running: bool = False
    """Whether an engine has the chunk."""


class Saver:
    """Has chunks saved by the engines. For one event loop."""

    def __init__(
        self,
        backend: EngineBackend,
        waiting_tokens_max: int = WAITING_TOKENS_MAX,
        shares: FairShares | None = None,
        times: SaveTimes | None = None,
    ) -> None:
        """``shares``: the queue in which calls to the engines wait for their namespace's turn. ``times``
        determines the time of a save's request."""
        self._backend = backend
        self._shares = shares or FairShares()
        self.times = times or SaveTimes()
        self._waiting_tokens = Allotment(waiting_tokens_max)
        self._waiting_chunks = Allotment(WAITING_CHUNKS_MAX)
        self._slots = asyncio.Semaphore(RUNNING_MAX)
        self._saves: dict[_Address, _Save] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no chunk waits or is being saved."""
        return not self._saves

    def submit(
        self,
        namespace: str,
        chunks: Sequence[ToSave],
        priority: int = 0,
        ttl_s: float | None = None,
        asked_at_s: float = 0.0,
    ) -> list[asyncio.Future[SaveOutcome]]:
        """Start to save chunks, whether or not the caller waits. ``ttl_s`` and ``asked_at_s`` (0: now): as in
        `EngineBackend.save`. Raises `ResourceExhausted` and then saves none."""
        asked_at_s = asked_at_s or self.times.now(namespace)
        addresses = [(namespace, key, ttl_s) for key, _ in chunks]
        fresh = {
            address: tokens
            for address, (_, tokens) in zip(addresses, chunks, strict=True)
            if address not in self._saves or self._saves[address].future.done()
        }
        if not self._waiting_chunks.fits(namespace, len(fresh)):
            raise _too_many(self._waiting_chunks, namespace, "chunks", "send fewer and longer ones")
        size = sum(map(len, fresh.values()))
        if not self._waiting_tokens.fits(namespace, size):
            raise _too_many(self._waiting_tokens, namespace, "tokens", "send fewer")
        self._waiting_chunks.add(namespace, len(fresh))
        self._waiting_tokens.add(namespace, size)
        loop = asyncio.get_running_loop()
        saves = [
            _Save(address, tokens, asked_at_s, loop.create_future()) for address, tokens in fresh.items()
        ]
        self._saves |= {one.address: one for one in saves}
        call = partial(self._backend.save, priority=priority, ttl_s=ttl_s, asked_at_s=asked_at_s)
        for batch in _batches(saves):
            task = asyncio.create_task(self._run(namespace, batch, call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return [self._saves[address].future for address in addresses]

    async def save(
        self,
        namespace: str,
        chunks: Sequence[ToSave],
        priority: int = 0,
        ttl_s: float | None = None,
        asked_at_s: float = 0.0,
    ) -> list[SaveOutcome]:
        """Submit chunks and wait for the outcomes."""
        futures = self.submit(namespace, chunks, priority, ttl_s=ttl_s, asked_at_s=asked_at_s)
        # Shielded: other callers may wait for the same chunk.
        return list(await asyncio.gather(*(asyncio.shield(future) for future in futures)))

    def drop_erased(self, namespace: str, keys: Collection[ChunkKey] | None, erased_at_s: float) -> None:
        """Drop waiting chunks that were requested before or at ``erased_at_s``; ``keys`` None: all chunks of
        the namespace and its parts. The store refuses the chunks that an engine is computing."""
        for one in list(self._saves.values()):
            name, key, _ = one.address
            is_covered = is_within(name, namespace) if keys is None else name == namespace and key in keys
            if not is_covered or one.asked_at_s > erased_at_s:
                continue
            if one.is_running:  # a later request of the chunk must not share this save
                del self._saves[one.address]
            elif not one.future.done():
                one.future.set_result(SaveOutcome(False, "the chunk was erased meanwhile"))

    async def _run(
        self,
        namespace: str,
        batch: Sequence[_Save],
        call: Callable[[str, str, Sequence[TokenIds]], Awaitable[list[SaveOutcome]]],
    ) -> None:
        saved: dict[_Save, SaveOutcome] = {}
        problem = "this gateway is shutting down"
        try:
            async with self._wait_for_turn(namespace, batch):
                waiting = [one for one in batch if not one.future.done()]
                for one in waiting:
                    one.is_running = True
                if waiting:
                    outcomes = await call(uuid.uuid4().hex, namespace, [one.tokens for one in waiting])
                    if len(outcomes) != len(waiting):
                        raise Unavailable(f"the engine answered {len(outcomes)} of {len(waiting)} chunks")
                    saved = dict(zip(waiting, outcomes, strict=True))
        except KintsugiError as error:
            problem = str(error)
        except Exception as defect:
            log.exception("%d chunks of %s were not saved", len(batch), namespace)
            problem = f"defect: {type(defect).__name__}"
        finally:
            self._waiting_chunks.add(namespace, -len(batch))
            self._waiting_tokens.add(namespace, -sum(len(one.tokens) for one in batch))
            for one in batch:
                if self._saves.get(one.address) is one:  # false if it was dropped
                    del self._saves[one.address]
                if not one.future.done():
                    one.future.set_result(saved.get(one) or SaveOutcome(False, problem))

    def _wait_for_turn(self, namespace: str, batch: Sequence[_Save]) -> AbstractAsyncContextManager[object]:
        """Wait in the queue of requests to the engines, if there is one: with slots of their own, saves would
        overtake requests of other namespaces."""
        if self._shares.has_places:
            return self._shares.place(namespace, sum(len(one.tokens) for one in batch))
        return self._slots

    async def close(self) -> None:
        """Cancel all saves. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _too_many(waiting: Allotment, namespace: str, what: str, remedy: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"{waiting[namespace]} {what} of {namespace!r} wait to be prefilled, {waiting.total} in all; "
        f"at most {waiting.each} of one and {2 * waiting.each} of all may: {remedy}, or again later"
    )


def _batches(saves: Sequence[_Save]) -> list[list[_Save]]:
    batches: list[list[_Save]] = []
    size = BATCH_TOKENS
    for one in saves:
        tokens = len(one.tokens)
        if size + tokens > BATCH_TOKENS:
            batches.append([])
            size = 0
        batches[-1].append(one)
        size += tokens
    return batches
