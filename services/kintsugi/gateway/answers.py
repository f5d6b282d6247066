"""The answer pipeline, which takes every request of both front ends to its answer.

A front end makes an `Ask` and forwards the events that `AnswerPipeline.stream` yields. The pipeline takes the
request's share of the gateway and engines, opens spans, sends the request to an engine (and to another one if
the first becomes unavailable before it answers), measures the time to the first event, records the accounting
in metrics and spans, and passes missed chunks to the filler.

If a namespace's privacy requires it, the answer is padded so that its timing does not reveal what was found
in the cache: the first token is sent at the next multiple of a time step, and later events are delayed by the
same time (docs/adr/0011).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any, ClassVar, Generic, TypeVar

from kintsugi.core.accounting import Outcome, label_of_reason
from kintsugi.core.errors import KintsugiError, Unavailable
from kintsugi.core.exchange import EngineBackend
from kintsugi.core.namespaces import NO_PRIVACY
from kintsugi.gateway.chunks import ToSave
from kintsugi.gateway.fill import Filler
from kintsugi.gateway.metrics import GatewayMetrics
from kintsugi.gateway.shares import EnginePlace, FairShares
from kintsugi.gateway.tracing import Attribute, TraceSpan, add_layers, describe, span

log = logging.getLogger("kintsugi.gateway")

ATTEMPTS = 2
"""Maximum number of engines that are tried, one after the other, for an answer that has not begun."""
RETRY_WAIT_S = 0.05
TALLY_MAX = 64
"""Maximum number of reasons that are counted separately; further ones are counted together."""
FOLLOW_UPS_MAX = 64
"""Maximum number of answers whose missed chunks are looked up at a time; misses of further answers are
dropped."""

Event = TypeVar("Event")
PENDING_MAX = 65_536
"""Maximum number of delayed events of one answer."""


class Ask(ABC, Generic[Event]):
    """One request to the engines, and the state of its answer."""

    span_name: ClassVar[str]
    """Name of the request's span."""

    def __init__(
        self, metrics: GatewayMetrics, method: str, namespace: str, request_id: str, trace: Mapping[str, str]
    ) -> None:
        """``trace``: the W3C headers that came with the request."""
        self.metrics = metrics
        self.is_counted = True
        """Whether the metrics and the service's tally include the answer."""
        self.method = method
        self.namespace = namespace
        self.request_id = request_id
        self.trace = trace
        self.ttl_s: float | None = None
        """Maximum lifetime of chunks that are stored because the request missed them; None: no limit."""
        self.accounting: Mapping[str, Any] | None = None
        """The engine's accounting; None until it is read."""
        self.tokens = 0
        """Estimated number of tokens of prompt and answer, set by `prepare` at the latest."""
        self.tokens_asked = 0
        """Part of `tokens` that is the prompt's."""
        self.tokens_unused = 0
        """Part of `tokens` that the answer did not need, set when it ends."""
        self.privacy = NO_PRIVACY
        """The privacy of its namespace."""
        self.hides_chunks = False
        """Whether the namespace's privacy hides from the caller which chunks are known."""
        self.shows_accounting = True
        """Whether the caller may know what was found in the cache."""
        self.sent_s = 0.0
        """Seconds from the request's arrival until it was sent to an engine."""
        self.delay_s: float | None = None
        """Delay of every event of the answer; None until it is known."""

    def authorize(self) -> None:
        """Raises `PermissionDenied`."""
        return

    def describe_request(self) -> Mapping[str, Attribute]:
        """Return the attributes of the request's span that are known before the answer."""
        return {}

    def describe_answer(self) -> Mapping[str, Attribute]:
        """Return the attributes of the request's span that are known after the answer."""
        return {}

    async def prepare(self, trace: TraceSpan) -> Sequence[Event]:
        """Prepare the request for an engine. Return the events that are sent before the answer.

        Raises the error that refuses the request.
        """
        return ()

    @abstractmethod
    def send(self, backend: EngineBackend, trace: Mapping[str, str]) -> AsyncGenerator[Any, None]:
        """Send the request to an engine. ``trace``: W3C headers."""

    @abstractmethod
    def read(self, item: Any) -> Sequence[Event]:
        """Return the events that the caller receives for an item of the engine's answer."""

    def delay(self, first_s: float) -> None:
        """Set the answer's delay. ``first_s`` is the time to the first event."""
        self.delay_s = 0.0
        if self.privacy.pads:
            self.delay_s = padding_s(self.first_token_s(first_s), self.privacy.step_s(self.tokens_asked))

    def observe_first(self, first_s: float) -> None:
        """Record the time to the first event in the metrics."""
        if self.is_counted:
            self.metrics.observe_first(self.method, first_s)

    def first_token_s(self, first_s: float) -> float:
        """Return the time to the first token of an answer whose first event came after ``first_s``."""
        return first_s

    async def learn(self) -> None:
        """Remember the chunks that the request names. Runs concurrently with the answer, from the
        engine's first item on."""
        return

    @abstractmethod
    def finish(self, first_s: float) -> Sequence[Event]:
        """Return the last events, after the engine's last item. ``first_s`` is the time to the first event.

        Raises `Unavailable` for an incomplete answer.
        """

    @abstractmethod
    async def find_missed(self) -> Sequence[ToSave]:
        """Return the chunks of which the engine may have missed some; none if the caller may not store
        chunks. Raises `KintsugiError`."""


