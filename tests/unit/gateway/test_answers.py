"""The one way to an answer, over an engine and an ask that are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.spaces import ChunkKey, TokenIds
from kintsugi.gateway import answers
from kintsugi.gateway.answers import AnswerPipeline, Ask, may_have_missed
from kintsugi.gateway.chunks import ToSave
from kintsugi.gateway.metrics import GatewayMetrics
from kintsugi.gateway.shares import FairShares
from kintsugi.gateway.tracing import TraceSpan

CHUNK = (ChunkKey(bytes(32)), TokenIds.of([1, 2]))
Item = str | Mapping[str, Any] | Exception


class ScriptedAsk(Ask[str]):
    """Sends `scripts` one after the other. Texts are events, except empty ones; mappings are accountings."""

    span_name = "test"

    def __init__(self, *scripts: Sequence[Item], incomplete: bool = False) -> None:
        self.counted = GatewayMetrics()
        super().__init__(self.counted, "/path", "tenant", "r1", {})
        self.scripts = [*scripts]
        self.incomplete = incomplete
        self.closed = 0

    async def prepare(self, trace: TraceSpan) -> Sequence[str]:
        return ("first",)

    def send(self, backend: Any, trace: Mapping[str, str]) -> AsyncGenerator[Item, None]:
        return self._play(self.scripts.pop(0))

    async def _play(self, items: Sequence[Item]) -> AsyncGenerator[Item, None]:
        try:
            for item in items:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed += 1

    def read(self, item: Any) -> Sequence[str]:
        if isinstance(item, str):
            return (item,) if item else ()
        self.accounting = item
        return ()

    def finish(self, first_s: float) -> Sequence[str]:
        if self.incomplete:
            raise Unavailable("it broke off")
        return ("last",)

    async def find_missed(self) -> Sequence[ToSave]:
        return [CHUNK]

    def sample(self, name: str, **labels: str) -> float:
        return self.counted.registry.get_sample_value(f"kintsugi_gateway_{name}", labels) or 0.0


def run(body: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "RETRY_WAIT_S", 0.0)
    asyncio.run(asyncio.wait_for(body(), 20))  # type: ignore[arg-type]


async def collected(ask: ScriptedAsk, answering: AnswerPipeline | None = None) -> list[str]:
    return [event async for event in (answering or AnswerPipeline(MagicMock())).stream(ask)]


def test_an_answer_does_not_wait_for_what_is_learned_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second event comes although the disk is still busy; the end waits for it."""
    is_written, written = asyncio.Event(), []

    class LearningAsk(ScriptedAsk):
        async def learn(self) -> None:
            await is_written.wait()
            written.append(True)

    async def body() -> None:
        events = AnswerPipeline(MagicMock()).stream(LearningAsk(["a", "b"]))
        assert [await anext(events) for _ in range(4)] == ["first", "a", "b", "last"]
        assert not written
        is_written.set()
        assert [event async for event in events] == []
        assert written == [True]

    run(body, monkeypatch)


def test_what_was_being_learned_from_an_answer_that_is_left_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    class LearningAsk(ScriptedAsk):
        async def learn(self) -> None:
            await asyncio.sleep(0.01)
            written.append(True)

    async def body() -> None:
        async with aclosing(AnswerPipeline(MagicMock()).stream(LearningAsk(["a", "b"]))) as events:
            assert [await anext(events) for _ in range(3)] == ["first", "a", "b"]
        assert written == [True]

    run(body, monkeypatch)


def test_an_engine_that_is_gone_before_it_answers_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Unavailable("gone")

    async def body() -> None:
        ask = ScriptedAsk(["", gone], ["a", "b"])
        assert await collected(ask) == ["first", "a", "b", "last"]
        assert ask.sample("ttft_seconds_count", method="/path") == 1
        for scripts in (
            ([gone], [gone], ["late"]),
            (["a", gone], ["again"]),
            ([InvalidField("x", "y")], ["b"]),
        ):
            ask = ScriptedAsk(*scripts)
            with pytest.raises((Unavailable, InvalidField)):
                await collected(ask)
            assert len(ask.scripts) == 1, "the last engine was not asked"
            assert ask.sample("chunk_tokens_total", result="hit") == 0

    run(body, monkeypatch)


def test_an_answer_is_under_way_until_it_ends_however_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        filler = MagicMock(suspect=AsyncMock())
        answering = AnswerPipeline(MagicMock(), filler)
        ask = ScriptedAsk(["a", "b"])
        async with aclosing(answering.stream(ask)) as events:
            assert answering.under_way == 0, "it is prepared first"
            assert [await anext(events), await anext(events)] == ["first", "a"]
            assert answering.under_way == 1
            assert await collected(ScriptedAsk(["c"]), answering) == ["first", "c", "last"]
            filler.wake.assert_not_called()
        assert (answering.under_way, ask.closed) == (0, 1)
        filler.wake.assert_called_once()
        for broken in (ScriptedAsk([ValueError()]), ScriptedAsk(["a"], incomplete=True)):
            with pytest.raises((ValueError, Unavailable)):
                await collected(broken, answering)
            assert answering.under_way == 0

    run(body, monkeypatch)


def test_misses_are_handed_on_behind_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        filler = MagicMock(suspect=AsyncMock())
        answering = AnswerPipeline(MagicMock(), filler)
        async with aclosing(answering.stream(ScriptedAsk(["a", {"chunks_missed": 1}]))) as events:
            async for event in events:
                assert not answering._follow_ups, event
        await asyncio.gather(*answering._follow_ups)
        filler.suspect.assert_called_once_with("tenant", [CHUNK], None)
        monkeypatch.setattr(answers, "FOLLOW_UPS_MAX", 1)
        is_free = asyncio.Event()

        async def wait(*given: Any) -> None:
            await is_free.wait()

        filler.suspect.side_effect = wait
        for _ in range(3):
            await collected(ScriptedAsk(["a", {"chunks_missed": 1}]), answering)
        is_free.set()
        await asyncio.gather(*answering._follow_ups)
        assert filler.suspect.call_count < 4
        await answering.close()

    run(body, monkeypatch)


@pytest.mark.parametrize(
    ("accounting", "expected"),
    [
        ({"chunks_hit": 2, "tokens_hit": 9, "outcome": "blended"}, False),
        ({"chunks_hit": 2, "chunks_missed": 1}, True),
        ({"chunks_hit": 2, "tokens_missed": 1}, True),
        ({"chunks_hit": 2, "outcome": "failed"}, True),
        ({"chunks_hit": 2, "outcome": "declined"}, True),
        ({"chunks_hit": 0}, True),
    ],
)
def test_which_answers_may_have_missed_a_chunk(accounting: Mapping[str, Any], expected: bool) -> None:
    assert may_have_missed(accounting) is expected


def test_a_caller_that_does_not_read_the_end_has_no_place_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        answering = AnswerPipeline(MagicMock(), shares=FairShares(places=1))
        async with aclosing(answering.stream(ScriptedAsk(["a"]))) as events:
            assert [await anext(events) for _ in range(3)] == ["first", "a", "last"]
            assert await collected(ScriptedAsk(["b"]), answering) == ["first", "b", "last"]

    run(body, monkeypatch)
