"""Learning: when a serving engine measures, at whose cost, and how it stops."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kintsugi.core.deploy import ModelSpec
from kintsugi.core.errors import Unavailable
from kintsugi.core.evidence import Quality
from kintsugi.core.exchange import EngineInfo
from kintsugi.core.gate import GateProgress, GateState, decide
from kintsugi.core.report import LADDER
from kintsugi.core.request import KintsugiParams, Op
from kintsugi.core.spaces import ChunkSpace, ModelFingerprint, Span, TokenIds
from kintsugi.engine.local import Generation, Prompt
from kintsugi.gateway.fill import FILL_PRIORITY
from kintsugi.quality import reports
from kintsugi.quality.stream import FULL_SHARE, PENDING_MAX
from kintsugi.serving import learning as module
from kintsugi.serving.learning import (
    BLEND_SHARE,
    IDLE_WAIT_S,
    PRIORITY,
    REPORT_FILE,
    SAVED_UP_S,
    Learning,
    make_learning,
    publish_shipped,
)
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.interface import ErasurePage
from tests.fakes.reports import (
    AT,
    BINDING,
    CELL,
    SAFEST,
    SOURCE,
    VERSIONS,
    fetch_report,
    open_report,
    part_of,
)
from tests.unit.quality.fakes import distribution, put_chunk

PROMPT = Prompt(
    range(1200), KintsugiParams("tenant", spans=(Span(0, 400), Span(400, 800)), ttl_s=60.0, asked_at_s=7.0)
)
NUMBERS = itertools.count()
DECLINED = {"outcome": "declined", "reason": "learning: 0 of about 40 prompts"}
BLENDED = {
    "outcome": "blended",
    "selector": "query",
    "ratio": 0.75,
    "cost": 0.7,
    "chunks_hit": 2,
    "tokens_hit": 800,
}


def answer(accounting: dict[str, Any] | None) -> Generation:
    return Generation([5, 5], top_logprobs=[distribution(5, 0.9)] * 2, accounting=accounting)


class StubGate:
    """Reads the store's report when it is told to."""

    binding, versions, quality = BINDING, VERSIONS, Quality.BALANCED

    def __init__(self, store: RamStore) -> None:
        self._store = store
        self.state = GateState()
        self.refresh()

    def refresh(self) -> None:
        document = self._store.get_report(BINDING.model, BINDING.report_name)
        self.state = decide(document, BINDING, self.quality, self.versions)


class StubEngine:
    """Twins take ``twin_s`` on a clock of its own, and may be held."""

    learns = True

    def __init__(self, store: RamStore | None = None) -> None:
        self.store = RamStore() if store is None else store
        self.gate = StubGate(self.store)
        self.watcher: Any = None
        self.waiting = 0
        self.generating = 0
        self.now_s = 0.0
        self.twin_s = 0.0
        self.hold: asyncio.Event | None = None
        self.failure: Exception | None = None
        self.aborted = 0
        self.calls: list[tuple[str, int]] = []
        self.saved: list[tuple[list[list[int]], int, float | None, float]] = []

    def clock(self) -> float:
        return self.now_s

    def stats(self) -> Any:
        return SimpleNamespace(waiting=self.waiting, running=self.waiting + self.generating)

    def watch(self, watcher: Any) -> None:
        self.watcher = watcher

    def space(self, namespace: str) -> ChunkSpace:
        return ChunkSpace(ModelFingerprint.of({"model": "stub"}), namespace)

    async def measure(self, prompt: Prompt, priority: int) -> Generation:
        if prompt.params is None:
            return await self._run("full", priority, None)
        if prompt.params.op is Op.AUDIT:
            return await self._run("audit", priority, {"outcome": "declined"})
        return await self._run("blend", priority, BLENDED)

    async def _run(self, kind: str, priority: int, accounting: dict[str, Any] | None) -> Generation:
        self.calls.append((kind, priority))
        self.now_s += self.twin_s
        if self.failure is not None:
            raise self.failure
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.aborted += 1
                raise
        return answer(accounting)

    async def save(
        self,
        request_id: str,
        namespace: str,
        chunks: Sequence[TokenIds],
        priority: int,
        ttl_s: float | None,
        asked_at_s: float,
    ) -> list[Any]:
        self.saved.append(([one.to_list() for one in chunks], priority, ttl_s, asked_at_s))
        return []


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.001)