class AnswerTally:
    """Counts of the answers since the gateway's start, by outcome and reason."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self.tokens_hit = self.tokens_missed = 0
        self.tokens_discovered = 0
        """Number of hit tokens of chunks that the request did not declare; these were discovered or put."""

    def count(self, accounting: Mapping[str, Any]) -> None:
        """``accounting`` is empty if the engine reported nothing."""
        outcome = str(accounting.get("outcome", "unknown"))
        is_blended = outcome == Outcome.BLENDED
        entry = outcome, label_of_reason(None if is_blended else accounting.get("reason"))
        if entry not in self._counts and len(self._counts) >= TALLY_MAX:
            entry = outcome, "other"
        self._counts[entry] += 1
        self.tokens_hit += int(accounting.get("tokens_hit", 0))
        self.tokens_missed += int(accounting.get("tokens_missed", 0))
        self.tokens_discovered += int(accounting.get("tokens_discovered", 0))

    @property
    def answers(self) -> int:
        return self._counts.total()

    def to_list(self) -> list[dict[str, Any]]:
        """Return the counts as JSON, the most frequent first."""
        return [
            {"outcome": outcome, "reason": reason, "count": count}
            for (outcome, reason), count in self._counts.most_common()
        ]


class AnswerPipeline:
    """Streams the answers to requests. For one event loop."""

    def __init__(
        self, backend: EngineBackend, filler: Filler | None = None, shares: FairShares | None = None
    ) -> None:
        """``filler`` receives missed chunks; None: misses are ignored."""
        self._backend = backend
        self._shares = shares or FairShares()
        self._filler = filler
        self._follow_ups: set[asyncio.Task[None]] = set()
        self.under_way = 0
        """Number of answers that are being prepared or sent."""
        self.tally = AnswerTally()

    def stream(self, ask: Ask[Event]) -> AsyncGenerator[Event, None]:
        """Stream the answer's events, delayed if the namespace's privacy requires it. Closing the generator
        ends the work in the engine.

        Raises the errors of `Ask.prepare` and of the engine, `ResourceExhausted` beyond the namespace's
        share, and `Unavailable` for an incomplete answer.
        """
        events = self._answer(ask)
        return pad_events(events, lambda: ask.delay_s) if ask.privacy.pads else events

    async def _answer(self, ask: Ask[Event]) -> AsyncGenerator[Event, None]:
        """Stream the events without a delay. `ask.delay_s` is set before the first event of the engine."""
        began_s, first_s = time.perf_counter(), 0.0
        with span(ask.span_name, ask.trace) as request:
            request.set("kintsugi.namespace", ask.namespace)
            request.set("kintsugi.request_id", ask.request_id)
            request.set_all(ask.describe_request())
            async with self._take_share(ask, request) as (before, place), _learn_beside(ask) as learn:
                with self._track_answer(), span("gateway.engine", request.headers()) as engine:
                    for event in before:
                        with place.lend():
                            yield event
                    for attempt in range(1, ATTEMPTS + 1):
                        try:
                            ask.sent_s = time.perf_counter() - began_s
                            ask.tokens_unused = 0
                            async with aclosing(ask.send(self._backend, engine.headers())) as items:
                                async for item in items:
                                    for event in ask.read(item):
                                        if not first_s:
                                            first_s = time.perf_counter() - began_s
                                            ask.delay(first_s)
                                            ask.observe_first(first_s)
                                        with place.lend():
                                            yield event
                                    learn()
                            break
                        except KintsugiError as error:
                            if not first_s:
                                ask.tokens_unused = ask.tokens
                            if first_s or attempt == ATTEMPTS or not isinstance(error, Unavailable):
                                raise
                            log.info("request %s is sent again: %s", ask.request_id, error)
                        await asyncio.sleep(RETRY_WAIT_S)
                    place.release()  # a caller may read the last events late
                    if not first_s:
                        first_s = time.perf_counter() - began_s
                        ask.delay(first_s)
                    after = ask.finish(first_s + (ask.delay_s or 0.0))
                    accounting = ask.accounting or {}
                    describe(request, accounting)
                    request.set_all(ask.describe_answer())
                    add_layers(engine, accounting)
                    self._count(ask, accounting)
                    for event in after:
                        yield event
        self._follow_up(ask)

    def _count(self, ask: Ask[Any], accounting: Mapping[str, Any]) -> None:
        if ask.is_counted:
            ask.metrics.count_accounting(accounting)
            self.tally.count(accounting)

    @asynccontextmanager
    async def _take_share(
        self, ask: Ask[Event], trace: TraceSpan
    ) -> AsyncIterator[tuple[Sequence[Event], EnginePlace]]:
        """Hold the request's share of the gateway and engines while the block runs. Yields the events that
        are sent before the answer, and the place at the engines. Raises the error that refuses the
        request."""
        ask.authorize()
        with self._shares.admit(ask.namespace):
            before = await ask.prepare(trace)
            self._shares.charge(ask.namespace, ask.tokens)
            ask.tokens_unused = ask.tokens  # until an engine has the request
            try:
                async with self._shares.place(ask.namespace, ask.tokens) as place:
                    yield before, place
            finally:
                self._shares.settle(ask.namespace, ask.tokens_unused)

    @contextmanager
    def _track_answer(self) -> Iterator[None]:
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            if self._filler is not None and not self.under_way:
                self._filler.wake()

    def _follow_up(self, ask: Ask[Any]) -> None:
        """Pass the chunks that an answer may have missed to the filler, in the background."""
        if self._filler is None or ask.accounting is None or not may_have_missed(ask.accounting):
            return
        if len(self._follow_ups) < FOLLOW_UPS_MAX:
            task = asyncio.create_task(self._suspect_missed(ask, self._filler))
            self._follow_ups.add(task)
            task.add_done_callback(self._follow_ups.discard)

    async def _suspect_missed(self, ask: Ask[Any], filler: Filler) -> None:
        try:
            await filler.suspect(ask.namespace, await ask.find_missed(), ask.ttl_s)
        except KintsugiError as error:
            log.info("misses of request %s are not filled: %s", ask.request_id, error)

    async def close(self) -> None:
        """Cancel the follow-ups of misses. Idempotent."""
        tasks = list(self._follow_ups)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _learn_beside(ask: Ask[Any]) -> AsyncIterator[Callable[[], None]]:
    """Yield a function that starts `Ask.learn` once, concurrently, so that the answer does not wait for a
    disk. On exit the chunks are known, so the caller's next request may name them."""
    learning: asyncio.Task[None] | None = None

    def learn() -> None:
        nonlocal learning
        if learning is None:
            learning = asyncio.create_task(ask.learn())

    try:
        yield learn
    finally:
        if learning is not None:
            await asyncio.wait([learning])  # does not cancel it
    if learning is not None:
        learning.result()


