"""Our decisions in Serve's terms, with stand-ins for its replicas; no Ray that runs."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="install the extra `serving`")

from ray.serve.request_router import PendingRequest

from kintsugi.core.exchange import EngineRequest, OpenAICall
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import TokenIds
from kintsugi.serving.engine_router import EngineRouter, Sent

PARAMS = KintsugiParams("acme")


def replica(name: str, **stats: Any) -> SimpleNamespace:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


def router() -> EngineRouter:
    """Without the state that Serve gives it: none of it is read by what is tested."""
    made = EngineRouter.__new__(EngineRouter)
    made.initialize_state()
    return made


def asked(argument: Any) -> PendingRequest:
    async def make() -> PendingRequest:
        metadata: Any = SimpleNamespace(internal_request_id=uuid.uuid4().hex)
        return PendingRequest([argument], {}, metadata=metadata)

    return asyncio.run(make())


def first(made: EngineRouter, replicas: list[Any], request: PendingRequest) -> str:
    ranks = asyncio.run(made.choose_replicas(replicas, request))
    assert sorted(rank[0].replica_id.unique_id for rank in ranks) == sorted(
        each.replica_id.unique_id for each in replicas
    )
    return str(ranks[0][0].replica_id.unique_id)


def prompt(begin: int, length: int = 512) -> EngineRequest:
    return EngineRequest("r", TokenIds.of(range(begin, begin + length)), PARAMS)


def test_what_waits_counts_and_all_others_follow() -> None:
    replicas = [replica("busy", waiting_tokens=9000), replica("idle", waiting_tokens=0)]
    assert first(router(), replicas, asked(prompt(0))) == "idle"


def test_a_prompt_goes_to_an_engine_of_its_model_while_there_is_one() -> None:
    replicas = [
        replica("idle", waiting_tokens=0, fingerprint="bb"),
        replica("busy", waiting_tokens=9000, fingerprint="aa"),
    ]
    request = asked(dataclasses.replace(prompt(0), fingerprint="aa"))
    assert first(router(), replicas, request) == "busy"
    assert first(router(), [replica("new"), *replicas], request) == "busy"
    assert first(router(), [replica("new"), *replicas[:1]], request) == "new"
    assert first(router(), replicas, asked(prompt(0))) == "idle"
    assert first(router(), replicas[:1], request) == "idle", "which refuses it: nobody waits for nothing"


def test_what_was_sent_counts_until_the_next_report() -> None:
    made, replicas = router(), [replica("a", at=1), replica("b", at=1)]
    counts = {"a": 0, "b": 0}
    for number in range(20):
        request = asked(prompt(1000 * number))
        name = first(made, replicas, request)
        counts[name] += 1
        made.on_request_routed(request, SimpleNamespace(unique_id=name), None)
    assert counts == {"a": 10, "b": 10}
    reported = [replica("a", at=2), replica("b", at=1)]
    assert first(made, reported, asked(prompt(99_000))) == "a"


def test_what_was_answered_before_the_next_report_counts_no_more() -> None:
    """Else, within a second, many short prompts would outweigh what an engine holds of a conversation."""
    made, replicas = router(), [replica("a", at=1), replica("b", at=1)]
    request = asked(prompt(0))
    name = first(made, replicas, request)
    for number in range(1, 20):
        made.on_request_routed(request, SimpleNamespace(unique_id=name), None)
        made.on_request_completed(SimpleNamespace(unique_id=name), request.metadata.internal_request_id)
        request = asked(prompt(0, 512 * number))
        assert first(made, replicas, request) == name
    made.on_request_completed(SimpleNamespace(unique_id="gone"), "whose")


def test_what_an_engine_reported_is_answered_at_the_rate_that_it_reported() -> None:
    """Else an engine that was busy when it reported would be avoided for a second, however fast it is."""
    now_s = 0.0
    sent = Sent(lambda: now_s)
    sent.take_report({"waiting_tokens": 900, "tokens_per_s": 1000.0})
    sent.add("r", 50)
    assert sent.waiting_tokens() == 950
    now_s = 0.5
    sent.take_report({"waiting_tokens": 900, "tokens_per_s": 1000.0})
    assert sent.waiting_tokens() == 450
    now_s = 2.0
    assert sent.waiting_tokens() == 50
    sent.take_report({"waiting_tokens": 300, "tokens_per_s": 0.0})
    now_s = 9.0
    assert sent.waiting_tokens() == 300, "no rate is known"


def test_a_conversation_goes_where_its_beginning_went_until_that_engine_dies() -> None:
    made, replicas = router(), [replica(name, at=1) for name in "abcd"]
    request = asked(prompt(0, 2048))
    name = first(made, replicas, request)
    made.on_request_routed(request, SimpleNamespace(unique_id=name), None)
    for each in replicas:
        each.routing_stats["at"] = 2
    assert first(made, replicas, asked(prompt(0, 2304))) == name
    made._memory.forget(name)
    assert made._memory.resident_tokens(made._memoize_wanted(request).prefix, name) == 0


def test_openai_calls_are_weighed_by_their_texts() -> None:
    made, replicas = router(), [replica("a", at=1), replica("b", at=1)]
    call = OpenAICall("r", "/v1/completions", {"prompt": "word " * 4000}, PARAMS)
    request = asked(call)
    name = first(made, replicas, request)
    made.on_request_routed(request, SimpleNamespace(unique_id=name), None)
    assert made._sent[name].tokens == 5001
    other = asked(OpenAICall("r", "/v1/completions", {"prompt": "other " * 4000}, PARAMS))
    assert first(made, replicas, other) != name


def test_a_call_about_the_engine_itself_goes_anywhere() -> None:
    assert first(router(), [replica("a"), replica("b")], asked("nothing of ours")) in "ab"
