"""Fills misses: chunks that requests missed are prefilled in the background, so that later requests hit them.

`FillQueue` decides, without clock or I/O, which misses to fill (by default on the second miss, because most
texts of a chat occur once), when (while no answer is being generated, or after `patience_s`), and when to
give up. `Filler` asks the store which chunks are missing, and the engines to save them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kintsugi.core.errors import KintsugiError, ResourceExhausted
from kintsugi.core.held import Allotment, Held
from kintsugi.core.namespaces import is_within
from kintsugi.core.request import longest_ttl
from kintsugi.core.spaces import ChunkKey, TokenIds
from kintsugi.gateway.chunks import Copies, Saver, ToSave

log = logging.getLogger(__name__)

FILL_PRIORITY = 1000
"""vLLM's priority of fills: after every request that a caller waits for."""

Address = tuple[str, ChunkKey]


@dataclass(frozen=True)
class FillConfig:
    """When and how misses are filled."""

    sights: int = 2
    """Number of misses after which a chunk is filled."""
    queue_max: int = 1024
    """Maximum number of a namespace's waiting chunks; further misses are dropped, and counted again when they
    recur."""
    queue_tokens_max: int = 4 << 20
    """Maximum number of tokens of a namespace's waiting chunks."""
    sighted_bytes_max: int = 64 << 20
    """Memory for the counts of misses."""
    batch: int = 4
    """Maximum number of chunks in one save. A request that arrives meanwhile may wait for them."""
    patience_s: float = 30.0
    """Maximum time for which a chunk waits until no answer is being generated."""
    failures_max: int = 3
    """Number of failed saves after which a chunk is no longer tried, until its counts are forgotten."""


class MissDecision(StrEnum):
    """The decision on one miss; also a metric's label."""

    COUNTED = "counted"
    """The chunk was not missed often enough yet."""
    QUEUED = "queued"
    DUPLICATE = "duplicate"
    """The chunk is waiting or being filled."""
    FULL = "full"
    """The queue of fills or the queue of saves is full. The next miss tries again."""
    GIVEN_UP = "given_up"
    """Too many saves of the chunk failed."""


@dataclass
class _Sighted:
    sights: int = 0
    failures: int = 0
    ttl_s: float | None = 0.0
    """The longest lifetime of the requests that missed it; None: no limit."""


@dataclass(frozen=True)
class Miss:
    """A missed chunk."""

    tokens: TokenIds
    ttl_s: float | None
    """Lifetime of the chunk after its save, in seconds; None: no limit."""
    asked_at_s: float
    """Time of the last request that missed it, as in `ChunkManifest`."""
    since_s: float = 0.0
    """Time at which it entered the queue."""


class FillQueue:
    """The misses to fill. All its contents are bounded; its caller passes the time."""

    def __init__(self, config: FillConfig | None = None) -> None:
        self.config = config or FillConfig()
        self.sighted: Held[ChunkKey, _Sighted] = Held(self.config.sighted_bytes_max)
        self._waiting: OrderedDict[Address, Miss] = OrderedDict()
        self._chunks = Allotment(self.config.queue_max)
        self._tokens = Allotment(self.config.queue_tokens_max)
        self._running: set[Address] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def record_miss(
        self,
        address: Address,
        tokens: TokenIds,
        now_s: float,
        ttl_s: float | None = None,
        asked_at_s: float = 0.0,
    ) -> MissDecision:
        """Count a miss, and queue the chunk if it was missed often enough. The chunk's lifetime is the
        longest ``ttl_s`` of its misses so far."""
        if address in self._waiting or address in self._running:
            return MissDecision.DUPLICATE
        sighted = self._remember(address)
        sighted.sights += 1
        sighted.ttl_s = longest_ttl(sighted.ttl_s, ttl_s)
        if sighted.failures >= self.config.failures_max:
            return MissDecision.GIVEN_UP
        if sighted.sights < self.config.sights:
            return MissDecision.COUNTED
        namespace = address[0]
        if not (self._chunks.fits(namespace, 1) and self._tokens.fits(namespace, len(tokens))):
            return MissDecision.FULL
        self._waiting[address] = Miss(tokens, sighted.ttl_s, asked_at_s, now_s)
        self._chunks.add(namespace, 1)
        self._tokens.add(namespace, len(tokens))
        return MissDecision.QUEUED

    def due_in_s(self, idle: bool, now_s: float) -> float | None:
        """Return the time in seconds until a chunk should be filled; None if the queue is empty."""
        if not self._waiting:
            return None
        oldest = next(iter(self._waiting.values()))
        return 0.0 if idle else max(0.0, oldest.since_s + self.config.patience_s - now_s)

    def take(self) -> list[tuple[Address, Miss]]:
        """Remove and return the next batch, whose chunks have one namespace and one lifetime. Call
        `complete_chunk` or `drop_chunk` for each of them."""
        if not self._waiting:
            return []
        (namespace, _), first = next(iter(self._waiting.items()))
        alike = [a for a, one in self._waiting.items() if a[0] == namespace and one.ttl_s == first.ttl_s]
        chosen = alike[: self.config.batch]
        self._running.update(chosen)
        return [(address, self._dequeue(address)) for address in chosen]

    def _dequeue(self, address: Address) -> Miss:
        miss = self._waiting.pop(address)
        self._chunks.add(address[0], -1)
        self._tokens.add(address[0], -len(miss.tokens))
        return miss

    def complete_chunk(self, address: Address, saved: bool) -> None:
        """End the fill of a chunk that was taken. A chunk that failed is tried again after further misses."""
        self._running.discard(address)
        if saved:
            self.sighted.pop(*address)
            return
        sighted = self._remember(address)
        sighted.failures += 1
        sighted.sights = 0

    def _remember(self, address: Address) -> _Sighted:
        """Return the chunk's counts, and make them the last to be forgotten."""
        sighted = self.sighted.get(*address, _Sighted())
        self.sighted.put(*address, sighted)
        return sighted

    def drop_chunk(self, address: Address) -> None:
        """End the fill of a chunk for which the queue of saves had no room. Its next miss queues it again."""
        self._running.discard(address)

    def known(self) -> set[Address]:
        """Return the waiting chunks, and the chunks whose misses are counted."""
        return {*self._waiting, *self.sighted}

    def forget(self, address: Address) -> None:
        """Forget a chunk and its misses."""
        if address in self._waiting:
            self._dequeue(address)
        self.sighted.pop(*address)


