"""Who sent a request over HTTP, and whether a web page had a browser send it.

A gateway without tokens trusts whoever reaches it over loopback, and a browser on this machine sends there
what any page tells it to. Two things keep pages out:

- A page may have its own name resolve to loopback (DNS rebinding). To the browser the gateway is then the
  page's own server, whose answers it may read. But the name stays in the `Host` header.
- A page may post a form or plain text anywhere without asking first, and make engines work although it
  cannot read their answers. But browsers say in `Origin` that a page is behind it.

This concerns everything that tells or does something: completions, models, what routers ask, the service,
metrics, and the console's endpoints. It leaves out `/healthz`, `/health` and `/readyz`, whose probes come
under any name and learn next to nothing, and the console's files, which are the same everywhere. With tokens
it is not needed, as browsers send none by themselves; and where a gateway is reached by another address, it
cannot know its own names.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.requests import Request

from kintsugi.core.errors import InvalidField, PermissionDenied
from kintsugi.gateway.fronts.http_connection import admit_connection
from kintsugi.gateway.fronts.limits import name_caller
from kintsugi.gateway.fronts.openai_server import identities_of_scope
from kintsugi.store.protocol.access import Access
from kintsugi.store.protocol.callers import Caller, parse_bearer
from kintsugi.store.protocol.tls import is_loopback

JSON_TYPE = "application/json"


def identify(access: Access, request: Request) -> Caller:
    """Who asks. Raises `Unauthenticated`, and what `check_no_page` raises."""
    token = parse_bearer(request.headers.get("authorization"))
    caller = access.caller(token, identities_of_scope(request.scope))
    check_no_page(access, request)
    admit_connection(request.scope)
    name_caller(request.scope, caller)
    return caller


def check_no_page(access: Access, request: Request) -> None:
    """Raises `PermissionDenied` and `InvalidField` for a request that a foreign page may have had a browser
    send to a gateway without tokens."""
    if needs_credentials(access) or not _is_here(request.scope.get("server")):
        return
    if not is_named_as_here(request):
        raise PermissionDenied(
            "this gateway has no tokens, and over loopback it answers to localhost and loopback addresses "
            f"alone: the name {request.headers.get('host', '')[:100]!r} may be a web page's; ask for "
            "http://127.0.0.1, have a proxy send `Host: localhost`, or start the gateway with --tokens-file"
        )
    if request.method == "POST" and "origin" in request.headers:
        check_is_json(request)


def check_is_json(request: Request) -> None:
    """Raises `InvalidField` for a body that a page may send without asking first."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != JSON_TYPE:
        raise InvalidField("content-type", f"must be {JSON_TYPE}")


def needs_credentials(access: Access) -> bool:
    """Whether callers need a token or a certificate."""
    return access.has_tokens or access.has_certificates


def is_from_here(request: Request) -> bool:
    """Whether the caller is on this machine."""
    return _is_here(request.scope.get("client"))


def is_named_as_here(request: Request) -> bool:
    """Whether the caller asked for the gateway by a name of this machine."""
    try:
        host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return False
    return _is_here((host, 0))


def _is_here(address: tuple[str, int | None] | None) -> bool:
    """IPv4 addresses may come in the form that sockets for both versions give them."""
    return address is not None and is_loopback(f"{address[0].removeprefix('::ffff:')}:0")
