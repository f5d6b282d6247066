"""Bounds requests: how many callers have at a time, what all of them hold together, and for HTTP how large,
how slow and how deeply nested their bodies are.

uvicorn bounds none of it. gRPC itself bounds the size of its messages; it would count requests before anybody
knows who sent them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kintsugi.core.errors import DeadlineExceeded, InvalidField, KintsugiError, ResourceExhausted
from kintsugi.gateway.gateway import GatewayLimits
from kintsugi.store.protocol.callers import Caller

SHARE_MAX = 3
BODY_READ_S = 30.0
"""Time in which a whole body has to arrive."""
LINGER_BYTES_MAX = 256 << 20
LINGER_S = 10.0
"""The rest of a refused body is read and dropped for this long: a caller that is still writing would not see
the answer otherwise."""
_CALLER = "kintsugi.caller"
PARSE_INLINE_BYTES = 1 << 16
"""Larger bodies are parsed, and searched for known chunks, on a thread: it takes milliseconds."""
DEPTH_MAX = 100
"""Levels of a body. Whoever reads it, vLLM and the encoder of its answers among them, takes a stack frame for
each."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
Result = TypeVar("Result")


class BodyTooLarge(InvalidField):
    """A body larger than one request's may be."""


class BodyTooSlow(DeadlineExceeded):
    """A body that did not arrive in time."""


class ByteBudget:
    """Memory that requests share. For one event loop: bytes that are taken are given back, however the
    request ends. Where callers can be told apart, one takes no more once it holds `SHARE_MAX` times as much
    as is free, as with `RequestSlots`."""

    def __init__(self, bytes_max: int, *, shared: bool = False) -> None:
        """``shared``: callers can be told apart; otherwise whoever comes first has the memory."""
        self._bytes_max = bytes_max
        self._shared = shared
        self._held_bytes: Counter[str] = Counter()

    def take(self, num_bytes: int, caller: str = "") -> None:
        """``caller``: its name. Raises `ResourceExhausted`; then nothing is taken."""
        free = self._bytes_max - self._held_bytes.total()
        if num_bytes > free:
            raise ResourceExhausted("requests hold all memory that is meant for them; try again later")
        if self._shared and (held := self._held_bytes[caller]) > SHARE_MAX * free:
            raise ResourceExhausted(
                f"requests of {caller!r} hold {held} bytes, and what is left is for others; end some, or try "
                "again later"
            )
        self._held_bytes[caller] += num_bytes

    def give_back(self, num_bytes: int, caller: str = "") -> None:
        self._held_bytes[caller] -= num_bytes
        if not self._held_bytes[caller]:
            del self._held_bytes[caller]

    @contextmanager
    def reserve(self, num_bytes: int, caller: str) -> Iterator[None]:
        """Takes bytes for as long as the block runs. Raises `ResourceExhausted`."""
        self.take(num_bytes, caller)
        try:
            yield
        finally:
            self.give_back(num_bytes, caller)


class RequestSlots:
    """Slots for concurrent requests of authenticated callers. For one event loop.

    A caller may hold `SHARE_MAX` times as many places as are free: one alone gets three quarters of them, the
    next three quarters of the rest, and whoever holds many gets no more while few are left.
    """

    def __init__(self, places_max: int, *, shared: bool) -> None:
        """``shared``: callers can be told apart; otherwise whoever comes first has a place."""
        self._places_max = places_max
        self._shared = shared
        self._held: Counter[str] = Counter()

    @contextmanager
    def hold(self, caller: Caller) -> Iterator[None]:
        """Takes a place for as long as the block runs. Raises `ResourceExhausted`."""
        free = self._places_max - self._held.total()
        if not free:
            raise ResourceExhausted(f"{self._places_max} requests are being answered; try again later")
        held = self._held[caller.name]
        if self._shared and held >= SHARE_MAX * free:
            raise ResourceExhausted(
                f"{held} requests of {caller.name!r} are being answered and {free} places are left for "
                "others; end some, or try again later"
            )
        self._held[caller.name] += 1
        try:
            yield
        finally:
            self._held[caller.name] -= 1
            if not self._held[caller.name]:
                del self._held[caller.name]


