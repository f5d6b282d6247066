"""Lets only operators read what a process serves over HTTP beside its calls, such as metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kintsugi.core.errors import PermissionDenied, Unauthenticated
from kintsugi.store.protocol.access import Access
from kintsugi.store.protocol.callers import Verb, parse_bearer

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


def require_admin(app: WSGIApplication, access: Access) -> WSGIApplication:
    """Return `app` for callers whose bearer token has the verb `admin` on every namespace. Others get 401 or
    403, and why."""

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
