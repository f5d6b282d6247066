"""What each verb opens on a gateway's HTTP port, for tokens and for client certificates."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Collection, Sequence
from pathlib import Path

import httpx
import pytest

from kintsugi.core import errors
from kintsugi.core.exchange import CHAT_PATH
from kintsugi.gateway.chunks import ToSave
from kintsugi.gateway.fill import FillConfig
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.openai_answer import Piece
from kintsugi.gateway.fronts.openai_server import HttpServer
from kintsugi.store.protocol.access import Access, Caller, TokenFile, Verb
from kintsugi.store.protocol.audit import AuditLog
from tests.audit_lines import read_audit
from tests.authority import Authority
from tests.fakes.openai_backend import JSON, STREAM, Item, ScriptedBackend, answered, gateway_over
from tests.unit.gateway.fronts.test_http import CHAT, Tokens, client, error_of, run, scripted


class Roles(Access):
    """Callers whose tokens are the verbs that they have, in a file that names verbs."""

    names_verbs = True

    def caller(self, token: str | None, identities: Collection[str] = ()) -> Caller:
        if token is None:
            raise errors.Unauthenticated("no token")
        verbs, _, namespace = token.partition("@")
        return Caller("someone", (namespace or "acme",), frozenset(map(Verb, verbs.split("+"))))


def bearing(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize("token", ["put+delete+list+admin+report", "list"])
def test_an_answer_needs_the_verb_generate(token: str) -> None:
    async def body() -> None:
        backend = ScriptedBackend()
        async with client(backend, Roles()) as caller:
            response = await caller.post(CHAT_PATH, json=CHAT, headers=bearing(token))
        assert response.status_code == 403
        assert "lacks the verb 'generate'" in error_of(response)["message"]
        assert not backend.calls

    run(body)


ACCOUNTED = {
    "choices": [{"text": 'says "kintsugi"', "kintsugi": 1}],
    "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}},
}


@pytest.mark.parametrize("stream", [False, True])
def test_only_who_may_list_learns_what_was_stored(stream: bool) -> None:
    accounting = {"outcome": "blended", "tokens_hit": 8}
    text = json.dumps({**ACCOUNTED, "kv_transfer_params": {"kintsugi": accounting}}).encode()
    items: list[Item] = [STREAM, b"data: " + text + b"\n\n", b"data: [DONE]\n\n"] if stream else [JSON, text]

    async def body() -> None:
        backend = scripted(*items)
        async with client(backend, Roles()) as caller:
            told = (await caller.post(CHAT_PATH, json=CHAT, headers=bearing("generate+list"))).text
            silent = (await caller.post(CHAT_PATH, json=CHAT, headers=bearing("generate"))).text
            metrics = await caller.get("/metrics", headers=bearing("admin@*"))
        assert "tokens_hit" in told
        assert "cached_tokens" in told
        first, *rest = silent.removeprefix("data: ").split("\n\n")
        expected = {**ACCOUNTED, "usage": {"prompt_tokens": 9}, "kv_transfer_params": {}}
        assert json.loads(first) == expected
        assert rest == (["data: [DONE]", ""] if stream else [])
        assert 'kintsugi_gateway_chunk_tokens_total{result="hit"} 16.0' in metrics.text, (
            "counted all the same"
        )

    run(body)


def test_misses_are_filled_for_who_may_put(monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"type": "text", "text": "a passage", "kintsugi": {"chunk": True}}
    question = {"messages": [{"role": "user", "content": [part]}]}

    async def body() -> None:
        backend = ScriptedBackend(lambda call: answered("fine", {"tokens_missed": 3}))
        gateway = gateway_over(backend, access=Roles(), fill=FillConfig())
        missed: list[int] = []

        async def suspect(namespace: str, chunks: Sequence[ToSave], ttl_s: float | None) -> None:
            missed.append(len(chunks))

        monkeypatch.setattr(gateway._filler, "suspect", suspect)
        transport = httpx.ASGITransport(HttpFront(gateway).app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as caller:
            for token in ("generate", "generate+put"):
                assert (
                    await caller.post(CHAT_PATH, json=question, headers=bearing(token))
                ).status_code == 200
                await asyncio.gather(*gateway.answers._follow_ups)
        await gateway.close()
        assert missed == [0, 1]

    run(body)


@pytest.mark.parametrize("own", ["timeline", "explain"])
def test_explain_needs_the_verb_list(own: str) -> None:
    async def body() -> None:
        backend = ScriptedBackend()
        async with client(backend, Roles()) as caller:
            for token, status in (("generate", 403), ("generate+list", 200)):
                asked = {**CHAT, "kintsugi": {own: True}}
                assert (
                    await caller.post(CHAT_PATH, json=asked, headers=bearing(token))
                ).status_code == status
        assert len(backend.calls) == 1

    run(body)


@pytest.mark.parametrize(
    ("token", "status"),
    [
        (None, 401),
        ("generate+put+delete+list+report@*", 403),
        ("admin", 403),
        ("admin@*", 200),
    ],
)
def test_metrics_are_for_admins_once_verbs_are_named(token: str | None, status: int) -> None:
    async def body() -> None:
        async with client(ScriptedBackend(), Roles()) as caller:
            response = await caller.get("/metrics", headers=bearing(token) if token else {})
            assert response.status_code == status
            assert ("kintsugi_gateway" in response.text) == (status == 200)
        async with client(ScriptedBackend(), Tokens()) as caller:  # a file of before there were verbs
            assert (await caller.get("/metrics")).status_code == 200

    run(body)


def test_a_client_certificate_stands_for_its_caller(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    own, worker, other = (authority.issue(name) for name in ("gateway", "worker", "other"))
    path = tmp_path / "tokens.json"
    entry = {"name": "worker", "subject": "CN=worker", "namespaces": ["docs"], "verbs": ["generate"]}
    path.write_text(json.dumps({"tokens": [], "certificates": [entry]}))
    path.chmod(0o600)

    async def body() -> None:
        backend = ScriptedBackend()
        app = HttpFront(gateway_over(backend, access=TokenFile(path))).app
        server = HttpServer(app, "127.0.0.1", 0, own)
        await server.start()
        try:
            for files, status in ((worker, 200), (other, 401)):
                shown = ssl.create_default_context(cafile=str(authority.ca))
                shown.load_cert_chain(files.cert, files.key)
                async with httpx.AsyncClient(verify=shown, base_url=f"https://{server.address}") as caller:
                    assert (await caller.post(CHAT_PATH, json=CHAT)).status_code == status
                    assert (await caller.get("/v1/models")).status_code == status
                    assert (await caller.get("/metrics")).status_code == (403 if status == 200 else 401)
        finally:
            await server.stop()
        assert [call.params.namespace for call in backend.calls] == ["docs"]

    run(body)


def without_accounting(data: bytes) -> bytes:
    piece = Piece(data)
    piece.remove_accounting()
    return piece.to_bytes()


def test_a_piece_that_cannot_be_read_is_left_out() -> None:
    assert without_accounting(b'data: {"kintsugi": ') == b""
    assert without_accounting(b"data: [DONE]") == b"data: [DONE]"


def test_only_the_accounting_is_left_out() -> None:
    piece = {"id": "one", "kv_transfer_params": {"kintsugi": {"tokens_hit": 1}, "more": 2}}
    left = {"id": "one", "kv_transfer_params": {"more": 2}}
    assert json.loads(without_accounting(json.dumps(piece).encode())) == left


def test_the_audit_log_says_who_asked_over_http(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, "gateway")

    async def body() -> None:
        async with client(ScriptedBackend(), Roles(), audit=log) as caller:
            for token in ("generate", "list"):
                await caller.post(CHAT_PATH, json=CHAT, headers={**bearing(token), "x-request-id": token})
            await caller.post(CHAT_PATH, json=CHAT)

    run(body)
    lines = read_audit(tmp_path)
    told = [(line["caller"], line["verb"], line["namespace"], line["result"]) for line in lines]
    assert told == [
        ("someone", "generate", "acme", "200"),
        ("someone", "generate", "acme", "403"),
        ("", "generate", "", "401"),
    ]
    assert [line["request_id"] for line in lines[:2]] == ["generate", "list"]
