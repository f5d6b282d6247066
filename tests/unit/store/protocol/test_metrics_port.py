"""Readiness beside whatever else is served."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest

from kintsugi.store.protocol.metrics_port import with_readiness


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
