"""Saves chunks: each is computed once however many callers want it, and a bounded number at a time."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager

from kintsugi.core.backend import EngineBackend
from kintsugi.core.errors import KintsugiError, ResourceExhausted, Unavailable
from kintsugi.core.exchange import SaveOutcome, SaveState
from kintsugi.core.namespaces.parts import is_within
from kintsugi.core.spaces import ChunkKey
from kintsugi.core.tokens import TokenIds
from kintsugi.gateway.shares import FairShares

log = logging.getLogger(__name__)

WAITING_TOKENS_MAX = 4 << 20
"""Maximum number of tokens in chunks that wait or run: hours of work for a small engine."""
WAITING_CHUNKS_MAX = 1 << 16
"""Maximum number of chunks that wait or run: each takes a kilobyte here, and a request in an engine."""
RUNNING_MAX = 4
"""Concurrent calls to the engines, unless a gateway's places bound them."""
BATCH_TOKENS = 16_384
"""Tokens in one call to the engines, unless a single chunk has more."""

ToSave = tuple[ChunkKey, TokenIds]
"""A chunk's key and its tokens."""
_Address = tuple[str, ChunkKey, float | None]
"""Namespace, key and lifetime: who wants a chunk for longer does not share the save of who does not."""


class Saver:
    """For one event loop."""

    def __init__(
        self,
        backend: EngineBackend,
        waiting_tokens_max: int = WAITING_TOKENS_MAX,
        shares: FairShares | None = None,
    ) -> None:
        """``shares``: where calls to the engines wait for their namespace's turn."""
        self._backend = backend
        self._shares = shares or FairShares()
        self._waiting_tokens_max = waiting_tokens_max
        self._waiting_tokens = 0
        self._slots = asyncio.Semaphore(RUNNING_MAX)
        self._futures: dict[_Address, asyncio.Future[SaveOutcome]] = {}
        self._submitted_s: dict[_Address, float] = {}
        """Unix seconds, of each future."""
        self._running: set[_Address] = set()
        """Those that an engine has."""
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(
        self,
        namespace: str,
        chunks: Sequence[ToSave],
        priority: int = 0,
        tier: str = "auto",
        ttl_s: float | None = None,
    ) -> list[asyncio.Future[SaveOutcome]]:
        """Starts saving chunks, also for a caller that leaves. ``ttl_s``: as in `EngineBackend.save`. Raises
        `ResourceExhausted`, saving none."""
        fresh = {key: tokens for key, tokens in chunks if not self._is_under_way((namespace, key, ttl_s))}
        if len(self._futures) + len(fresh) > WAITING_CHUNKS_MAX:
            raise ResourceExhausted(
                f"{len(self._futures)} chunks wait to be prefilled and at most {WAITING_CHUNKS_MAX} may; "
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
        for key in fresh:
            self._futures[namespace, key, ttl_s] = loop.create_future()
            self._submitted_s[namespace, key, ttl_s] = time.time()
        for batch in _batches(list(fresh.items())):
            futures = [self._futures[namespace, key, ttl_s] for key, _ in batch]
            task = asyncio.create_task(self._run(namespace, batch, futures, priority, tier, ttl_s))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return [self._futures[namespace, key, ttl_s] for key, _ in chunks]

    async def save(
        self, namespace: str, chunks: Sequence[ToSave], priority: int = 0, ttl_s: float | None = None
    ) -> list[SaveOutcome]:
        """Saves chunks and waits for the outcomes. Raises `ResourceExhausted`."""
        futures = self.submit(namespace, chunks, priority, ttl_s=ttl_s)
        # Shielded: other callers may wait for the same chunk.
        return list(await asyncio.gather(*(asyncio.shield(future) for future in futures)))

    async def forget(self, namespace: str, keys: Collection[ChunkKey] | None, asked_at_s: float) -> bool:
        """Drop chunks that wait, all of the namespace and its parts for None, and wait for those that are
        being saved, if they were submitted before ``asked_at_s`` (Unix seconds). Returns whether any was
        being saved: the store may have it now."""
        wanted = [
            address
            for address, since_s in self._submitted_s.items()
            if (is_within(address[0], namespace) if keys is None else address[0] == namespace)
            and (keys is None or address[1] in keys)
            and since_s <= asked_at_s
        ]
        running = []
        for address in wanted:
            if address in self._running:
                running.append(self._futures[address])
            elif not self._futures[address].done():
                self._futures[address].set_result(SaveOutcome(SaveState.FAILED, "it was erased meanwhile"))
        if running:
            await asyncio.wait(running)
        return bool(running)

    def _is_under_way(self, address: _Address) -> bool:
        """Whether the chunk is to be saved; not one that was dropped."""
        return address in self._futures and not self._futures[address].done()

    async def _run(
        self,
        namespace: str,
        batch: Sequence[ToSave],
        futures: Sequence[asyncio.Future[SaveOutcome]],
        priority: int,
        tier: str,
        ttl_s: float | None,
    ) -> None:
        outcomes = [SaveOutcome(SaveState.FAILED, "this gateway is shutting down")] * len(batch)
        try:
            async with self._wait_for_turn(namespace, batch):
                waiting = [one for one, future in zip(batch, futures, strict=True) if not future.done()]
                self._running.update((namespace, key, ttl_s) for key, _ in waiting)
                ids = [tokens for _, tokens in waiting]
                if ids:
                    request_id = uuid.uuid4().hex
                    saved = await self._backend.save(request_id, namespace, ids, priority, tier, ttl_s)
                    if len(saved) != len(waiting):
                        raise Unavailable(f"the engine answered {len(saved)} of {len(waiting)} chunks")
                    by_key = {key: outcome for (key, _), outcome in zip(waiting, saved, strict=True)}
                    outcomes = [by_key.get(key, outcomes[0]) for key, _ in batch]
        except KintsugiError as error:
            outcomes = [SaveOutcome(SaveState.FAILED, str(error))] * len(batch)
        except Exception as defect:
            log.exception("%d chunks of %s were not saved", len(batch), namespace)
            outcomes = [SaveOutcome(SaveState.FAILED, f"defect: {type(defect).__name__}")] * len(batch)
        finally:
            for (key, tokens), future, outcome in zip(batch, futures, outcomes, strict=True):
                self._waiting_tokens -= len(tokens)
                address = (namespace, key, ttl_s)
                if self._futures.get(address) is future:  # else it was dropped, and submitted again
                    self._running.discard(address)
                    del self._futures[address], self._submitted_s[address]
                if not future.done():
                    future.set_result(outcome)

    def _wait_for_turn(self, namespace: str, batch: Sequence[ToSave]) -> AbstractAsyncContextManager[object]:
        """Where requests wait for engines, saves wait with them: a place of their own would pass by others,
        and both would keep a place at the engines idle."""
        if self._shares.has_places:
            return self._shares.place(namespace, sum(len(tokens) for _, tokens in batch))
        return self._slots

    async def close(self) -> None:
        """Cancels what runs. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _batches(chunks: Sequence[ToSave]) -> list[list[ToSave]]:
    batches: list[list[ToSave]] = []
    size = BATCH_TOKENS
    for chunk in chunks:
        tokens = len(chunk[1])
        if size + tokens > BATCH_TOKENS:
            batches.append([])
            size = 0
        batches[-1].append(chunk)
        size += tokens
    return batches
