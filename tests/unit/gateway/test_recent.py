from __future__ import annotations

import asyncio

import pytest

from kintsugi.core.errors import Unavailable
from kintsugi.core.exchange import EngineInfo
from kintsugi.gateway import chunks as gateway_chunks
from kintsugi.gateway.chunks import Recent
from tests.fakes.openai_backend import INFO


class Engine:
    """Answers once it is let."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None
        self.go = asyncio.Event()

    async def info(self, namespace: str = "") -> EngineInfo:
        self.asked += 1
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return INFO


def test_many_who_ask_at_once_and_soon_after_ask_the_engine_once() -> None:
    async def ask() -> None:
        engine = Engine()
        recent = Recent(engine.info, "no engine answered")
        callers = [asyncio.create_task(recent.get()) for _ in range(50)]
        await asyncio.sleep(0)
        callers[0].cancel()
        engine.go.set()
        answers = await asyncio.gather(*callers, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert answers[1:] == [INFO] * 49
        assert await recent.get() is INFO
        assert engine.asked == 1

    asyncio.run(ask())


def test_what_is_old_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        engine = Engine()
        engine.go.set()
        recent = Recent(engine.info, "no engine answered")
        assert await recent.get() is INFO
        engine.error = Unavailable("gone")
        assert await recent.get() is INFO, "for a second"
        monkeypatch.setattr(gateway_chunks, "RECENT_S", 0.0)
        with pytest.raises(Unavailable, match="gone"):
            await recent.get()
        monkeypatch.undo()
        engine.error = None
        with pytest.raises(Unavailable, match="gone"):
            await recent.get()
        assert engine.asked == 2, "a failure is believed as long"

    asyncio.run(ask())


def test_what_was_said_once_is_known_while_engines_hang_or_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> None:
        engine = Engine()
        engine.go.set()
        recent = Recent(engine.info, "no engine answered")
        engine.error = Unavailable("not yet")
        with pytest.raises(Unavailable, match="not yet"):
            await recent.get_stale(60.0)
        engine.error = None
        assert await recent.get_stale(60.0) is INFO, "the first is asked for until it is there"
        monkeypatch.setattr(gateway_chunks, "RECENT_S", 0.0)
        engine.go.clear()
        for _ in range(3):
            assert await recent.get_stale(0.0) is INFO, "without waiting for the engine"
            await asyncio.sleep(0)
        assert engine.asked == 3, "one at a time"
        engine.go.set()
        for error, told in ((Unavailable("gone"), "gone"), (KeyError("not one of ours"), "KeyError")):
            engine.error = error
            async with asyncio.timeout(10):
                while told not in caplog.text:
                    assert await recent.get_stale(0.0) is INFO
                    await asyncio.sleep(0)
        with pytest.raises(KeyError):
            await recent.get()
        await recent.close()

    asyncio.run(ask())


def test_an_engine_that_hangs_is_waited_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        monkeypatch.setattr(gateway_chunks, "ANSWER_S", 0.01)
        engine = Engine()
        with pytest.raises(Unavailable, match="no engine answered within"):
            await Recent(engine.info, "no engine answered").get()

    asyncio.run(ask())


def test_a_defect_is_told_to_who_asked_and_not_kept() -> None:
    async def ask() -> None:
        engine = Engine()
        engine.go.set()
        engine.error = KeyError("not one of ours")
        recent = Recent(engine.info, "no engine answered")
        for _ in range(2):
            with pytest.raises(KeyError):
                await recent.get()
        assert engine.asked == 2

    asyncio.run(ask())
