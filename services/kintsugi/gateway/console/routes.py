"""Serves the console's files, and the page's endpoints under `/console/api`.

The files hold no secrets and need no token, because a browser cannot send one when it opens a page. The
endpoints require a token if the gateway has tokens; otherwise they answer only callers on this machine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Send

from kintsugi.core.errors import InvalidField, KintsugiError, PermissionDenied
from kintsugi.core.namespaces import narrow_by_headers
from kintsugi.core.request import SelectorName
from kintsugi.core.schema import load
from kintsugi.gateway.console import CONSOLE_PATH
from kintsugi.gateway.console.comparison import Comparer, Comparison, CountRequest, Message
from kintsugi.gateway.fronts.errors import LEFT_STATUS, Endpoint
from kintsugi.gateway.fronts.identity import (
    check_is_json,
    identify,
    is_from_here,
    is_named_as_here,
    needs_credentials,
)
from kintsugi.gateway.fronts.limits import parse_object, read_body, run_beside
from kintsugi.gateway.fronts.service_routes import describe_caller
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.requests import REQUEST_ID, ServedRequest
from kintsugi.models.bundled import BUNDLED_NAME, showcase
from kintsugi.models.demo_questions import choose_shown, read_demo_questions
from kintsugi.models.passages import read_bundled_passages
from kintsugi.store.protocol.access import Access, Caller, Verb

Asked = TypeVar("Asked", Comparison, CountRequest)

API_PATH = f"{CONSOLE_PATH}/api"
STREAM_TYPE = "application/x-ndjson"
BODY_BYTES_MAX = 4 << 20
SAMPLE_DOCUMENTS = 6
"""Maximum number of sample documents, about 3,700 tokens; the demo uses as many."""
FILES = Path(__file__).parent / "static"
FILES_BYTES_MAX = 400 << 10
"""Maximum size of all files together, so that the console opens quickly over any connection."""
HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Headers of every file. They forbid other origins, inline scripts and styles, and text that becomes markup.
Browsers revalidate each file; the answer is 304 if it has not changed."""
TENANTS_MAX = 100
"""Maximum number of listed tenants; those with the most tokens come first."""
PRIVATE: Mapping[str, str] = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

_SELECTORS: Mapping[SelectorName, str] = {
    SelectorName.QUERY: "tokens that the question attends to",
    SelectorName.HKVD: "tokens whose KV deviates most",
    SelectorName.HKVD_GRADUAL: "tokens whose KV deviates most, filtered at every layer",
    SelectorName.HYBRID: "chunk heads, and what the question attends to",
    SelectorName.CHUNK_HEAD: "the first tokens of each chunk",
    SelectorName.RANDOM: "tokens at random, for comparison",
}
"""Selectors that the page offers, with a description of the tokens that each selects."""


class ConsoleFiles(StaticFiles):
    """The page's files, with the headers that restrict their use."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(HEADERS)
        return response


class Console:
    """The console of one gateway. For one event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._comparer = Comparer(gateway)
        self._files = ConsoleFiles(directory=FILES)

    @property
    def routes(self) -> list[BaseRoute]:
        return [
            Route(CONSOLE_PATH, self._page, methods=["GET"]),
            Route(f"{API_PATH}/service", self._service, methods=["GET"]),
            Route(f"{API_PATH}/live", self._describe_live, methods=["GET"]),
            Route(f"{API_PATH}/compare", Endpoint(self._gateway, self._compare), methods=["POST"]),
            Route(f"{API_PATH}/count", Endpoint(self._gateway, self._count), methods=["POST"]),
            Route(f"{CONSOLE_PATH}/{{name}}", self._file, methods=["GET"]),
        ]

    async def _page(self, request: Request) -> Response:
        return await self._files.get_response("index.html", request.scope)

    async def _file(self, request: Request) -> Response:
        return await self._files.get_response(request.path_params["name"], request.scope)

    async def _service(self, request: Request) -> Response:
        """Describe what the page needs before the first question."""
        caller = identify_here(self._gateway.access, request)
        info = await self._gateway.recent_info.get()
        document = {
            "model": info.model,
            "is_test_model": info.model == BUNDLED_NAME,
            "max_model_len": info.max_model_len,
            "blending": info.blending,
            "progress": {"state": info.progress.state, "detail": info.progress.detail},
            "default": {"selector": info.selector, "ratio": info.ratio},
            "selectors": [
                {"name": name.value, "about": about, "ratio_min": _least_ratio(name, info.ratios_min)}
                for name, about in _SELECTORS.items()
            ],
            "caller": describe_caller(caller),
            "samples": find_samples(info.model, info.max_model_len),
        }
        return JSONResponse(document, headers=dict(PRIVATE))

    async def _describe_live(self, request: Request) -> Response:
        caller = identify_here(self._gateway.access, request)
        self._gateway.access.check_sees_all(caller)
        return JSONResponse(await describe_live(self._gateway, caller), headers=dict(PRIVATE))

    async def _compare(self, request: Request, served: ServedRequest, send: Send) -> None:
        _, asked = await self._read(request, served, Comparison)
        served.status = LEFT_STATUS  # until the whole answer is sent
        headers = {**PRIVATE, REQUEST_ID: served.request_id}
        async with aclosing(self._lines(request, asked, served)) as lines:
            reply = StreamingResponse(lines, media_type=STREAM_TYPE, headers=headers)
            await reply(request.scope, request.receive, send)

    async def _count(self, request: Request, served: ServedRequest, send: Send) -> None:
        """Answer with the number of tokens of each text."""
        caller, asked = await self._read(request, served, CountRequest)
        counts = await asked.count(self._gateway, caller)
        await JSONResponse({"tokens": counts}, headers=dict(PRIVATE))(request.scope, request.receive, send)

    async def _read(self, request: Request, served: ServedRequest, kind: type[Asked]) -> tuple[Caller, Asked]:
        """Return the caller and the request. Raises the error that refuses it."""
        caller = identify_here(self._gateway.access, request)
        served.caller = caller.name
        check_is_json(request)
        raw = await read_body(request)
        asked = await run_beside(len(raw), lambda: _parse(raw, kind))
        served.namespace = narrow_by_headers(asked.namespace, request.headers)
        caller.authorize(served.namespace, Verb.GENERATE)
        return caller, replace(asked, namespace=served.namespace)

    async def _lines(
        self, request: Request, asked: Comparison, served: ServedRequest
    ) -> AsyncGenerator[bytes, None]:
        """Stream the comparison's messages, one JSON object per line. A failure is the last message."""
        access = self._gateway.access
        messages = self._comparer.run(lambda: identify_here(access, request), asked, served)
        try:
            async with aclosing(messages):
                async for message in messages:
                    # A view has every position of the prompt, which may be long.
                    is_long = message["event"] == "view"
                    yield await asyncio.to_thread(_encode, message) if is_long else _encode(message)
        except KintsugiError as error:
            served.failure = error
            yield _encode({"event": "failed", "kind": type(error).__name__, "message": str(error)})
        served.status = 200


