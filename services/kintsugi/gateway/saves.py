"""Saves chunks: concurrent requests for one chunk share one save, and the number of saves is bounded."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial

from kintsugi.core.errors import KintsugiError, ResourceExhausted, Unavailable
from kintsugi.core.exchange import (
    EngineBackend,
    SaveOutcome,
    SaveState,
)
from kintsugi.core.namespaces import is_within
from kintsugi.core.spaces import ChunkKey, TokenIds
from kintsugi.gateway.shares import FairShares
from kintsugi.store.protocol.save_times import SaveTimes

log = logging.getLogger(__name__)

WAITING_TOKENS_MAX = 4 << 20
"""Maximum number of tokens in chunks that wait or are being saved: hours of work for a small engine."""
WAITING_CHUNKS_MAX = 1 << 16
"""Maximum number of chunks that wait or are being saved: each needs a kilobyte here, and a request in an
engine."""
RUNNING_MAX = 4
"""Maximum number of concurrent calls to the engines if the gateway has no engine places."""
BATCH_TOKENS = 16_384
"""Maximum number of tokens in one call to the engines, unless a single chunk has more."""

ToSave = tuple[ChunkKey, TokenIds]
"""A chunk's key and its tokens."""
_Address = tuple[str, ChunkKey, float | None]
"""Namespace, key and lifetime. Saves of a chunk with different lifetimes are not merged."""


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
        self._waiting_tokens_max = waiting_tokens_max
        self._waiting_tokens = 0
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
        if len(self._saves) + len(fresh) > WAITING_CHUNKS_MAX:
            raise ResourceExhausted(
                f"{len(self._saves)} chunks wait to be prefilled and at most {WAITING_CHUNKS_MAX} may; "
                "send fewer and longer ones, or again later"
            )
        size = sum(map(len, fresh.values()))
        if self._waiting_tokens + size > self._waiting_tokens_max:
            raise ResourceExhausted(
                f"{self._waiting_tokens} tokens wait to be prefilled and at most {self._waiting_tokens_max} "
                "may; send fewer, or again later"
            )
        self._waiting_tokens += size
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
        """Drop waiting chunks that were requested until ``erased_at_s``; ``keys`` None: all chunks of the
        namespace and its parts. The store refuses the chunks that an engine is computing."""
        for one in list(self._saves.values()):
            name, key, _ = one.address
            is_covered = is_within(name, namespace) if keys is None else name == namespace and key in keys
            if not is_covered or one.asked_at_s > erased_at_s:
                continue
            if one.is_running:  # a later request of the chunk must not share this save
                del self._saves[one.address]
            elif not one.future.done():
                one.future.set_result(SaveOutcome(SaveState.FAILED, "the chunk was erased meanwhile"))

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
            for one in batch:
                self._waiting_tokens -= len(one.tokens)
                if self._saves.get(one.address) is one:  # false if it was dropped
                    del self._saves[one.address]
                if not one.future.done():
                    one.future.set_result(saved.get(one) or SaveOutcome(SaveState.FAILED, problem))

    def _wait_for_turn(self, namespace: str, batch: Sequence[_Save]) -> AbstractAsyncContextManager[object]:
        """Wait in the queue of requests to the engines, if there is one: saves with slots of their own would
        overtake other namespaces."""
        if self._shares.has_places:
            return self._shares.place(namespace, sum(len(one.tokens) for one in batch))
        return self._slots

    async def close(self) -> None:
        """Cancel all saves. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
