"""The SDK's connection to a gateway, with and without an event loop.

Both clients share one set of coroutines over a `Transport`. On a blocking transport, a call ends before it is
awaited, so a coroutine never suspends: `run_to_completion` and `iterate` run it in the caller's thread.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from kintsugi.core.errors import InvalidField
from kintsugi.core.namespaces import SESSION, TENANT, check_value
from kintsugi.store.protocol.grpc_status import errors_of
from kintsugi.store.protocol.tls import is_loopback, parse_address, read_pem

SERVICE = "kintsugi.rpc.v1.Kintsugi"
MESSAGE_BYTES_MAX = 64 << 20
"""Maximum size of a gateway's message."""

Item = TypeVar("Item")


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
        parse_address("address", address)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidField("tls_cert", "and tls_key belong together")
        if self.token and not (self.encrypted or self.insecure or is_loopback(address)):
            raise InvalidField(
                "token", f"would be sent to {address} unencrypted: set tls or tls_ca, or insecure"
            )
        if not (self.timeout_s > 0 and self.attempts >= 1):
            raise InvalidField("timeout_s", "must be above 0, and attempts at least 1")
        for name, value in self.narrowing:
            check_value(name, value)
        return self

    @property
    def narrowing(self) -> tuple[tuple[str, str], ...]:
        """Metadata that restrict every call to a part of the namespace."""
        given = ((TENANT, self.tenant), (SESSION, self.session))
        return tuple((name, value) for name, value in given if value is not None)

    def credentials(self) -> Any:
        """Return the channel's credentials. Raises `InvalidField` for a file that cannot be read."""
        files = (self.tls_ca, self.tls_key, self.tls_cert)
        contents = [None if path is None else read_pem("tls", path) for path in files]
        return grpc.ssl_channel_credentials(*contents)


class Transport:
    """Calls to one gateway. Raises the errors of `store.protocol.grpc_status.errors_of`."""

    def __init__(self, address: str, options: ClientOptions, is_blocking: bool) -> None:
        """``is_blocking``: calls block the caller's thread; otherwise they run on its event loop."""
        self.address = address
        self.options = options.checked(address)
        self._is_blocking = is_blocking
        library: Any = grpc if is_blocking else grpc.aio
        limits = (("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),)
        if options.encrypted:
            self._channel = library.secure_channel(address, options.credentials(), options=limits)
        else:
            self._channel = library.insecure_channel(address, options=limits)

    def _start(self, kind: str, name: str, request: Any, response: Any, timeout_s: float) -> Any:
        """Start a call. A blocking call with one response has ended when this returns."""
        token = self.options.token
        bearer = (("authorization", f"Bearer {token}"),) if token else ()
        metadata = (("x-request-id", uuid.uuid4().hex), *bearer, *self.options.narrowing)
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
