"""Serves the console's files, and the endpoints under `/console/api` that the page asks.

The files hold no secrets and need no token: a browser cannot send one when it opens a page. The endpoints
need one wherever the gateway has tokens, and where it has none they answer callers on this machine alone.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from kintsugi.core.errors import InvalidField, NotFound, PermissionDenied
from kintsugi.core.request import SelectorName
from kintsugi.gateway.console.assets import CONSOLE_PATH, HEADERS, PAGE, read_assets
from kintsugi.gateway.console.comparison import Comparer, Comparison
from kintsugi.gateway.console.live import LiveService
from kintsugi.gateway.console.samples import find_samples
from kintsugi.gateway.fronts.errors import http_status_of
from kintsugi.gateway.fronts.http_connection import admit_connection
from kintsugi.gateway.fronts.limits import name_caller
from kintsugi.gateway.fronts.narrowing import narrow_by_headers
from kintsugi.gateway.fronts.openai_server import identities_of_scope
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.requests import REQUEST_ID, ServedRequest
from kintsugi.store.protocol.callers import Caller, Verb
from kintsugi.store.protocol.tls import is_loopback

API_PATH = f"{CONSOLE_PATH}/api"
JSON_TYPE = "application/json"
STREAM_TYPE = "application/x-ndjson"
BODY_BYTES_MAX = 4 << 20
PRIVATE: Mapping[str, str] = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

_SELECTORS: Mapping[SelectorName, str] = {
    SelectorName.QUERY: "tokens that the question attends to",
    SelectorName.HKVD: "tokens whose KV deviates most",
    SelectorName.HKVD_GRADUAL: "tokens whose KV deviates most, filtered at every layer",
    SelectorName.HYBRID: "chunk heads, and what the question attends to",
    SelectorName.CHUNK_HEAD: "the first tokens of each chunk",
    SelectorName.PRIOR: "tokens that scored highest when the chunk was stored",
    SelectorName.RANDOM: "tokens at random, for comparison",
}
"""What the page says of each selector that it offers."""


class Console:
    """The console of one gateway. For one event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._comparer = Comparer(gateway)
        self._live = LiveService(gateway)

    @property
    def routes(self) -> list[BaseRoute]:
        return [
            Route(CONSOLE_PATH, self._page, methods=["GET"]),
            Route(f"{API_PATH}/service", self._service, methods=["GET"]),
            Route(f"{API_PATH}/live", self._describe_live, methods=["GET"]),
            Route(f"{API_PATH}/compare", self._compare, methods=["POST"]),
            Route(f"{CONSOLE_PATH}/{{name}}", self._file, methods=["GET"]),
        ]

    async def _page(self, request: Request) -> Response:
        return _send_file(request, PAGE)

    async def _file(self, request: Request) -> Response:
        return _send_file(request, request.path_params["name"])

    def _identify(self, request: Request) -> Caller:
        """Raises `Unauthenticated`, and `PermissionDenied` for a stranger to a gateway without tokens."""
        access = self._gateway.access
        served = ServedRequest(request.url.path, request.headers, self._gateway.metrics.http, 200)
        caller = served.authenticate(access, identities_of_scope(request.scope))
        if not access.has_tokens and not access.has_certificates:
            check_local(request)
        admit_connection(request.scope)
        name_caller(request.scope, caller)
        return caller

    async def _service(self, request: Request) -> Response:
        """What the page has to know before the first question."""
        caller = self._identify(request)
        info = await self._gateway.recent_info.get()
        document = {
            "model": info.model,
            "max_model_len": info.max_model_len,
            "blending": info.blending,
            "default": {"selector": info.selector, "ratio": info.ratio},
            "selectors": [
                {"name": name.value, "about": about, "ratio_min": _least_ratio(name, info.ratios_min)}
                for name, about in _SELECTORS.items()
            ],
            "caller": {
                "name": caller.name,
                "namespaces": list(caller.namespaces),
                "verbs": sorted(caller.verbs),
                "may_see_live": self._may_see_live(caller),
            },
            "has_tokens": self._gateway.access.has_tokens,
            "read_only": self._gateway.read_only,
            "samples": find_samples(info.model, info.max_model_len),
        }
        return JSONResponse(document, headers=dict(PRIVATE))

    def _may_see_live(self, caller: Caller) -> bool:
        """As with metrics: where entries name verbs, one that may operate the whole service."""
        return not self._gateway.access.names_verbs or (caller.may(Verb.ADMIN) and caller.is_unrestricted)

    async def _describe_live(self, request: Request) -> Response:
        caller = self._identify(request)
        if self._gateway.access.names_verbs:
            caller.require_everywhere(Verb.ADMIN)
        return JSONResponse(await self._live.describe(caller), headers=dict(PRIVATE))

    async def _compare(self, request: Request) -> Response:
        """Streams one JSON object a line."""
        caller = self._identify(request)
        # Another site's page may send a form or plain text without asking first, but not JSON.
        if request.headers.get("content-type", "").partition(";")[0].strip() != JSON_TYPE:
            raise InvalidField("content-type", f"must be {JSON_TYPE}")
        asked = Comparison.from_mapping(_parse(await request.body()))
        asked = replace(asked, namespace=narrow_by_headers(asked.namespace, request.headers))
        caller.authorize(asked.namespace, Verb.GENERATE)
        served = ServedRequest(
            request.url.path, request.headers, self._gateway.metrics.http, 200, audit=self._gateway.audit
        )
        served.caller, served.namespace = caller.name, asked.namespace

        async def lines() -> AsyncIterator[bytes]:
            with served.record(http_status_of):
                async with aclosing(self._comparer.run(lambda: self._identify(request), asked)) as messages:
                    async for message in messages:
                        yield json.dumps(message).encode() + b"\n"

        headers = {**PRIVATE, REQUEST_ID: served.request_id}
        return StreamingResponse(lines(), media_type=STREAM_TYPE, headers=headers)


def check_local(request: Request) -> None:
    """Raises `PermissionDenied` unless the caller is on this machine and asked for it by a name of this
    machine: another name would be a foreign page's, made to resolve to loopback."""
    try:
        host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        host = ""
    client = request.client.host if request.client is not None else ""
    if not (is_loopback(f"{client}:0") and (host == "localhost" or is_loopback(f"{host}:0"))):
        raise PermissionDenied(
            "the console answers only on the gateway's own machine while the gateway has no tokens; open it "
            "at http://127.0.0.1, or start the gateway with --tokens-file"
        )


def _least_ratio(name: SelectorName, ratios_min: Mapping[str, float] | None) -> float | None:
    """The least ratio that the gate allows; None: the selector is not allowed."""
    return 0.0 if ratios_min is None else ratios_min.get(name.value)


def _parse(raw: bytes) -> dict[str, Any]:
    if len(raw) > BODY_BYTES_MAX:
        raise InvalidField("body", f"is larger than {BODY_BYTES_MAX >> 20} MiB; remove some documents")
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidField("body", f"is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidField("body", "must be a JSON object")
    return values


def _send_file(request: Request, name: str) -> Response:
    asset = read_assets().get(name)
    if asset is None:
        raise NotFound(f"the console has no file {name!r}; open {CONSOLE_PATH}")
    headers = {**HEADERS, "etag": asset.etag}
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)