class Filler:
    """Runs a `FillQueue` on an event loop."""

    def __init__(
        self,
        copies: Copies,
        saver: Saver,
        idle: Callable[[], bool],
        config: FillConfig | None = None,
        observe: Callable[[str], None] = lambda event: None,
    ) -> None:
        """``idle`` returns whether no answer is being generated. ``observe`` is called with each decision and
        outcome."""
        self.queue = FillQueue(config)
        self._copies = copies
        self._saver = saver
        self._idle = idle
        self._observe = observe
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="kintsugi-fill")

    async def suspect(self, namespace: str, chunks: Sequence[ToSave], ttl_s: float | None = None) -> None:
        """Count the misses of a request that missed some of ``chunks``: those that the store lacks now. Fill
        them when they are due. ``ttl_s``: maximum lifetime of the stored chunks, in seconds. Raises
        `Unavailable`."""
        if not chunks:
            return
        asked_at_s = self._saver.times.now(namespace)
        for key, tokens in await self._copies.find_missing(namespace, chunks):
            decision = self.queue.record_miss((namespace, key), tokens, time.monotonic(), ttl_s, asked_at_s)
            self._observe(decision)
        self._wake.set()

    def wake(self) -> None:
        """Check whether something can be filled, because no answer is being generated any more."""
        if len(self.queue):
            self._wake.set()

    def forget(self, namespace: str, keys: Collection[ChunkKey] | None) -> None:
        """Forget missed chunks; None: all chunks of the namespace and its parts."""
        if keys is None:
            gone = [address for address in self.queue.known() if is_within(address[0], namespace)]
        else:
            gone = [(namespace, key) for key in keys]
        for address in gone:
            self.queue.forget(address)

    async def _run(self) -> None:
        while True:
            due_s = self.queue.due_in_s(self._idle(), time.monotonic())
            if due_s != 0.0:
                self._wake.clear()
                try:
                    await asyncio.wait_for(self._wake.wait(), due_s)
                except TimeoutError:
                    continue  # a chunk has waited for `patience_s`
                continue
            try:
                await self._fill()
            except Exception:
                log.exception("filling failed; the next chunks are still filled")

    async def _fill(self) -> None:
        """Save the next batch."""
        batch = self.queue.take()
        (namespace, _), first = batch[0]
        saved = [False] * len(batch)
        try:
            chunks = [(key, miss.tokens) for (_, key), miss in batch]
            outcomes = await self._saver.save(namespace, chunks, FILL_PRIORITY, first.ttl_s, first.asked_at_s)
            saved = [outcome.is_saved for outcome in outcomes]
        except ResourceExhausted as error:
            log.info("%d misses are not filled now: %s", len(batch), error)
            for address, _ in batch:
                self.queue.drop_chunk(address)
                self._observe(MissDecision.FULL)
            batch, saved = [], []
        except KintsugiError as error:
            log.info("%d misses are not filled: %s", len(batch), error)
        finally:
            for (address, _), one in zip(batch, saved, strict=True):
                self.queue.complete_chunk(address, one)
                self._observe("filled" if one else "failed")

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
