"""Additions to a metrics port: an answer at `/readyz`, and an optional check of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kintsugi.core.errors import PermissionDenied, Unauthenticated
from kintsugi.store.protocol.access import Access, Verb, parse_bearer

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

READY_PATH = "/readyz"


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
