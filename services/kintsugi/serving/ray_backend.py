"""The gateway's view of the engines behind a Ray Serve handle.

A request whose replica dies ends with `Unavailable`; the gateway retries requests whose answers had not
begun. While there is no replica, requests wait for Serve to start one, until their callers cancel.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from kintsugi.core.errors import KintsugiError, ResourceExhausted, Unavailable
from kintsugi.core.exchange import (
    EngineBackend,
    EngineDelta,
    EngineInfo,
    EngineRequest,
    LostPart,
    OpenAICall,
    OpenAIHead,
    PromptMatch,
    SaveOutcome,
)
from kintsugi.core.spaces import TokenIds
from kintsugi.serving.lost_parts import LostParts


class RayBackend(EngineBackend):
    """Calls engines through a `DeploymentHandle`."""

    def __init__(self, handle: Any, lost: LostParts | None = None) -> None:
        """``lost``: its owner updates it; None: losses are not watched."""
        self._handle = handle
        self._lost = LostParts() if lost is None else lost
        self._streams = handle.options(stream=True)
        self._closed = False

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        return self._stream_answer(self._streams.generate, request)

    def openai(self, call: OpenAICall) -> AsyncGenerator[OpenAIHead | bytes, None]:
        return self._stream_answer(self._streams.openai, call)

    async def save(
        self,
        request_id: str,
        namespace: str,
        chunks: Sequence[TokenIds],
        priority: int = 0,
        ttl_s: float | None = None,
        asked_at_s: float = 0.0,
    ) -> list[SaveOutcome]:
        outcomes: list[SaveOutcome] = await self._await_answer(
            self._handle.save, request_id, namespace, list(chunks), priority, ttl_s, asked_at_s
        )
        return outcomes

    async def find_chunks(self, call: OpenAICall) -> PromptMatch:
        match: PromptMatch = await self._await_answer(self._handle.find_chunks, call)
        return match

    async def info(self, namespace: str = "") -> EngineInfo:
        info: EngineInfo = await self._await_answer(self._handle.info, namespace)
        return info

    def lost_parts(self) -> Sequence[LostPart]:
        return self._lost.losses

    async def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("this backend was closed")

    async def _stream_answer(self, method: Any, argument: Any) -> AsyncGenerator[Any, None]:
        self._check_open()
        answer = method.remote(argument)
        try:
            async for piece in answer:
                yield piece
        except Exception as failure:
            raise _translate_ray_error(failure) from failure
        finally:
            # Ends the engine's work if the caller has left.
            answer.cancel()

    async def _await_answer(self, method: Any, *arguments: Any) -> Any:
        self._check_open()
        try:
            return await method.remote(*arguments)
        except Exception as failure:
            raise _translate_ray_error(failure) from failure


def _translate_ray_error(failure: Exception) -> Exception:
    """Return the engine's own error, or one of ours in place of an error of Ray."""
    from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError
    from ray.serve.exceptions import BackPressureError, RayServeException

    if isinstance(failure, RayTaskError):
        return failure.cause if isinstance(failure.cause, KintsugiError) else failure
    if isinstance(failure, OutOfMemoryError):
        return Unavailable(
            "the engine was ended by Ray's memory monitor during the answer, because other programs fill its "
            "machine; Ray starts another: send the request again"
        )
    if isinstance(failure, RayActorError):
        return Unavailable(
            "the engine was killed or crashed during the answer; Ray starts another: send the request again"
        )
    if isinstance(failure, BackPressureError):
        return ResourceExhausted("too many requests wait for an engine; try again later")
    if isinstance(failure, RayServeException):
        return Unavailable(f"no engine answers ({failure}); try again later")
    if isinstance(failure, RayError):
        return Unavailable(f"Ray lost the engine's answer ({failure}); send the request again")
    return failure
