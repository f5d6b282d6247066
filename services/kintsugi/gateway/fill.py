"""Fills misses: chunks that requests lacked are prefilled in the background, so that later requests hit them.

`FillQueue` decides, without clock or I/O, which misses to fill (by default those that are seen for the second
time: most texts of a chat are seen once), when (while no answer is under way, or after `patience_s`), and
when to give up. `Filler` asks the store which chunks are missing and has the engines save them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kintsugi.core.errors import KintsugiError, ResourceExhausted
from kintsugi.core.exchange import SaveState
from kintsugi.core.namespaces.parts import is_within
from kintsugi.core.request import longest_ttl
from kintsugi.core.spaces import ChunkKey
from kintsugi.core.tokens import TokenIds
from kintsugi.gateway.copies import Copies
from kintsugi.gateway.saves import Saver, ToSave

log = logging.getLogger(__name__)

FILL_PRIORITY = 1000
"""vLLM's priority: behind everything that a caller waits for."""

Address = tuple[str, ChunkKey]


@dataclass(frozen=True)
class FillConfig:
    """How eagerly misses are filled."""

    sights: int = 2
    """Number of requests that have to miss a chunk before it is filled."""
    queue_max: int = 1024
    """Maximum number of chunks that wait; further misses are dropped, and counted again when they recur."""
    queue_tokens_max: int = 4 << 20
    """Maximum number of tokens in all chunks that wait."""
    sighted_max: int = 100_000
    """Maximum number of chunks whose misses are counted."""
    batch: int = 4
    """Chunks saved at a time. A request that arrives meanwhile may have to wait for them."""
    patience_s: float = 30.0
    """How long a chunk waits for an idle moment; after that it is filled between requests."""
    failures_max: int = 3
    """Failed saves after which a chunk is given up until it is forgotten."""


class MissDecision(StrEnum):
    """What is done about one miss; also a metric's label."""

    COUNTED = "counted"
    """It has been missed too few times so far."""
    QUEUED = "queued"
    DUPLICATE = "duplicate"
    """It is waiting or being filled already."""
    FULL = "full"
    """The queue, or that of all chunks to be saved, is full. The next miss tries again."""
    GIVEN_UP = "given_up"


@dataclass
class _Sighted:
    sights: int = 0
    failures: int = 0
    ttl_s: float | None = 0.0
    """The longest lifetime that a request which missed it allows; None: no bound."""


@dataclass(frozen=True)
class _Waiting:
    tokens: TokenIds
    since_s: float
    ttl_s: float | None
    asked_at_s: float
    """When the last request missed it, as in `ChunkManifest`."""


@dataclass(frozen=True)
class _Unchecked:
    tokens: TokenIds
    ttl_s: float | None
    asked_at_s: float


class FillQueue:
    """The misses to fill. Everything it holds is bounded; its caller passes the time."""

    def __init__(self, config: FillConfig | None = None) -> None:
        self.config = config or FillConfig()
        self._sighted: OrderedDict[Address, _Sighted] = OrderedDict()
        self._waiting: OrderedDict[Address, _Waiting] = OrderedDict()
        self._waiting_tokens = 0
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
        """Counts a miss and queues the chunk if it is due. It is kept for the longest ``ttl_s`` of the
        requests that missed it until then."""
        if address in self._waiting or address in self._running:
            return MissDecision.DUPLICATE
        sighted = self._remember(address)
        sighted.sights += 1
        sighted.ttl_s = longest_ttl(sighted.ttl_s, ttl_s)
        if sighted.failures >= self.config.failures_max:
            return MissDecision.GIVEN_UP
        if sighted.sights < self.config.sights:
            return MissDecision.COUNTED
        full = len(self._waiting) >= self.config.queue_max
        if full or self._waiting_tokens + len(tokens) > self.config.queue_tokens_max:
            return MissDecision.FULL
        self._waiting[address] = _Waiting(tokens, now_s, sighted.ttl_s, asked_at_s)
        self._waiting_tokens += len(tokens)
        return MissDecision.QUEUED

    def due_in_s(self, idle: bool, now_s: float) -> float | None:
        """Seconds until a chunk should be filled, 0 for now; None if nothing waits."""
        if not self._waiting:
            return None
        oldest = next(iter(self._waiting.values()))
        return 0.0 if idle else max(0.0, oldest.since_s + self.config.patience_s - now_s)

    @property
    def next_ttl_s(self) -> float | None:
        """The lifetime of the next batch's chunks; None: no bound."""
        return next((one.ttl_s for one in self._waiting.values()), None)

    @property
    def next_asked_at_s(self) -> float:
        """When the next batch's first chunk was asked for."""
        return next((one.asked_at_s for one in self._waiting.values()), 0.0)

    def take(self) -> list[tuple[Address, TokenIds]]:
        """The next batch, all of one namespace and lifetime. Each chunk ends with `complete_chunk` or
        `drop_chunk`."""
        if not self._waiting:
            return []
        namespace, ttl_s = next(iter(self._waiting))[0], self.next_ttl_s
        alike = [a for a, one in self._waiting.items() if a[0] == namespace and one.ttl_s == ttl_s]
        chosen = alike[: self.config.batch]
        self._running.update(chosen)
        return [(address, self._dequeue(address)) for address in chosen]

    def _dequeue(self, address: Address) -> TokenIds:
        """Removes a chunk from the queue; its tokens."""
        tokens = self._waiting.pop(address).tokens
        self._waiting_tokens -= len(tokens)
        return tokens

    def complete_chunk(self, address: Address, saved: bool) -> None:
        """Ends a chunk that was taken. One that failed has to be missed again before it is tried again."""
        self._running.discard(address)
        if saved:
            self._sighted.pop(address, None)
            return
        sighted = self._remember(address)
        sighted.failures += 1
        sighted.sights = 0

    def _remember(self, address: Address) -> _Sighted:
        """The chunk's counts; it becomes the last to be forgotten."""
        sighted = self._sighted.setdefault(address, _Sighted())
        self._sighted.move_to_end(address)
        if len(self._sighted) > self.config.sighted_max:
            self._sighted.popitem(last=False)
        return sighted

    def drop_chunk(self, address: Address) -> None:
        """Ends a chunk that was taken and found no room. It has not failed: its next miss queues it."""
        self._running.discard(address)

    def known(self) -> set[Address]:
        """The chunks that wait, and those whose misses are counted."""
        return {*self._waiting, *self._sighted}

    def forget(self, address: Address) -> None:
        """Forgets a chunk that was deleted, and its misses."""
        if address in self._waiting:
            self._dequeue(address)
        self._sighted.pop(address, None)


