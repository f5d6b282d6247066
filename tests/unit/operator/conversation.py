"""A server that answers with prepared pages and remembers what it was asked. It decides nothing itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

Answer = tuple[int, Any]


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    content_type: str
    authorization: str
    body: Any


@dataclass
class Conversation:
    """Answers by (method, path); a callable decides by itself."""

    answers: dict[tuple[str, str], Answer | Callable[[Asked], Answer]] = field(default_factory=dict)
    events: dict[str, list[Any]] = field(default_factory=dict)
    """What a watch of a path sends before it falls silent."""
    asked: list[Asked] = field(default_factory=list)
    url: str = ""

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        one = Asked(
            request.method,
            request.path,
            dict(request.query),
            request.headers.get("Content-Type", ""),
            request.headers.get("Authorization", ""),
            json.loads(text) if text else None,
        )
        self.asked.append(one)
        if request.query.get("watch") == "true":
            return await self._watch(request)
        answer = self.answers.get((one.method, one.path), (404, {"message": "not found", "code": 404}))
        status, body = answer(one) if callable(answer) else answer
        return web.json_response(body, status=status)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.events.get(request.path, []):
            await response.write(json.dumps(event).encode() + b"\n")
        await asyncio.sleep(3600)
        return response

    def of(self, method: str) -> list[Asked]:
        """Requests with a method, in order."""
        return [one for one in self.asked if one.method == method]


@asynccontextmanager
async def held(conversation: Conversation) -> AsyncIterator[ApiClient]:
    """Serve it on loopback, and a client for it."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", conversation._answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (socket,) = site._server.sockets  # type: ignore[union-attr]
    conversation.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    configuration = Configuration(host=conversation.url, api_key={"BearerToken": "Bearer secret"})
    try:
        async with ApiClient(configuration) as client:
            yield client
    finally:
        await runner.cleanup()
