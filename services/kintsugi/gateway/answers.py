"""The one way from a request to its answer, whichever front end it came through.

A front end makes an `Ask`, sends on the events that `AnswerPipeline.stream` yields, and does nothing else.
The pipeline counts answers under way, opens spans, asks an engine (and another one, if the first is gone
before it answered), measures the time to the first event, gives the accounting to metrics and spans, and
hands on missed chunks to be filled. Before that it takes the request's share of gateway and engines.

Where a namespace's privacy asks for it, the answer is padded, so that its timing does not tell what was found
in the cache: the first token leaves at the next multiple of a time step, and everything behind it as much
later as the first token is (docs/adr/0011).
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
from kintsugi.core.backend import EngineBackend
from kintsugi.core.errors import KintsugiError, Unavailable
from kintsugi.core.namespaces.privacy import NO_PRIVACY
from kintsugi.gateway.fill import Filler
from kintsugi.gateway.metrics import FrontMetrics
from kintsugi.gateway.saves import ToSave
from kintsugi.gateway.shares import EnginePlace, FairShares
from kintsugi.gateway.tracing import Attribute, Timelines, TraceSpan, add_layers, describe, span

log = logging.getLogger("kintsugi.gateway")

ATTEMPTS = 2
"""Engines that are asked, one after the other, for an answer that has not begun."""
RETRY_WAIT_S = 0.05
TALLY_MAX = 64
"""Reasons that are counted apart; further ones are counted together."""
FOLLOW_UPS_MAX = 64
"""Answers whose missed chunks are being found; misses of further ones are dropped."""

Event = TypeVar("Event")
PENDING_MAX = 65_536
"""Events of one answer that are ready and wait for their time."""


class Ask(ABC, Generic[Event]):
    """What one request asks of the engines, and how their answer is read. Used for one answer, and holds what
    was read of it."""

    span_name: ClassVar[str]
    """Name of the request's span."""

    def __init__(
        self, metrics: FrontMetrics, method: str, namespace: str, request_id: str, trace: Mapping[str, str]
    ) -> None:
        """``trace``: the W3C headers that came with the request."""
        self.metrics = metrics
        self.is_counted = True
        """Whether the answer counts among those that the service reports."""
        self.method = method
        self.namespace = namespace
        self.request_id = request_id
        self.trace = trace
        self.ttl_s: float | None = None
        """How long chunks are kept at most that are stored because the request missed them."""
        self.wants_times = False
        """Whether the caller wants to know when each layer was computed."""
        self.accounting: Mapping[str, Any] | None = None
        """What the engine reported, once that was read."""
        self.tokens = 0
        """About how many tokens prompt and answer have, once the request is prepared."""
        self.tokens_asked = 0
        """About how many of `tokens` the prompt has."""
        self.tokens_unused = 0
        """How many of `tokens` the answer did not need, once it has ended."""
        self.is_negative_priority = False
        """Whether the request goes before those that wait for an engine."""
        self.privacy = NO_PRIVACY
        """What its answer may reveal."""
        self.hides_chunks = False
        """Whether the namespace's privacy hides from the caller which chunks are known."""
        self.shows_accounting = True
        """Whether the caller may know what was found in the cache."""
        self.sent_s = 0.0
        """Time from the request's arrival until an engine was asked."""
        self.delay_s: float | None = None
        """By how much every event of the answer is late; None until that is known."""

    def authorize(self) -> None:
        """Raises `PermissionDenied`."""
        return

    def describe_request(self) -> Mapping[str, Attribute]:
        """Attributes of the request's span, before it is answered."""
        return {}

    def describe_answer(self) -> Mapping[str, Attribute]:
        """Further ones, once it has been answered."""
        return {}

    async def prepare(self, trace: TraceSpan) -> Sequence[Event]:
        """Makes the request ready for an engine; the events that go out before the answer.

        Raises what the caller is refused with.
        """
        return ()

    @abstractmethod
    def send(
        self, backend: EngineBackend, timeline: bool, trace: Mapping[str, str]
    ) -> AsyncGenerator[Any, None]:
        """Asks an engine, with ``trace`` as headers. ``timeline``: it reports when layers were computed."""

    @abstractmethod
    def read(self, item: Any) -> Sequence[Event]:
        """The events that the caller gets for an item of the engine's answer. The first one begins it."""

    def delay(self, first_s: float) -> None:
        """Decides how late the answer is, at its first event."""
        self.delay_s = 0.0
        if self.privacy.pads:
            self.delay_s = padding_s(self.first_token_s(first_s), self.privacy.step_s(self.tokens_asked))

    def first_token_s(self, first_s: float) -> float:
        """Time to the first token of an answer whose first event came after ``first_s``."""
        return first_s

    async def learn(self) -> None:
        """Remembers what the request named. Called once an engine has accepted it, after its first event."""
        return

    @abstractmethod
    def finish(self, first_s: float) -> Sequence[Event]:
        """The last events, once the engine has ended; ``first_s`` is the time to the first event.

        Raises `Unavailable` for an answer that is not complete.
        """

    @abstractmethod
    async def find_missed(self) -> Sequence[ToSave]:
        """The chunks of which the engine may have lacked some; none for a caller who may not store chunks.
        Raises `KintsugiError`."""