Observe = Callable[[str], None]


class Filler:
    """Runs a `FillQueue` on an event loop."""

    def __init__(
        self,
        copies: Copies,
        saver: Saver,
        idle: Callable[[], bool],
        config: FillConfig | None = None,
        observe: Observe = lambda verdict: None,
    ) -> None:
        """``idle``: whether no answer is under way. ``observe`` is called with each decision and outcome."""
        self.queue = FillQueue(config)
        self._copies = copies
        self._saver = saver
        self._idle = idle
        self._observe = observe
        self._unchecked: OrderedDict[Address, _Unchecked] = OrderedDict()
        """Chunks of requests that missed some of them; the store is asked which."""
        self._unchecked_tokens = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="kintsugi-fill")

    def suspect(self, namespace: str, chunks: Sequence[ToSave], ttl_s: float | None = None) -> None:
        """Looks up chunks of which a request lacked some, and fills the missing ones when they are due, to be
        kept for ``ttl_s`` at most."""
        asked_at_s = self._saver.times.now(namespace)
        for key, tokens in chunks:
            room = self.queue.config.queue_tokens_max - self._unchecked_tokens
            if (known := self._unchecked.get((namespace, key))) is not None:
                self._unchecked[namespace, key] = _Unchecked(
                    tokens, longest_ttl(known.ttl_s, ttl_s), asked_at_s
                )
                continue
            if len(self._unchecked) >= self.queue.config.queue_max or len(tokens) > room:
                self._observe(MissDecision.FULL)
                continue
            self._unchecked[namespace, key] = _Unchecked(tokens, ttl_s, asked_at_s)
            self._unchecked_tokens += len(tokens)
        self._wake.set()

    def wake(self) -> None:
        """Checks whether something can be filled: no answer is under way any more."""
        if len(self.queue):
            self._wake.set()

    def forget(self, namespace: str, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            if (unchecked := self._unchecked.pop((namespace, key), None)) is not None:
                self._unchecked_tokens -= len(unchecked.tokens)
            self.queue.forget((namespace, key))

    def forget_namespace(self, namespace: str) -> None:
        """Forget all chunks of a namespace and its parts that were missed."""
        for name, key in {*self._unchecked, *self.queue.known()}:
            if is_within(name, namespace):
                self.forget(name, [key])

    async def _run(self) -> None:
        while True:
            due_s = 0.0 if self._unchecked else self.queue.due_in_s(self._idle(), time.monotonic())
            if due_s != 0.0:
                self._wake.clear()
                try:
                    await asyncio.wait_for(self._wake.wait(), due_s)
                except TimeoutError:
                    continue  # a chunk has waited for `patience_s`
                continue
            try:
                await self._check()
                if self.queue.due_in_s(self._idle(), time.monotonic()) == 0.0:
                    await self._fill()
            except Exception:
                log.exception("filling failed; it goes on with the next chunk")

    async def _check(self) -> None:
        unchecked, self._unchecked, self._unchecked_tokens = self._unchecked, OrderedDict(), 0
        by_namespace: dict[str, dict[ChunkKey, _Unchecked]] = {}
        for (namespace, key), one in unchecked.items():
            by_namespace.setdefault(namespace, {})[key] = one
        for namespace, missed in by_namespace.items():
            await self._check_namespace(namespace, missed)

    async def _check_namespace(self, namespace: str, missed: Mapping[ChunkKey, _Unchecked]) -> None:
        chunks = [(key, one.tokens) for key, one in missed.items()]
        try:
            missing = await self._copies.find_missing(namespace, chunks)
        except KintsugiError as error:
            log.debug("%d misses are not filled: the store does not answer (%s)", len(chunks), error)
            return
        for key, tokens in missing:
            one = missed[key]
            decision = self.queue.record_miss(
                (namespace, key), tokens, time.monotonic(), one.ttl_s, one.asked_at_s
            )
            self._observe(decision)

    async def _fill(self) -> None:
        ttl_s, asked_at_s = self.queue.next_ttl_s, self.queue.next_asked_at_s
        batch = self.queue.take()
        namespace = batch[0][0][0]
        saved = [False] * len(batch)
        try:
            chunks = [(key, tokens) for (_, key), tokens in batch]
            outcomes = await self._saver.save(namespace, chunks, FILL_PRIORITY, ttl_s, asked_at_s)
            saved = [outcome.state is SaveState.SAVED for outcome in outcomes]
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
