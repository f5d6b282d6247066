"""What becomes of a miss: chunks that requests lacked are prefilled in the background, so that the next hit.

`FillQueue` decides, without clock or I/O: which miss is worth it (by default one that is seen for the second
time: most texts of a chat are seen once), when (while nobody waits for an answer, or after `patience_s`), and
when to stop trying. `Filler` asks the store what is missing and has the engines save it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kintsugi.core.errors import InvalidField, KintsugiError, ResourceExhausted
from kintsugi.core.exchange import SaveState
from kintsugi.core.schema import STRICT
from kintsugi.core.spaces import ChunkKey
from kintsugi.core.tokens import TokenIds
from kintsugi.gateway.saves import Saver, ToSave
from kintsugi.store.protocol.interface import AsyncChunkStore

log = logging.getLogger(__name__)

FILL_PRIORITY = 1000
"""vLLM's: far behind everything that somebody waits for."""

Address = tuple[str, ChunkKey]


class FillMode(StrEnum):
    """`GatewaySpec.fill_on_miss`."""

    OFF = "off"
    BACKGROUND = "background"


@dataclass(frozen=True)
class FillConfig:
    """How eagerly misses are filled."""

    __pydantic_config__ = STRICT

    sights: int = 2
    """Requests that have to miss a chunk before it is filled."""
    queue_max: int = 1024
    """Chunks that wait; further ones are dropped, and may come again."""
    queue_tokens_max: int = 4 << 20
    """Of all that wait: chunks may be long."""
    sighted_max: int = 100_000
    """Chunks whose misses are counted."""
    batch: int = 4
    """Chunks saved at a time: what a request that comes meanwhile has to wait for."""
    patience_s: float = 30.0
    """So long a chunk waits for an idle moment; then it is filled between requests."""
    failures_max: int = 3
    """Then a chunk is left alone until it is forgotten."""

    def __post_init__(self) -> None:
        for name in ("sights", "queue_max", "queue_tokens_max", "sighted_max", "batch", "failures_max"):
            if getattr(self, name) < 1:
                raise InvalidField(name, f"{getattr(self, name)} is less than 1")
        if not self.patience_s >= 0:
            raise InvalidField("patience_s", f"{self.patience_s} is no duration")


class MissDecision(StrEnum):
    """On one miss; also a metric's label."""

    COUNTED = "counted"
    """Seen too seldom so far."""
    QUEUED = "queued"
    DUPLICATE = "duplicate"
    """It waits or is being filled."""
    FULL = "full"
    """No room: here, or among all chunks that wait to be saved. The next miss tries again."""
    GIVEN_UP = "given_up"


@dataclass
class _Sighted:
    sights: int = 0
    failures: int = 0


@dataclass(frozen=True)
class _Waiting:
    tokens: TokenIds
    since_s: float


class FillQueue:
    """Bounded in every direction. Times are those that its caller names."""

    def __init__(self, config: FillConfig | None = None) -> None:
        self.config = config or FillConfig()
        self._sighted: OrderedDict[Address, _Sighted] = OrderedDict()
        self._waiting: OrderedDict[Address, _Waiting] = OrderedDict()
        self._waiting_tokens = 0
        self._running: set[Address] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def missed(self, address: Address, tokens: TokenIds, now_s: float) -> MissDecision:
        """A request lacked a chunk."""
        if address in self._waiting or address in self._running:
            return MissDecision.DUPLICATE
        sighted = self._find_sighted(address)
        sighted.sights += 1
        if sighted.failures >= self.config.failures_max:
            return MissDecision.GIVEN_UP
        if sighted.sights < self.config.sights:
            return MissDecision.COUNTED
        full = len(self._waiting) >= self.config.queue_max
        if full or self._waiting_tokens + len(tokens) > self.config.queue_tokens_max:
            return MissDecision.FULL
        self._waiting[address] = _Waiting(tokens, now_s)
        self._waiting_tokens += len(tokens)
        return MissDecision.QUEUED

    def _find_sighted(self, address: Address) -> _Sighted:
        """The counts of a chunk, the newest of at most `sighted_max`."""
        sighted = self._sighted.setdefault(address, _Sighted())
        self._sighted.move_to_end(address)
        if len(self._sighted) > self.config.sighted_max:
            self._sighted.popitem(last=False)
        return sighted

    def due_in_s(self, idle: bool, now_s: float) -> float | None:
        """Seconds until something should be filled, 0 for now; None where nothing waits."""
        if not self._waiting:
            return None
        oldest = next(iter(self._waiting.values()))
        return 0.0 if idle else max(0.0, oldest.since_s + self.config.patience_s - now_s)

    def take(self) -> list[tuple[Address, TokenIds]]:
        """The next batch, all of one namespace; each has to be reported to `done`."""
        if not self._waiting:
            return []
        namespace = next(iter(self._waiting))[0]
        chosen = [address for address in self._waiting if address[0] == namespace][: self.config.batch]
        self._running.update(chosen)
        return [(address, self._dequeue(address)) for address in chosen]

    def _dequeue(self, address: Address) -> TokenIds:
        """Take a chunk out of the queue: its tokens."""
        tokens = self._waiting.pop(address).tokens
        self._waiting_tokens -= len(tokens)
        return tokens

    def done(self, address: Address, saved: bool) -> None:
        """A chunk that failed has to be missed again before it is tried again."""
        self._running.discard(address)
        if saved:
            self._sighted.pop(address, None)
            return
        sighted = self._find_sighted(address)
        sighted.failures += 1
        sighted.sights = 0

    def dropped(self, address: Address) -> None:
        """A chunk that was taken found no room: no failure of its own, and its next miss is enough."""
        self._running.discard(address)

    def forget(self, address: Address) -> None:
        """Somebody deleted it: what was counted does not count any more."""
        if address in self._waiting:
            self._dequeue(address)
        self._sighted.pop(address, None)


