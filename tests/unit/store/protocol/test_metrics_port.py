"""What a metrics port answers, and what it bears."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest

from kintsugi.store.protocol import metrics_port
from kintsugi.store.protocol.metrics_port import CONNECTIONS_MAX, MetricsServer, with_readiness


def other(_: Any, start: Any) -> Iterable[bytes]:
    start("200 OK", [])
    return [b"other"]


def start_noting(seen: list[str]) -> Any:
    return lambda status, _headers, _error=None: seen.append(status)


@pytest.mark.parametrize(
    ("path", "reason", "status", "body"),
    [
        ("/readyz", "", "200 OK", b"ready\n"),
        ("/readyz", "it drains", "503 Service Unavailable", b"it drains\n"),
        ("/metrics", "it drains", "200 OK", b"other"),
        ("/", "", "200 OK", b"other"),
    ],
)
def test_readiness_is_answered_and_the_rest_is_left(path: str, reason: str, status: str, body: bytes) -> None:
    environ: dict[str, Any] = {}
    setup_testing_defaults(environ)
    environ["PATH_INFO"] = path
    seen: list[str] = []
    answer = with_readiness(other, lambda: reason)(environ, start_noting(seen))
    assert (seen, b"".join(answer)) == ([status], body)


def test_what_is_wrong_with_a_ready_process_is_said_beside_it() -> None:
    environ: dict[str, Any] = {}
    setup_testing_defaults(environ)
    environ["PATH_INFO"] = "/readyz"
    seen: list[str] = []
    app = with_readiness(other, lambda: "", lambda: "ssd0 fails: read-only")
    answer = app(environ, start_noting(seen))
    assert (seen, b"".join(answer)) == (["200 OK"], b"ready; ssd0 fails: read-only\n")


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer(other, "127.0.0.1", 0)
    yield server
    server.stop()


def scrape(server: MetricsServer) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=5) as answer:
        body: bytes = answer.read()
        return body


def test_peers_without_a_request_neither_keep_prometheus_out_nor_take_threads(server: MetricsServer) -> None:
    before = threading.active_count()
    with ExitStack() as peers:
        for number in range(5 * CONNECTIONS_MAX):
            peer = peers.enter_context(socket.create_connection(("127.0.0.1", server.server_port), timeout=5))
            if number % 2:
                peer.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert scrape(server) == b"other"
        assert threading.active_count() - before <= CONNECTIONS_MAX + 1


def test_a_peer_that_sends_nothing_is_cut(monkeypatch: pytest.MonkeyPatch, server: MetricsServer) -> None:
    monkeypatch.setattr(metrics_port._Handler, "timeout", 0.05)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=5) as peer:
        peer.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert peer.recv(1) == b""
