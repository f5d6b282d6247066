"""Saves chunks: each is computed once however many callers want it, and a bounded number at a time."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from kintsugi.core.backend import EngineBackend
from kintsugi.core.errors import KintsugiError, ResourceExhausted, Unavailable
from kintsugi.core.exchange import SaveOutcome, SaveState
from kintsugi.core.namespaces.parts import is_within
from kintsugi.core.spaces import ChunkKey
from kintsugi.core.tokens import TokenIds
from kintsugi.gateway.shares import FairShares
from kintsugi.store.protocol.save_times import SaveTimes

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
        times: SaveTimes | None = None,
    ) -> None:
        """``shares``: where calls to the engines wait for their namespace's turn. ``times``: when saves count
        as asked for."""
        self._backend = backend
        self._shares = shares or FairShares()
        self.times = times or SaveTimes()
        self._waiting_tokens_max = waiting_tokens_max
        self._waiting_tokens = 0
        self._slots = asyncio.Semaphore(RUNNING_MAX)
        self._futures: dict[_Address, asyncio.Future[SaveOutcome]] = {}
        self._asked_at_s: dict[_Address, float] = {}
        """When each chunk's save was asked for, in Unix seconds (`SaveTimes`)."""
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
        asked_at_s: float = 0.0,
    ) -> list[asyncio.Future[SaveOutcome]]:
        """Starts saving chunks, also for a caller that leaves. ``ttl_s`` and ``asked_at_s`` (0: now): as in
        `EngineBackend.save`. Raises `ResourceExhausted`, saving none."""
        asked_at_s = asked_at_s or self.times.now(namespace)
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
            self._asked_at_s[namespace, key, ttl_s] = asked_at_s
        for batch in _batches(list(fresh.items())):
            futures = [self._futures[namespace, key, ttl_s] for key, _ in batch]
            saving = partial(
                self._backend.save, priority=priority, tier=tier, ttl_s=ttl_s, asked_at_s=asked_at_s
            )
            task = asyncio.create_task(self._run(namespace, batch, futures, ttl_s, saving))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return [self._futures[namespace, key, ttl_s] for key, _ in chunks]

    async def save(
        self,
        namespace: str,
        chunks: Sequence[ToSave],
        priority: int = 0,
        ttl_s: float | None = None,
        asked_at_s: float = 0.0,
    ) -> list[SaveOutcome]:
        """As `submit`, and waits for the outcomes."""
        futures = self.submit(namespace, chunks, priority, ttl_s=ttl_s, asked_at_s=asked_at_s)
        # Shielded: other callers may wait for the same chunk.
        return list(await asyncio.gather(*(asyncio.shield(future) for future in futures)))

    def drop_erased(self, namespace: str, keys: Collection[ChunkKey] | None, erased_at_s: float) -> None:
        """Drop chunks that wait, all of the namespace and its parts for None, if they were asked for until
        ``erased_at_s``. The store refuses those that an engine computes."""
        covered = [
            (name, key, ttl_s)
            for (name, key, ttl_s), asked_at_s in self._asked_at_s.items()
            if (is_within(name, namespace) if keys is None else name == namespace and key in keys)
            and asked_at_s <= erased_at_s
        ]
        for address in covered:
            if address in self._running:  # who wants the chunk from here on must not wait for this save
                self._running.discard(address)
                del self._futures[address], self._asked_at_s[address]
            elif not self._futures[address].done():
                self._futures[address].set_result(SaveOutcome(SaveState.FAILED, "it was erased meanwhile"))

    def _is_under_way(self, address: _Address) -> bool:
        """Whether the chunk is to be saved; not one that was dropped."""
        return address in self._futures and not self._futures[address].done()

    async def _run(
        self,
        namespace: str,
        batch: Sequence[ToSave],
        futures: Sequence[asyncio.Future[SaveOutcome]],
        ttl_s: float | None,
        save: Callable[[str, str, Sequence[TokenIds]], Awaitable[list[SaveOutcome]]],
    ) -> None:
        outcomes = [SaveOutcome(SaveState.FAILED, "this gateway is shutting down")] * len(batch)
        try:
            async with self._wait_for_turn(namespace, batch):
                waiting = [one for one, future in zip(batch, futures, strict=True) if not future.done()]
                self._running.update((namespace, key, ttl_s) for key, _ in waiting)
                ids = [tokens for _, tokens in waiting]
                if ids:
                    saved = await save(uuid.uuid4().hex, namespace, ids)
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
                    del self._futures[address], self._asked_at_s[address]
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
