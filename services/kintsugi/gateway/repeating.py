"""A task of the event loop that repeats a step, also after errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kintsugi.core.errors import KintsugiError

log = logging.getLogger(__name__)


class Repeating:
    """Runs a step until there is no more work, waits for a period, and starts again."""

    def __init__(self, name: str, step: Callable[[], Awaitable[object]], period_s: float) -> None:
        """`name`: name of the task, in logs too. `step` returns whether there may be more work."""
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
