"""Requests over HTTP that narrow their namespace, by headers and by fields of OpenAI's body."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import httpx
import pytest

from kintsugi.core.exchange import CHAT_PATH
from kintsugi.core.spaces import ChunkKey, TokenIds
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.store.protocol.access import Access, Caller
from tests.fakes.openai_backend import ScriptedBackend, gateway_over
from tests.unit.gateway.fronts.test_http import error_of, run

CHAT: Mapping[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}


class Tokens(Access):
    """One token for one namespace, and one for the parts of a single tenant."""

    def caller(self, token: str | None, identities: Collection[str] = ()) -> Caller:
        return Caller("acme", ("docs/-/acme",)) if token == "acme" else Caller("docs", ("docs",))


def client(backend: ScriptedBackend, token: str = "docs", **gateway: Any) -> httpx.AsyncClient:
    app = HttpFront(gateway_over(backend, access=Tokens(), **gateway)).app
    headers = {"authorization": f"Bearer {token}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x-tenant-id": "acme"}, {}),
        ({"x-session-id": "one: two"}, {}),
        ({}, {"prompt_cache_key": "one"}),
        ({}, {"cache_salt": "one"}),
        ({"x-tenant-id": "acme", "x-session-id": "s"}, {"prompt_cache_key": "k", "cache_salt": "s"}),
    ],
)
def test_a_request_works_in_a_part_of_what_its_token_permits(
    headers: dict[str, str], body: dict[str, str]
) -> None:
    async def check() -> None:
        backend = ScriptedBackend()
        async with client(backend) as caller:
            for more, extra in (({}, {}), (headers, body)):
                answer = await caller.post(CHAT_PATH, json={**CHAT, **extra}, headers=more)
                assert answer.status_code == 200
        plain, narrowed = (call.params.namespace for call in backend.calls)
        assert plain == "docs"
        assert narrowed.startswith("docs/-/")
        assert not {"prompt_cache_key", "cache_salt"} & set(backend.calls[1].body), "the engine sets the salt"

    run(check)


@pytest.mark.parametrize(
    ("headers", "body", "field"),
    [
        ([("x-tenant-id", "../other")], {}, "x-tenant-id"),
        ([("x-tenant-id", "")], {}, "x-tenant-id"),
        ([("x-tenant-id", "a"), ("x-tenant-id", "b")], {}, "x-tenant-id"),
        ([("x-session-id", "s" * 257)], {}, "x-session-id"),
        ([], {"prompt_cache_key": 7}, "prompt_cache_key"),
        ([], {"cache_salt": ""}, "cache_salt"),
        ([], {"cache_salt": {"a": 1}}, "cache_salt"),
    ],
)
def test_a_bad_value_is_refused(headers: list[tuple[str, str]], body: dict[str, Any], field: str) -> None:
    async def check() -> None:
        backend = ScriptedBackend()
        async with client(backend) as caller:
            answer = await caller.post(CHAT_PATH, json={**CHAT, **body}, headers=headers)
        assert answer.status_code == 400
        assert error_of(answer)["param"] == field
        assert not backend.calls

    run(check)


def test_null_narrows_nothing() -> None:
    async def check() -> None:
        backend = ScriptedBackend()
        async with client(backend) as caller:
            await caller.post(CHAT_PATH, json={**CHAT, "prompt_cache_key": None, "cache_salt": None})
        assert [call.params.namespace for call in backend.calls] == ["docs"]

    run(check)


def test_a_token_of_one_tenant_reaches_no_other() -> None:
    async def check() -> None:
        backend = ScriptedBackend()
        async with client(backend, "acme") as caller:
            for namespace, headers, status in (
                ("docs/-/acme", {}, 200),
                ("docs/-/acme", {"x-session-id": "s"}, 200),
                ("docs", {"x-tenant-id": "acme"}, 403),
                ("docs", {"x-tenant-id": "beta"}, 403),
                ("docs/-/beta", {}, 403),
            ):
                named = {"x-kintsugi-namespace": namespace, **headers}
                answer = await caller.post(CHAT_PATH, json=CHAT, headers=named)
                assert answer.status_code == status, (namespace, headers)
            (answer,) = [await caller.post(CHAT_PATH, json=CHAT, headers={"x-tenant-id": "beta"})]
            assert answer.status_code == 200
        assert backend.calls[-1].params.namespace == "docs/-/acme/beta", "inside its own part"

    run(check)


def test_texts_of_one_tenant_are_not_found_for_another() -> None:
    async def check() -> None:
        text = "A passage that both tenants send, long enough to be found wherever a message holds it."
        known = KnownChunks()
        known.remember("docs/-/acme", ChunkKey(bytes(32)), TokenIds.of(range(20)), text)
        backend = ScriptedBackend()
        async with client(backend, known=known) as caller:
            for tenant in ({"x-tenant-id": "acme"}, {"x-tenant-id": "beta"}, {}):
                body = {**CHAT, "messages": [{"role": "user", "content": f"{text} Why?"}]}
                assert (await caller.post(CHAT_PATH, json=body, headers=tenant)).status_code == 200
        assert [call.chunk_texts for call in backend.calls] == [(text,), (), ()]

    run(check)
