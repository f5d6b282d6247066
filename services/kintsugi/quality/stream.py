"""The stream of evidence from served requests: pairs of answers by full prefill and by a blend.

A connector cannot add requests, so the code that submits requests calls `Stream.prepare_prompt` before each
request (one that is measured then requests logprobs), `Stream.take` with its answer, and `Stream.run_one`
when the engine is idle. The client's answer is not affected. The other half of a pair, its twin, is forced
along the served answer's tokens, up to `POSITIONS_MAX` of them. A twin that blends pauses while other
requests are prefilled. vLLM cannot pause a full prefill: a request that arrives ends such a twin, which is
run again later, and after `INTERRUPTIONS_MAX` such ends runs beside requests.

- If blending is closed, or the open configurations are predicted to be slower, the request was prefilled in
  full. Its twins are blends with the configurations that are not decided yet: as many as the time between two
  answers allows, or only the first one if other answers wait. Chunks that the request declares and the store
  lacks are saved first.
- Where the request was blended, the twin is a full prefill; further twins blend with cheaper configurations.
  One stored chunk of the prompt is audited, too: it is prefilled again and compared with the stored KV
  (`fusor.audit`). While a cheaper configuration is still to be tested, every blend may be measured; otherwise
  only a small share.

Which requests are measured is decided when they are admitted, by their namespace, the free places and a
random id, never by their answers. A prompt that was measured before is not measured again. A blend that fails
counts as the worst loss. Waiting prompts are held in memory alone, at most `PENDING_MAX` of them for
`PENDING_S`; only losses are kept (`quality.reports`).

When the trip test detects that served blends are beyond the limit, blending is closed for that namespace, and
when audits find damaged chunks, for all. Closings are evidence in the same report.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import blake3

from kintsugi.core.accounting import ChunkAudit, Outcome
from kintsugi.core.errors import KintsugiError
from kintsugi.core.evidence import (
    POSITIONS_MAX,
    Deviation,
    Levels,
    Quality,
    Tally,
    TripTest,
    trip_limits,
)
from kintsugi.core.gate import CLOSED, LEARNING, UNMEASURED, GateState
from kintsugi.core.held import ITEM_BYTES, Held
from kintsugi.core.namespaces import is_within
from kintsugi.core.plan import Selection, make_trial
from kintsugi.core.report import Allowance, Cell, Closing, Report, ServedBlend, source_of
from kintsugi.core.spaces import ChunkKey, ChunkSpace, token_bytes
from kintsugi.engine.auditing import StoredCopy
from kintsugi.engine.local import Generation, Prompt
from kintsugi.fusor.audit import find_damage
from kintsugi.quality import metrics
from kintsugi.quality.metrics import TOP_LOGPROBS
from kintsugi.quality.reports import ReportKeeper
from kintsugi.quality.sampling import FairSampler, is_sampled

logger = logging.getLogger(__name__)

FULL_PREFILLS = frozenset((LEARNING, CLOSED, UNMEASURED, "blending_is_slower", "loading_is_slower"))
"""Reasons of full prefills that are measured: blending is closed for it, or predicted to be slower."""
PENDING_MAX = 8
"""Maximum number of answers that wait for their twins."""
REMEMBERED_MAX = 4096
"""Maximum number of measured prompts remembered by digest: a repeated prompt is no further evidence."""
PENDING_S = 600.0
"""Maximum wait. An answer that waited longer is dropped and counted."""
INTERRUPTIONS_MAX = 3
"""Maximum number of times that arriving requests end the twins of one answer. Otherwise an engine whose
requests arrive faster than a full prefill ends would measure nothing."""
FULL_SHARE = 0.3
"""Maximum share of an engine's time that twins of answers by full prefill may take."""
OPEN_SHARE = 0.005
"""Share of blended requests that are measured, divided evenly among the namespaces that send enough."""
OPEN_PER_MINUTE = 1.0
"""Minimum number of blends to measure per minute, if the share yields fewer."""
PROBATION_SHARE = 0.25
"""Share of blends that are measured while the evidence of other versions is on probation."""
HOPELESS_PAIRS = 24
"""Minimum number of pairs before a configuration can count as beyond the limit, and no more are run."""
TRIP_PAIRS_MIN = 32
"""Minimum number of a namespace's own pairs whose losses set the limit of its trip test."""
TRIP_STEP = 8
"""Pairs between two computations of that limit."""
WATCHED_BYTES_MAX = 8 << 20
"""Memory for the trip tests of namespaces."""
AUDITS_WINDOW = 300
"""Number of the latest audits in which damaged chunks are counted: five hours at one a minute."""
DAMAGED_MIN = 2
"""Blending stops when this many different chunks among them are damaged; on probation, when one is. Except on
probation, a single damaged chunk is tolerated: a bad disk may be the cause."""