class AnswerTally:
    """How many answers were blended since the gateway started, and why the others were not."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self.tokens_discovered = 0
        """Tokens that were hit although their request did not declare their chunks, which may have been
        discovered or put."""

    def count(self, accounting: Mapping[str, Any]) -> None:
        """``accounting`` is empty if the engine reported nothing."""
        outcome = str(accounting.get("outcome", "unknown"))
        is_blended = outcome == Outcome.BLENDED
        entry = outcome, label_of_reason(None if is_blended else accounting.get("reason"))
        if entry not in self._counts and len(self._counts) >= TALLY_MAX:
            entry = outcome, "other"
        self._counts[entry] += 1
        self.tokens_discovered += int(accounting.get("tokens_discovered", 0))

    def to_list(self) -> list[dict[str, Any]]:
        """JSON form, the most frequent first."""
        return [
            {"outcome": outcome, "reason": reason, "count": count}
            for (outcome, reason), count in self._counts.most_common()
        ]


class AnswerPipeline:
    """Answers asks. For one event loop."""

    def __init__(
        self, backend: EngineBackend, filler: Filler | None = None, shares: FairShares | None = None
    ) -> None:
        """``filler`` is given missed chunks; None: misses are not followed up."""
        self._backend = backend
        self._shares = shares or FairShares()
        self._filler = filler
        self._timelines = Timelines()
        self._follow_ups: set[asyncio.Task[None]] = set()
        self.under_way = 0
        """Answers that an engine is asked for or gives."""
        self.tally = AnswerTally()

    def stream(self, ask: Ask[Event]) -> AsyncGenerator[Event, None]:
        """The answer's events as they come, or as late as its namespace's privacy has them. Closing the
        generator ends the work in the engine.

        Raises what `Ask.prepare` and the engine raise, `ResourceExhausted` beyond the namespace's share, and
        `Unavailable` for an answer that breaks off.
        """
        events = self._answer(ask)
        return pad_events(events, lambda: ask.delay_s) if ask.privacy.pads else events

    async def _answer(self, ask: Ask[Event]) -> AsyncGenerator[Event, None]:
        """The events as they come; `ask.delay_s` is set before the first that an engine caused."""
        began_s, first_s, is_accepted = time.perf_counter(), 0.0, False
        with span(ask.span_name, ask.trace) as request:
            request.set("kintsugi.namespace", ask.namespace)
            request.set("kintsugi.request_id", ask.request_id)
            request.set_all(ask.describe_request())
            async with self._take_share(ask, request) as (before, place):
                with self._track_answer(), span("gateway.engine", request.headers()) as engine:
                    timeline = ask.wants_times or self._timelines.should_trace_layers(engine)
                    for event in before:
                        with place.lend():
                            yield event
                    for attempt in range(1, ATTEMPTS + 1):
                        try:
                            ask.sent_s = time.perf_counter() - began_s
                            ask.tokens_unused = 0
                            async with aclosing(ask.send(self._backend, timeline, engine.headers())) as items:
                                async for item in items:
                                    for event in ask.read(item):
                                        if not first_s:
                                            first_s = time.perf_counter() - began_s
                                            ask.metrics.observe_first(ask.method, first_s)
                                            ask.delay(first_s)
                                        with place.lend():
                                            yield event
                                    if not is_accepted:  # the first event does not wait for a disk
                                        is_accepted = True
                                        await ask.learn()
                            break
                        except KintsugiError as error:
                            if not first_s:
                                ask.tokens_unused = ask.tokens
                            if first_s or attempt == ATTEMPTS or not isinstance(error, Unavailable):
                                raise
                            log.info("request %s is sent again: %s", ask.request_id, error)
                        await asyncio.sleep(RETRY_WAIT_S)
                    place.release()  # the last events may wait for a caller that does not read
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
        ask.metrics.count_accounting(accounting)
        if ask.is_counted:
            self.tally.count(accounting)

    @asynccontextmanager
    async def _take_share(
        self, ask: Ask[Event], trace: TraceSpan
    ) -> AsyncIterator[tuple[Sequence[Event], EnginePlace]]:
        """Holds the request's share of gateway and engines while the block runs: the events that go out
        before the answer, and the place at the engines. Raises what the caller is refused with."""
        ask.authorize()
        with self._shares.admit(ask.namespace):
            before = await ask.prepare(trace)
            self._shares.charge(ask.namespace, ask.tokens)
            ask.tokens_unused = ask.tokens  # until an engine has the request
            try:
                async with self._shares.place(ask.namespace, ask.tokens, ask.is_negative_priority) as place:
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
        """Has the chunks of an answer looked up that it may have lacked."""
        if self._filler is None or ask.accounting is None or not may_have_missed(ask.accounting):
            return
        if len(self._follow_ups) < FOLLOW_UPS_MAX:
            task = asyncio.create_task(self._suspect_missed(ask, self._filler))
            self._follow_ups.add(task)
            task.add_done_callback(self._follow_ups.discard)

    async def _suspect_missed(self, ask: Ask[Any], filler: Filler) -> None:
        try:
            filler.suspect(ask.namespace, await ask.find_missed(), ask.ttl_s)
        except KintsugiError as error:
            log.info("misses of request %s are not filled: %s", ask.request_id, error)

    async def close(self) -> None:
        """Ends what follows up on misses. Idempotent."""
        tasks = list(self._follow_ups)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def may_have_missed(accounting: Mapping[str, Any]) -> bool:
    """Whether a prompt had chunks that the engine did not load, as far as its accounting tells."""
    return bool(
        accounting.get("chunks_missed")
        or accounting.get("tokens_missed")
        or not accounting.get("chunks_hit")
        or accounting.get("outcome") in (Outcome.DECLINED, Outcome.FAILED)
    )


def padding_s(first_token_s: float, step_s: float) -> float:
    """How late a first token is that leaves at a multiple of the step."""
    if step_s <= 0:
        return 0.0
    return max(1, math.ceil(first_token_s / step_s)) * step_s - first_token_s


async def pad_events(
    events: AsyncGenerator[Event, None],
    delay_s: Callable[[], float | None],
    clock: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[Event, None]:
    """Yields the events ``delay_s()`` later than they come; while it is None they wait. An error passes at
    once unless events wait before it. Closing the generator closes ``events``."""
    ready: asyncio.Queue[tuple[float, Event] | BaseException | None] = asyncio.Queue(PENDING_MAX)

    async def read() -> None:
        try:
            async with aclosing(events) as source:
                async for event in source:
                    await ready.put((clock(), event))
        except asyncio.CancelledError as error:  # by the source itself, or below: then nobody waits
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
