"""Limits of requests: their number, their memory, and the size, duration and nesting depth of HTTP bodies.

uvicorn has none of these limits. gRPC limits the size of messages, but would count requests before their
callers are authenticated.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kintsugi.core.errors import DeadlineExceeded, InvalidField, KintsugiError
from kintsugi.core.schema import check_text, parse_json
from kintsugi.gateway.gateway import GatewayLimits
from kintsugi.gateway.requests import BODY_READ_S
from kintsugi.store.protocol.access import Caller
from kintsugi.store.protocol.quota import BYTES, Quota

LINGER_BYTES_MAX = 256 << 20
LINGER_S = 10.0
"""Maximum time for which the rest of a refused body is read and dropped: a caller that is still writing would
not read the answer otherwise."""
_CALLER = "kintsugi.caller"
PARSE_INLINE_BYTES = 1 << 16
"""Larger bodies are parsed and searched for known chunks on a thread, because this takes milliseconds."""
DEPTH_MAX = 100
"""Maximum nesting depth of a body. Parsers and encoders, vLLM's included, need a stack frame for each
level."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
Result = TypeVar("Result")


class BodyTooLarge(InvalidField):
    """A body exceeds the limit of one request."""


class BodyTooSlow(DeadlineExceeded):
    """A body did not arrive in time."""


class BodyEncoded(InvalidField):
    """A body is compressed."""


class RequestLimits:
    """ASGI middleware that limits request bodies; GET requests have none and pass unchanged.

    A body beyond a limit raises a typed error when the application reads it. An application that
    authenticates first never reads the body of an unauthenticated caller.
    """

    def __init__(self, app: ASGIApp, limits: GatewayLimits, *, shared: bool = False) -> None:
        """``shared``: callers can be told apart; the application names them with `name_caller`."""
        self._app = app
        self._limits = limits
        self._memory = Quota(limits.messages_bytes_max, BYTES, shared=shared)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive, send, self._limits, self._memory)
        try:
            await self._app(scope, body.receive, body.send)
        finally:
            body.give_back()


class _Body:
    """The body of one request while it arrives, and the answer to it."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, limits: GatewayLimits, memory: Quota
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._bytes_max = limits.message_bytes_max
        self._memory = memory
        self._caller = ""
        """Name of the caller whose memory the body uses."""
        self._is_encoded = any(
            name == b"content-encoding" and value.strip().lower() != b"identity"
            for name, value in scope["headers"]
        )
        self._declared = dict(scope["headers"]).get(b"content-length", b"0").decode("latin-1")
        self._held_bytes = 0
        self._deadline_s: float | None = None
        self._is_over = False
        """Whether the body has ended or timed out."""

    async def receive(self) -> Message:
        """Raises `ResourceExhausted`, `BodyEncoded`, `BodyTooLarge` and `BodyTooSlow`, and then releases the
        body's memory."""
        if self._is_over:  # the next message is the disconnect
            return await self._receive()
        try:
            return await self._receive_piece()
        except KintsugiError:
            self.give_back()
            raise

    async def _receive_piece(self) -> Message:
        if self._is_encoded:
            raise BodyEncoded("content-encoding", "must be identity; send the body uncompressed")
        self._check_size(int(self._declared) if self._declared.isdecimal() else None)
        if self._deadline_s is None:
            self._deadline_s = asyncio.get_running_loop().time() + BODY_READ_S
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            self._is_over = True
            raise BodyTooSlow(f"the body did not arrive within {BODY_READ_S:.0f} s; send it faster") from None
        self._is_over = _ends_body(message)
        size = len(message.get("body", b""))
        self._check_size(self._held_bytes + size)
        self._caller = self._scope.get(_CALLER, "")
        self._memory.take(self._caller, size)
        self._held_bytes += size
        return message

    def _check_size(self, num_bytes: int | None) -> None:
        if num_bytes is None or num_bytes > self._bytes_max:
            raise BodyTooLarge(
                "body", f"is larger than {self._bytes_max >> 20} MiB; send fewer or shorter messages"
            )

    def give_back(self) -> None:
        """Idempotent."""
        self._memory.give_back(self._caller, self._held_bytes)
        self._held_bytes = 0

    async def send(self, message: Message) -> None:
        """Send a message. Servers stop reading when an answer is complete, so its end waits for the body."""
        if message["type"] == "http.response.body" and not message.get("more_body") and not self._is_over:
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _linger(self) -> None:
        """Read and drop the rest of the body, for at most `LINGER_S`."""
        dropped = 0
        try:
            async with asyncio.timeout(LINGER_S):
                while dropped < LINGER_BYTES_MAX and not self._is_over:
                    message = await self._receive()
                    dropped += len(message.get("body", b""))
                    self._is_over = _ends_body(message)
        except TimeoutError:
            self._is_over = True


def name_caller(scope: Scope, caller: Caller) -> None:
    """Tell `RequestLimits` whose body is read next."""
    scope[_CALLER] = caller.name


def _ends_body(message: Message) -> bool:
    return message["type"] == "http.disconnect" or not message.get("more_body", False)


async def read_body(request: Request) -> bytes:
    """Return a request's body. Raises as `_Body.receive`, and `InvalidField` if the caller disconnects."""
    try:
        return await request.body()
    except ClientDisconnect:
        raise InvalidField("body", "was cut off; send it whole") from None


async def run_beside(num_bytes: int, work: Callable[[], Result]) -> Result:
    """Return the result of work on a body of ``num_bytes``, on a thread unless the body is small."""
    return work() if num_bytes <= PARSE_INLINE_BYTES else await asyncio.to_thread(work)


def parse_object(data: bytes | str, where: str = "body") -> dict[str, Any]:
    """Return a JSON object. ``where``: the request's field, for errors. Raises `InvalidField`."""
    try:
        text = data if isinstance(data, str) else data.decode()
        found = parse_json(text)
        if text.count("[") + text.count("{") > DEPTH_MAX and _is_deeper(found, DEPTH_MAX):
            raise RecursionError
    except RecursionError:
        raise InvalidField(where, f"is nested more than {DEPTH_MAX} levels deep") from None
    except ValueError as error:
        raise InvalidField(where, f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidField(where, f"must be a JSON object, not {type(found).__name__}")
    if _SURROGATE.search(text):
        # JSON can write half of a surrogate pair, but neither a tokenizer nor an answer can hold it.
        _check_texts(found, "" if where == "body" else where)
    return found


def _check_texts(value: Any, where: str) -> None:
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_texts(inner, f"{where}[{index}]")
    elif isinstance(value, dict):
        for name, inner in value.items():
            check_text(name, where or "body")
            _check_texts(inner, f"{where}.{name}" if where else name)


def _is_deeper(document: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than ``levels`` deep. Visits each value once."""
    level = [document]
    for _ in range(levels):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(level)
