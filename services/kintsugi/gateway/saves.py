"""Saves chunks: each is computed once however many callers want it, and a bounded number at a time."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from kintsugi.core.backend import EngineBackend
from kintsugi.core.errors import KintsugiError, ResourceExhausted, Unavailable
from kintsugi.core.exchange import SaveOutcome, SaveState
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
_Address = tuple[str, ChunkKey]


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
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(
        self, namespace: str, chunks: Sequence[ToSave], priority: int = 0, tier: str = "auto"
    ) -> list[asyncio.Future[SaveOutcome]]:
        """Starts saving chunks, also for a caller that leaves. Raises `ResourceExhausted`, saving none."""
        fresh = {key: tokens for key, tokens in chunks if (namespace, key) not in self._futures}
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
            self._futures[namespace, key] = loop.create_future()
        for batch in _batches(list(fresh.items())):
            task = asyncio.create_task(self._run(namespace, batch, priority, tier))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return [self._futures[namespace, key] for key, _ in chunks]

    async def save(self, namespace: str, chunks: Sequence[ToSave], priority: int = 0) -> list[SaveOutcome]:
        """Saves chunks and waits for the outcomes. Raises `ResourceExhausted`."""
        futures = self.submit(namespace, chunks, priority)
        # Shielded: other callers may wait for the same chunk.
        return list(await asyncio.gather(*(asyncio.shield(future) for future in futures)))

    async def _run(self, namespace: str, batch: Sequence[ToSave], priority: int, tier: str) -> None:
        outcomes = [SaveOutcome(SaveState.FAILED, "this gateway is shutting down")] * len(batch)
        try:
            async with self._wait_for_turn(namespace, batch):
                ids = [tokens for _, tokens in batch]
                outcomes = await self._backend.save(uuid.uuid4().hex, namespace, ids, priority, tier)
                if len(outcomes) != len(batch):
                    raise Unavailable(f"the engine answered {len(outcomes)} of {len(batch)} chunks")
        except KintsugiError as error:
            outcomes = [SaveOutcome(SaveState.FAILED, str(error))] * len(batch)
        except Exception as defect:
            log.exception("%d chunks of %s were not saved", len(batch), namespace)
            outcomes = [SaveOutcome(SaveState.FAILED, f"defect: {type(defect).__name__}")] * len(batch)
        finally:
            for (key, tokens), outcome in zip(batch, outcomes, strict=True):
                self._waiting_tokens -= len(tokens)
                future = self._futures.pop((namespace, key))
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
