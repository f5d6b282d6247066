"""The frame of an HTTP endpoint, which records its requests and turns errors into responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from kintsugi.gateway.fronts.errors import Problem, http_status_of
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.requests import ServedRequest

Answer = Callable[[Request, ServedRequest, Send], Awaitable[None]]
"""Answers one request. Raises the error that refuses it."""


class Endpoint:
    """An ASGI endpoint that calls an `Answer` for each request."""

    def __init__(self, gateway: Gateway, answer: Answer) -> None:
        self._gateway = gateway
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        metrics, audit = self._gateway.metrics, self._gateway.audit
        served = ServedRequest(request.url.path, request.headers, metrics, 200, audit=audit)
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            with served.record(http_status_of):
                await self._answer(request, served, send_noted)
        except Exception as error:
            if has_begun:  # the status was sent; an exception makes the server close the connection
                raise
            await Problem.of(error, served.request_id).response()(scope, receive, send)
