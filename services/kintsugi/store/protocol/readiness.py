"""Readiness over HTTP: `/readyz` beside whatever else a process serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

READY_PATH = "/readyz"


def with_readiness(
    app: WSGIApplication, why_not: Callable[[], str], warning: Callable[[], str] = lambda: ""
) -> WSGIApplication:
    """Return `app` with an answer at `READY_PATH`: 200, or 503 and the reason that `why_not` gives.

    An empty reason means ready; `warning` then says what is wrong all the same, if anything is. Every other
    path goes to `app`.
    """

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != READY_PATH:
            return app(environ, start)
        reason = why_not()
        headers = [("Content-Type", "text/plain; charset=utf-8")]
        start("503 Service Unavailable" if reason else "200 OK", headers)
        words = [reason] if reason else ["ready", warning()]
        return [("; ".join(filter(None, words)) + "\n").encode()]

    return answer
