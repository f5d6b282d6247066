"""Learning: a serving engine measures in idle time how much quality blends lose on its prompts.

`quality.stream` decides what is measured and what follows from it. This module decides when: one answer at a
time, with the lowest priority in vLLM's queue, and for at most a share of the engine's time. Twins start
while the engine has no requests, so that they delay no token; after `IDLE_WAIT_S` they start while requests
generate, but never while one waits for its first token. Twins use the engine's own KV cache.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kintsugi.core.deploy import ModelSpec
from kintsugi.core.errors import KintsugiError, Unavailable
from kintsugi.core.exchange import EngineInfo
from kintsugi.core.gate import GateProgress, summarize
from kintsugi.core.report import BANDS, Binding, ServedBlend
from kintsugi.core.spaces import ChunkKey, ChunkSpace, TokenIds
from kintsugi.engine.asynchronous import AsyncEngine
from kintsugi.engine.auditing import StoredCopy, find_stored_copies
from kintsugi.engine.local import Generation, Prompt
from kintsugi.gateway.fill import FILL_PRIORITY
from kintsugi.models.reference import resolve_model
from kintsugi.quality import reports
from kintsugi.quality.reports import ReportKeeper
from kintsugi.quality.stream import FULL_SHARE, Stream, StreamCounts
from kintsugi.store.client.registry import open_store

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Interval between checks for waiting answers."""
PRIORITY = FILL_PRIORITY + 1
ANSWER_TIMEOUT_S = 300.0
BLEND_SHARE = 0.05
"""Maximum share of an engine's time for comparing blended answers with full prefill."""
IDLE_WAIT_S = 30.0
"""Maximum time that an answer waits for an engine without requests."""
REPORT_FILE = "calibration.json"
SAVED_UP_S = 300.0
"""Unused engine time that twins may save up. They can then start as soon as an answer ends, when the next
request is likely to be furthest away."""
PUBLISH_RETRY_S = 0.5
FOLLOW_S = 1.0
"""Interval between reads of the store's erasures."""
PACE_PROMPTS = 16
"""Number of the latest measured prompts from which the pace is estimated."""


class _EngineTwins:
    """Runs twins on an engine. Raises `Unavailable` if the engine is busy for too long."""

    priority = PRIORITY

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def run(self, prompt: Prompt) -> Generation:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self._engine.measure(prompt, PRIORITY)
        except TimeoutError:
            raise Unavailable(f"the engine was busy for {ANSWER_TIMEOUT_S:.0f} s") from None

    async def stored_copies(self, prompt: Prompt) -> list[StoredCopy]:
        assert prompt.params is not None
        space = self._engine.space(prompt.params.namespace)
        return await asyncio.to_thread(
            find_stored_copies, self._engine.store, space, prompt.token_ids, prompt.params.spans
        )

    async def save_missing(self, prompt: Prompt) -> None:
        params = prompt.params
        assert params is not None
        if not params.spans:
            return
        try:
            stored = {copy.token_ids.data for copy in await self.stored_copies(prompt)}
            tokens = [TokenIds.of(prompt.token_ids[one.start : one.end]) for one in params.spans]
            missing = {one.data: one for one in tokens if one.data not in stored}
            if missing:
                await self._engine.save(
                    "learning",
                    params.namespace,
                    [*missing.values()],
                    PRIORITY,
                    ttl_s=params.ttl_s,
                    asked_at_s=params.asked_at_s,
                )
        except KintsugiError as error:
            log.info("chunks of a measured prompt are not saved: %s", error)

    async def delete(self, space: ChunkSpace, key: ChunkKey) -> None:
        try:
            await asyncio.to_thread(self._engine.store.delete, space.namespace, [key])
        except KintsugiError as error:
            log.warning("damaged chunk %s may still be stored: %s", key, error)

    async def exchange(self, keeper: ReportKeeper) -> list[ServedBlend]:
        found = await asyncio.to_thread(keeper.exchange)
        await asyncio.to_thread(self._engine.gate.refresh)
        return found


