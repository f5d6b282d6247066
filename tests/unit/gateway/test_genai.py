"""The attributes of GenAI spans, and how many tokens count as read from a cache."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kintsugi.core.accounting import count_cached
from kintsugi.core.exchange import CHAT_PATH, COMPLETIONS_PATH, Usage
from kintsugi.gateway.tracing import describe_answer, describe_request
from tests.fakes.openai_backend import INFO, JSON, STREAM, Item, ScriptedBackend
from tests.recorded_spans import recorded
from tests.unit.gateway.fronts.test_http import client, run

BLENDED = {"outcome": "blended", "tokens_hit": 60, "tokens_prefix_cached": 16}


def test_a_request_is_described_by_its_body() -> None:
    body = {
        "model": "m",
        "max_tokens": 3,
        "temperature": 1,
        "stream": True,
        "seed": 7,
        "messages": ["secret"],
    }
    assert describe_request(CHAT_PATH, body) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kintsugi",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.stream": True,
        "gen_ai.request.seed": 7,
    }
    wrong = {"model": 3, "max_tokens": "3", "temperature": "hot", "stream": 1, "n": True, "seed": None}
    assert set(describe_request(COMPLETIONS_PATH, wrong)) == {"gen_ai.operation.name", "gen_ai.provider.name"}


def test_an_answer_is_described_by_its_usage() -> None:
    assert describe_answer(Usage(100, 5, 76), replace(INFO, model="m"), "id", ["stop"]) == {
        "gen_ai.response.id": "id",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 76,
    }
    assert describe_answer(None, None, "id", []) == {"gen_ai.response.id": "id"}


@pytest.mark.parametrize(
    ("reported", "accounting", "cached"),
    [
        (99, BLENDED, 76),
        (50, BLENDED, 50),
        (48, {"outcome": "prefix_hit", "tokens_prefix_cached": 0}, 48),
        (48, {"outcome": "declined", "tokens_missed": 60}, 48),
        (48, {}, 48),
    ],
)
def test_what_a_blend_computed_is_not_cached(
    reported: int, accounting: dict[str, object], cached: int
) -> None:
    assert count_cached(reported, accounting) == cached


def answer(stream: bool) -> list[Item]:
    usage = {"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 76}}
    last = {"choices": [{"finish_reason": "stop", "index": 0}]}
    if not stream:
        document = {**last, "usage": usage, "kv_transfer_params": {"kintsugi": BLENDED}}
        return [JSON, json.dumps(document, separators=(",", ":")).encode()]
    events = [last, {"choices": [], "usage": usage, "kv_transfer_params": {"kintsugi": BLENDED}}]
    texts = (json.dumps(event, separators=(",", ":")) for event in events)
    return [STREAM, *(f"data: {text}\n\n".encode() for text in texts), b"data: [DONE]\n\n"]


@pytest.mark.parametrize("stream", [False, True])
def test_spans_and_usage_of_openai_requests_say_what_was_cached(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def body() -> None:
        async with client(ScriptedBackend(lambda call: answer(stream))) as caller:
            await caller.get("/v1/models")
            response = await caller.post(CHAT_PATH, json={"messages": [], "model": "org/scripted"})
        assert '"cached_tokens":76' in response.text

    with recorded(monkeypatch) as exporter:
        run(body)
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "gateway.openai"]
    assert span.attributes is not None
    assert span.attributes["gen_ai.request.model"] == "org/scripted"
    assert span.attributes["gen_ai.response.model"] == "scripted"
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert span.attributes["gen_ai.usage.input_tokens"] == 100
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 76
