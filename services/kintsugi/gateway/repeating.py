"""A task of the event loop that does a kind of work again and again, whatever fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kintsugi.core.errors import KintsugiError

log = logging.getLogger(__name__)


class Repeating:
    """Runs a step as long as it finds work, then waits for a period. `start` it, and `close` it."""

    def __init__(self, name: str, step: Callable[[], Awaitable[object]], period_s: float) -> None:
        """`name` names the task, and the work in logs. `step` returns whether there may be more to do."""
        self._name = name
        self._step = step
        self._period_s = period_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def _run(self) -> None:
        while True:
            try:
                while await self._step():
                    pass
            except KintsugiError as error:
                log.debug("%s: %s; next attempt in %.0f s", self._name, error, self._period_s)
            except Exception:
                log.exception("%s failed; next attempt in %.0f s", self._name, self._period_s)
            await asyncio.sleep(self._period_s)

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
