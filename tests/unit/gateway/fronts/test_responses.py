"""What the gateway makes of an engine's answers in the form of the Responses API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kintsugi.core import errors
from kintsugi.core.exchange import RESPONSES_PATH
from tests.fakes.openai_backend import JSON, STREAM, Item, ScriptedBackend
from tests.recorded_spans import recorded
from tests.unit.gateway.fronts.test_http import post, run
from tests.unit.gateway.fronts.test_limits_and_privacy import HIDDEN, client
from tests.unit.gateway.test_genai import BLENDED

ASKED = {"input": "Why?", "model": "scripted"}
DETAILS = {"cached_tokens": 76, "cache_write_tokens": 1, "cached_tokens_per_turn": [99]}
USAGE = {"input_tokens": 100, "output_tokens": 5, "total_tokens": 105, "input_tokens_details": DETAILS}


def response(status: str, usage: Any = None, accounting: Any = None) -> dict[str, Any]:
    params = None if accounting is None else {"kintsugi": accounting}
    return {"object": "response", "status": status, "usage": usage, "kv_transfer_params": params}


def event(name: str, **more: Any) -> bytes:
    document = json.dumps({"type": name, **more}, separators=(",", ":"))
    return f"event: {name}\ndata: {document}\n\n".encode()


OPENING = [event(f"response.{name}", response=response("in_progress")) for name in ("created", "in_progress")]
DELTA = event("response.output_text.delta", delta="x")
LAST = event("response.completed", response=response("completed", USAGE, BLENDED))
STREAMED: list[Item] = [STREAM, *OPENING, DELTA, LAST]
WHOLE: list[Item] = [JSON, json.dumps(response("completed", USAGE, BLENDED)).encode()]


def answers_in(text: str) -> list[dict[str, Any]]:
    """Every response that an answer holds."""
    if not text.startswith("event: "):
        return [json.loads(text)]
    documents = [json.loads(one.partition("data: ")[2]) for one in text.strip().split("\n\n")]
    return [document["response"] for document in documents if "response" in document]


@pytest.mark.parametrize("items", [STREAMED, WHOLE])
def test_usage_and_spans_say_what_was_cached(monkeypatch: pytest.MonkeyPatch, items: list[Item]) -> None:
    async def body() -> None:
        answer = await post(ScriptedBackend(lambda call: items), ASKED, RESPONSES_PATH)
        *_, last = answers_in(answer.text)
        assert last["usage"]["input_tokens_details"]["cached_tokens"] == 76
        assert last["kv_transfer_params"]["kintsugi"] == BLENDED
        assert answer.text.count("event: response.completed\ndata: ") == (items is STREAMED)

    with recorded(monkeypatch) as exporter:
        run(body)
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "gateway.openai"]
    assert span.attributes is not None
    assert span.attributes["gen_ai.operation.name"] == "chat"
    assert span.attributes["gen_ai.response.finish_reasons"] == ("completed",)
    assert span.attributes["gen_ai.usage.input_tokens"] == 100
    assert span.attributes["gen_ai.usage.output_tokens"] == 5
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 76


@pytest.mark.parametrize("items", [STREAMED, WHOLE])
@pytest.mark.parametrize("token", ["tenant", "operator"])
def test_what_was_cached_is_told_to_those_who_may_know(items: list[Item], token: str) -> None:
    async def body() -> None:
        headers = {"authorization": f"Bearer {token}", "x-kintsugi-namespace": "acme"}
        async with client(ScriptedBackend(lambda call: items), HIDDEN) as caller:
            text = (await caller.post(RESPONSES_PATH, json=ASKED, headers=headers)).text
        *_, last = answers_in(text)
        assert ("tokens_hit" in text) == (token == "operator")
        if token == "tenant":  # the field is there all the same: clients read it unasked
            nothing = {"cached_tokens": 0, "cache_write_tokens": 0}
            assert last["usage"] == {**USAGE, "input_tokens_details": nothing}

    run(body)


def test_an_engine_that_dies_before_the_first_token_is_replaced_by_another() -> None:
    """vLLM has the first events ready before a request has its turn: they are no answer."""
    scripts: list[list[Item]] = [[STREAM, *OPENING, errors.Unavailable("gone")], STREAMED]

    async def body() -> None:
        backend = ScriptedBackend(lambda call: scripts[len(backend.calls) - 1])
        answer = await post(backend, ASKED, RESPONSES_PATH)
        assert len(backend.calls) == 2
        assert [one["status"] for one in answers_in(answer.text)] == ["in_progress"] * 2 + ["completed"]

    run(body)


def test_an_answer_without_a_token_is_still_begun() -> None:
    async def body() -> None:
        answer = await post(ScriptedBackend(lambda call: STREAMED[:3]), ASKED, RESPONSES_PATH)
        assert [one["status"] for one in answers_in(answer.text)] == ["in_progress"] * 2

    run(body)