_T = TypeVar("_T")


class Twins(Protocol):
    """What the stream needs of an engine."""

    priority: int
    """vLLM's priority of all requests for the stream."""

    async def run(self, prompt: Prompt) -> Generation:
        """Run the audit or trial of `Prompt.params`, or a full prefill without any, along `Prompt.forced`."""
        ...

    async def save_missing(self, prompt: Prompt) -> None:
        """Save the chunks that the prompt declares and the store lacks."""
        ...

    async def stored_copies(self, prompt: Prompt) -> list[StoredCopy]:
        """Return the copies of chunks that a blend of the prompt loads."""
        ...

    async def delete(self, space: ChunkSpace, key: ChunkKey) -> None: ...

    async def exchange(self, keeper: ReportKeeper) -> list[ServedBlend]: ...


class _Interrupted(Exception):
    """A request has arrived."""


@dataclass
class _Pending:
    prompt: Prompt
    served: Generation
    reason: str
    """Why it was prefilled in full; empty for a blend."""
    taken_s: float
    is_compared: bool = False
    """Whether a served blend was compared with its full prefill. If a request arrives meanwhile, further
    measurements are skipped."""
    is_erased: bool = False
    """Whether the namespace was erased, so that the prompt is not kept."""
    interruptions: int = 0
    """Number of times that an arriving request ended its twin."""

    @property
    def is_blend(self) -> bool:
        return not self.reason


@dataclass
class _Watched:
    """The trip test of one namespace, and its limits."""

    test: TripTest = field(default_factory=TripTest)
    limits: dict[tuple[Cell, Selection], Levels] = field(default_factory=dict)


@dataclass
class StreamCounts:
    """Counts since the start."""

    pairs: int = 0
    """Pairs that were measured."""
    failed: int = 0
    """Pairs whose twin failed. A failed blend counts as the worst loss, a failed full prefill is ignored."""
    dropped: Counter[int] = field(default_factory=Counter)
    """Answers that waited too long for their twin, or were erased with their namespace, by the band of their
    prompts' lengths (`core.report.BANDS`)."""
    audited: int = 0
    """Stored chunks that were compared with a new prefill."""
    damaged: int = 0
    """Audited chunks that differed by more than rounding and the codec explain, and were deleted."""
    closings: int = 0
    interrupted: int = 0
    """Twins that ended because a request arrived. Each is run again."""


def compare_steps(
    full: Sequence[dict[int, float]], blend: Sequence[dict[int, float]], positions: int
) -> Deviation:
    """Compare the distributions at the leading positions that both have. Raises `InvalidField` if there are
    none."""
    pairs = list(zip(full[:positions], blend[:positions], strict=False))
    return Deviation.of(
        [metrics.kl_divergence(*pair) for pair in pairs],
        [not metrics.same_top(*pair, metrics.TIE) for pair in pairs],
    )


def count_positions(generation: Generation) -> int:
    """Return the number of leading positions to compare. The token that ends an answer is not compared,
    unless it is the whole answer."""
    length = min(len(generation.token_ids), len(generation.top_logprobs))
    ended = generation.finish_reason == "stop" and length > 1
    return min(POSITIONS_MAX, length - ended)


def is_hopeless(tally: Tally, quality: Quality) -> bool:
    """Whether a configuration is most likely beyond a limit, so that pairs would be wasted. Its mean is
    then two standard errors above the limit; no verdict depends on it."""
    if tally.pairs < HOPELESS_PAIRS:
        return False
    tested = (tally.loss, quality.loss_max), (tally.lost / tally.pairs, quality.lost_max)
    return any(mean - 2 * math.sqrt(mean * (1 - mean) / tally.pairs) > limit for mean, limit in tested)


