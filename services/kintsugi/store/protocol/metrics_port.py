"""The metrics port of a shard or an engine: scrapes, `/readyz`, and an optional check of tokens."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from kintsugi.core.errors import PermissionDenied, Unauthenticated
from kintsugi.store.protocol.access import Access, Verb, parse_bearer

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

READY_PATH = "/readyz"
CONNECTIONS_MAX = 32
"""Maximum number of open connections. Each has a thread, so more of them could take the process's memory and
its file descriptors."""
IDLE_S = 10.0
"""Maximum time for which a peer may send or read nothing."""


class _Handler(WSGIRequestHandler):
    timeout = IDLE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape every few seconds says nothing new."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application in threads of its own until `stop`.

    A new connection aborts the oldest one if `CONNECTIONS_MAX` are open, so peers that hold connections
    without a request do not keep Prometheus out. Prometheus's own server has neither limit."""

    daemon_threads = True
    block_on_close = False  # `stop` does not wait for a peer that neither sends nor reads
    request_queue_size = 128

    def __init__(self, app: WSGIApplication, host: str, port: int) -> None:
        """Start to serve. Raises `OSError` if the address cannot be bound."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._open: dict[socket.socket, None] = {}  # used as an ordered set, the oldest first
        self._lock = threading.Lock()
        super().__init__((host.strip("[]"), port), _Handler)
        self.set_app(app)
        self.address = (
            f"[{host.strip('[]')}]:{self.server_port}" if ":" in host else f"{host}:{self.server_port}"
        )
        """`host:port`, with the port that was bound."""
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) >= CONNECTIONS_MAX else None
            self._open[request] = None
            if oldest is not None:
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of one connection: its peer has gone, or was too slow."""

    def stop(self) -> None:
        """Close the port. Answers that are being sent end with the process."""
        self.shutdown()
        self.server_close()


def with_readiness(
    app: WSGIApplication, why_not: Callable[[], str], warning: Callable[[], str] = lambda: ""
) -> WSGIApplication:
    """Return `app` with an answer at `READY_PATH`: 200, or 503 and the reason that `why_not` gives.

    An empty reason means ready; `warning` may then return a problem that does not affect readiness. Every
    other path goes to `app`."""

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != READY_PATH:
            return app(environ, start)
        reason = why_not()
        headers = [("Content-Type", "text/plain; charset=utf-8")]
        start("503 Service Unavailable" if reason else "200 OK", headers)
        words = [reason] if reason else ["ready", warning()]
        return [("; ".join(filter(None, words)) + "\n").encode()]

    return answer


def require_admin(app: WSGIApplication, access: Access) -> WSGIApplication:
    """Return `app` for callers whose bearer token has the verb `admin` on every namespace. Other callers
    receive 401 or 403 and the reason."""

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        try:
            caller = access.caller(parse_bearer(environ.get("HTTP_AUTHORIZATION")))
            caller.require_everywhere(Verb.ADMIN)
        except (Unauthenticated, PermissionDenied) as error:
            is_known = isinstance(error, PermissionDenied)
            start(
                "403 Forbidden" if is_known else "401 Unauthorized",
                [("Content-Type", "text/plain; charset=utf-8"), ("WWW-Authenticate", "Bearer")],
            )
            return [f"{error}\n".encode()]
        return app(environ, start)

    return answer
