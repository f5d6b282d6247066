"""Runs an ASGI application with uvicorn, inside the event loop of who asks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from kintsugi.core.errors import Unavailable

KEEP_ALIVE_S = 60
DRAIN_S = 10
"""For answers that are under way when told to stop."""
BACKLOG = 2048
POLL_S = 0.01


@dataclass(frozen=True)
class HttpTls:
    """PEM files. With an authority, callers must show a certificate that it signed."""

    certificate: Path
    key: Path
    client_authority: Path | None = None


class _Quiet(uvicorn.Server):
    """Signals belong to the process that runs us."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """One listening address."""

    def __init__(self, app: ASGIApp, host: str, port: int, tls: HttpTls | None = None) -> None:
        self._host, self._port = host, port
        options: dict[str, Any] = {}
        if tls is not None:
            options |= {"ssl_certfile": str(tls.certificate), "ssl_keyfile": str(tls.key)}
            if tls.client_authority is not None:
                import ssl

                options |= {"ssl_ca_certs": str(tls.client_authority), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        self._server = _Quiet(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=DRAIN_S,
                backlog=BACKLOG,
                **options,
            )
        )
        self._task: asyncio.Task[None] | None = None
        self.address = ""
        """`host:port`, once started."""

    async def start(self) -> None:
        """Returns once it listens. Raises `Unavailable` where the address cannot be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host, self._port))
        except OSError as error:
            listener.close()
            raise Unavailable(
                f"{self._host}:{self._port} cannot be listened on ({error.strerror}); free it or name another"
            ) from error
        self.address = f"{self._host}:{listener.getsockname()[1]}"
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._task.done():
                await self._task
                raise Unavailable(f"the server on {self.address} ended while it started")
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Let running answers end, for `DRAIN_S` at most. Idempotent."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None
