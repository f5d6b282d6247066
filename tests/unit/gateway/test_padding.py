"""Answers that leave at multiples of a time step. The event loop's own clock is not waited for: steps are
milliseconds, and only orders and differences are asserted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from kintsugi.gateway.padding import pad_events, padding_s


@pytest.mark.parametrize(
    ("first_s", "step_s", "leaves_s"),
    [(0.01, 0.1, 0.1), (0.1, 0.1, 0.1), (0.11, 0.1, 0.2), (0.0, 0.1, 0.1), (0.3, 0.0, 0.3)],
)
def test_first_tokens_leave_at_multiples_of_the_step(first_s: float, step_s: float, leaves_s: float) -> None:
    assert first_s + padding_s(first_s, step_s) == pytest.approx(leaves_s)


def run(first_s: float, gap_s: float, late_s: float, fails: bool = False) -> list[tuple[str, float]]:
    """Events with the times at which they left."""
    seen: list[tuple[str, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began_s, delay = loop.time(), [None, late_s][:1]

        async def events() -> AsyncGenerator[str, None]:
            yield "before"
            await asyncio.sleep(first_s)
            delay[0] = late_s
            for name in ("first", "second", "third"):
                yield name
                await asyncio.sleep(gap_s)
            if fails:
                raise ValueError("broke off")

        async for event in pad_events(events(), lambda: delay[0], loop.time):
            seen.append((event, loop.time() - began_s))

    asyncio.run(main())
    return seen


def test_every_event_is_as_late_as_the_first() -> None:
    seen = run(first_s=0.02, gap_s=0.03, late_s=0.1)
    assert [event for event, _ in seen] == ["before", "first", "second", "third"]
    times = dict(seen)
    assert times["before"] >= 0.12
    assert times["first"] >= 0.12
    assert times["second"] - times["first"] >= 0.02  # not in one burst with the first


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
