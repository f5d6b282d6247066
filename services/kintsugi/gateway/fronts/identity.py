"""Identifies the callers of HTTP requests, and refuses requests of foreign web pages.

A gateway without tokens trusts every caller over loopback, and a browser on this machine sends requests there
for any web page. Two checks keep pages out:

- A page may make its own name resolve to loopback (DNS rebinding). The browser then treats the gateway as the
  page's own server and lets the page read its answers. But the `Host` header still has the page's name.
- A page may post a form or plain text to any server, and cause work although it cannot read the answer. But
  browsers then send the header `Origin`.

The checks apply to completions, models, the routers' endpoints, the service's state, metrics and the
console's endpoints. They do not apply to `/healthz`, `/health` and `/readyz`, whose probes use any name and
which reveal little, nor to the console's files, which are public. Tokens make them unnecessary, because
browsers do not send tokens automatically. A gateway that is reached by another address cannot know its own
names.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.requests import Request

from kintsugi.core.errors import InvalidField, PermissionDenied
from kintsugi.gateway.fronts.http_connection import admit_connection
from kintsugi.gateway.fronts.limits import name_caller
from kintsugi.gateway.fronts.openai_server import identities_of_scope
from kintsugi.store.protocol.access import Access, Caller, read_token
from kintsugi.store.protocol.tls import is_loopback

JSON_TYPE = "application/json"


def identify(access: Access, request: Request) -> Caller:
    """Return the caller. Raises `Unauthenticated`, and as `read_token` and `check_no_page`."""
    caller = access.caller(read_token(request.headers.items()), identities_of_scope(request.scope))
    check_no_page(access, request)
    admit_connection(request.scope)
    name_caller(request.scope, caller)
    return caller


def check_no_page(access: Access, request: Request) -> None:
    """Raise `PermissionDenied` or `InvalidField` for a request to a gateway without tokens that a browser may
    have sent for a foreign page."""
    if needs_credentials(access) or not _is_here(request.scope.get("server")):
        return
    if not is_named_as_here(request):
        raise PermissionDenied(
            "this gateway has no tokens, so over loopback it accepts only localhost and loopback addresses "
            f"as its name: {request.headers.get('host', '')[:100]!r} may be a web page's; use "
            "http://127.0.0.1, let the proxy send `Host: localhost`, or start the gateway with --tokens-file"
        )
    if request.method == "POST" and "origin" in request.headers:
        check_is_json(request)


def check_is_json(request: Request) -> None:
    """Raise `InvalidField` for a body that a browser sends for a page without a preflight request."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != JSON_TYPE:
        raise InvalidField("content-type", f"must be {JSON_TYPE}")


def needs_credentials(access: Access) -> bool:
    """Return whether callers need a token or a certificate."""
    return access.has_tokens or access.has_certificates


def is_from_here(request: Request) -> bool:
    """Return whether the caller is on this machine."""
    return _is_here(request.scope.get("client"))


def is_named_as_here(request: Request) -> bool:
    """Return whether the `Host` header has a name of this machine."""
    try:
        host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return False
    return _is_here((host, 0))


def _is_here(address: tuple[str, int | None] | None) -> bool:
    """Return whether an address is loopback. Dual-stack sockets write IPv4 addresses with the prefix
    `::ffff:`."""
    return address is not None and is_loopback(f"{address[0].removeprefix('::ffff:')}:0")
