"""When shadowing stops: nothing is asked of an engine that is about to end."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from kintsugi.core.accounting import Accounting, ChunkAudit, Outcome
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkSpace, ModelFingerprint, Span
from kintsugi.engine.local import Generation, Prompt
from kintsugi.quality.reports import publish
from kintsugi.quality.shadow import ShadowConfig
from kintsugi.serving import shadowing
from kintsugi.serving.shadowing import SHADOW_PRIORITY, Shadowing
from kintsugi.store.client.ram import RamStore
from tests.unit.core.test_report import BINDING
from tests.unit.quality.fakes import answer, good_report, put_chunk

PROMPT = Prompt([1, 2, 3], KintsugiParams("acme", spans=(Span(0, 2),)))
SOUND = Accounting(Outcome.AUDITED, audit=ChunkAudit("raw", [0.0], [0.0]))


class StubEngine:
    """Answers in full only once it is let; hands out the coroutine for it only once it is let, too."""

    def __init__(self) -> None:
        self.store = RamStore()
        self.binding = BINDING
        self.watcher: Any = None
        self.asked = threading.Event()
        self.may_ask = threading.Event()
        self.may_ask.set()
        self.may_answer = asyncio.Event()
        self.begun = self.running = 0
        self.audits: list[int] = []

    def space(self, namespace: str) -> ChunkSpace:
        return ChunkSpace(ModelFingerprint.of({"model": "stub"}), namespace)

    async def audit(self, prompt: Prompt, priority: int) -> Generation:
        self.audits.append(priority)
        return answer(5, 0.9, SOUND.to_mapping(), prompt)

    def watch(self, watcher: Any) -> None:
        self.watcher = watcher

    def stats(self) -> Any:
        return SimpleNamespace(waiting=0)

    def answer_in_full(self, prompt: Prompt, priority: int) -> Coroutine[Any, Any, Generation]:
        self.asked.set()
        assert self.may_ask.wait(10)
        return self._answered(prompt)

    async def _answered(self, prompt: Prompt) -> Generation:
        self.begun, self.running = self.begun + 1, self.running + 1
        try:
            await self.may_answer.wait()
        finally:
            self.running -= 1
        return answer(5, 0.9, None, prompt)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadowing, "POLL_S", 0.001)


async def started(engine: StubEngine) -> Shadowing:
    """With one answer on its way into its shadow."""
    shadowed = Shadowing(engine, ShadowConfig(share=1.0))  # type: ignore[arg-type]
    marked = engine.watcher.prepare_prompt("a", PROMPT)
    assert engine.watcher.take(marked, answer(5, 0.9, {"outcome": "blended"}))
    assert await asyncio.to_thread(engine.asked.wait, 10)
    return shadowed


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test

    asyncio.run(bounded())


def test_an_answer_is_shadowed_while_nobody_waits() -> None:
    async def test() -> None:
        engine = StubEngine()
        engine.may_answer.set()
        shadowed = await started(engine)
        while not shadowed.counts.compared:
            await asyncio.sleep(0.001)
        await shadowed.close()
        await shadowed.close()

    run(test())


def test_a_prefill_under_way_ends_with_shadowing(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        engine = StubEngine()
        shadowed = await started(engine)
        while not engine.running:
            await asyncio.sleep(0.001)
        await shadowed.close()
        while engine.running:
            await asyncio.sleep(0.001)
        assert (engine.watcher, engine.begun) == (None, 1)

    run(test())
    assert "the engine is about to stop" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_nothing_is_submitted_once_shadowing_closes() -> None:
    """Its thread was just about to."""

    async def test() -> None:
        engine = StubEngine()
        engine.may_ask.clear()
        shadowed = await started(engine)
        closing = asyncio.create_task(shadowed.close())
        await asyncio.sleep(0.01)
        assert not closing.done(), "the thread is still there"
        engine.may_ask.set()
        await closing
        assert engine.begun == 0

    run(test())


def test_a_chunk_is_audited_behind_the_answer() -> None:
    async def test() -> None:
        engine = StubEngine()
        publish(engine.store, good_report())
        put_chunk(engine.store, engine.space("acme"), PROMPT.token_ids[:2])
        engine.may_answer.set()
        shadowed = await started(engine)
        while not shadowed.counts.audited:
            await asyncio.sleep(0.001)
        await shadowed.close()
        assert (shadowed.counts.compared, shadowed.counts.damaged) == (1, 0)
        assert engine.audits == [SHADOW_PRIORITY]

    run(test())


def test_full_prefills_take_no_more_than_their_share_of_the_time() -> None:
    """Each takes 2 s by this clock; at a share of a tenth, the next may start 20 s after it started."""

    class Clock:
        def __init__(self) -> None:
            self.now_s = 0.0

        def __call__(self) -> float:
            return self.now_s

    async def test() -> None:
        engine, clock = StubEngine(), Clock()
        engine.may_answer.set()
        engine.may_ask.clear()
        shadowed = Shadowing(engine, ShadowConfig(share=1.0), time_share=0.1, clock=clock)  # type: ignore[arg-type]
        for _ in range(2):
            marked = engine.watcher.prepare_prompt("a", PROMPT)
            assert engine.watcher.take(marked, answer(5, 0.9, {"outcome": "blended"}))
        assert await asyncio.to_thread(engine.asked.wait, 10)
        clock.now_s = 2.0
        engine.may_ask.set()
        while not shadowed.counts.compared:
            await asyncio.sleep(0.001)
        clock.now_s = 19.9
        for _ in range(20):
            await asyncio.sleep(shadowing.POLL_S)
        assert shadowed.counts.compared == 1
        clock.now_s = 20.0
        while shadowed.counts.compared == 1:
            await asyncio.sleep(0.001)
        await shadowed.close()

    run(test())
