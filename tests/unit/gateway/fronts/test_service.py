"""What a gateway tells its operator, and that the commands read what it tells."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest

from kintsugi import __version__
from kintsugi.cli.commands.status import describe_status
from kintsugi.cli.service_facts import AnswerCount, Contact, EngineFacts, ServiceLink, ask_service
from kintsugi.core.errors import Unavailable
from kintsugi.core.exchange import CHAT_PATH, EngineInfo, LossReason, LostPart, OpenAIHead
from kintsugi.core.gate import GateProgress
from kintsugi.gateway import chunks as gateway_chunks
from kintsugi.gateway.answers import TALLY_MAX, AnswerTally
from kintsugi.gateway.fronts import service_routes
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.openai_server import HttpServer
from kintsugi.gateway.fronts.service_routes import SERVICE_PATH
from kintsugi.store.client.ram import RamStore
from tests.fakes.openai_backend import ScriptedBackend, answered, gateway_over
from tests.unit.gateway.fronts.test_http import CHAT, Tokens, client, error_of, run
from tests.unit.gateway.fronts.test_http_roles import Roles, bearing


def test_the_commands_read_what_a_gateway_tells() -> None:
    accountings: list[dict[str, object]] = [
        {"outcome": "blended", "reason": "confirmed", "tokens_discovered": 70},
        {"outcome": "declined", "reason": "no_chunk_cached: the store holds none"},
        {"outcome": "declined", "reason": "no_chunk_cached: the store holds none"},
    ]
    backend = ScriptedBackend(lambda call: answered("fine", accountings.pop()))

    async def body() -> None:
        server = HttpServer(HttpFront(gateway_over(backend)).app, "127.0.0.1", 0)
        await server.start()
        try:
            async with httpx.AsyncClient(base_url=f"http://{server.address}") as caller:
                for _ in range(3):
                    assert (await caller.post(CHAT_PATH, json=CHAT)).status_code == 200
            link = ServiceLink(url=f"http://{server.address}/v1")
            facts = await asyncio.to_thread(ask_service, link)
        finally:
            await server.stop()
        assert facts.contact is Contact.ANSWERED, facts.detail
        assert (facts.version, facts.has_tokens) == (__version__, False)
        assert facts.engines is not None
        assert facts.engines.progress["state"] == "off"
        assert dataclasses.replace(facts.engines, progress={}) == EngineFacts(
            None, "scripted", 4096, "", "on"
        )
        assert facts.store is not None
        assert (facts.store.error, facts.store.shards, facts.store.chunks) == (None, 1, 0)
        assert facts.answers == (
            AnswerCount("declined", "no_chunk_cached", 2),
            AnswerCount("blended", "none", 1),
        )
        assert (facts.tokens_discovered, facts.discovering) == (70, ())
        status = describe_status(facts)
        assert status.running
        assert dict(status.runs)["engines"] == "scripted, 4,096 tokens"
        assert status.why_not == ["no_chunk_cached: 2 answers"]
        assert any("kintsugi precompute" in one for one in status.helps)

    run(body)


@pytest.mark.parametrize(("token", "sees_all"), [("generate@*", False), ("admin", False), ("admin@*", True)])
def test_what_concerns_every_tenant_is_for_admins_once_verbs_are_named(token: str, sees_all: bool) -> None:
    async def body() -> None:
        async with client(ScriptedBackend(), Roles()) as caller:
            assert (await caller.get(SERVICE_PATH)).status_code == 401
            told = (await caller.get(SERVICE_PATH, headers=bearing(token))).json()
        for name in ("store", "answers", "tokens_discovered", "discovering", "lost"):
            assert (told[name] is not None) == sees_all, name
        assert told["engines"]["model"] == "scripted"
        assert told["caller"]["name"] == "someone"
        async with client(ScriptedBackend(), Tokens()) as caller:  # a file of before there were verbs
            told = (await caller.get(SERVICE_PATH, headers=bearing("one"))).json()
        assert told["store"] is not None

    run(body)


def test_a_request_that_vllm_refuses_is_no_answer() -> None:
    refusal: list[OpenAIHead | bytes | Exception | float] = [
        OpenAIHead(400, "application/json"),
        b'{"error": {"message": "too long"}}',
    ]

    async def body() -> None:
        gateway = gateway_over(ScriptedBackend(lambda call: refusal))
        transport = httpx.ASGITransport(HttpFront(gateway).app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as caller:
            assert (await caller.post(CHAT_PATH, json=CHAT)).status_code == 400
        assert gateway.answers.tally.to_list() == []
        assert "unknown" not in generate_latest(gateway.metrics.registry).decode()
        await gateway.close()

    run(body)


class LearningBackend(ScriptedBackend):
    """Has measured other prompts in each namespace."""

    async def info(self, namespace: str = "") -> EngineInfo:
        progress = GateProgress(
            "learning", f"of {namespace or 'the one that is furthest'}", minutes_missing=3
        )
        return dataclasses.replace(await super().info(), progress=progress, learning={"dropped": {"2048": 1}})


@pytest.mark.parametrize(
    ("token", "namespace"), [("generate@acme", "acme"), ("generate@*", ""), ("admin@*", "")]
)
def test_a_caller_sees_how_far_its_own_namespace_is(token: str, namespace: str) -> None:
    async def body() -> None:
        async with client(LearningBackend(), Roles()) as caller:
            told = (await caller.get(SERVICE_PATH, headers=bearing(token))).json()["engines"]
        assert told["namespace"] == namespace
        assert told["progress"]["detail"] == f"of {namespace or 'the one that is furthest'}"
        assert told["progress"]["minutes_missing"] == 3
        assert told["learning"] == {"dropped": {"2048": 1}}

    run(body)


class LosingBackend(ScriptedBackend):
    """Has no engine, which was killed just now."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = LostPart("Engine", 7, time.time(), LossReason.KERNEL_MEMORY)

    async def info(self, namespace: str = "") -> EngineInfo:
        await asyncio.sleep(60)
        raise AssertionError("waited for too long")

    def lost_parts(self) -> list[LostPart]:
        return [self.lost]


