"""The console's files and endpoints: who may ask, what is refused with which sentence, and what streams."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from kintsugi.core.namespaces import NamespaceLimits, NamespaceRules
from kintsugi.core.request import SelectorName
from kintsugi.gateway.access import add_grant, new_token
from kintsugi.gateway.console.routes import _SELECTORS, FILES, FILES_BYTES_MAX, HEADERS
from kintsugi.gateway.fronts import limits
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.gateway import Gateway
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.access import TokenFile, Verb, open_access
from tests.fakes.stub_backend import LOGPROBS, StubBackend
from tests.integration.serving.gateways import bundled_tokenize

COMPARE = "/console/api/compare"
DEADLINE_S = 20.0
DOCUMENT = {
    "title": "Tides",
    "text": "The Moon pulls the sea, and twice a day the water rises and falls again.",
}
ASKED: dict[str, Any] = {"question": "What moves the sea?", "documents": [DOCUMENT], "max_tokens": 3}
LOCAL = ("127.0.0.1", 4000)
AWAY = ("203.0.113.7", 4000)


class Opened:
    """A gateway over the stub, and a client of its HTTP front."""

    def __init__(
        self, *, client: tuple[str, int] = LOCAL, base: str = "http://127.0.0.1:8000", **gateway: Any
    ):
        store = RamStore()
        self.backend = StubBackend(gateway.pop("delays", None), store=store)
        self.gateway = Gateway(
            self.backend, store, bundled_tokenize(), detokenize=lambda ids: f"<{ids[0]}>", **gateway
        )
        transport = httpx.ASGITransport(HttpFront(self.gateway).app, client=client)
        self.http = httpx.AsyncClient(transport=transport, base_url=base)

    async def __aenter__(self) -> Opened:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        await self.gateway.close()

    async def compare(self, asked: dict[str, Any] | None = None, **more: Any) -> list[dict[str, Any]]:
        response = await self.http.post(COMPARE, json=ASKED if asked is None else asked, **more)
        assert response.status_code == 200, response.text
        return [json.loads(line) for line in response.text.splitlines()]


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await body()

    asyncio.run(bounded())


def message_of(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


def tokens_of(folder: Path, **grants: Any) -> tuple[TokenFile, str]:
    """An access with one token, and the token."""
    path = folder / "tokens.json"
    token, grant = new_token("tester", grants.pop("namespaces", ["*"]), **grants)
    add_grant(path, grant)
    access = open_access(path)
    assert isinstance(access, TokenFile)
    return access, token


def test_the_page_loads_nothing_from_elsewhere_and_is_small() -> None:
    async def body() -> None:
        async with Opened() as opened:
            page = await opened.http.get("/console")
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            names = re.findall(r'(?:src|href)="(?!#)([^"]+)"', page.text)
            assert len(names) >= 3
            for name in names:
                assert name.startswith("console/")
                assert (await opened.http.get(f"/{name}")).status_code == 200
            assert not re.search(r"<script>|<style|\sstyle=|\son\w+=", page.text)
            again = await opened.http.get("/console", headers={"if-none-match": page.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            missing = await opened.http.get("/console/passwd")
            assert missing.status_code == 404
            assert "is not served here" in message_of(missing)
            assert (await opened.http.get("/console/../routes.py")).status_code == 404

    run(body)


def test_the_files_are_within_their_size_and_write_no_markup() -> None:
    files = list(FILES.iterdir())
    assert sum(file.stat().st_size for file in files) <= FILES_BYTES_MAX
    for file in files:
        name, text = file.name, file.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
    assert HEADERS["x-content-type-options"] == "nosniff"


def test_every_selector_is_offered() -> None:
    assert set(SelectorName) == set(_SELECTORS)


def test_a_comparison_streams_both_answers_one_after_the_other() -> None:
    async def body() -> None:
        async with Opened() as opened:
            messages = await opened.compare({**ASKED, "ratio": 0.2, "selector": "query"})
            events = [(one["event"], one.get("way")) for one in messages if one["event"] != "text"]
            assert events == [
                ("storing", None),
                ("stored", None),
                ("begun", "full"),
                ("answered", "full"),
                ("begun", "blend"),
                ("answered", "blend"),
                ("view", None),
                ("scoring", None),
                ("quality", None),
                ("done", None),
            ]
            full, blend = (one for one in messages if one["event"] == "answered")
            assert full["text"] == "made up by "
            assert full["cost"] == 1.0
            assert blend["accounting"]["outcome"] == "blended"
            asked = opened.backend.seen.requests
            assert [one.params.op.value for one in asked[:2]] == ["off", "blend"]
            assert (asked[1].params.ratio, asked[1].params.selector) == (0.2, SelectorName.QUERY)
            assert asked[1].params.explain
            # A measurement of its own each, so that neither finds what the other left in the prefix cache.
            assert len({one.measurement for one in asked[:2]} - {""}) == 2
            view = next(one["view"] for one in messages if one["event"] == "view")
            assert sum(len(part["tokens"]) for part in view["parts"]) == len(asked[1].prompt_token_ids)
            quality = next(one for one in messages if one["event"] == "quality")
            full_likely, blend_likely = (math.exp(one) for one in LOGPROBS.values())
            assert quality["full"] == pytest.approx(full_likely)
            assert quality["blend"] == pytest.approx(blend_likely)
            assert [one["text"] for one in quality["tokens"]] == ["<0>", "<1>", "<2>"]

    run(body)


def test_scores_are_of_the_full_prefills_answer_behind_the_same_prompt() -> None:
    async def body() -> None:
        async with Opened() as opened:
            await opened.compare()
            full, blend, *scores = opened.backend.seen.requests
            prompt = list(full.prompt_token_ids)
            assert len(scores) == 6
            for first, ways in ((full, scores[:3]), (blend, scores[3:])):
                assert sorted(list(one.prompt_token_ids)[len(prompt) :] for one in ways) == [[], [0], [0, 1]]
                assert {one.measurement for one in ways} == {first.measurement}
                assert {one.scored_token for one in ways} == {0, 1, 2}

    run(body)


def test_scores_do_not_shift_what_the_gateway_counts_of_answers() -> None:
    async def body() -> None:
        async with Opened() as opened:
            await opened.compare()
            count = opened.gateway.metrics.registry.get_sample_value(
                "kintsugi_gateway_ttft_seconds_count", {"method": "Generate"}
            )
            assert len(opened.backend.seen.requests) == 8
            assert count == 2

    run(body)


def test_scoring_can_be_left_out() -> None:
    async def body() -> None:
        async with Opened() as opened:
            messages = await opened.compare({**ASKED, "score": False})
            assert not {"scoring", "quality"} & {one["event"] for one in messages}
            assert len(opened.backend.seen.requests) == 2

    run(body)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"documents": []}, "add a sample document or drop a text file"),
        ({"documents": [{"title": "empty", "text": " "}]}, "write some or remove it"),
        ({"question": "  "}, "write what you want to know"),
        ({"documents": [DOCUMENT] * 129}, "remove some"),
        ({"ratio": 1.5}, "outside [0, 1]"),
        ({"selector": "best"}, "is not one of"),
        ({"max_tokens": 0}, "outside [1, 256]"),
        ({"colour": "red"}, "colour"),
        ({"namespace": "Bad Name"}, "namespace"),
    ],
)
def test_bad_questions_are_refused_with_a_sentence(change: dict[str, Any], says: str) -> None:
    async def body() -> None:
        async with Opened() as opened:
            response = await opened.http.post(COMPARE, json={**ASKED, **change})
            assert response.status_code == 400
            assert says in message_of(response)
            assert not opened.backend.seen.requests

    run(body)


def test_a_body_of_a_gigabyte_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINGER_BYTES_MAX", 0)  # else the rest of it is read, and dropped

    async def body() -> None:
        read = 0

        async def endless() -> Any:
            nonlocal read
            for _ in range(1 << 10):
                read += 1 << 20
                yield b" " * (1 << 20)

        async with Opened() as opened:
            headers = {"content-type": "application/json", "content-length": str(1 << 30)}
            response = await opened.http.post(COMPARE, content=endless(), headers=headers)
            assert response.status_code == 413
            assert "larger than 8 MiB" in message_of(response)
            assert read == 0

    run(body)


def test_without_tokens_only_this_machine_is_answered() -> None:
    async def body() -> None:
        paths = ("/console/api/service", "/console/api/live")
        async with Opened(client=AWAY) as away, Opened(base="http://evil.example") as rebound:
            for opened in (away, rebound):
                for path in paths:
                    response = await opened.http.get(path)
                    assert response.status_code == 403
                    assert "--tokens-file" in message_of(response)
                assert (await opened.http.post(COMPARE, json=ASKED)).status_code == 403
                assert (await opened.http.get("/console")).status_code == 200
        for base in ("http://localhost:8000", "http://127.0.0.1:8000", "http://[::1]:8000"):
            async with Opened(base=base) as opened:
                for path in paths:
                    assert (await opened.http.get(path)).status_code == 200

    run(body)


def test_with_tokens_everybody_needs_one(tmp_path: Path) -> None:
    async def body() -> None:
        access, token = tokens_of(tmp_path)
        async with Opened(client=AWAY, base="https://kv.example", access=access) as opened:
            for path in ("/console/api/service", "/console/api/live"):
                assert (await opened.http.get(path)).status_code == 401
                bearing = {"authorization": f"Bearer {token}"}
                assert (await opened.http.get(path, headers=bearing)).status_code == 200
            assert (await opened.http.post(COMPARE, json=ASKED)).status_code == 401
            assert not opened.backend.seen.requests

    run(body)


def test_another_sites_form_cannot_ask() -> None:
    async def body() -> None:
        async with Opened() as opened:
            for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
                response = await opened.http.post(
                    COMPARE, content=json.dumps(ASKED), headers={"content-type": kind}
                )
                assert response.status_code == 400
                assert "content-type" in message_of(response)

    run(body)


def test_live_needs_the_verb_admin_where_verbs_are_named(tmp_path: Path) -> None:
    async def body() -> None:
        access, token = tokens_of(tmp_path, verbs=[Verb.GENERATE, Verb.LIST])
        bearing = {"authorization": f"Bearer {token}"}
        async with Opened(access=access) as opened:
            refused = await opened.http.get("/console/api/live", headers=bearing)
            assert refused.status_code == 403
            assert "'admin'" in message_of(refused)

    run(body)


def test_a_caller_without_put_or_list_gets_answers_and_no_more(tmp_path: Path) -> None:
    async def body() -> None:
        access, token = tokens_of(tmp_path, verbs=[Verb.GENERATE])
        async with Opened(access=access) as opened:
            messages = await opened.compare(headers={"authorization": f"Bearer {token}"})
            stored = next(one for one in messages if one["event"] == "stored")
            assert "lacks the verb put" in stored["problem"]
            assert not opened.backend.seen.saves
            assert "view" not in {one["event"] for one in messages}
            assert messages[-1]["event"] == "done"

    run(body)


def test_a_namespace_of_others_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        access, token = tokens_of(tmp_path, namespaces=["mine"])
        bearing = {"authorization": f"Bearer {token}"}
        async with Opened(access=access) as opened:
            refused = await opened.http.post(COMPARE, json={**ASKED, "namespace": "theirs"}, headers=bearing)
            assert refused.status_code == 403
            assert "'theirs'" in message_of(refused)

    run(body)


def test_a_token_that_expires_while_a_stream_runs_ends_it_with_a_sentence(tmp_path: Path) -> None:
    async def body() -> None:
        _, token = tokens_of(tmp_path, expires="2027-01-31T12:00:00Z")
        now_s = [datetime(2027, 1, 31, 11, 59, tzinfo=UTC).timestamp()]
        access = TokenFile(tmp_path / "tokens.json", clock=lambda: now_s[0])
        async with Opened(access=access) as opened:
            bearing = {"authorization": f"Bearer {token}"}

            def expire(*_: Any, **__: Any) -> None:
                now_s[0] += 120

            generate = opened.backend.generate
            opened.backend.generate = lambda request: (expire(), generate(request))[1]  # type: ignore[method-assign]
            messages = await opened.compare(headers=bearing)
            assert [one["event"] for one in messages][-2:] == ["answered", "failed"]
            assert messages[-1]["kind"] == "Unauthenticated"
            assert "expired at 2027-01-31T12:00:00Z; ask for another" in messages[-1]["message"]
            assert len(opened.backend.seen.requests) == 1

    run(body)


def test_half_a_character_is_refused() -> None:
    async def body() -> None:
        async with Opened() as opened:
            response = await opened.http.post(
                COMPARE,
                content=json.dumps({**ASKED, "question": "\ud800"}),
                headers={"content-type": "application/json"},
            )
            assert (response.status_code, opened.backend.seen.requests) == (400, [])

    run(body)


def test_an_engine_that_fails_ends_the_stream_with_a_sentence() -> None:
    async def body() -> None:
        async with Opened() as opened:
            await opened.http.get("/console/api/service")
            opened.backend.down = True
            messages = await opened.compare()
            assert messages[-1]["event"] == "failed"
            assert messages[-1]["kind"] == "Unavailable"

    run(body)


def test_the_service_tells_what_the_page_offers() -> None:
    async def body() -> None:
        async with Opened() as opened:
            service = (await opened.http.get("/console/api/service")).json()
            assert service["model"] == "stub"
            assert service["samples"]["documents"]
            assert service["samples"]["questions"]
            assert {one["name"] for one in service["selectors"]} == {name.value for name in _SELECTORS}

    run(body)


def test_live_shows_the_store_and_the_callers_own_tenants(tmp_path: Path) -> None:
    async def body() -> None:
        access, token = tokens_of(tmp_path, namespaces=["mine", "mine2"])
        rules = NamespaceRules(
            {"mine": NamespaceLimits(concurrent=5), "theirs": NamespaceLimits(concurrent=5)}
        )
        bearing = {"authorization": f"Bearer {token}"}
        async with Opened(access=access, rules=rules) as opened:
            with opened.gateway.shares.admit("mine"), opened.gateway.shares.admit("theirs"):
                live = (await opened.http.get("/console/api/live", headers=bearing)).json()
            assert [(one["name"], one["in_flight"]) for one in live["tenants"]] == [("mine", 1)]
            assert live["store"]["problem"] == ""
            assert live["store"]["bytes_used"] == 0
            assert live["gateway"]["tokens_discovered"] == 0
            opened.gateway.answers.tally.count({"outcome": "blended", "tokens_discovered": 7})
            live = (await opened.http.get("/console/api/live", headers=bearing)).json()
            assert live["gateway"]["tokens_discovered"] == 7

    run(body)
