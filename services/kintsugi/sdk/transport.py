"""The SDK's connection to a gateway, with and without an event loop.

Both clients share one set of coroutines over a `Transport`. On a blocking transport, a call ends before it is
awaited, so a coroutine never suspends: `run_to_completion` and `iterate` run it in the caller's thread.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from kintsugi.core.errors import InvalidField
from kintsugi.core.namespaces import SESSION, TENANT, check_value
from kintsugi.core.schema import check_number, check_text, check_whole
from kintsugi.store.protocol.grpc_status import errors_of
from kintsugi.store.protocol.tls import is_loopback, parse_address, read_pem
from kintsugi.store.protocol.wire import CONNECTION_OPTIONS

SERVICE = "kintsugi.rpc.v1.Kintsugi"
MESSAGE_BYTES_MAX = 64 << 20
"""Maximum size of a gateway's message."""

TIMEOUT_S_MAX = 10 * 365 * 86_400.0
"""Ten years, so that a deadline does not exceed the range of gRPC's clock."""
ATTEMPTS_MAX = 1_000
_SENDABLE = re.compile(r"[!-~]([ -~]*[!-~])?")

Item = TypeVar("Item")


def check_timeout(timeout_s: object) -> float:
    """Return a maximum time in seconds. Raises `InvalidField`."""
    return min(check_number(timeout_s, "timeout_s", above=0), TIMEOUT_S_MAX)


@dataclass(frozen=True)
class ClientOptions:
    """Options of a client's connection and retries."""

    token: str | None = None
    """Bearer token, made with `kintsugi token`."""
    tls: bool = False
    """Use TLS and trust the system's authorities. `tls_ca` and `tls_cert` imply it."""
    tls_ca: Path | None = None
    """PEM file of the authority that signed the gateway's certificate."""
    tls_cert: Path | None = None
    """PEM file of the client's certificate, for a gateway that requires one."""
    tls_key: Path | None = None
    """PEM file of that certificate's private key."""
    insecure: bool = False
    """Allow an unencrypted token beyond loopback."""
    timeout_s: float = 60.0
    """Maximum time in seconds for a whole call, including all attempts and, in `put_chunks` with `wait`, the
    prefill of the chunks."""
    attempts: int = 5
    """Maximum number of attempts of a call that may be retried; with the waits, 5 attempts take at least 1.5
    s."""
    retry_wait_s_max: float = 2.0
    """Maximum wait between two attempts, in seconds."""
    tenant: str | None = None
    """Restrict calls to this tenant's part of the namespace (docs/TENANTS.md)."""
    session: str | None = None
    """Restrict calls to this session's part of the namespace, or of the tenant's part."""

    @property
    def encrypted(self) -> bool:
        """Whether the connection uses TLS."""
        return self.tls or self.tls_ca is not None or self.tls_cert is not None

    def checked(self, address: str) -> Self:
        """Return the options. Raises `InvalidField` if they contradict each other or `address`."""
        parse_address("address", check_text(address, "address"))
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidField("tls_cert", "and tls_key belong together")
        for name in ("token", "tenant", "session"):
            if (value := getattr(self, name)) and not _SENDABLE.fullmatch(check_text(value, name)):
                raise InvalidField(name, "must hold visible ASCII characters only, because it is metadata")
        if self.token and not (self.encrypted or self.insecure or is_loopback(address)):
            raise InvalidField(
                "token", f"would be sent to {address} unencrypted: set tls or tls_ca, or insecure"
            )
        check_timeout(self.timeout_s)
        check_whole(self.attempts, "attempts", 1, ATTEMPTS_MAX)
        check_number(self.retry_wait_s_max, "retry_wait_s_max", above=0)
        for (name, value), field in zip(self.narrowing, ("tenant", "session"), strict=True):
            if value is not None:
                check_value(name, value, field)
        return self

    @property
    def narrowing(self) -> tuple[tuple[str, str | None], ...]:
        """Metadata that restrict every call to a part of the namespace; None is not sent."""
        return (TENANT, self.tenant), (SESSION, self.session)

    def credentials(self) -> Any:
        """Return the channel's credentials. Raises `InvalidField` for a file that cannot be read."""
        names = ("tls_ca", "tls_key", "tls_cert")
        files = [(name, getattr(self, name)) for name in names]
        contents = [None if path is None else read_pem(name, _check_path(path, name)) for name, path in files]
        return grpc.ssl_channel_credentials(*contents)


def _check_path(path: object, where: str) -> Path:
    if not isinstance(path, Path) or "\0" in str(path):
        raise InvalidField(where, f"must be the Path of a PEM file, not {path!r}")
    check_text(str(path), where)
    return path


class Transport:
    """Calls to one gateway. Raises the errors of `store.protocol.grpc_status.errors_of`."""

    def __init__(self, address: str, options: ClientOptions, is_blocking: bool) -> None:
        """``is_blocking``: calls block the caller's thread; otherwise they run on its event loop."""
        self.address = address
        self.options = options.checked(address)
        self._is_blocking = is_blocking
        library: Any = grpc if is_blocking else grpc.aio
        limits = (("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), *CONNECTION_OPTIONS)
        if options.encrypted:
            self._channel = library.secure_channel(address, options.credentials(), options=limits)
        else:
            self._channel = library.insecure_channel(address, options=limits)

    def _start(self, kind: str, name: str, request: Any, response: Any, timeout_s: float) -> Any:
        """Start a call. A blocking call with one response has ended when this returns."""
        token = self.options.token
        bearer = (("authorization", f"Bearer {token}"),) if token else ()
        narrowing = (one for one in self.options.narrowing if one[1] is not None)
        metadata = (("x-request-id", uuid.uuid4().hex), *bearer, *narrowing)
        make = getattr(self._channel, kind)
        method = make(f"/{SERVICE}/{name}", type(request).SerializeToString, response.FromString)
        return method(request, timeout=timeout_s, metadata=metadata)

    async def unary(self, name: str, request: Any, response: Any, timeout_s: float) -> Any:
        """Return the response of a call."""
        with errors_of(self.address):
            answer = self._start("unary_unary", name, request, response, timeout_s)
            return answer if self._is_blocking else await answer

    async def stream(
        self, name: str, request: Any, response: Any, timeout_s: float
    ) -> AsyncGenerator[Any, None]:
        """Yield the messages of a call. Closing the generator cancels the call."""
        with errors_of(self.address):
            call = self._start("unary_stream", name, request, response, timeout_s)
            try:
                if self._is_blocking:
                    for message in call:
                        yield message
                else:
                    async for message in call:
                        yield message
            finally:
                call.cancel()

    async def pause(self, seconds: float) -> None:
        """Wait for a time."""
        if self._is_blocking:
            time.sleep(seconds)
        else:
            await asyncio.sleep(seconds)

    async def close(self) -> None:
        """Idempotent."""
        closing = self._channel.close()
        if not self._is_blocking:
            await closing


def run_to_completion(coroutine: Coroutine[Any, Any, Item]) -> Item:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: Item = stop.value
        return result
    raise AssertionError("a coroutine over blocking calls suspended")


def iterate(items: AsyncGenerator[Item, None]) -> Generator[Item, None, None]:
    """Yield the items of an asynchronous generator that never suspends, and close it."""
    try:
        while True:
            try:
                item = run_to_completion(items.__anext__())
            except StopAsyncIteration:
                return
            yield item
    finally:
        run_to_completion(items.aclose())