def identify_here(access: Access, request: Request) -> Caller:
    """Return the caller. If the gateway has no tokens, only callers on this machine are accepted.

    Raises `Unauthenticated` and `PermissionDenied`.
    """
    if not needs_credentials(access) and not (is_from_here(request) and is_named_as_here(request)):
        raise PermissionDenied(
            "the console answers only on the gateway's own machine while the gateway has no tokens; open it "
            "at http://127.0.0.1, or start the gateway with --tokens-file"
        )
    return identify(access, request)


def _encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _least_ratio(name: SelectorName, ratios_min: Mapping[str, float] | None) -> float | None:
    """Return the lowest ratio that the gate permits; None: the selector is not permitted."""
    return 0.0 if ratios_min is None else ratios_min.get(name.value)


def _parse(raw: bytes, kind: type[Asked]) -> Asked:
    if len(raw) > BODY_BYTES_MAX:
        raise InvalidField("body", f"is larger than {BODY_BYTES_MAX >> 20} MiB; remove some documents")
    return load(kind, parse_object(raw))


def find_samples(model: str, max_model_len: int) -> dict[str, Any]:
    """Return the documents and questions that the page offers first, as JSON. The bundled model knows only
    the words of its own chronicles; for other models, the number of passages is small enough for their
    context."""
    if model == BUNDLED_NAME:
        shown = showcase()
        documents = [{"title": f"Chronicle {n}", "text": text} for n, text in enumerate(shown.chunks, 1)]
        return {"documents": documents, "questions": [shown.question], "max_tokens": 1}
    passages = read_bundled_passages()[: max(1, min(SAMPLE_DOCUMENTS, max_model_len // 800))]
    shown_first = choose_shown(read_demo_questions())
    titles = {passage.title for passage in passages}
    others = [one.question for one in read_demo_questions() if one.passage in titles and one != shown_first]
    first = [shown_first.question] if shown_first.passage in titles else []
    return {
        "documents": [{"title": passage.title, "text": passage.text} for passage in passages],
        "questions": [*first, *others[:8]],
        "max_tokens": 48,
    }


async def describe_live(gateway: Gateway, caller: Caller) -> dict[str, Any]:
    """Describe the service as JSON, with the tenants that the caller may use."""
    tally = gateway.answers.tally
    return {
        "at_unix_s": time.time(),
        "store": await _describe_store(gateway),
        "gateway": {
            "answers": tally.answers,
            "answers_under_way": gateway.answers.under_way,
            "known_chunks": len(gateway.known),
            "fill_queue_chunks": gateway.fill_queue_chunks,
            "tokens_hit": tally.tokens_hit,
            "tokens_missed": tally.tokens_missed,
            "tokens_discovered": tally.tokens_discovered,
        },
        "tenants": _describe_tenants(gateway, caller),
    }


def _describe_tenants(gateway: Gateway, caller: Caller) -> list[dict[str, Any]]:
    accounts = [one for one in gateway.shares.accounts if caller.may_use(one.name)]
    accounts.sort(key=lambda account: (-account.tokens_charged, account.name))
    return [
        {
            "name": account.name,
            "in_flight": account.in_flight,
            "queued": len(account.waiting),
            "requests": account.requests_total,
            "tokens": max(0, account.tokens_charged),
            "refused": sum(account.refused_total.values()),
        }
        for account in accounts[:TENANTS_MAX]
    ]


async def _describe_store(gateway: Gateway) -> dict[str, Any]:
    try:
        stats = await gateway.recent_stats.get()
    except KintsugiError as error:
        return {"problem": str(error), "shards": []}
    return {
        "problem": "",
        "chunks": stats.chunks,
        "bytes_used": stats.bytes_used,
        "bytes_capacity": stats.bytes_capacity,
        "transport": stats.transport,
        "shards": [asdict(shard) for shard in stats.shards],
    }
