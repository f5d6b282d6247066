"""The gateway on HTTP: OpenAI's chat completions, completions and responses, models, health and metrics.

It authenticates callers and finds chunks in messages. vLLM's own handlers in the engine process everything
else in a request. `fronts.limits` limits requests, and `answers` runs them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Send

from kintsugi.core.errors import InvalidField, KintsugiError
from kintsugi.core.exchange import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH, OpenAICall, OpenAIHead
from kintsugi.core.namespaces import NAMESPACE_HEADER, narrow_by_request
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway.console.routes import Console
from kintsugi.gateway.fronts.errors import LEFT_STATUS, Endpoint, Problem
from kintsugi.gateway.fronts.identity import check_no_page, identify
from kintsugi.gateway.fronts.limits import RequestLimits, parse_object, read_body, run_beside
from kintsugi.gateway.fronts.openai_answer import OpenAIAsk
from kintsugi.gateway.fronts.openai_request import find_requested_namespace, parse_openai_call
from kintsugi.gateway.fronts.service_routes import (
    SERVICE_PATH,
    describe_residency,
    describe_service,
    model_routes,
    parse_residency,
)
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.requests import REQUEST_ID, RESIDENCY_PATH, ServedRequest
from kintsugi.gateway.texts.segments import Segment
from kintsugi.store.protocol.access import Caller, Verb
from kintsugi.store.protocol.quota import SLOTS, Quota

DEFAULT_NAMESPACE = "default"
"""The namespace of an unrestricted caller that names none, as unmodified clients do."""


class HttpFront:
    """The ASGI application `app`. For one event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        shared = gateway.access.has_tokens
        self._slots = Quota(gateway.limits.http_concurrent_max, SLOTS, shared=shared)
        answers = Endpoint(gateway, self._answer)
        self.app = Starlette(
            routes=[
                *(
                    Route(path, answers, methods=["POST"])
                    for path in (CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH)
                ),
                *model_routes(gateway, lambda request: identify(gateway.access, request)),
                Route(RESIDENCY_PATH, Endpoint(gateway, self._find_residency), methods=["POST"]),
                Route(SERVICE_PATH, self._service, methods=["GET"]),
                Route("/healthz", self._health, methods=["GET"]),
                # The path of vLLM's own server, which load generators try first.
                Route("/health", self._health, methods=["GET"]),
                Route("/readyz", self._ready, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                *Console(gateway).routes,
            ],
            middleware=[Middleware(RequestLimits, gateway.limits, shared=shared)],
            exception_handlers={
                404: _answer_unknown_path,
                405: _answer_unknown_path,
                KintsugiError: _answer_problem,
            },
        )

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """Report whether an engine answers."""
        try:
            info = await self._gateway.recent_info.get()
        except KintsugiError as error:
            return JSONResponse({"status": "not ready", "reason": str(error)}, 503)
        return JSONResponse({"status": "ready", "model": info.model, "blending": info.blending})

    async def _metrics(self, request: Request) -> Response:
        access = self._gateway.access
        check_no_page(access, request)
        if access.names_verbs:
            access.check_sees_all(identify(access, request))
        return Response(generate_latest(self._gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _service(self, request: Request) -> Response:
        """Describe the service, and count its answers by outcome."""
        caller = identify(self._gateway.access, request)
        return JSONResponse(await describe_service(self._gateway, caller))

    @asynccontextmanager
    async def _admit(self, request: Request, served: ServedRequest) -> AsyncIterator[Caller]:
        """Authenticate a request before its body is read. The request has a slot while the block runs.

        Raises `Unauthenticated`, `PermissionDenied`, `InvalidField` and `ResourceExhausted`.
        """
        caller = identify(self._gateway.access, request)
        served.caller = caller.name
        with self._slots.hold(caller.name):
            yield caller

    async def _find_residency(self, request: Request, served: ServedRequest, send: Send) -> None:
        """Describe where the chunks of a request are stored. Raises as `_admit`, `read_body` and
        `Gateway.find_residency`."""
        gateway = self._gateway
        async with self._admit(request, served) as caller:
            raw = await read_body(request)

            def parse() -> tuple[list[Segment], list[ChunkKey], OpenAICall | None]:
                body = parse_object(raw)
                served.namespace = _find_namespace(caller, served.headers, body)
                return parse_residency(gateway, served.namespace, body)

            chunks, keys, call = await run_beside(len(raw), parse)
            found = await gateway.find_residency(caller, served.namespace, chunks, keys, call)
            info = await gateway.recent_info.get()
            response = JSONResponse(describe_residency(served.namespace, info, found))
        await response(request.scope, request.receive, send)

    async def _answer(self, request: Request, served: ServedRequest, send: Send) -> None:
        """Answer a request with an engine. If the caller disconnects, the engine's work is cancelled."""
        async with self._admit(request, served) as caller:
            try:
                raw = await request.body()
            except ClientDisconnect:
                served.status = LEFT_STATUS
                return
            call = await self._parse(caller, served, request.url.path, raw)
            ask = OpenAIAsk(self._gateway.prompts, caller, call)
            answer = asyncio.create_task(_Reply(served, send).send_answer(self._gateway, caller, ask))
            left = asyncio.create_task(_wait_for_disconnect(request.receive))
            try:
                await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    await answer
                else:
                    served.status = LEFT_STATUS
            finally:
                for task in (answer, left):
                    task.cancel()
                await asyncio.gather(answer, left, return_exceptions=True)

    async def _parse(self, caller: Caller, served: ServedRequest, path: str, raw: bytes) -> OpenAICall:
        """Parse a body and find the chunks in it. Raises `InvalidField` and `PermissionDenied`."""

        def parse() -> OpenAICall:
            body = parse_object(raw)
            namespace = served.namespace = _find_namespace(caller, served.headers, body)
            caller.require(Verb.GENERATE)
            call = parse_openai_call(
                served.request_id,
                path,
                body,
                namespace,
                lambda text: self._gateway.find_known_texts(namespace, text),
                served.trace,
            )
            if call.params.explain or call.params.timeline:
                caller.require(Verb.LIST)
            return call

        return await run_beside(len(raw), parse)


class _Reply:
    """The response to one request."""

    def __init__(self, served: ServedRequest, send: Send) -> None:
        self._served = served
        self._send = send
        self._is_stream = False

    async def send_answer(self, gateway: Gateway, caller: Caller, ask: OpenAIAsk) -> None:
        """Send the answer's events. A stream that fails ends with an error event. An error before the head,
        or in a response that is not a stream, is raised."""
        try:
            async with aclosing(gateway.answer(caller, ask)) as events:
                async for event in events:
                    if isinstance(event, OpenAIHead):
                        await self._send_head(event)
                    else:
                        await self._send_body(event)
        except KintsugiError as error:
            if not self._is_stream:
                raise
            self._served.failure = error
            text = f"data: {json.dumps(Problem.of(error).document)}\n\ndata: [DONE]\n\n"
            await self._send_body(text.encode())
        await self._send_body(b"", more=False)

    async def _send_head(self, head: OpenAIHead) -> None:
        self._served.status = head.status
        self._is_stream = head.content_type.startswith("text/event-stream")
        headers = [
            (b"content-type", head.content_type.encode()),
            (REQUEST_ID.encode(), self._served.request_id.encode()),
        ]
        if self._is_stream:
            headers.append((b"cache-control", b"no-cache"))
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def _send_body(self, body: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _find_namespace(caller: Caller, headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """Return the namespace of a request, or the part of it that the request narrows itself to.

    Raises `InvalidField` and `PermissionDenied`.
    """
    wanted = find_requested_namespace(body, headers.get(NAMESPACE_HEADER))
    return narrow_by_request(_choose_namespace(caller, wanted), headers, body)


def _choose_namespace(caller: Caller, wanted: str | None) -> str:
    if wanted:
        return caller.authorize(wanted)
    if caller.is_unrestricted:
        return DEFAULT_NAMESPACE
    if len(caller.namespaces) == 1 and not caller.namespaces[0].endswith("*"):
        return caller.namespaces[0]
    raise InvalidField("namespace", f"your token allows several; name one in the header {NAMESPACE_HEADER}")


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait until the caller disconnects. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer_problem(request: Request, error: Exception) -> Response:
    return Problem.of(error).response()


async def _answer_unknown_path(request: Request, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 404))
    served = f"POST {CHAT_PATH}, {RESPONSES_PATH} and {COMPLETIONS_PATH}, and GET /v1/models"
    message = f"{request.method} {request.url.path} is not served here; this gateway answers {served}"
    kind = "NotFoundError" if status == 404 else "MethodNotAllowedError"
    return Problem(status, kind, message).response()
