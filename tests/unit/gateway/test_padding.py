"""Answers that leave at multiples of a time step. Steps are milliseconds; a busy machine only makes events
later, and what is asserted is how early they may leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from kintsugi.gateway.answers import pad_events, padding_s


@pytest.mark.parametrize(
    ("first_s", "step_s", "leaves_s"),
    [(0.01, 0.1, 0.1), (0.1, 0.1, 0.1), (0.11, 0.1, 0.2), (0.0, 0.1, 0.1), (0.3, 0.0, 0.3)],
)
def test_first_tokens_leave_at_multiples_of_the_step(first_s: float, step_s: float, leaves_s: float) -> None:
    assert first_s + padding_s(first_s, step_s) == pytest.approx(leaves_s)


def run(first_s: float, gap_s: float, late_s: float, fails: bool = False) -> list[tuple[str, float]]:
    """Events, and how long after they came they left."""
    seen: list[tuple[str, float]] = []
    came_s: dict[str, float] = {}

    async def main() -> None:
        loop = asyncio.get_running_loop()
        delay: list[float | None] = [None]

        async def events() -> AsyncGenerator[str, None]:
            came_s["before"] = loop.time()
            yield "before"
            await asyncio.sleep(first_s)
            delay[0] = late_s
            for name in ("first", "second", "third"):
                came_s[name] = loop.time()
                yield name
                await asyncio.sleep(gap_s)
            if fails:
                raise ValueError("broke off")

        async for event in pad_events(events(), lambda: delay[0], loop.time):
            seen.append((event, loop.time() - came_s[event]))

    asyncio.run(main())
    return seen


def test_every_event_is_as_late_as_the_first() -> None:
    seen = run(first_s=0.02, gap_s=0.03, late_s=0.1)
    assert [event for event, _ in seen] == ["before", "first", "second", "third"]
    waited_s = dict(seen)
    assert waited_s["before"] >= 0.119  # what came before the first leaves with it
    assert min(waited_s[event] for event in ("first", "second", "third")) >= 0.099


def test_an_error_comes_behind_what_came_before_it() -> None:
    with pytest.raises(ValueError, match="broke off"):
        run(0.0, 0.0, 0.01, fails=True)


def test_closing_ends_the_source() -> None:
    closed = asyncio.Event()

    async def main() -> None:
        async def events() -> AsyncGenerator[str, None]:
            try:
                while True:
                    yield "more"
                    await asyncio.sleep(0)
            finally:
                closed.set()

        padded = pad_events(events(), lambda: 0.0)
        assert await anext(padded) == "more"
        await padded.aclose()

    asyncio.run(main())
    assert closed.is_set()


def test_a_source_that_is_cancelled_does_not_leave_its_reader_waiting() -> None:
    async def main() -> None:
        async def events() -> AsyncGenerator[str, None]:
            yield "more"
            raise asyncio.CancelledError

        padded = pad_events(events(), lambda: 0.0)
        assert await anext(padded) == "more"
        reading = asyncio.ensure_future(anext(padded))
        assert await asyncio.wait((reading,), timeout=5) == ({reading}, set())
        assert reading.cancelled()

    asyncio.run(main())
