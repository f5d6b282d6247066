"""A server that answers with prepared pages and remembers what it was asked. It decides nothing itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
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
async def served(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[ApiClient]:
    """Serve every path on loopback, and yield a client of it."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    configuration = Configuration(host=url, api_key={"BearerToken": "Bearer secret"})
    try:
        async with ApiClient(configuration) as client:
            yield client
    finally:
        await runner.cleanup()


@asynccontextmanager
async def held(conversation: Conversation) -> AsyncIterator[ApiClient]:
    """Serve a conversation on loopback, and yield a client of it."""
    async with served(conversation._answer) as client:
        conversation.url = client.configuration.host
        yield client