Observe = Callable[[str], None]


class Filler:
    """Runs a `FillQueue` on an event loop."""

    def __init__(
        self,
        store: AsyncChunkStore,
        saver: Saver,
        idle: Callable[[], bool],
        config: FillConfig | None = None,
        observe: Observe = lambda verdict: None,
    ) -> None:
        """``idle``: whether nobody waits for an answer. ``observe``: told each verdict and outcome."""
        self.queue = FillQueue(config)
        self._store = store
        self._saver = saver
        self._idle = idle
        self._observe = observe
        self._unchecked: OrderedDict[Address, TokenIds] = OrderedDict()
        """Chunks of requests that missed some; the store has to say which."""
        self._unchecked_tokens = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="kintsugi-fill")

    def suspect(self, namespace: str, chunks: Sequence[ToSave]) -> None:
        """A request lacked some of these."""
        for key, tokens in chunks:
            room = self.queue.config.queue_tokens_max - self._unchecked_tokens
            if (namespace, key) in self._unchecked:
                continue
            if len(self._unchecked) >= self.queue.config.queue_max or len(tokens) > room:
                self._observe(MissDecision.FULL)
                continue
            self._unchecked[namespace, key] = tokens
            self._unchecked_tokens += len(tokens)
        self._wake.set()

    def wake(self) -> None:
        """It may be idle now."""
        if len(self.queue):
            self._wake.set()

    def forget(self, namespace: str, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self._unchecked_tokens -= len(self._unchecked.pop((namespace, key), TokenIds()))
            self.queue.forget((namespace, key))

    async def _run(self) -> None:
        while True:
            due_s = 0.0 if self._unchecked else self.queue.due_in_s(self._idle(), time.monotonic())
            if due_s != 0.0:
                self._wake.clear()
                try:
                    await asyncio.wait_for(self._wake.wait(), due_s)
                except TimeoutError:
                    continue  # its patience is over
                continue
            try:
                await self._check()
                if self.queue.due_in_s(self._idle(), time.monotonic()) == 0.0:
                    await self._fill()
            except Exception:
                log.exception("filling broke; it goes on with the next chunk")

    async def _check(self) -> None:
        unchecked, self._unchecked, self._unchecked_tokens = self._unchecked, OrderedDict(), 0
        by_namespace: dict[str, list[ToSave]] = {}
        for (namespace, key), tokens in unchecked.items():
            by_namespace.setdefault(namespace, []).append((key, tokens))
        for namespace, chunks in by_namespace.items():
            try:
                # Not `lookup`: a shard that does not answer would make all it holds look missing.
                tiers = await self._store.tiers(namespace, [key for key, _ in chunks])
            except KintsugiError as error:
                log.debug("%d misses are not filled: the store does not say (%s)", len(chunks), error)
                continue
            for (key, tokens), tier in zip(chunks, tiers, strict=True):
                if tier is None:
                    self._observe(self.queue.missed((namespace, key), tokens, time.monotonic()))

    async def _fill(self) -> None:
        batch = self.queue.take()
        namespace = batch[0][0][0]
        saved = [False] * len(batch)
        try:
            chunks = [(key, tokens) for (_, key), tokens in batch]
            outcomes = await self._saver.save(namespace, chunks, FILL_PRIORITY)
            saved = [outcome.state is SaveState.SAVED for outcome in outcomes]
        except ResourceExhausted as error:
            log.info("%d misses are not filled now: %s", len(batch), error)
            for address, _ in batch:
                self.queue.dropped(address)
                self._observe(MissDecision.FULL)
            batch, saved = [], []
        except KintsugiError as error:
            log.info("%d misses are not filled: %s", len(batch), error)
        finally:
            for (address, _), one in zip(batch, saved, strict=True):
                self.queue.done(address, one)
                self._observe("filled" if one else "failed")

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