def serve(engine: StubEngine, accounting: dict[str, Any] = DECLINED) -> None:
    """Answer a request, each with another prompt, that waits for its twins."""
    number = next(NUMBERS)
    prompt = dataclasses.replace(PROMPT, token_ids=[*PROMPT.token_ids[:-1], number])
    marked = engine.watcher.prepare_prompt(f"request {number}", prompt)
    assert engine.watcher.take(marked, answer(accounting))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def live(
    test: Callable[[StubEngine, Learning], Awaitable[None]],
    engine: StubEngine | None = None,
    registry: CollectorRegistry | None = None,
) -> StubEngine:
    """Run a test beside an engine that learns."""
    engine = StubEngine() if engine is None else engine

    async def run() -> None:
        learning = Learning(engine, registry, engine.clock)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(60):
                await test(engine, learning)
        finally:
            await learning.close()

    asyncio.run(run())
    return engine


def open_engine() -> StubEngine:
    """One on which blends are open, by evidence of the same versions."""
    store = RamStore()
    reports.publish(store, open_report())
    return StubEngine(store)


def test_an_answer_is_measured_behind_everything_else_and_the_evidence_is_published() -> None:
    async def test(engine: StubEngine, learning: Learning) -> None:
        serve(engine)
        await until(lambda: learning.stream.counts.pairs == len(LADDER))

    engine = live(test)
    assert PRIORITY > FILL_PRIORITY
    assert engine.calls == [("blend", PRIORITY)] * len(LADDER)


def test_evidence_reaches_the_stores_report_and_the_engines_gate() -> None:
    async def test(engine: StubEngine, learning: Learning) -> None:
        serve(engine)
        await until(lambda: learning.stream.counts.pairs == len(LADDER))
        engine.now_s = 60.0
        serve(engine)
        await until(lambda: learning.stream.counts.pairs == 2 * len(LADDER))
        report = fetch_report(engine.store, BINDING)
        assert report is not None
        assert report.tally(CELL, SOURCE, SAFEST).pairs >= 1
        assert engine.gate.state.report is not None
        assert engine.gate.state.report.tally(CELL, SOURCE, SAFEST).pairs >= 1

    live(test)


@pytest.mark.parametrize(("accounting", "share"), [(DECLINED, FULL_SHARE), (BLENDED, BLEND_SHARE)])
def test_twins_take_their_share_of_the_time_at_most(accounting: dict[str, Any], share: float) -> None:
    async def test(engine: StubEngine, learning: Learning) -> None:
        engine.twin_s = 1.0
        serve(engine, accounting)
        await until(lambda: not learning.stream.pending and not learning._may_run() and engine.now_s > 0)
        await until(lambda: learning._rested_s > engine.now_s)
        busy_s = engine.now_s
        engine.waiting = 1
        serve(engine, accounting)
        engine.waiting = 0
        engine.now_s = busy_s / share - 0.01
        assert not learning._may_run()
        engine.now_s = busy_s / share + 0.01
        assert learning._may_run()

    live(test, open_engine() if accounting is BLENDED else None)


def test_time_without_twins_is_saved_up_to_a_limit() -> None:
    """A twin starts as soon as its answer ends; one in the middle of a pause would meet the next request."""

    async def test(engine: StubEngine, learning: Learning) -> None:
        engine.now_s, engine.twin_s = 1000.0, 40.0
        each_s = engine.twin_s / FULL_SHARE - engine.twin_s
        for _ in range(PENDING_MAX):
            serve(engine)
        await until(lambda: not learning._may_run())
        assert learning.stream.counts.pairs == math.floor(SAVED_UP_S / each_s) + 1 < PENDING_MAX

    live(test)


