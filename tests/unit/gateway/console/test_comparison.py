"""Comparisons of the console: whose turn it is, how they end, what is audited."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from threading import current_thread
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.exchange import EngineDelta, EngineRequest
from kintsugi.core.namespaces import NamespaceLimits, NamespaceRules
from kintsugi.core.schema import load
from kintsugi.gateway.access import add_grant, new_token
from kintsugi.gateway.console import comparison, routes
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.limits import parse_object
from kintsugi.gateway.requests import ServedRequest
from kintsugi.store.protocol.access import ANYONE, TokenFile
from kintsugi.store.protocol.audit import AuditLog
from tests.audit_lines import read_audit
from tests.fakes.stub_backend import StubDelays
from tests.unit.gateway.console.test_routes import ASKED, COMPARE, DOCUMENT, LOCAL, Opened, run, tokens_of


def test_two_tabs_take_turns() -> None:
    async def body() -> None:
        async with Opened(delays=StubDelays(first_token_s=0.05)) as opened:
            first, second = await asyncio.gather(opened.compare(), opened.compare())
            assert [first[0]["event"], second[0]["event"]] == ["storing", "waiting"]
            ways = [one.params.op.value for one in opened.backend.seen.requests if one.scored_token is None]
            assert ways == ["off", "blend", "off", "blend"]

    run(body)


def test_too_many_tabs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "WAITING_MAX", 1)

    async def body() -> None:
        async with Opened(delays=StubDelays(first_token_s=0.05)) as opened:
            runs = await asyncio.gather(*(opened.compare() for _ in range(3)))
            assert sorted(one[-1]["event"] for one in runs) == ["done", "done", "failed"]
            refused = next(one[-1] for one in runs if one[-1]["event"] == "failed")
            assert "try again in a minute" in refused["message"]

    run(body)


def test_a_caller_has_one_comparison_at_a_time(tmp_path: Path) -> None:
    async def body() -> None:
        access, token = tokens_of(tmp_path)
        other, grant = new_token("another", ["*"])
        add_grant(tmp_path / "tokens.json", grant)
        access = TokenFile(tmp_path / "tokens.json")
        mine, theirs = ({"authorization": f"Bearer {one}"} for one in (token, other))
        async with Opened(access=access, delays=StubDelays(first_token_s=0.05)) as opened:
            runs = await asyncio.gather(*(opened.compare(headers=one) for one in (mine, mine, theirs)))
            assert [one[-1]["event"] for one in runs] == ["done", "failed", "done"]
            assert runs[1][-1]["kind"] == "ResourceExhausted"
            assert "wait for its end, or stop it" in runs[1][-1]["message"]
            assert (await opened.compare(headers=mine))[-1]["event"] == "done"

    run(body)


def test_a_comparison_that_takes_too_long_is_ended_and_lets_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with Opened(delays=StubDelays(first_token_s=60.0)) as opened:
            monkeypatch.setattr(comparison, "TURN_S", 0.05)
            messages = await opened.compare()
            assert messages[-1]["kind"] == "DeadlineExceeded"
            assert "compare fewer documents" in messages[-1]["message"]
            assert opened.backend.seen.running == 0
            monkeypatch.undo()
            opened.backend.delays = StubDelays()
            assert (await opened.compare())[-1]["event"] == "done"

    run(body)


def test_who_does_not_read_keeps_nobody_waiting() -> None:
    async def body() -> None:
        async with Opened() as opened:
            comparer = comparison.Comparer(opened.gateway)

            def compare() -> AsyncGenerator[dict[str, Any], None]:
                served = ServedRequest(COMPARE, {}, opened.gateway.metrics, 200)
                return comparer.run(lambda: ANYONE, load(comparison.Comparison, ASKED), served)

            async with aclosing(compare()) as unread:
                assert (await anext(unread))["event"] == "storing"
                assert [one["event"] async for one in compare()][-1] == "done"

    run(body)


def test_a_tab_that_is_closed_ends_the_work() -> None:
    async def body() -> None:
        async with Opened(delays=StubDelays(token_s=0.01)) as opened:
            incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
            incoming.put_nowait({"type": "http.request", "body": json.dumps(ASKED).encode()})

            async def send(message: dict[str, Any]) -> None:
                if b'"text"' in message.get("body", b""):
                    incoming.put_nowait({"type": "http.disconnect"})
                    await asyncio.sleep(60.0)  # nobody reads this any more

            scope = {
                "type": "http",
                "asgi": {"version": "3.0", "spec_version": "2.3"},  # as uvicorn says it
                "method": "POST",
                "path": COMPARE,
                "query_string": b"",
                "headers": [
                    (b"host", b"localhost"),
                    (b"content-type", b"application/json"),
                    (b"content-length", b"%d" % len(json.dumps(ASKED))),
                ],
                "client": LOCAL,
                "server": ("127.0.0.1", 8000),
            }
            await HttpFront(opened.gateway).app(scope, incoming.get, send)  # type: ignore[arg-type]
            assert (opened.backend.seen.running, opened.backend.seen.ended_early) == (0, 1)
            left = {"method": COMPARE, "status": "499"}
            assert (
                opened.gateway.metrics.registry.get_sample_value("kintsugi_gateway_requests_total", left) == 1
            )

    run(body)


def test_a_comparison_takes_one_place_of_its_tenant() -> None:
    async def body() -> None:
        rules = NamespaceRules({"console": NamespaceLimits(concurrent=1)})
        async with Opened(rules=rules) as opened:
            messages = await opened.compare({**ASKED, "max_tokens": 16})
            assert messages[-1]["event"] == "done"
            assert len(next(one for one in messages if one["event"] == "quality")["tokens"]) == 16

    run(body)


def test_a_score_that_fails_is_the_last() -> None:
    async def body() -> None:
        async with Opened() as opened:
            generate = opened.backend.generate

            def fail(request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
                if request.scored_token == 1:
                    raise InvalidField("sampling.logprobs", "are not to be had")
                return generate(request)

            opened.backend.generate = fail  # type: ignore[method-assign]
            messages = await opened.compare({**ASKED, "max_tokens": 16})
            assert "are not to be had" in messages[-1]["message"]
            assert [one.scored_token for one in opened.backend.seen.requests] == [None, None, 0]

    run(body)


def test_comparisons_and_their_puts_are_audited_however_they_end(tmp_path: Path) -> None:
    async def body() -> None:
        access, token = tokens_of(tmp_path, namespaces=["mine"])
        audit = AuditLog(tmp_path / "audit", "gateway")
        headers = {"authorization": f"Bearer {token}", "x-request-id": "one"}
        asked = {**ASKED, "namespace": "mine"}
        async with Opened(access=access, audit=audit) as opened:
            assert (await opened.compare(asked, headers=headers))[-1]["event"] == "done"
            for bad in ({**ASKED, "namespace": "theirs"}, {**asked, "documents": []}):
                await opened.http.post(COMPARE, json=bad, headers=headers)
            opened.backend.down = True
            assert (await opened.compare(asked, headers=headers))[-1]["event"] == "failed"
            await opened.http.post(COMPARE, json=asked)
        lines = read_audit(tmp_path / "audit")
        told = [(one["method"], one["verb"], one["result"], one["namespace"], one["caller"]) for one in lines]
        assert told == [
            ("PutChunks", "put", "OK", "mine", "tester"),
            (COMPARE, "generate", "200", "mine", "tester"),
            (COMPARE, "generate", "403", "theirs", "tester"),
            (COMPARE, "generate", "400", "", "tester"),
            ("PutChunks", "put", "OK", "mine", "tester"),
            (COMPARE, "generate", "200", "mine", "tester"),
            (COMPARE, "generate", "401", "", ""),
        ]
        assert {one["request_id"] for one in lines[:-1]} == {"one"}
        assert lines[0]["keys"] == lines[1]["keys"] != []
        assert "Unavailable" in lines[5]["error"]
        assert "error" not in lines[1]

    run(body)


def test_a_large_question_is_parsed_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        threads: list[str] = []
        monkeypatch.setattr(
            routes, "parse_object", lambda raw: (threads.append(current_thread().name), parse_object(raw))[1]
        )
        async with Opened() as opened:
            await opened.compare()
            large = {**DOCUMENT, "text": DOCUMENT["text"] * 1000}
            await opened.http.post(COMPARE, json={**ASKED, "documents": [large, {"title": "", "text": ""}]})
        assert [name == current_thread().name for name in threads] == [True, False]

    run(body)
