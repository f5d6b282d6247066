"""The OpenAI-compatible front end: an ASGI application over any `EngineBackend`.

It checks who calls, reads the body within bounds, finds chunks, and hands everything else to the engine,
where vLLM's own handlers answer. An answer passes through piece by piece; a caller that leaves ends the work
in the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from kintsugi.core.backend import EngineBackend
from kintsugi.core.errors import (
    DeadlineExceeded,
    InvalidField,
    KintsugiError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from kintsugi.core.exchange import CHAT_PATH, COMPLETIONS_PATH, OpenAICall, OpenAIHead
from kintsugi.gateway.access import Access, Caller
from kintsugi.gateway.byte_budget import ByteBudget
from kintsugi.gateway.fronts.openai_answer import accounting_in, without_times_in
from kintsugi.gateway.fronts.openai_metrics import HttpMetrics
from kintsugi.gateway.fronts.openai_request import find_requested_namespace, parse_openai_call
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.logs import RequestLine
from kintsugi.gateway.recent_info import RecentInfo
from kintsugi.gateway.tracing import TRACE_HEADERS, Timelines, add_layers, describe, span

logger = logging.getLogger(__name__)

BODY_BYTES_MAX = 8 << 20
"""A million tokens as text; JSON takes some ten times its size while it is parsed."""
BODIES_BYTES_MAX = 256 << 20
"""Of all bodies that are being read or answered."""
BODY_READ_S = 30.0
LINGER_BYTES_MAX = 256 << 20
LINGER_S = 10.0
"""A refused body is read on and dropped for so long: a caller that still writes would not see the answer."""
REQUESTS_MAX = 1024
FOLLOW_UPS_MAX = 64
"""Answers whose missed chunks are being looked at; those of more are forgotten."""
SEARCH_INLINE_CHARS = 1 << 16
"""Longer bodies are searched for known chunks on a thread: milliseconds that others would wait."""
ATTEMPTS = 2
"""On another engine, where the first did not answer at all."""
LEFT_STATUS = 499
SLOW_STATUS = 408
RETRY_AFTER_S = 1
NAMESPACE_HEADER = "x-kintsugi-namespace"
DEFAULT_NAMESPACE = "default"
"""Of callers that may use every namespace and name none, as unmodified clients do."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

_STATUSES: tuple[tuple[type[KintsugiError], int, str], ...] = (
    (InvalidField, 400, "BadRequestError"),
    (Unauthenticated, 401, "AuthenticationError"),
    (PermissionDenied, 403, "PermissionDeniedError"),
    (NotFound, 404, "NotFoundError"),
    (ResourceExhausted, 429, "RateLimitError"),
    (Unavailable, 503, "ServiceUnavailableError"),
    (DeadlineExceeded, 504, "TimeoutError"),
)


class Known(Protocol):
    """Chunk texts that were seen."""

    def find(self, namespace: str, text: str) -> Sequence[tuple[int, int]]:
        """`[start, end)` of known chunk texts inside `text`, in characters."""


OnMiss = Callable[[str, Sequence[str]], Awaitable[None]]
"""Told the namespace and the chunk texts of which an answer had to compute some."""


class BodyTooLarge(InvalidField):
    """A request that is not read to its end."""


class BodyTooSlow(DeadlineExceeded):
    """A request that does not come to its end."""


