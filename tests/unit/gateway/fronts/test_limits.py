"""Bounds of HTTP requests, without a server: what the application and the caller see."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kintsugi.core.errors import KintsugiError, ResourceExhausted
from kintsugi.gateway.fronts import limits
from kintsugi.gateway.fronts.errors import Problem
from kintsugi.gateway.fronts.limits import RequestLimits
from kintsugi.gateway.gateway import GatewayLimits
from kintsugi.store.protocol import access
from kintsugi.store.protocol.quota import SLOTS, Quota


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body's size; an unread one to whoever asks for `/unread`."""
    try:
        size = 0 if scope["path"] == "/unread" else len(await Request(scope, receive).body())
        response: ASGIApp = Problem(200, "", str(size)).response()
    except KintsugiError as error:
        response = Problem.of(error).response()
    await response(scope, receive, send)


class Caller:
    """Sends pieces of a body, and notes how many were taken when an answer's parts came."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.messages: list[Message] = [
            {"type": "http.request", "body": piece, "more_body": index < len(pieces) - 1}
            for index, piece in enumerate(pieces)
        ]
        self.left: list[tuple[str, bool, int]] = []
        self.status = 0

    async def receive(self) -> Message:
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop(0)

    async def send(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        self.left.append((message["type"], message.get("more_body", False), len(self.messages)))

    async def ask(self, limited: ASGIApp, path: str = "/", **headers: str) -> int:
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "headers": raw}
        await limited(scope, self.receive, self.send)
        return self.status


def test_an_answers_end_waits_for_a_body_that_is_not_wanted() -> None:
    async def body() -> None:
        limited = RequestLimits(app, GatewayLimits())
        for path in ("/unread", "/"):
            caller = Caller([b"x"] * 3)
            assert await caller.ask(limited, path) == 200
            assert [
                kind for kind, more, left in caller.left if kind.endswith("body") and not more and not left
            ]
            assert caller.messages == []

    asyncio.run(body())


@pytest.mark.parametrize("size", ["101", "-1", "9" * 30])
def test_a_declared_size_is_believed(size: str) -> None:
    async def body() -> None:
        limited = RequestLimits(app, GatewayLimits(message_bytes_max=100))
        assert await Caller([b""]).ask(limited, content_length=size) == 413
        assert await Caller([b"x" * 100]).ask(limited, content_length="100") == 200

    asyncio.run(body())


def test_a_refused_body_counts_no_more_while_its_rest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a few that are too large would keep all others out for seconds."""
    monkeypatch.setattr(limits, "LINGER_S", 0.2)

    async def body() -> None:
        limited = RequestLimits(app, GatewayLimits(message_bytes_max=100, messages_bytes_max=150))
        slow = Caller([b"x" * 90, b"x" * 20])
        slow.messages[-1]["more_body"] = True  # and nothing follows
        lingering = asyncio.create_task(slow.ask(limited))
        while slow.status != 413:
            await asyncio.sleep(0)
        assert await Caller([b"x" * 100]).ask(limited) == 200
        assert not lingering.done()
        await lingering

    asyncio.run(body())


def test_memory_of_an_abandoned_request_is_given_back() -> None:
    async def body() -> None:
        limited = RequestLimits(app, GatewayLimits())
        slow = Caller([b"x", b"x"])
        slow.messages.pop()
        asked = asyncio.create_task(slow.ask(limited))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        with pytest.raises(ResourceExhausted):
            limited._memory.take("", GatewayLimits().messages_bytes_max + 1)
        limited._memory.take("", GatewayLimits().messages_bytes_max)

    asyncio.run(body())


def fill(places: Quota, name: str, stack: ExitStack) -> int:
    """How many places a caller gets who asks until it is refused."""
    for held in range(10_000):
        try:
            stack.enter_context(places.hold(name))
        except ResourceExhausted:
            return held
    raise AssertionError("places have no end")


def test_a_caller_leaves_places_to_others() -> None:
    places = Quota(512, SLOTS, shared=True)
    with ExitStack() as stack:
        assert [fill(places, f"greedy {number}", stack) for number in range(4)] == [384, 96, 24, 6]
        assert fill(places, "greedy 0", stack) == 0
    with ExitStack() as stack:
        assert fill(places, "another", stack) == 384, "all were given back"


def test_callers_who_cannot_be_told_apart_share_all_places() -> None:
    with ExitStack() as stack:
        assert fill(Quota(5, SLOTS, shared=False), "anyone", stack) == 5


def test_one_callers_bodies_leave_memory_for_others() -> None:
    async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
        limits.name_caller(scope, access.Caller(scope["path"], ("*",)))
        await app(scope, receive, send)

    async def body() -> None:
        limited = RequestLimits(read_all, GatewayLimits(messages_bytes_max=100), shared=True)
        held = []
        for _ in range(12):
            slow = Caller([b"x" * 10, b""])
            slow.messages.pop()  # and nothing follows
            held.append(asyncio.create_task(slow.ask(limited, "/greedy")))
            await asyncio.sleep(0)
        assert await Caller([b"x" * 10]).ask(limited, "/greedy") == 429
        assert await Caller([b"x" * 10]).ask(limited, "/other") == 200
        for one in held:
            one.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        assert await Caller([b"x" * 70]).ask(limited, "/greedy") == 200

    asyncio.run(body())
