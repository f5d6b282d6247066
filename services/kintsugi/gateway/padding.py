"""Delays answers so that their timing does not tell what was found in the cache.

The first token leaves at the next multiple of a time step, and everything behind it as much later as the
first token is: the rest of the answer would otherwise tell, at its end, how early the first token was ready.
See docs/adr/0011.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import TypeVar

PENDING_MAX = 65_536
"""Events of one answer that are ready and wait for their time."""

Event = TypeVar("Event")


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