@dataclass(frozen=True)
class Problem:
    """An error in OpenAI's form."""

    status: int
    kind: str
    message: str
    field: str | None = None

    @staticmethod
    def of(error: KintsugiError) -> Problem:
        field = error.field if isinstance(error, InvalidField) else None
        if isinstance(error, BodyTooLarge):
            return Problem(413, "RequestEntityTooLargeError", str(error))
        if isinstance(error, BodyTooSlow):
            return Problem(SLOW_STATUS, "RequestTimeoutError", str(error))
        for cls, status, kind in _STATUSES:
            if isinstance(error, cls):
                return Problem(status, kind, str(error), field)
        return Problem(500, "InternalServerError", str(error))

    @staticmethod
    def of_defect(request_id: str) -> Problem:
        text = f"the server failed; its log says why, under request {request_id}"
        return Problem(500, "InternalServerError", text)

    @property
    def document(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.field,
                "code": self.status,
            }
        }

    def response(self) -> Response:
        headers = {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (SLOW_STATUS, 413):
            headers["connection"] = "close"
        return JSONResponse(self.document, self.status, headers)


class HttpFront:
    """The application is `app`. For one event loop."""

    def __init__(
        self,
        backend: EngineBackend,
        access: Access,
        known: Known | None = None,
        on_miss: OnMiss | None = None,
        registry: CollectorRegistry | None = None,
        answering: Callable[[], AbstractContextManager[None]] = nullcontext,
        overtaking: bool = False,
        info: RecentInfo | None = None,
    ) -> None:
        """``answering`` is entered while a request is under way. ``overtaking`` as `Gateway` has it. ``info``
        of the same backend is asked where it is given, and is its owner's to close."""
        self._backend = backend
        self._info = info or RecentInfo(backend.info)
        self._access = access
        self._known = known
        self._on_miss = on_miss
        self.metrics = HttpMetrics(registry or CollectorRegistry())
        self._bodies = _Bodies()
        self._answering = answering
        self._overtaking = overtaking
        self._requests = 0
        self._follow_ups: set[asyncio.Task[None]] = set()
        self._timelines = Timelines()
        self.app = Starlette(
            routes=[
                Route(CHAT_PATH, self._post, methods=["POST"]),
                Route(COMPLETIONS_PATH, self._post, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/healthz", self._health, methods=["GET"]),
                Route("/readyz", self._ready, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
            ],
            exception_handlers={404: _no_such_path, 405: _no_such_path},
        )

    @staticmethod
    def of(gateway: Gateway) -> HttpFront:
        """What is missed is filled by the gateway, which counts our requests as its own."""
        return HttpFront(
            gateway.backend,
            gateway.access,
            gateway.known,
            gateway.suspect_texts,
            gateway.metrics.registry,
            gateway.answering,
            gateway.overtaking,
            gateway.recent_info,
        )

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """Whether an engine answers."""
        try:
            info = await self._info.get()
        except KintsugiError as error:
            return JSONResponse({"status": "not ready", "reason": str(error)}, 503)
        return JSONResponse({"status": "ready", "model": info.model, "blending": info.blending})

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _models(self, request: Request) -> Response:
        try:
            self._caller(request)
            info = await self._info.get()
        except KintsugiError as error:
            return Problem.of(error).response()
        model = {
            "id": info.model,
            "object": "model",
            "created": 0,
            "owned_by": "kintsugi",
            "max_model_len": info.max_model_len,
            "kintsugi": {
                "fingerprint": info.fingerprint,
                "prefix_token_ids": list(info.prefix_token_ids),
                "portable": info.portable,
                "blending": info.blending,
            },
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def _post(self, request: Request) -> Response:
        return _Deferred(lambda scope, receive, send: self._answer(request, receive, send))

    async def _answer(self, request: Request, receive: Receive, send: Send) -> None:
        path, incoming, reply = request.url.path, _Incoming(receive), _Reply(send)
        given = request.headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        status, began_s, failure = 500, time.perf_counter(), None
        self.metrics.in_flight.inc()
        self._requests += 1
        try:
            status = await self._handle_request(request, request_id, incoming, reply)
        except Exception as error:
            problem, failure = _problem_of(error, request_id), error
            if reply.has_begun:
                # What was sent cannot be taken back: an exception makes the server cut the connection.
                raise
            status = problem.status
            await _send_problem(problem, incoming, reply)
        finally:
            self._requests -= 1
            self.metrics.in_flight.dec()
            self.metrics.answered(path, status)
            if logger.isEnabledFor(logging.INFO):
                namespace = getattr(request.state, "namespace", "")
                logger.info(RequestLine.of(request_id, path, namespace, status, began_s, failure))

    async def _handle_request(
        self, request: Request, request_id: str, incoming: _Incoming, reply: _Reply
    ) -> int:
        """Answer; the status. Raises what becomes another answer, while nothing was sent."""
        if self._requests > REQUESTS_MAX:
            raise ResourceExhausted(f"{REQUESTS_MAX} requests are being answered; try again later")
        caller = self._caller(request)  # first: a stranger's body is not even read
        async with self._bodies.of(request, incoming) as raw:
            call = await self._call(request, caller, request_id, raw)
            del raw
            with self._answering():
                return await self._relay_answer(call, incoming, reply)

    def _caller(self, request: Request) -> Caller:
        """Raises `Unauthenticated`."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return self._access.caller(token.strip() if scheme.lower() == "bearer" else None)

    async def _call(self, request: Request, caller: Caller, request_id: str, raw: bytearray) -> OpenAICall:
        """Parsed, chunks found."""
        headers = request.headers
        body = _parsed(raw)
        namespace = namespace_of(caller, find_requested_namespace(body, headers.get(NAMESPACE_HEADER)))
        request.state.namespace = namespace
        trace = {name: headers[name] for name in TRACE_HEADERS if name in headers}

        def parse() -> OpenAICall:
            known = self._known
            return parse_openai_call(
                request_id,
                request.url.path,
                body,
                namespace,
                lambda text: () if known is None else known.find(namespace, text),
                trace,
                self._overtaking,
            )

        return parse() if len(raw) <= SEARCH_INLINE_CHARS else await asyncio.to_thread(parse)

    async def _relay_answer(self, call: OpenAICall, receive: Receive, send: Send) -> int:
        """Send the engine's answer; the status. A caller that leaves ends it."""
        answer = asyncio.create_task(self._sent(call, send))
        left = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
            return await answer if answer.done() else LEFT_STATUS
        finally:
            for task in (answer, left):
                task.cancel()
            await asyncio.gather(answer, left, return_exceptions=True)

    async def _sent(self, call: OpenAICall, send: Send) -> int:
        for attempt in range(1, ATTEMPTS + 1):
            outgoing = _Outgoing(call.request_id, send)
            try:
                await self._streamed(call, outgoing)
            except Unavailable as error:
                if outgoing.status is None and attempt < ATTEMPTS:
                    continue
                await outgoing.report_failure(error)
            except KintsugiError as error:
                await outgoing.report_failure(error)
            assert outgoing.status is not None
            return outgoing.status
        raise AssertionError("the last attempt returns or raises")

    async def _streamed(self, call: OpenAICall, outgoing: _Outgoing) -> None:
        with span("gateway.openai", call.trace) as trace:
            trace.set("kintsugi.namespace", call.params.namespace)
            trace.set("kintsugi.request_id", call.request_id)
            own = call.params.timeline or call.params.explain
            params = replace(call.params, timeline=own or self._timelines.wanted(trace))
            asked = replace(call, params=params, trace=trace.headers())
            accounting = await self._forward_pieces(asked, outgoing, tells_times=own)
            if accounting is not None:
                describe(trace, accounting)
                add_layers(trace, accounting)
        await outgoing.end()
        if accounting is not None:
            self.metrics.accounted(accounting)
            if accounting.get("tokens_missed") or not accounting.get("chunks_hit"):
                self._start_follow_up(call)

    async def _forward_pieces(
        self, call: OpenAICall, outgoing: _Outgoing, tells_times: bool
    ) -> Mapping[str, Any] | None:
        """Send the pieces of an answer on as they come; what it cost, where it says so."""
        started_s = time.monotonic()
        accounting: Mapping[str, Any] | None = None
        async with aclosing(self._backend.openai(call)) as items:
            async for item in items:
                if isinstance(item, OpenAIHead):
                    outgoing.head(item)
                    continue
                if started_s:
                    self.metrics.first_piece_s.labels(call.path).observe(time.monotonic() - started_s)
                    started_s = 0.0
                if (found := accounting_in(item)) is not None:
                    accounting = found
                    item = item if tells_times else without_times_in(item)
                await outgoing.piece(item)
        return accounting

    def _start_follow_up(self, call: OpenAICall) -> None:
        """Follow up on chunks that were computed, once the answer is out."""
        if self._on_miss is None or not call.chunk_texts or len(self._follow_ups) >= FOLLOW_UPS_MAX:
            return
        task = asyncio.create_task(_run_follow_up(self._on_miss(call.params.namespace, call.chunk_texts)))
        self._follow_ups.add(task)
        task.add_done_callback(self._follow_ups.discard)


def _problem_of(error: Exception, request_id: str) -> Problem:
    """What a caller is told. Defects are logged, and not explained to strangers."""
    problem = Problem.of(error) if isinstance(error, KintsugiError) else Problem.of_defect(request_id)
    if problem.status == 500:
        logger.exception("Request %s failed", request_id)
    return problem


async def _run_follow_up(work: Awaitable[None]) -> None:
    try:
        await work
    except KintsugiError as error:
        logger.info("Missed chunks are not filled: %s", error)


@dataclass
class _Outgoing:
    """One response, on its way. Its head goes with the first of its body, which an engine gives out with its
    first token: until then another engine may answer."""

    request_id: str
    _send: Send
    status: int | None = None
    """Once the head was sent."""
    _head: OpenAIHead | None = None
    """Until it is sent."""
    _is_stream: bool = False

    def head(self, head: OpenAIHead) -> None:
        self._head = head

    async def _begin(self) -> None:
        head, self._head = self._head, None
        if head is None:
            return
        self.status = head.status
        self._is_stream = head.content_type.startswith("text/event-stream")
        headers = [
            (b"content-type", head.content_type.encode()),
            (b"x-request-id", self.request_id.encode()),
            *([(b"cache-control", b"no-cache")] if self._is_stream else []),
        ]
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def piece(self, body: bytes) -> None:
        await self._begin()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        await self._begin()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def report_failure(self, error: KintsugiError) -> None:
        """Say so where that is still possible: as the answer, or as a stream's last event.

        Raises ``error`` where nothing was sent, and where what was sent cannot be continued.
        """
        if self.status is None or not self._is_stream:
            raise error
        event = f"data: {json.dumps(Problem.of(error).document)}\n\ndata: [DONE]\n\n"
        await self.piece(event.encode())
        await self.end()


class _Deferred(Response):
    """A response that is made while it is sent."""

    def __init__(self, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._answer = answer
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


@dataclass
class _Reply:
    """Sends, and knows whether an answer has begun."""

    _send: Send
    has_begun: bool = False

    async def __call__(self, message: Message) -> None:
        self.has_begun = True
        await self._send(message)


@dataclass
class _Incoming:
    """A request's messages, and whether its body has come to its end."""

    _receive: Receive
    is_complete: bool = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.is_complete |= message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message


class _Bodies:
    """Reads bodies within bounds, each and all together."""

    def __init__(self) -> None:
        self._budget = ByteBudget(BODIES_BYTES_MAX)

    @asynccontextmanager
    async def of(self, request: Request, receive: Receive) -> AsyncIterator[bytearray]:
        """The whole body, counted until the block ends.

        Raises `BodyTooLarge`, `BodyTooSlow` and `ResourceExhausted`; what came so far is dropped at once.
        """
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > BODY_BYTES_MAX:
            raise _too_large()
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_READ_S):
                    await self._read(body, receive)
            except TimeoutError:
                raise BodyTooSlow(
                    f"the body did not come within {BODY_READ_S:.0f} s; send it faster"
                ) from None
            yield body
        finally:
            self._budget.give_back(len(body))

    async def _read(self, body: bytearray, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Unavailable("the caller left before the request had come")
            self._take(body, message.get("body", b""))
            if not message.get("more_body", False):
                return

    def _take(self, body: bytearray, piece: bytes) -> None:
        if len(body) + len(piece) > BODY_BYTES_MAX:
            raise _too_large()
        self._budget.take(len(piece))
        body += piece


def namespace_of(caller: Caller, wanted: str | None) -> str:
    """The namespace that a request works in. Raises `InvalidField` and `PermissionDenied`."""
    if wanted:
        return caller.checked(wanted)
    if caller.unrestricted:
        return DEFAULT_NAMESPACE
    if len(caller.namespaces) == 1 and not caller.namespaces[0].endswith("*"):
        return caller.namespaces[0]
    raise InvalidField(
        "namespace", f"your token is bound to several; name one in the header {NAMESPACE_HEADER}"
    )


def _too_large() -> BodyTooLarge:
    return BodyTooLarge("body", f"is larger than {BODY_BYTES_MAX >> 20} MiB; send fewer or shorter messages")


def _parsed(raw: bytearray) -> dict[str, Any]:
    """The request's JSON object."""
    try:
        text = raw.decode()
        body = json.loads(text)
        if _SURROGATE.search(text):
            # Half of a pair is no character: neither a tokenizer nor an answer can hold it.
            json.dumps(body, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidField("body", "is nested too deeply") from None
    except ValueError as error:
        raise InvalidField("body", f"is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidField("body", f"must be a JSON object, not {type(body).__name__}")
    return body


async def _wait_for_disconnect(receive: Receive) -> None:
    """Returns when the caller has left. The body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_problem(problem: Problem, incoming: _Incoming, send: Send) -> None:
    """Answer with a problem. Servers stop reading once an answer is complete, so its end comes last."""
    response = problem.response()
    start = {"type": "http.response.start", "status": problem.status, "headers": response.raw_headers}
    await send(start)
    await send({"type": "http.response.body", "body": bytes(response.body), "more_body": True})
    if not incoming.is_complete and problem.status != SLOW_STATUS:
        await _linger(incoming)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _linger(receive: Receive) -> None:
    """Read on what is not wanted, a bounded while."""
    dropped = 0
    try:
        async with asyncio.timeout(LINGER_S):
            while dropped < LINGER_BYTES_MAX:
                message = await receive()
                dropped += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


async def _no_such_path(request: Request, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 404))
    message = f"{request.method} {request.url.path} is not served here; see /v1/models"
    kind = "NotFoundError" if status == 404 else "MethodNotAllowedError"
    return Problem(status, kind, message).response()