def choose_trials(state: GateState, cell: Cell, source: str, most: int | None = None) -> list[Selection]:
    """Return the configurations to measure for a source in a cell, from the safest to the cheapest of those
    that have not passed. The list ends before a configuration that is beyond the limit."""
    if state.report is None:
        return []
    allowed = state.allowance(cell, source)
    passed = 0 if allowed is None else len(allowed.selections)
    return list_undecided(state.report, cell, source, state.quality, most, passed)


def list_undecided(
    report: Report, cell: Cell, source: str, quality: Quality, most: int | None = None, passed: int = 0
) -> list[Selection]:
    """As `choose_trials`, by the source's own evidence. The first ``passed`` configurations of the ladder are
    left out."""
    passed = max(passed, len(report.standing(cell, source, quality).passed))
    found: list[Selection] = []
    for selection in report.ladder[passed:]:
        if len(found) == most or is_hopeless(report.tally(cell, source, selection), quality):
            break
        found.append(selection)
    return found


class Stream:
    """Measures the requests of one engine, on its event loop."""

    def __init__(
        self,
        twins: Twins,
        keeper: ReportKeeper,
        gate: Callable[[], GateState],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``gate`` returns the engine's state; ``clock`` seconds."""
        self.counts = StreamCounts()
        self._twins = twins
        self._keeper = keeper
        self._gate = gate
        self._clock = clock
        self._sampler = FairSampler(OPEN_SHARE, OPEN_PER_MINUTE, clock)
        self._pending: deque[_Pending] = deque()
        self._taken_s, self._gap_s = -math.inf, math.inf
        """Time of the last answer, and between the last two."""
        self._measured: OrderedDict[bytes, None] = OrderedDict()
        """Digests of the measured prompts, the latest last."""
        self.watched: Held[int, _Watched] = Held(WATCHED_BYTES_MAX)
        """By source and number of closings: evidence from before a closing trips nothing after it."""
        self._audits: deque[tuple[ChunkKey, str] | None] = deque(maxlen=AUDITS_WINDOW)
        self._current: _Pending | None = None
        """The answer whose twins run."""
        self._running: asyncio.Future[Any] | None = None
        """The computation that the engine runs for the stream now."""
        self._is_interrupted = False
        self._yields = False
        """Whether the engine itself pauses that computation while it prefills other requests."""
        # Seeded, so that equal runs audit the same chunks.
        self._picks = random.Random(0)

    @property
    def positions(self) -> int:
        """Number of leading positions of an answer that `take` needs: one more than are compared, because the
        last one may be the token that ends the answer."""
        return POSITIONS_MAX + 1

    @property
    def pending(self) -> int:
        """Number of answers that wait for their twins."""
        return len(self._pending)

    @property
    def waited_s(self) -> float:
        """How long the next answer has waited; 0 if none waits."""
        return self._clock() - self._pending[0].taken_s if self._pending else 0.0

    @property
    def is_next_blend(self) -> bool:
        """Whether the next waiting answer is a blend."""
        return bool(self._pending) and self._pending[0].is_blend

    def note_arrival(self, priority: int) -> None:
        """End the running twin if it would delay the request that arrives. Priorities are vLLM's: the lowest
        number goes first."""
        current = self._current
        if self._running is None or self._yields or priority >= self._twins.priority:
            return
        if current is None or current.interruptions < INTERRUPTIONS_MAX:
            self._is_interrupted = self._running.cancel()

    async def _run(self, answer: Awaitable[_T], yields: bool = False) -> _T:
        """Await the engine's computation. ``yields``: the engine pauses it while it prefills other requests.
        Raises `_Interrupted` if a request ends it."""
        running = asyncio.ensure_future(answer)
        self._running, self._is_interrupted, self._yields = running, False, yields
        try:
            return await running
        except asyncio.CancelledError:
            if not self._is_interrupted:
                raise
            self.counts.interrupted += 1
            raise _Interrupted from None
        finally:
            self._running = None

    def prepare_prompt(self, request_id: str, prompt: Prompt) -> Prompt:
        """Return the request to submit; a measured one requests logprobs."""
        state = self._gate()
        if prompt.params is None or state.report is None:
            return prompt
        if prompt.params.no_store or not prompt.params.learn:
            return prompt
        cell = Cell.of(prompt.params.is_discovered, len(prompt.token_ids))
        source = source_of(prompt.params.namespace)
        allowed = state.allowance(cell, source)
        if allowed is None:
            measured = bool(choose_trials(state, cell, source, 1))
        else:
            share = max(
                self._sampler.count_request(source),
                PROBATION_SHARE * allowed.on_probation,
                1.0 if not self._pending and choose_trials(state, cell, source, 1) else 0.0,
            )
            measured = is_sampled(request_id, share)
        if not measured or len(self._pending) >= PENDING_MAX:
            return prompt
        # What is saved for the pair counts as put now: a later erasure removes it.
        params = dataclasses.replace(prompt.params, asked_at_s=prompt.params.asked_at_s or time.time())
        return dataclasses.replace(prompt, params=params, top_logprobs=max(prompt.top_logprobs, TOP_LOGPROBS))

    def take(self, prompt: Prompt, generation: Generation) -> bool:
        """Queue the answer to a prompt from `prepare_prompt`. Return whether it is queued."""
        accounting = generation.accounting or {}
        is_blend = accounting.get("outcome") == Outcome.BLENDED.value
        label = str(accounting.get("reason") or "").partition(":")[0]
        if not (is_blend or label in FULL_PREFILLS) or prompt.top_logprobs < TOP_LOGPROBS:
            return False
        if not generation.token_ids or len(self._pending) >= PENDING_MAX or self._is_repeated(prompt):
            return False
        now_s = self._clock()
        self._gap_s, self._taken_s = now_s - self._taken_s, now_s
        self._pending.append(_Pending(prompt, generation, "" if is_blend else label, now_s))
        return True

    def _is_repeated(self, prompt: Prompt) -> bool:
        """Remember the prompt. Return whether it was measured before: equal prompts are not independent."""
        assert prompt.params is not None
        name = prompt.params.namespace.encode() + b"\0"
        digest = blake3.blake3(name + token_bytes(prompt.token_ids)).digest()
        is_repeated = digest in self._measured
        self._measured[digest] = None
        self._measured.move_to_end(digest)
        if len(self._measured) > REMEMBERED_MAX:
            self._measured.popitem(last=False)
        return is_repeated

    async def run_one(self) -> None:
        """Run the twins of the answer that waits longest, if one still waits."""
        self.drop_late()
        if not self._pending:
            return
        if self._keeper.is_due:  # first, because other engines' closings and slots count
            await self._exchange()
        pending = self._current = self._pending.popleft()
        state, params = self._gate(), pending.prompt.params
        assert params is not None
        cell = Cell.of(params.is_discovered, len(pending.prompt.token_ids))
        source = source_of(params.namespace)
        is_changed = False
        try:
            measure = self._measure_blend if pending.is_blend else self._measure_full
            is_changed = await measure(pending, state, cell, source)
        except _Interrupted:
            is_changed = pending.is_compared  # what was recorded before may open or close
            pending.interruptions += 1
            if not (pending.is_compared or pending.is_erased):
                self._pending.appendleft(pending)
        finally:
            self._current = None
        if is_changed or self._keeper.is_due:
            await self._exchange()

    async def _measure_full(self, pending: _Pending, state: GateState, cell: Cell, source: str) -> bool:
        """Compare an answer by full prefill with blends. Return whether something opened."""
        await self._run(self._twins.save_missing(pending.prompt))
        allowed, started_s = state.allowance(cell, source), self._clock()
        trials = choose_trials(state, cell, source, 1 if self._pending else None)
        if pending.reason == UNMEASURED and allowed is not None:
            trials = [allowed.cheapest]
        is_changed = False
        for selection in trials:
            opens = await self._try(pending, pending.served.top_logprobs, selection, cell, source)
            if opens is None:
                break
            is_changed |= opens
            if self._clock() - started_s > FULL_SHARE * self._gap_s:
                break  # do not delay the next answer; the safest configuration opens first
        return is_changed

    def drop_late(self) -> None:
        """Drop the answers that waited too long."""
        while self._pending and self._clock() - self._pending[0].taken_s > PENDING_S:
            self._count_dropped(self._pending.popleft())

    def forget(self, namespaces: Collection[str]) -> None:
        """Drop the answers to prompts that may hold texts of these namespaces and their parts, because
        something was erased there. A running twin ends."""
        kept, waiting = deque[_Pending](), self._pending
        for one in waiting:
            if _concerns(one.prompt, namespaces):
                self._count_dropped(one)
            else:
                kept.append(one)
        self._pending = kept
        current = self._current
        if current is not None and not current.is_erased and _concerns(current.prompt, namespaces):
            current.is_erased = True
            self._count_dropped(current)
            if self._running is not None:
                self._is_interrupted = self._running.cancel()

    def _count_dropped(self, dropped: _Pending) -> None:
        self.counts.dropped[Cell.of(False, len(dropped.prompt.token_ids)).band] += 1

    async def _exchange(self) -> None:
        closed: set[str] = set()
        for served in await self._twins.exchange(self._keeper):
            # A source's other blends were chosen before its closing, so they do not count after it.
            if served.source not in closed and self._watch(served):
                closed.add(served.source)

    async def _try(
        self,
        pending: _Pending,
        full_steps: Sequence[dict[int, float]],
        selection: Selection,
        cell: Cell,
        source: str,
    ) -> bool | None:
        """Blend the prompt with a configuration, and record the pair. Return whether the configuration passes
        now; None if the prompt cannot be blended."""
        params = pending.prompt.params
        assert params is not None
        positions = count_positions(pending.served)
        trial = dataclasses.replace(
            pending.prompt,
            params=dataclasses.replace(
                params,
                trial=make_trial(selection),
                discover=params.discover and not pending.is_blend,
                ratio=None,
                selector=None,
            ),
            forced=pending.served.token_ids[:positions],
        )
        try:
            twin = await self._run(self._twins.run(trial), yields=True)
        except KintsugiError as error:
            logger.warning("a blend for comparison failed, which counts as the worst loss: %s", error)
            self.counts.failed += 1
            return self._keeper.record(cell, source, selection, Tally.of(Deviation(0.0, 1.0), 1.0, [1]))
        accounting = twin.accounting or {}
        if accounting.get("outcome") != Outcome.BLENDED.value:
            return None
        deviation = compare_steps(full_steps, twin.top_logprobs, positions)
        self.counts.pairs += 1
        return self._keeper.record(cell, source, selection, _tally(deviation, accounting))

    async def _measure_blend(self, pending: _Pending, state: GateState, cell: Cell, source: str) -> bool:
        """Compare a served blend with full prefill. Return whether something opened or closed."""
        positions = count_positions(pending.served)
        plain = dataclasses.replace(pending.prompt, params=None, forced=pending.served.token_ids[:positions])
        try:
            full = await self._run(self._twins.run(plain))
        except KintsugiError:
            self.counts.failed += 1  # an engine's failure says nothing about the blend
            raise
        deviation = compare_steps(full.top_logprobs, pending.served.top_logprobs, positions)
        self.counts.pairs += 1
        accounting = pending.served.accounting or {}
        served = _served_selection(state.allowance(cell, source), accounting)
        is_changed = False
        pending.is_compared = True
        if served is not None:
            is_changed = self._keeper.record(cell, source, served, _tally(deviation, accounting))
        watched = ServedBlend.of(source, Levels.of(deviation), self._trip_limits(state, cell, source))
        self._keeper.record_served(watched)
        is_changed |= self._watch(watched)
        is_changed |= await self._audit(pending.prompt, state)
        for selection in choose_trials(state, cell, source):
            is_changed |= bool(await self._try(pending, full.top_logprobs, selection, cell, source))
        return is_changed

    def _trip_limits(self, state: GateState, cell: Cell, source: str) -> Levels:
        """Return the lowest trip limits since the last closing. Only a namespace's own evidence lowers
        them."""
        report, allowed = state.report, state.allowance(cell, source)
        limits = Levels.limits(state.quality.loss_max)
        if report is None or allowed is None:
            return limits
        lowest = self._watched_of(source).limits
        own = report.tally(cell, source, allowed.cheapest)
        if own.pairs >= TRIP_PAIRS_MIN and own.pairs % TRIP_STEP == 0:
            limits = trip_limits(own, limits.loss)
        key = cell, allowed.cheapest
        lowest[key] = limits.lowest(lowest.get(key, limits))
        return lowest[key]

    def _watched_of(self, source: str) -> _Watched:
        epoch = self._keeper.report.epoch(source)
        found = self.watched.get(source, epoch, _Watched())
        self.watched.put(source, epoch, found, ITEM_BYTES * len(found.limits))
        return found

    def _watch(self, served: ServedBlend) -> bool:
        """Add a served blend to the trip test of its namespace. Return whether that closed blending."""
        test = self._watched_of(served.source).test
        found = test.observe(Levels(*served.levels), Levels(*served.limits))
        if found is None:
            return False
        self._close(Closing(found, self._keeper.now, served.source))
        return True

    def _close(self, closing: Closing) -> None:
        whom = "all namespaces" if not closing.source else "a namespace"
        logger.error("BLENDING IS TURNED OFF for %s: %s", whom, closing.reason)
        self.counts.closings += 1
        self._keeper.close(closing)

    async def _audit(self, prompt: Prompt, state: GateState) -> bool:
        """Audit a random chunk that the prompt's blend loaded. Return whether that closed blending."""
        try:
            copies = await self._twins.stored_copies(prompt)
            if not copies:
                return False
            copy = self._picks.choice(copies)
            answer = await self._run(self._twins.run(copy.prompt))
        except KintsugiError as error:
            logger.warning("the audit of a chunk failed: %s", error)
            return False
        accounting = answer.accounting or {}
        if accounting.get("outcome") != Outcome.AUDITED.value:
            logger.warning("chunk %s is not audited: %s", copy.key, accounting.get("reason"))
            return False
        damage = find_damage(ChunkAudit(**accounting["audit"]))
        self.counts.audited += 1
        self._audits.append(None if damage is None else (copy.key, damage))
        if damage is None:
            return False
        self.counts.damaged += 1
        logger.error("a stored chunk, %s, is damaged and is deleted: %s", copy.key, damage)
        await self._twins.delete(copy.space, copy.key)
        damaged = dict(one for one in self._audits if one is not None)
        probation = state.report is not None and state.report.on_probation(state.versions)
        if len(damaged) < (1 if probation else DAMAGED_MIN):
            return False
        self._audits.clear()
        examples = "; ".join(f"{key}: {what}" for key, what in [*damaged.items()][-DAMAGED_MIN:])
        reason = f"{len(damaged)} audited chunks differ from what the model computes ({examples})"
        self._close(Closing(reason, self._keeper.now))
        return True


def _concerns(prompt: Prompt, namespaces: Collection[str]) -> bool:
    """Whether a prompt may hold texts of one of these namespaces."""
    assert prompt.params is not None
    own = [name for name in (prompt.params.namespace, prompt.params.shared) if name]
    return any(is_within(name, one) for name in own for one in namespaces)


def _served_selection(allowed: Allowance | None, accounting: dict[str, object]) -> Selection | None:
    """Return the configuration of a served blend: the cheapest that is open may have changed since. None if
    no open one has its ratio: a blend at a higher ratio, as the loading controller may choose, would be
    evidence for less than it computed."""
    ratio = float(accounting.get("ratio") or 0.0)  # type: ignore[arg-type]
    passed = () if allowed is None else allowed.selections
    found = (one for one in passed if one.selector == accounting.get("selector"))
    return next((one for one in found if math.isclose(one.ratio, ratio)), None)


def _tally(deviation: Deviation, accounting: dict[str, object]) -> Tally:
    cost = float(accounting.get("cost") or 1.0)  # type: ignore[arg-type]
    chunks, tokens = int(accounting.get("chunks_hit") or 0), int(accounting.get("tokens_hit") or 0)  # type: ignore[call-overload]
    return Tally.of(deviation, cost, [tokens // max(1, chunks)] * max(1, chunks))
