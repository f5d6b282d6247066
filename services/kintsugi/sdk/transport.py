"""How the SDK reaches a gateway, with and without an event loop.

The clients are one body of coroutines over a `Transport`. With an event loop they wait as coroutines do. On a
blocking transport every call is over before its await returns, so a coroutine runs from its beginning to its
end in the caller's thread and never suspends: `run_to_completion` and `iterate` drive it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from kintsugi.core.errors import InvalidField
from kintsugi.core.namespaces.parts import SESSION, TENANT, check_value
from kintsugi.store.protocol.grpc_status import errors_of
from kintsugi.store.protocol.tls import is_loopback, parse_address, read_pem

SERVICE = "kintsugi.rpc.v1.Kintsugi"
MESSAGE_BYTES_MAX = 64 << 20
"""Maximum size of a gateway's message."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class ClientOptions:
    """How a client talks to a gateway."""

    token: str | None = None
    """Bearer token, made with `kintsugi token`."""
    tls: bool = False
    """Implied by `tls_ca` and `tls_cert`; alone it trusts the system's authorities."""
    tls_ca: Path | None = None
    """PEM file of the authority that signed the gateway's certificate."""
    tls_cert: Path | None = None
    """PEM file of the client's certificate, for a gateway that asks for one."""
    tls_key: Path | None = None
    """PEM file of that certificate's private key."""
    insecure: bool = False
    """Send the token in the clear beyond loopback."""
    timeout_s: float = 60.0
    """For a whole call with all its attempts. `put_chunks` with `wait` includes the prefill of its chunks."""
    attempts: int = 5
    """Attempts at a call that may be sent again, including the first: with the waits, at least 1.5 s."""
    retry_wait_s_max: float = 2.0
    """Longest wait between two attempts, in seconds."""
    tenant: str | None = None
    """Narrows the client's namespace to this tenant's part of it (docs/TENANTS.md)."""
    session: str | None = None
    """Narrows the namespace to this session's part; with `tenant`, to the part of that."""

    @property
    def encrypted(self) -> bool:
        """Whether the connection uses TLS."""
        return self.tls or self.tls_ca is not None or self.tls_cert is not None

    def checked(self, address: str) -> Self:
        """Return the options. Raises `InvalidField` where they do not fit together or with `address`."""
        parse_address("address", address)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidField("tls_cert", "and tls_key belong together")
        if self.token and not (self.encrypted or self.insecure or is_loopback(address)):
            raise InvalidField(
                "token", f"would travel to {address} in the clear: give tls or tls_ca, or say insecure"
            )
        if not (self.timeout_s > 0 and self.attempts >= 1):
            raise InvalidField("timeout_s", "must be above 0, and attempts at least 1")
        for name, value in self.narrowing:
            check_value(name, value)
        return self

    @property
    def narrowing(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call that say which part of the namespace it works in."""
        given = ((TENANT, self.tenant), (SESSION, self.session))
        return tuple((name, value) for name, value in given if value is not None)

    def credentials(self) -> Any:
        """Raises `InvalidField` for a file that cannot be read."""
        files = (self.tls_ca, self.tls_key, self.tls_cert)
        contents = [None if path is None else read_pem("tls", path) for path in files]
        return grpc.ssl_channel_credentials(*contents)


class Transport:
    """Calls to one gateway. Raises failures as `store.protocol.grpc_status` reads them."""

    def __init__(self, address: str, options: ClientOptions, is_blocking: bool) -> None:
        """``is_blocking``: calls wait in the caller's thread; else in its event loop."""
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
        """Start a call; a blocking call with one response is over when this returns."""
        token = self.options.token
        bearer = (("authorization", f"Bearer {token}"),) if token else ()
        metadata = (("x-request-id", uuid.uuid4().hex), *bearer, *self.options.narrowing)
        make = getattr(self._channel, kind)
        method = make(f"/{SERVICE}/{name}", type(request).SerializeToString, response.FromString)
        return method(request, timeout=timeout_s, metadata=metadata)

    async def unary(self, name: str, request: Any, response: Any, timeout_s: float) -> Any:
        """One call's response."""
        with errors_of(self.address):
            answer = self._start("unary_unary", name, request, response, timeout_s)
            return answer if self._is_blocking else await answer

    async def stream(
        self, name: str, request: Any, response: Any, timeout_s: float
    ) -> AsyncGenerator[Any, None]:
        """A call's messages; closing the generator cancels the call."""
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
        """Wait."""
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
    """The result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: Item = stop.value
        return result
    raise AssertionError("a coroutine over blocking calls suspended")


def iterate(items: AsyncGenerator[Item, None]) -> Iterator[Item]:
    """The items of an asynchronous generator that never suspends; closes it."""
    try:
        while True:
            try:
                item = run_to_completion(items.__anext__())
            except StopAsyncIteration:
                return
            yield item
    finally:
        run_to_completion(items.aclose())
