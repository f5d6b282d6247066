"""The engines behind a Ray Serve handle, as a gateway sees them.

A request whose replica dies ends with `Unavailable`; the gateway sends those again that had not begun. While
no replica is there, requests wait for the one that Serve starts, as long as their callers do.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from kintsugi.core.errors import KintsugiError, ResourceExhausted, Unavailable
from kintsugi.core.exchange import EngineDelta, EngineInfo, EngineRequest, OpenAICall, OpenAIHead, SaveOutcome
from kintsugi.core.tokens import TokenIds
from kintsugi.gateway.backend import EngineBackend

T = TypeVar("T")


class RayBackend(EngineBackend):
    """Over a `DeploymentHandle` of the deployment `Engine`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._streams = handle.options(stream=True)
        self._closed = False

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        self._check_open()
        async with aclosing(self._streamed(self._streams.generate.remote(request))) as deltas:
            async for delta in deltas:
                yield delta

    async def openai(self, call: OpenAICall) -> AsyncGenerator[OpenAIHead | bytes, None]:
        self._check_open()
        async with aclosing(self._streamed(self._streams.openai.remote(call))) as pieces:
            async for piece in pieces:
                yield piece

    async def save(
        self,
        request_id: str,
        namespace: str,
        chunks: Sequence[TokenIds],
        priority: int = 0,
        tier: str = "auto",
    ) -> list[SaveOutcome]:
        self._check_open()
        return await self._asked(
            self._handle.save.remote(request_id, namespace, list(chunks), priority, tier)
        )

    async def info(self) -> EngineInfo:
        self._check_open()
        return await self._asked(self._handle.info.remote())

    async def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("this backend was closed")

    async def _streamed(self, answer: Any) -> AsyncGenerator[Any, None]:
        try:
            async for piece in answer:
                yield piece
        except Exception as failure:
            raise _translate_ray_error(failure) from failure
        finally:
            # Ends the work in the engine where nobody reads on; nothing once it has ended.
            answer.cancel()

    async def _asked(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except Exception as failure:
            raise _translate_ray_error(failure) from failure


def _translate_ray_error(failure: Exception) -> Exception:
    """What an engine raised, as it raised it; Ray's own errors as ours."""
    from ray.exceptions import RayActorError, RayTaskError
    from ray.serve.exceptions import BackPressureError, RayServeException

    if isinstance(failure, RayTaskError):
        return failure.cause if isinstance(failure.cause, KintsugiError) else failure
    if isinstance(failure, RayActorError):
        return Unavailable("the engine ended while it answered; ask again")
    if isinstance(failure, BackPressureError):
        return ResourceExhausted("too many requests wait for an engine; try again later")
    if isinstance(failure, RayServeException):
        return Unavailable(f"no engine answers ({failure}); ask again later")
    return failure