def may_have_missed(accounting: Mapping[str, Any]) -> bool:
    """Return whether, by its accounting, a prompt may have had chunks that the engine did not load."""
    return bool(
        accounting.get("chunks_missed")
        or accounting.get("tokens_missed")
        or not accounting.get("chunks_hit")
        or accounting.get("outcome") in (Outcome.DECLINED, Outcome.FAILED)
    )


def padding_s(first_token_s: float, step_s: float) -> float:
    """Return the delay that moves a first token to the next multiple of the step."""
    if step_s <= 0:
        return 0.0
    return max(1, math.ceil(first_token_s / step_s)) * step_s - first_token_s


async def pad_events(
    events: AsyncGenerator[Event, None],
    delay_s: Callable[[], float | None],
    clock: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[Event, None]:
    """Yield the events with a delay of ``delay_s()``; while it is None they wait. An error is raised after
    the events before it. Closing the generator closes ``events``."""
    ready: asyncio.Queue[tuple[float, Event] | BaseException | None] = asyncio.Queue(PENDING_MAX)

    async def read() -> None:
        try:
            async with aclosing(events) as source:
                async for event in source:
                    await ready.put((clock(), event))
        except asyncio.CancelledError as error:  # by the source, or below when the generator is closed
            with suppress(asyncio.QueueFull):
                ready.put_nowait(error)
            raise
        except Exception as error:  # noqa: BLE001  # raised to the reader below
            await ready.put(error)
        else:
            await ready.put(None)

    reading = asyncio.create_task(read())
    held: list[Event] = []
    try:
        while (item := await ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            came_s, event = item
            held.append(event)
            late_s = delay_s()
            if late_s is None:
                continue
            await asyncio.sleep(came_s + late_s - clock())
            for one in held:
                yield one
            held = []
        for one in held:
            yield one
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