def test_a_killed_engine_is_told_by_status_by_metrics_and_by_what_its_callers_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_chunks, "ANSWER_S", 0.01)
    monkeypatch.setattr(gateway_chunks, "RECENT_S", 0.0)  # the next call asks again

    async def body() -> None:
        backend = LosingBackend()
        gateway = gateway_over(backend)
        told = await service_routes.describe_service(gateway, gateway.access.caller(None))
        (lost,) = told["lost"]
        assert (lost["part"], lost["reason"], lost["pid"]) == ("Engine", "kernel_memory", 7)
        assert lost["text"].startswith("Engine (process 7) was ended by the kernel because memory ran out")
        with pytest.raises(Unavailable, match=r"no engine answered within 0 s; Engine .* by the kernel"):
            await gateway.recent_info.get()
        gateway.report_loss(backend.lost)
        count = gateway.metrics.registry.get_sample_value(
            "kintsugi_gateway_lost_parts_total", {"part": "Engine", "reason": "kernel_memory"}
        )
        assert count == 1
        await gateway.close()

    run(body)


class FailingStore(RamStore):
    def stats(self) -> Any:
        raise Unavailable("the directory does not answer")


class HangingStore(RamStore):
    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def stats(self) -> Any:
        assert self.let_go.wait(30)
        return super().stats()


def test_engines_and_stores_that_fail_are_told_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        gateway = gateway_over(ScriptedBackend(info_error=Unavailable("no engine")))
        caller = gateway.access.caller(None)
        gateway._store._store = FailingStore()
        failing = await service_routes.describe_service(gateway, caller)
        assert failing["engines"] == {"error": "no engine"}
        assert failing["store"] == {"error": "the directory does not answer"}
        gateway._store._store = hanging = HangingStore()
        monkeypatch.setattr(gateway_chunks, "RECENT_S", 0.0)
        monkeypatch.setattr(gateway_chunks, "ANSWER_S", 0.01)
        told = await service_routes.describe_service(gateway, caller)
        hanging.let_go.set()
        assert "did not answer within" in told["store"]["error"]
        await gateway.close()

    run(body)


class CountingStore(RamStore):
    asked = 0

    def stats(self) -> Any:
        self.asked += 1
        return super().stats()


def test_the_store_is_asked_once_for_all_who_want_to_know() -> None:
    async def body() -> None:
        gateway = gateway_over(ScriptedBackend())
        gateway._store._store = store = CountingStore()
        transport = httpx.ASGITransport(HttpFront(gateway).app, client=("127.0.0.1", 4000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as caller:
            paths = [SERVICE_PATH, "/console/api/live"] * 5
            told = await asyncio.gather(*map(caller.get, paths))
        assert {one.status_code for one in told} == {200}
        assert store.asked == 1
        await gateway.close()

    run(body)


def test_a_model_is_retrieved_by_its_name() -> None:
    async def body() -> None:
        async with client(ScriptedBackend()) as caller:
            (model,) = (await caller.get("/v1/models")).json()["data"]
            assert (await caller.get("/v1/models/scripted")).json() == model
            for other in ("another", "/models/another", "scripted/more"):
                missing = await caller.get(f"/v1/models/{other}")
                assert missing.status_code == 404
                assert "request one of scripted" in error_of(missing)["message"]
        async with client(ScriptedBackend(), Roles()) as caller:
            assert (await caller.get("/v1/models/scripted")).status_code == 401

    run(body)


def test_reasons_that_are_counted_are_bounded() -> None:
    tally = AnswerTally()
    for index in range(3 * TALLY_MAX):
        letters = "".join(chr(ord("a") + int(digit)) for digit in str(index))
        tally.count({"outcome": "declined", "reason": f"{letters}: why"})
    tally.count({})
    found = tally.to_list()
    assert len(found) <= TALLY_MAX + 2
    assert sum(entry["count"] for entry in found) == 3 * TALLY_MAX + 1
    assert found[0] == {"outcome": "declined", "reason": "other", "count": 2 * TALLY_MAX}
