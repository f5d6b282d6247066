"""What becomes of Ray's errors, and when work is ended; a stub for Serve's handle, no Ray that runs."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="install the extra `serving`")

from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, RayServeException

from kintsugi.core.errors import InvalidField, ResourceExhausted, Unavailable, UnknownField
from kintsugi.core.exchange import EngineDelta, EngineRequest
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import TokenIds
from kintsugi.serving.ray_backend import RayBackend

REQUEST = EngineRequest("r", TokenIds.of([1, 2]), KintsugiParams("acme"))
DELTAS = [EngineDelta((1,), "a"), EngineDelta((2,), "b")]


class StubAnswer:
    """What a handle returns: items, then perhaps an error."""

    def __init__(self, items: list[Any], error: Exception | None) -> None:
        self._items = iter(items)
        self._error = error
        self.cancelled = 0

    def __aiter__(self) -> StubAnswer:
        return self

    async def __anext__(self) -> Any:
        for item in self._items:
            return item
        raise self._error or StopAsyncIteration

    def __await__(self) -> Any:
        async def answer() -> Any:
            if self._error is not None:
                raise self._error
            return next(self._items)

        return answer().__await__()

    def cancel(self) -> None:
        self.cancelled += 1


class StubHandle:
    def __init__(self, items: list[Any], error: Exception | None = None) -> None:
        self.answer = StubAnswer(items, error)

    def options(self, stream: bool) -> StubHandle:
        assert stream
        return self

    def __getattr__(self, name: str) -> StubHandle:
        return self

    def remote(self, *arguments: Any) -> StubAnswer:
        return self.answer


async def answered(handle: StubHandle) -> list[EngineDelta]:
    return [delta async for delta in RayBackend(handle).generate(REQUEST)]


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("generate", "traceback", cause)


ERRORS = [
    (task_error(InvalidField("ratio", "2 is outside [0, 1]")), InvalidField, "2 is outside"),
    (task_error(UnknownField("sampling.n", ["stop"])), UnknownField, "sampling.n"),
    (task_error(Unavailable("the engine has ended")), Unavailable, "has ended"),
    (ActorDiedError(), Unavailable, "killed or crashed .* send the request again"),
    (OutOfMemoryError("95 %"), Unavailable, "Ray's memory monitor"),
    (WorkerCrashedError(), Unavailable, "Ray lost the engine's answer"),
    (BackPressureError(5, 4), ResourceExhausted, "too many requests"),
    (RayServeException("no replica"), Unavailable, "no engine answers"),
    (task_error(RuntimeError("a defect")), RayTaskError, "traceback"),
]


@pytest.mark.parametrize(("error", "kind", "match"), ERRORS)
def test_errors_arrive_as_they_are_promised(error: Exception, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        asyncio.run(answered(StubHandle(DELTAS[:1], error)))
    with pytest.raises(kind, match=match):
        asyncio.run(RayBackend(StubHandle([], error)).info())


def test_an_answer_passes_through() -> None:
    handle = StubHandle(DELTAS)
    assert asyncio.run(answered(handle)) == DELTAS


def test_an_answer_that_is_left_is_ended_in_the_engine() -> None:
    handle = StubHandle(DELTAS)

    async def leave() -> None:
        async with aclosing(RayBackend(handle).generate(REQUEST)) as deltas:
            assert await anext(deltas) == DELTAS[0]
            assert not handle.answer.cancelled

    asyncio.run(leave())
    assert handle.answer.cancelled == 1
