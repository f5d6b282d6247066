"""The gateway on HTTP: OpenAI's chat completions, completions and responses, models, health and metrics.

It checks who calls and finds chunks in messages; everything else in a request is for vLLM's own handlers, in
the engine. `fronts.limits` bounds requests, `answers` runs them; a caller that leaves ends the work.
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
from starlette.types import Receive, Scope, Send

from kintsugi.core.errors import InvalidField, KintsugiError
from kintsugi.core.exchange import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH, OpenAICall, OpenAIHead
from kintsugi.core.namespaces.parts import find_fields, narrow_by_request
from kintsugi.gateway.console.routes import Console
from kintsugi.gateway.fronts.errors import LEFT_STATUS, Problem, http_status_of
from kintsugi.gateway.fronts.identity import check_no_page, identify
from kintsugi.gateway.fronts.limits import RequestLimits, RequestSlots, parse_body, run_beside
from kintsugi.gateway.fronts.openai_answer import OpenAIAsk
from kintsugi.gateway.fronts.openai_request import find_requested_namespace, parse_openai_call
from kintsugi.gateway.fronts.service_routes import (
    SERVICE_PATH,
    AskedOf,
    describe_service,
    model_routes,
    router_routes,
)
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.requests import REQUEST_ID, ServedRequest
from kintsugi.store.protocol.callers import Caller, Verb

NAMESPACE_HEADER = "x-kintsugi-namespace"
DEFAULT_NAMESPACE = "default"
"""The namespace of callers that may use every one and name none, as unmodified clients do."""


class HttpFront:
    """The application is `app`. For one event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        answers = _Answers(gateway)
        self.app = Starlette(
            routes=[
                Route(CHAT_PATH, answers, methods=["POST"]),
                Route(COMPLETIONS_PATH, answers, methods=["POST"]),
                Route(RESPONSES_PATH, answers, methods=["POST"]),
                *model_routes(gateway, lambda request: identify(gateway.access, request)),
                *router_routes(gateway, answers.receive),
                Route(SERVICE_PATH, self._service, methods=["GET"]),
                Route("/healthz", self._health, methods=["GET"]),
                # Where vLLM's own server answers, and load generators look first.
                Route("/health", self._health, methods=["GET"]),
                Route("/readyz", self._ready, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                *Console(gateway).routes,
            ],
            middleware=[Middleware(RequestLimits, gateway.limits, shared=gateway.access.has_tokens)],
            exception_handlers={
                404: _answer_unknown_path,
                405: _answer_unknown_path,
                KintsugiError: _answer_problem,
            },
        )

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """Whether an engine answers."""
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
        """What runs, and what becomes of answers."""
        caller = identify(self._gateway.access, request)
        return JSONResponse(await describe_service(self._gateway, caller))


class _Answers:
    """The ASGI endpoint of what an engine answers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._slots = RequestSlots(gateway.limits.http_concurrent_max, shared=gateway.access.has_tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        metrics = self._gateway.metrics
        served = ServedRequest(
            request.url.path, request.headers, metrics.http, 200, audit=self._gateway.audit
        )
        reply = _Reply(served, send)
        try:
            with metrics.http_in_flight.track_inprogress(), served.record(http_status_of):
                await self._answer(request, served, reply)
        except Exception as error:
            if reply.has_begun:
                # What was sent cannot be taken back: an exception makes the server cut the connection.
                raise
            await Problem.of(error, served.request_id).response()(scope, receive, send)

    async def _answer(self, request: Request, served: ServedRequest, reply: _Reply) -> None:
        """Raises what the caller is refused with. A caller that leaves ends the work."""
        async with self._admit(request, served) as caller:
            try:
                raw = await request.body()
            except ClientDisconnect:
                served.status = LEFT_STATUS
                return
            await self._answer_body(caller, request, served, reply, raw)

    @asynccontextmanager
    async def _admit(self, request: Request, served: ServedRequest) -> AsyncIterator[Caller]:
        """Authenticates a request before its body is read. It has a slot while the block runs. Raises what
        the caller is refused with."""
        caller = identify(self._gateway.access, request)
        served.caller = caller.name
        with self._slots.hold(caller):
            yield caller

    @asynccontextmanager
    async def receive(self, request: Request, served: ServedRequest) -> AsyncIterator[AskedOf]:
        """Authenticates a request that is not for an engine, and parses its body; the request has a slot
        while the block runs. Raises what it is refused with."""
        async with self._admit(request, served) as caller:
            try:
                raw = await request.body() if request.method == "POST" else b""
            except ClientDisconnect:
                raise InvalidField("body", "was cut off; send it whole") from None
            body: Mapping[str, Any] = find_fields(request.query_params.multi_items())
            if request.method == "POST":
                body = await run_beside(len(raw), lambda: parse_body(raw))
            served.namespace = _find_namespace(caller, served.headers, body)
            yield AskedOf(caller, served.namespace, body, len(raw))

    async def _answer_body(
        self, caller: Caller, request: Request, served: ServedRequest, reply: _Reply, raw: bytes
    ) -> None:
        call = await self._parse(caller, served, request.url.path, raw)
        ask = OpenAIAsk(self._gateway.prompts, caller, call)
        answer = asyncio.create_task(reply.send_answer(self._gateway, caller, ask))
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
        """Parses a body and finds chunks in it. Raises `InvalidField` and `PermissionDenied`."""

        def parse() -> OpenAICall:
            body = parse_body(raw)
            namespace = served.namespace = _find_namespace(caller, served.headers, body)
            caller.require(Verb.GENERATE)
            call = parse_openai_call(
                served.request_id,
                path,
                body,
                namespace,
                lambda text: self._gateway.find_known_texts(namespace, text),
                served.trace,
                self._gateway.allow_negative_priority,
            )
            if call.params.explain or call.params.timeline:
                caller.require(Verb.LIST)
            return call

        return await run_beside(len(raw), parse)


class _Reply:
    """One response on its way."""

    def __init__(self, served: ServedRequest, send: Send) -> None:
        self._served = served
        self._send = send
        self._is_stream = False
        self.has_begun = False

    async def send_answer(self, gateway: Gateway, caller: Caller, ask: OpenAIAsk) -> None:
        """Sends the answer's events. A stream that fails ends with an event that says so; before its head,
        and in a response that is no stream, the error is raised."""
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
        self.has_begun = True
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
    """The namespace of a request, or the part that it narrows itself to. Raises `InvalidField` and
    `PermissionDenied`."""
    wanted = find_requested_namespace(body, headers.get(NAMESPACE_HEADER))
    return narrow_by_request(choose_namespace(caller, wanted), headers, body)


def choose_namespace(caller: Caller, wanted: str | None) -> str:
    """The namespace that a request works in. Raises `InvalidField` and `PermissionDenied`."""
    if wanted:
        return caller.authorize(wanted)
    if caller.is_unrestricted:
        return DEFAULT_NAMESPACE
    if len(caller.namespaces) == 1 and not caller.namespaces[0].endswith("*"):
        return caller.namespaces[0]
    raise InvalidField(
        "namespace", f"your token is bound to several; name one in the header {NAMESPACE_HEADER}"
    )


async def _wait_for_disconnect(receive: Receive) -> None:
    """Returns when the caller has left. The body has been read."""
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
