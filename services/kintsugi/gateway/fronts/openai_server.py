"""Runs an ASGI application with uvicorn, in the running event loop."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Scope

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.gateway.addresses import format_address
from kintsugi.gateway.fronts.grpc_server import STOP_GRACE_S
from kintsugi.gateway.fronts.http_connection import HEAD_READ_S, BoundedConnection, Connections
from kintsugi.store.protocol.access import identities_of_certificate
from kintsugi.store.protocol.tls import TlsFiles
from kintsugi.store.protocol.watched_files import WatchedFiles

KEEP_ALIVE_S = 60
BACKLOG = 2048
ACCEPTED_AT_ONCE = 16
"""Maximum number of connections that are accepted before earlier ones are read: a caller's head must be read
before many strangers follow it."""
CONNECTIONS_MAX = 4096
STRANGERS_MAX = 256
"""Maximum number of connections without an authenticated caller. Each needs up to 60 KiB."""
POLL_S = 0.01
_IDENTITIES = "kintsugi.identities"


class _Tls:
    """A TLS context that reads its files at every handshake, as `store.protocol.tls.ServerTls` does."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises `InvalidField` if a file cannot be read or has other contents."""
        self._files = files
        self._watched = WatchedFiles("set of TLS files", files.paths, self._read, always_check=True)
        self.context = self._watched.current()
        self.context.sni_callback = self._on_hello

    def _read(self) -> ssl.SSLContext:
        self._files.read()  # raises an error that names the file
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A resumed session shows no certificate, so a client whose authority was removed could continue.
        context.num_tickets, context.options = 0, context.options | ssl.OP_NO_TICKET
        try:
            context.load_cert_chain(self._files.cert, self._files.key)
            if self._files.ca is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(self._files.ca)
        except (ssl.SSLError, OSError) as error:
            raise InvalidField("tls", f"{self._files.cert}, its key or its authority: {error}") from error
        return context

    def _on_hello(self, connection: ssl.SSLObject | ssl.SSLSocket, *_: object) -> None:
        """Load the current certificate files for a handshake. Called with or without a server name."""
        connection.context = self._watched.current()


class _CertifiedConnection(BoundedConnection):
    """Adds the identities of the client certificate to the scope of the connection's requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        identities = identities_of_certificate(transport.get_extra_info("peercert"))
        self.app_state = {**self.app_state, _IDENTITIES: identities}


def identities_of_scope(scope: Scope) -> tuple[str, ...]:
    """Return the identities of a request's client certificate; none without mutual TLS."""
    identities: tuple[str, ...] = scope.get("state", {}).get(_IDENTITIES, ())
    return identities


class _Server(uvicorn.Server):
    """Serves `BoundedConnection`s, and does not handle the process's signals."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with a time limit for a TLS handshake."""
        connections = Connections(CONNECTIONS_MAX, STRANGERS_MAX)
        connection_of = _CertifiedConnection if self.config.ssl else BoundedConnection

        def accept() -> BoundedConnection:
            return connection_of(
                connections, config=self.config, server_state=self.server_state, app_state={}
            )

        assert sockets, "`HttpServer` binds its address itself"
        server = await asyncio.get_running_loop().create_server(
            accept,
            sock=sockets[0],
            ssl=self.config.ssl,
            backlog=ACCEPTED_AT_ONCE,
            ssl_handshake_timeout=HEAD_READ_S if self.config.ssl else None,
        )
        sockets[0].listen(BACKLOG)  # asyncio takes one number for both
        self.servers = [server]
        self.started = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """One listening address."""

    def __init__(self, app: ASGIApp, host: str, port: int, tls: TlsFiles | None = None) -> None:
        """Raises `InvalidField` for unreadable TLS files."""
        self._host, self._port = host, port
        options: dict[str, Any] = {}
        if tls is not None:
            context = _Tls(tls).context
            options["ssl_context_factory"] = lambda config, default: context
        self._server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
                **options,
            )
        )
        self._task: asyncio.Task[None] | None = None
        self.address = ""
        """Address `host:port`; empty before `start`."""

    async def start(self) -> None:
        """Start to listen. Raises `Unavailable` if the address cannot be bound."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host.strip("[]"), self._port))
        except OSError as error:
            listener.close()
            address = format_address(self._host, self._port)
            raise Unavailable(
                f"{address} cannot be bound ({error.strerror}); free it or name another"
            ) from error
        self.address = format_address(self._host, listener.getsockname()[1])
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._task.done():
                await self._task
                raise Unavailable(f"the server on {self.address} ended while it started")
            await asyncio.sleep(POLL_S)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stop the server, and wait up to ``grace_s``, rounded up to seconds, for answers to end.
        Idempotent."""
        if self._task is not None:
            self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
            self._server.should_exit = True
            await self._task
            self._task = None