def test_while_a_request_waits_nothing_is_measured() -> None:
    async def test(engine: StubEngine, learning: Learning) -> None:
        engine.waiting = 1
        serve(engine)
        assert not learning._may_run()
        engine.waiting = 0
        await until(lambda: learning.stream.counts.pairs > 0)

    live(test)


def test_while_requests_generate_only_answers_that_have_waited_long_are_measured() -> None:
    async def test(engine: StubEngine, learning: Learning) -> None:
        engine.generating = 1
        serve(engine)
        assert not learning._may_run()
        engine.now_s = IDLE_WAIT_S
        await until(lambda: learning.stream.counts.pairs > 0)

    live(test)


def test_under_constant_load_answers_do_not_wait_for_ever() -> None:
    async def test(engine: StubEngine, learning: Learning) -> None:
        engine.waiting = 1
        serve(engine)
        engine.now_s = 601.0
        await until(lambda: learning.stream.pending == 0)
        assert learning.stream.counts.dropped == {1: 1}

    assert live(test).calls == []


def test_closing_aborts_a_running_twin_and_nothing_is_measured_afterwards() -> None:
    async def test(engine: StubEngine, learning: Learning) -> None:
        engine.hold = asyncio.Event()
        serve(engine)
        serve(engine)
        await until(lambda: bool(engine.calls))
        await learning.close()
        assert (engine.aborted, engine.watcher) == (1, None)
        await learning.close()

    assert len(live(test).calls) == 1


def test_a_twin_of_a_busy_engine_is_the_worst_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.01)

    async def test(engine: StubEngine, learning: Learning) -> None:
        engine.hold = asyncio.Event()
        serve(engine)
        await until(lambda: learning.stream.counts.failed > 0)

    assert live(test).aborted >= 1


def test_a_defect_is_logged_and_learning_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def test(engine: StubEngine, learning: Learning) -> None:
        engine.failure = ZeroDivisionError("by the test")
        serve(engine)
        await until(lambda: "because of a defect" in caplog.text)
        engine.failure = None
        engine.now_s += 60.0
        serve(engine)
        await until(lambda: learning.stream.counts.pairs > 0)

    live(test)


def test_waiting_prompts_of_a_namespace_are_erased_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FOLLOW_S", 0.001)
    read: list[str] = []

    class FollowedStore(RamStore):
        def erasures(self, cursor: str) -> ErasurePage:
            read.append(cursor)
            return super().erasures(cursor)

    async def test(engine: StubEngine, learning: Learning) -> None:
        await until(lambda: bool(read) and read[-1] != "")
        engine.waiting = 1  # no twin runs
        serve(engine)
        assert learning.stream.pending == 1
        engine.store.erase("tenant", None, 0.0)
        await until(lambda: learning.stream.pending == 0)
        assert learning.stream.counts.dropped == {1: 1}

    live(test, StubEngine(FollowedStore()))


def test_what_was_measured_and_what_failed_is_told() -> None:
    info = EngineInfo("m", "", (), True, 1, "learning", GateProgress("learning", "", pairs_missing=30))

    async def test(engine: StubEngine, learning: Learning) -> None:
        assert learning.describe(info).progress.minutes_missing is None
        for number in range(1, 3):
            serve(engine)
            await until(lambda number=number: learning.stream.counts.pairs == number * len(LADDER))  # type: ignore[misc]
            engine.now_s += 120.0
        told = learning.describe(info)
        assert (told.progress.minutes_missing, told.learning["failure"]) == (60, "")
        assert (told.learning["pairs"], told.learning["pending"]) == (2 * len(LADDER), 0)
        engine.gate.refresh = refuse  # type: ignore[method-assign]
        serve(engine)
        await until(lambda: learning.describe(info).learning["failure"] == "the report is gone")

    def refuse() -> None:
        raise Unavailable("the report is gone")

    live(test)


