"""An engine of this process as a gateway sees it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kintsugi.core.errors import Unavailable
from kintsugi.core.exchange import EngineDelta, EngineInfo, EngineRequest, OpenAICall, OpenAIHead, SaveOutcome
from kintsugi.core.tokens import TokenIds
from kintsugi.engine.asynchronous import AsyncEngine
from kintsugi.gateway.backend import EngineBackend


class LocalBackend(EngineBackend):
    """Does not own the engine: whoever started it stops it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine: AsyncEngine | None = engine

    def _open(self) -> AsyncEngine:
        if self._engine is None:
            raise Unavailable("this backend was closed")
        self._engine.check_health()
        return self._engine

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        async with aclosing(self._open().generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def save(
        self,
        request_id: str,
        namespace: str,
        chunks: Sequence[TokenIds],
        priority: int = 0,
        tier: str = "auto",
    ) -> list[SaveOutcome]:
        return await self._open().save(request_id, namespace, chunks, priority, tier)

    async def openai(self, call: OpenAICall) -> AsyncGenerator[OpenAIHead | bytes, None]:
        async with aclosing(self._open().openai(call)) as pieces:
            async for piece in pieces:
                yield piece

    async def info(self) -> EngineInfo:
        return self._open().info()

    async def close(self) -> None:
        self._engine = None
