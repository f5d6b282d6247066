"""The HTTP status of each error, and the frame of HTTP endpoints.

The frame records requests and turns errors into responses. `store.protocol.grpc_status` has the gRPC
statuses, which all services use.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from kintsugi.core import errors
from kintsugi.gateway.fronts.limits import BodyEncoded, BodyTooLarge, BodyTooSlow
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.requests import ServedRequest
from kintsugi.store.protocol.grpc_status import status_of

LEFT_STATUS = 499
"""Status of a request whose caller disconnected before the answer."""
RETRY_AFTER_S = 1

_HTTP: tuple[tuple[type[errors.KintsugiError], int, str], ...] = (
    # HTTP status and OpenAI's error type. The first row of which an error is an instance applies.
    (BodyEncoded, 415, "UnsupportedMediaTypeError"),
    (BodyTooLarge, 413, "RequestEntityTooLargeError"),
    (BodyTooSlow, 408, "RequestTimeoutError"),
    (errors.InvalidField, 400, "BadRequestError"),
    (errors.Unauthenticated, 401, "AuthenticationError"),
    (errors.PermissionDenied, 403, "PermissionDeniedError"),
    (errors.NotFound, 404, "NotFoundError"),
    (errors.ResourceExhausted, 429, "RateLimitError"),
    (errors.Unavailable, 503, "ServiceUnavailableError"),
    (errors.DeadlineExceeded, 504, "TimeoutError"),
    (errors.Corrupted, 500, "InternalServerError"),
    (errors.VersionMismatch, 400, "BadRequestError"),
    (errors.NotBlendable, 500, "InternalServerError"),
    (errors.SelfTestFailed, 500, "InternalServerError"),
)


@dataclass(frozen=True)
class Problem:
    """An error in OpenAI's format."""

    status: int
    kind: str
    message: str
    field: str | None = None
    retry_after_s: float = RETRY_AFTER_S
    """For statuses 429 and 503."""

    @staticmethod
    def of(error: Exception, request_id: str = "") -> Problem:
        """Return the problem of an error. The message of a defect names only the request; the log explains
        it."""
        for cls, status, kind in _HTTP:
            if isinstance(error, cls):
                field = error.field if isinstance(error, errors.InvalidField) else None
                retry_after_s = getattr(error, "retry_after_s", None) or RETRY_AFTER_S
                return Problem(status, kind, str(error), field, retry_after_s)
        text = f"the server failed; see its log for request {request_id}"
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
        headers = {"retry-after": str(math.ceil(self.retry_after_s))} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (408, 413, 415):
            headers["connection"] = "close"
        return JSONResponse(self.document, self.status, headers)


def http_status_of(error: BaseException) -> int:
    """Return the HTTP status of a request that ended with an error."""
    return Problem.of(error).status if isinstance(error, Exception) else LEFT_STATUS


def grpc_status_of(error: BaseException) -> str:
    """Return the name of the gRPC status of a call that ended with an error."""
    if isinstance(error, errors.KintsugiError):
        return str(status_of(error).name)
    return "CANCELLED" if isinstance(error, asyncio.CancelledError) else "INTERNAL"


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