def test_chunks_that_the_store_lacks_are_saved_first_as_the_request_dated_them() -> None:
    engine = StubEngine()
    put_chunk(engine.store, engine.space("tenant"), range(400))

    async def test(engine: StubEngine, learning: Learning) -> None:
        serve(engine)
        await until(lambda: learning.stream.counts.pairs > 0)

    live(test, engine)
    assert engine.saved == [([list(range(400, 800))], PRIORITY, 60.0, 7.0)]


def test_a_chunk_that_cannot_be_saved_does_not_end_the_measurement(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def refuse(*_: Any, **__: Any) -> None:
        raise Unavailable("the store is full")

    monkeypatch.setattr(StubEngine, "save", refuse)

    async def test(engine: StubEngine, learning: Learning) -> None:
        serve(engine)
        await until(lambda: learning.stream.counts.pairs > 0)

    live(test)
    assert "chunks of a measured prompt are not saved: the store is full" in caplog.text


def test_counts_and_progress_are_exported() -> None:
    registry = CollectorRegistry()

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"kintsugi_quality_{name}")

    async def test(engine: StubEngine, learning: Learning) -> None:
        assert (value("open"), value("pairs_total")) == (1.0, 0.0)
        serve(engine, BLENDED)
        await until(lambda: learning.stream.counts.pairs > 0 and not learning.stream.pending)
        assert value("pairs_total") == learning.stream.counts.pairs
        assert (value("cost"), value("loss"), value("loss_max")) == (0.5, 0.0, 0.25)
        engine.gate.state = GateState(report=open_report().with_part(part_of(writer="x"), AT), versions="new")
        assert value("open") == 1.0
        engine.gate.state = GateState("report_unavailable", "gone")
        assert (value("open"), value("cost")) == (0.0, None)

    live(test, open_engine(), registry)


def test_an_engine_that_tests_nothing_does_not_learn() -> None:
    engine: Any = SimpleNamespace(learns=False)
    assert make_learning(engine) is None


# --- The report beside a checkpoint


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    return ModelSpec(str(tmp_path))


def use(monkeypatch: pytest.MonkeyPatch, store: RamStore) -> RamStore:
    monkeypatch.setattr(module, "open_store", lambda url: store)
    return store


def test_the_report_beside_a_checkpoint_is_published_once(
    monkeypatch: pytest.MonkeyPatch, model: ModelSpec, tmp_path: Path
) -> None:
    store = use(monkeypatch, RamStore())
    assert not publish_shipped(model, "ram://", BINDING), "there is none"
    reports.write(tmp_path / REPORT_FILE, open_report())
    other = dataclasses.replace(BINDING, codec="int8")
    assert not publish_shipped(model, "ram://", other), "it is about another codec"
    assert store.get_report(BINDING.model, BINDING.report_name) is None
    assert publish_shipped(model, "ram://", BINDING)
    found = fetch_report(store, BINDING)
    assert found is not None
    assert found.tally(CELL, SOURCE, SAFEST) == open_report().tally(CELL, SOURCE, SAFEST)
    assert not publish_shipped(model, "ram://", BINDING), "the store has one"


def test_a_store_that_still_starts_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, model: ModelSpec, tmp_path: Path
) -> None:
    class Starting(RamStore):
        refusals = 2

        def get_report(self, *names: Any) -> bytes | None:
            if self.refusals:
                self.refusals -= 1
                raise Unavailable("starting")
            return super().get_report(*names)

    monkeypatch.setattr(module, "PUBLISH_RETRY_S", 0.0)
    reports.write(tmp_path / REPORT_FILE, open_report())
    store = Starting()
    use(monkeypatch, store)
    with pytest.raises(Unavailable):
        publish_shipped(model, "ram://", BINDING)
    assert publish_shipped(model, "ram://", BINDING, patience_s=60.0)
