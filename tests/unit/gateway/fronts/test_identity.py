"""What a browser may not be abused for: requests that another site's page has it send to this machine."""

from __future__ import annotations

import httpx
import pytest

from kintsugi.core.errors import Unavailable
from kintsugi.core.exchange import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH
from kintsugi.gateway.console.routes import API_PATH
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.service_routes import SERVICE_PATH
from kintsugi.gateway.requests import RESIDENCY_PATH
from kintsugi.store.protocol.access import Access
from tests.fakes.openai_backend import ScriptedBackend, gateway_over
from tests.unit.gateway.fronts.test_http import CHAT, error_of, run
from tests.unit.gateway.fronts.test_http_roles import Roles, bearing

OPEN = ("GET /healthz", "GET /health", "GET /readyz", "GET /console", "GET /console/app.js")
CLOSED = (
    f"POST {CHAT_PATH}",
    f"POST {COMPLETIONS_PATH}",
    f"POST {RESPONSES_PATH}",
    "GET /v1/models",
    "GET /v1/models/scripted",
    f"POST {RESIDENCY_PATH}",
    f"GET {SERVICE_PATH}",
    "GET /metrics",
    f"GET {API_PATH}/service",
    f"GET {API_PATH}/live",
    f"POST {API_PATH}/compare",
    f"POST {API_PATH}/count",
)
HERE = "http://127.0.0.1:8000"


def at(url: str, access: Access | None = None, backend: ScriptedBackend | None = None) -> httpx.AsyncClient:
    """A client on this machine of the gateway that listens at an address."""
    app = HttpFront(gateway_over(backend or ScriptedBackend(), access=access)).app
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=("127.0.0.1", 4000)), base_url=url)


def test_every_route_is_open_or_closed_to_foreign_names_on_purpose() -> None:
    routes = HttpFront(gateway_over(ScriptedBackend())).app.routes
    paths = {route.path for route in routes}  # type: ignore[attr-defined]
    named = {"/v1/models/scripted": "/v1/models/{name:path}", "/console/app.js": "/console/{name}"}
    assert {named.get(path, path) for _, path in map(str.split, (*OPEN, *CLOSED))} == paths


class WithTokens(Roles):
    has_tokens = True


@pytest.mark.parametrize("is_away", [False, True], ids=["engine there", "engine away"])
@pytest.mark.parametrize("route", [*OPEN, *CLOSED])
def test_a_foreign_name_that_resolves_to_loopback_opens_nothing(route: str, is_away: bool) -> None:
    method, path = route.split()
    away = Unavailable("no engine answers; send the request again")
    backend = ScriptedBackend(lambda call: [away], info_error=away) if is_away else ScriptedBackend()
    unready = 503 if is_away and route == "GET /readyz" else 200

    async def body() -> None:
        async with at(HERE, backend=backend) as caller:
            for name in ("evil.example:8000", "localhost.evil.example", "[", ""):
                answer = await caller.request(method, path, json=CHAT, headers={"host": name})
                assert answer.status_code == (403 if route in CLOSED else unready), name
                if route in CLOSED:
                    assert "--tokens-file" in error_of(answer)["message"]
            for name in ("localhost:8000", "127.0.0.1:8000", "[::1]:8000"):
                answer = await caller.request(method, path, json=CHAT, headers={"host": name})
                assert answer.status_code != 403, name

    run(body)


def test_with_tokens_or_by_another_address_any_name_will_do() -> None:
    async def body() -> None:
        foreign = {"host": "kv.example"}
        async with at(HERE, WithTokens()) as caller:
            assert (await caller.get("/v1/models", headers={**foreign, **bearing("list")})).status_code == 200
        async with at("http://192.0.2.7:8000") as caller:
            assert (await caller.get("/v1/models", headers=foreign)).status_code == 200
        async with at("http://[::ffff:127.0.0.1]:8000") as caller:
            assert (await caller.get("/v1/models", headers=foreign)).status_code == 403

    run(body)


def test_another_sites_form_makes_no_engine_work() -> None:
    async def body() -> None:
        backend = ScriptedBackend()
        async with at(HERE, backend=backend) as caller:
            page = {"origin": "https://evil.example"}
            for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
                form = {**page, "content-type": kind}
                refused = await caller.post(CHAT_PATH, content=b'{"messages": []}', headers=form)
                assert (refused.status_code, error_of(refused)["param"]) == (400, "content-type")
            assert not backend.calls
            assert (await caller.post(CHAT_PATH, json=CHAT, headers=page)).status_code == 200
            plain = {"content-type": "text/plain"}  # no page, as it says of no origin
            answer = await caller.post(CHAT_PATH, content=b'{"messages": []}', headers=plain)
            assert answer.status_code == 200

    run(body)
