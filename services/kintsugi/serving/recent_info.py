"""What an engine last said of itself, for those who ask often: probes, balancers, who lists models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from kintsugi.core.errors import KintsugiError, Unavailable
from kintsugi.core.exchange import EngineInfo

RECENT_S = 1.0
ANSWER_S = 5.0


class RecentInfo:
    """For one event loop. However many ask, an engine is asked once a second, and once at a time."""

    def __init__(self, ask: Callable[[], Awaitable[EngineInfo]]) -> None:
        self._ask = ask
        self._last: EngineInfo | KintsugiError = Unavailable("no engine was asked yet")
        self._last_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def get(self) -> EngineInfo:
        """At most `RECENT_S` old. Raises what the engine raised, also for `RECENT_S`, and `Unavailable`
        where none came within `ANSWER_S`."""
        if time.monotonic() - self._last_s >= RECENT_S:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._renew())
            await asyncio.shield(self._asking)  # one caller that leaves does not take it from the others
        if isinstance(self._last, KintsugiError):
            raise self._last.with_traceback(None)  # or it would grow with every caller
        return self._last

    async def _renew(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                self._last = await self._ask()
        except KintsugiError as error:
            self._last = error
        except TimeoutError:
            self._last = Unavailable(f"no engine answered within {ANSWER_S:.0f} s")
        self._last_s = time.monotonic()
