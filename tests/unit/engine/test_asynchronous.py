"""What an engine tells of its end, with a stand-in for vLLM's task; no engine that runs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from kintsugi.engine.asynchronous import AsyncEngine


async def told_of_end(*, stopped: bool) -> bool:
    """Whether somebody is told, once vLLM's task has ended by itself or was cancelled."""

    async def read_answers() -> None:
        await (asyncio.Event().wait() if stopped else asyncio.sleep(0))

    engine, told = AsyncEngine.__new__(AsyncEngine), asyncio.Event()
    task = asyncio.create_task(read_answers())
    engine.client = SimpleNamespace(output_handler=task)
    engine.when_ended(told.set)
    await asyncio.sleep(0)
    if stopped:
        task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    return told.is_set()


def test_the_end_of_a_core_is_told_unless_it_was_asked_for() -> None:
    assert asyncio.run(told_of_end(stopped=False))
    assert not asyncio.run(told_of_end(stopped=True))