class RequestLimits:
    """ASGI middleware. A body beyond a limit fails when the application asks for it, with a typed error: an
    application that authenticates first never reads a stranger's body. GET requests have no body and pass
    unbounded."""

    def __init__(self, app: ASGIApp, limits: GatewayLimits, *, shared: bool = False) -> None:
        """``shared``: callers can be told apart; the application names them with `name_caller`."""
        self._app = app
        self._limits = limits
        self._budget = ByteBudget(limits.messages_bytes_max, shared=shared)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive, send, self._limits, self._budget)
        try:
            await self._app(scope, body.receive, body.send)
        finally:
            body.give_back()


class _Body:
    """One request's body as it arrives, and the answer to it."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, limits: GatewayLimits, budget: ByteBudget
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._limits = limits
        self._budget = budget
        self._caller = ""
        """Whose memory the body is."""
        self._declared = dict(scope["headers"]).get(b"content-length", b"0").decode("latin-1")
        self._held_bytes = 0
        self._deadline_s: float | None = None
        self._is_over = False
        """Nothing more comes, or is waited for."""

    async def receive(self) -> Message:
        """Raises `ResourceExhausted`, `BodyTooLarge` and `BodyTooSlow`; then the body counts no more."""
        if self._is_over:  # what follows says that the caller left
            return await self._receive()
        try:
            return await self._receive_piece()
        except KintsugiError:
            self.give_back()
            raise

    async def _receive_piece(self) -> Message:
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
        self._budget.take(size, self._caller)
        self._held_bytes += size
        return message

    def _check_size(self, num_bytes: int | None) -> None:
        bytes_max = self._limits.message_bytes_max
        if num_bytes is None or num_bytes > bytes_max:
            raise BodyTooLarge(
                "body", f"is larger than {bytes_max >> 20} MiB; send fewer or shorter messages"
            )

    def give_back(self) -> None:
        """Idempotent."""
        self._budget.give_back(self._held_bytes, self._caller)
        self._held_bytes = 0

    async def send(self, message: Message) -> None:
        """Servers stop reading once an answer is complete: while the body is not, the answer's end waits."""
        if message["type"] == "http.response.body" and not message.get("more_body") and not self._is_over:
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _linger(self) -> None:
        """Reads and drops the rest of the body, for a bounded time."""
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
    """Tells `RequestLimits` whose body is about to be read."""
    scope[_CALLER] = caller.name


def _ends_body(message: Message) -> bool:
    return message["type"] == "http.disconnect" or not message.get("more_body", False)


async def run_beside(num_bytes: int, work: Callable[[], Result]) -> Result:
    """The result of work on a body of so many bytes, done on a thread unless the body is small."""
    return work() if num_bytes <= PARSE_INLINE_BYTES else await asyncio.to_thread(work)


def parse_body(raw: bytes) -> dict[str, Any]:
    """The request's JSON object. Raises `InvalidField`."""
    try:
        text = raw.decode()
        body = json.loads(text)
        if _SURROGATE.search(text):
            # Half of a pair is no character: neither a tokenizer nor an answer can hold it.
            json.dumps(body, ensure_ascii=False).encode()
        if raw.count(b"[") + raw.count(b"{") > DEPTH_MAX and _is_deeper(body, DEPTH_MAX):
            raise RecursionError
    except RecursionError:
        raise InvalidField("body", f"is nested more than {DEPTH_MAX} levels deep") from None
    except ValueError as error:
        raise InvalidField("body", f"is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidField("body", f"must be a JSON object, not {type(body).__name__}")
    return body


def _is_deeper(document: Any, levels: int) -> bool:
    """Whether lists and objects are nested in more levels. Cost: one look at each value."""
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