class Learning:
    """Measures one engine's requests, on that engine's event loop. `close` it before the engine."""

    def __init__(
        self,
        engine: AsyncEngine,
        registry: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``registry`` exports the counts; None: no export."""
        gate = engine.gate
        keeper = ReportKeeper(engine.store, gate.binding, gate.versions, gate.quality, clock=clock)
        self._engine = engine
        self._clock = clock
        self._keeper = keeper
        self._rested_s = clock()
        """When the next twin may start. Each twin adds its time divided by its share."""
        self._measured_s: deque[float] = deque(maxlen=PACE_PROMPTS)
        """When the latest prompts were measured."""
        self._failure = ""
        """Why the latest prompt was not measured; empty if it was."""
        self.stream = Stream(_EngineTwins(engine), keeper, lambda: gate.state, clock)
        if registry is not None:
            registry.register(LearningMetrics(self.stream.counts, lambda: summarize(gate.state)))
        self._closing = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._run(), name="kintsugi-learning"),
            asyncio.create_task(self._follow(), name="kintsugi-learning-erasures"),
        ]
        engine.watch(self.stream)

    async def _run(self) -> None:
        while not self._closing.is_set():
            self.stream.drop_late()
            while self._may_run():
                share = BLEND_SHARE if self.stream.is_next_blend else FULL_SHARE
                started_s, pairs = self._clock(), self.stream.counts.pairs
                try:
                    await self.stream.run_one()
                    self._failure = ""
                except KintsugiError as error:
                    self._failure = str(error)
                    log.warning("an answer was not measured: %s", error)
                except Exception as error:
                    self._failure = f"a defect: {type(error).__name__}: {error}"
                    log.exception("an answer could not be measured because of a defect")
                if self.stream.counts.pairs > pairs:
                    self._measured_s.append(self._clock())
                rested_s = max(self._rested_s, started_s - SAVED_UP_S)
                self._rested_s = rested_s + (self._clock() - started_s) / share
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), POLL_S)

    async def _follow(self) -> None:
        """Drop waiting answers of namespaces in which something is erased."""
        cursor = ""
        while True:
            try:
                page = await asyncio.to_thread(self._engine.store.erasures, cursor)
                cursor = page.cursor
                self.stream.forget({one.namespace for one in page.erasures})
            except KintsugiError as error:
                log.debug("erasures could not be read and are read again: %s", error)
            await asyncio.sleep(FOLLOW_S)

    def describe(self, info: EngineInfo) -> EngineInfo:
        """Add to an engine's description what was measured, what failed last, and an estimate of the
        remaining time."""
        counts = dataclasses.asdict(self.stream.counts)
        dropped = {label_of_band(band): number for band, number in self.stream.counts.dropped.items()}
        failure = self._failure or self._keeper.failure
        facts = {**counts, "dropped": dropped, "pending": self.stream.pending, "failure": failure}
        progress, times = info.progress, self._measured_s
        if progress.pairs_missing and len(times) > 1:
            pace_s = (times[-1] - times[0]) / (len(times) - 1)
            minutes = math.ceil(progress.pairs_missing * pace_s / 60)
            progress = dataclasses.replace(progress, minutes_missing=minutes)
        return dataclasses.replace(info, progress=progress, learning=facts)

    def _may_run(self) -> bool:
        if self._closing.is_set() or not self.stream.pending:
            return False
        load = self._engine.stats()
        is_late = self.stream.waited_s >= IDLE_WAIT_S
        return not load.waiting and (is_late or not load.running) and self._clock() >= self._rested_s

    async def close(self) -> None:
        """Stop measuring, and abort a running twin. Nothing uses the engine or its store afterwards.
        Idempotent."""
        self._engine.watch(None)
        self._closing.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class LearningMetrics(Collector):
    """Prometheus metrics of one engine's evidence."""

    def __init__(self, counts: StreamCounts, progress: Callable[[], GateProgress]) -> None:
        self._counts = counts
        self._progress = progress

    def collect(self) -> Iterator[Metric]:
        for name, about in (
            ("pairs", "Answers that were compared with a twin"),
            ("failed", "Comparisons whose twin failed; a failed blend counts as the worst loss"),
            ("interrupted", "Twins that ended because a request arrived; they run again"),
            ("audited", "Stored chunks that were prefilled again and compared"),
            ("damaged", "Compared chunks that were damaged and were deleted"),
            ("closings", "Number of times that this engine turned blending off"),
        ):
            yield CounterMetricFamily(f"kintsugi_quality_{name}", about, value=getattr(self._counts, name))
        dropped = CounterMetricFamily(
            "kintsugi_quality_dropped",
            "Answers whose comparison was dropped: it waited too long or was erased, by prompt length",
            labels=["prompt_tokens"],
        )
        for band, number in sorted(self._counts.dropped.items()):
            dropped.add_metric([label_of_band(band)], number)
        yield dropped
        progress = self._progress()
        for name, about in (
            ("open", "1 if blending is on, 0 if it is off"),
            ("cost", "Cost of the configuration that blends use, as a share of a full prefill's work"),
            ("loss", "Mean loss of the configuration that blends use, or else of the measured one"),
            ("loss_upper", "95 % upper bound of the mean loss of the configuration that blends use"),
            ("loss_max", "Limit of the mean loss"),
            ("kl", "Mean KL of the configuration that blends use, in nats"),
            ("changed", "Mean share of changed tokens of the configuration that blends use"),
            ("pairs_missing", "Estimated number of further prompts until the next configuration passes"),
        ):
            value = progress.state == "open" if name == "open" else getattr(progress, name)
            if value is not None:
                yield GaugeMetricFamily(f"kintsugi_quality_{name}", about, value=float(value))


def label_of_band(band: int) -> str:
    """Return a band's upper bound in tokens, or what it exceeds, such as `2048` or `>32768`."""
    return str(BANDS[band]) if band < len(BANDS) else f">{BANDS[-1]}"


def make_learning(engine: AsyncEngine, registry: CollectorRegistry | None = None) -> Learning | None:
    """Return the `Learning` of an engine; None if the engine tests nothing, or its report is not in the
    store."""
    return Learning(engine, registry) if engine.learns else None


def publish_shipped(model: ModelSpec, store_url: str, binding: Binding, patience_s: float = 0.0) -> bool:
    """Publish the report beside the checkpoint if it has this `binding` and the store has none.

    Retries for `patience_s` while the store does not answer: it may still be starting. Returns whether the
    report was published. Raises `Corrupted` and `VersionMismatch` for an invalid report, and the store's
    errors.
    """
    file = Path(resolve_model(model.path)) / REPORT_FILE
    if not file.is_file():
        return False
    report = reports.read(file)
    if report.binding != binding:
        return False
    until_s = time.monotonic() + patience_s
    with closing(open_store(store_url)) as store:
        while True:
            try:
                if store.get_report(binding.model, binding.report_name) is not None:
                    return False
                reports.publish(store, report)
                return True
            except Unavailable as error:
                if time.monotonic() >= until_s:
                    raise
                log.info("the store does not accept the report yet (%s)", error)
                time.sleep(PUBLISH_RETRY_S)
