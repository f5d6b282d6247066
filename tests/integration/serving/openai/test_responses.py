"""OpenAI's Responses API by OpenAI's own client, over the front end, the engine and the store, all real."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest

from kintsugi.core.exchange import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH
from kintsugi.engine.openai.serving import OurResponses
from kintsugi.gateway.requests import RESIDENCY_PATH
from kintsugi.models.bundled import showcase
from tests.integration.serving.openai.conftest import DyingEngine, Served, check_nothing_runs
from tests.integration.serving.openai.test_openai_client import TOOL, accounting_of, client, reused

pytestmark = pytest.mark.engine

FUNCTION: Any = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]


def nested(levels: int) -> dict[str, Any]:
    return {"properties": {"x": nested(levels - 1) if levels else {}}}


def ask(served: Served, namespace: str, given: Any, **more: Any) -> Any:
    """The response, or all events of a stream."""
    asked = {"model": served.model, "input": given, "max_output_tokens": 2, "temperature": 0, **more}
    with client(served, namespace) as api:  # an error would keep it, and its connection
        answer = api.responses.create(**asked)
        return list(answer) if asked.get("stream") else answer


def test_known_chunks_in_the_input_are_hit_and_the_answer_is_right(served: Served) -> None:
    show = showcase()
    stored = served.store("responses", show.chunks)
    answer = ask(served, "responses", "".join(show.chunks) + show.question)
    assert answer.output_text.strip().startswith(show.answer)
    assert answer.id.startswith("resp_")
    assert answer.usage.input_tokens_details.cached_tokens >= stored
    accounting = accounting_of(answer)
    assert (accounting["outcome"], reused(served, accounting)) == ("blended", stored)
    assert reused(served, accounting_of(ask(served, "another", "".join(show.chunks)))) == 0


def test_a_stream_ends_with_the_accounting(served: Served) -> None:
    show = showcase()
    stored = served.store("streamed", show.chunks)
    events = ask(served, "streamed", "".join(show.chunks) + show.question, stream=True)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text.strip().startswith(show.answer)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert (last.output_text, last.usage.output_tokens) == (text, 2)
    assert reused(served, accounting_of(last)) == stored


def test_chunks_in_instructions_messages_and_results_of_tools_are_hit(served: Served) -> None:
    show = showcase()
    first, second, *others = show.chunks
    stored = served.store("items", show.chunks)
    answer = ask(
        served,
        "items",
        [
            {"role": "user", "content": [{"type": "input_text", "text": second}]},
            {"type": "function_call", "call_id": "1", "name": "look_up", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "found:\n" + "\n\n".join(others)},
            {"role": "user", "content": show.question},
        ],
        instructions=first,
    )
    assert reused(served, accounting_of(answer)) == stored


def test_a_tool_that_was_named_is_called(served: Served) -> None:
    blanks = {token for blank in (" ", "\n", "\t", "\r") for token in served.chunker.token_ids(blank)}
    answer = ask(
        served,
        "functions",
        "Where?",
        tools=[FUNCTION],
        tool_choice={"type": "function", "name": "look_up"},
        max_output_tokens=200,
        extra_body={"logit_bias": {str(token): -100 for token in blanks}},
    )
    (call,) = answer.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "look_up",
        {"city": "Lima"},
    )


def test_routers_see_what_lies_of_an_input(served: Served) -> None:
    show = showcase()
    served.store("responses-routed", show.chunks)
    body = {"model": served.model, "input": "".join(show.chunks)}
    residency = served.post(RESIDENCY_PATH, body, "responses-routed").json()
    assert [one["resident"] for one in residency["chunks"]] == [True] * len(show.chunks)
    unknown = served.post(RESIDENCY_PATH, {**body, "input": "Where is it, then?"}, "responses-routed").json()
    assert unknown["chunks"] == [], "an engine has rendered and searched it"
    endless = served.post(RESIDENCY_PATH, {**body, "input": "a " * 4200}, "responses-routed")
    assert endless.status_code == 400
    other = served.post(
        RESIDENCY_PATH, {"model": "another", "input": "Where is it, then?"}, "responses-routed"
    )
    assert other.status_code == 404


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"model": "another"}, 404, "model"),
        ({"input": "a " * 4200}, 400, "input_tokens"),
        ({"input": 3}, 400, "input"),
        ({"input": None}, 400, "input"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "user", "content": None}]}, 400, "input[1]"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": None}]}, 400, "input[0]"),
        ({"input": [None]}, 400, "input[0]"),
        ({"tools": [{"type": "function", "name": "f", "parameters": nested(90)}]}, 400, "body"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, 400, "tool_choice.type"),
        ({"max_output_tokens": "many"}, 400, "max_output_tokens"),
        ({"temperature": -1, "stream": True}, 400, "temperature"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"background": True}, 400, "background"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, 400, "kv_transfer_params"),
    ],
)
def test_bad_input_is_refused_and_the_next_request_is_served(
    served: Served, change: dict[str, Any], status: int, field: str
) -> None:
    body = {"model": served.model, "input": "Where?", "max_output_tokens": 1}
    refused = served.post(RESPONSES_PATH, {**body, **change})
    assert refused.status_code == status, refused.text
    param = refused.json()["error"]["param"]
    assert param == field or param.startswith(f"{field}."), refused.text
    fine = served.post(RESPONSES_PATH, {**body, "store": True, "an_unknown_field": 1})
    assert fine.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_clients_leave_empty_is_as_if_it_were_not_there(served: Served, stream: bool) -> None:
    """vLLM's request allows null where no answer can be made of it, and says so behind the answer."""
    names = ("background", "truncation", "tools", "tool_choice", "service_tier", "instructions", "text")
    body = {"model": served.model, "input": "Where?", "max_output_tokens": 1, "stream": stream}
    answer = served.post(RESPONSES_PATH, {**body, **dict.fromkeys(names)})
    assert answer.status_code == 200, answer.text
    assert '"status":"incomplete"' in answer.text


def test_an_answer_that_cannot_be_made_is_not_the_callers_mistake(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it given back what was generated."""
    from kintsugi.engine.openai.serving import OurResponsesRequest

    def checked(value: Any) -> Any:
        request = validate(value)
        request.service_tier = "no tier"
        return request

    validate = OurResponsesRequest.model_validate
    monkeypatch.setattr(OurResponsesRequest, "model_validate", checked)
    refused = served.post(RESPONSES_PATH, {"model": served.model, "input": "Where?", "max_output_tokens": 1})
    assert refused.status_code == 500
    assert "see the engine's log" in refused.json()["error"]["message"]


def test_a_conversation_as_clients_send_it_back(served: Served) -> None:
    """With parts, with a refusal, and with nothing said: vLLM reads a message's first part alone."""
    show = showcase()
    first, second, *others = show.chunks
    stored = served.store("sent-back", show.chunks)
    said = [{"type": "output_text", "text": text} for text in (first, second)]
    items = [
        {"role": "assistant", "content": said},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "message", "role": "assistant", "content": []},
        {"role": "user", "content": "".join(others) + show.question},
    ]
    assert reused(served, accounting_of(ask(served, "sent-back", items))) == stored


def test_a_truncated_input_leaves_room_for_an_answer(served: Served) -> None:
    show = showcase()
    *_, last = served.chunker.token_ids(show.question)
    content = "a " * 4200 + show.question
    asked = {"model": served.model, "input": content, "truncation": "auto", "enable_response_messages": True}
    half = served.info.max_model_len // 2
    for most, room in ((None, 256), (2, 2), (half + 100, half)):
        limit = {"max_output_tokens": most, "stop": ["."]}
        answer = served.post(RESPONSES_PATH, {**asked, **limit})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["input_tokens"] == served.info.max_model_len - room
        assert last in answer.json()["input_messages"][0]["tokens"][-8:], "the question is still there"


@pytest.mark.parametrize("path", [RESPONSES_PATH, CHAT_PATH, COMPLETIONS_PATH])
def test_a_failure_behind_the_engine_is_not_the_callers_mistake(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Whatever its type: vLLM takes a `ValueError` for one."""
    generate = served.engine.client.generate

    async def failing(*args: Any, **more: Any) -> AsyncGenerator[Any, None]:
        async for output in generate(*args, **more):
            yield output
        raise ValueError("odd")

    monkeypatch.setattr(served.engine.client, "generate", failing)
    asked = {"input": "Where?", "messages": [{"role": "user", "content": "Where?"}], "prompt": "Where?"}
    name = {RESPONSES_PATH: "input", CHAT_PATH: "messages", COMPLETIONS_PATH: "prompt"}[path]
    limit = "max_output_tokens" if path == RESPONSES_PATH else "max_tokens"
    answer = served.post(path, {"model": served.model, name: asked[name], limit: 2})
    assert answer.status_code == 500
    assert "see the engine's log" in answer.json()["error"]["message"]


@pytest.mark.parametrize("error", [ValueError("odd"), "error"], ids=["raised", "reported"])
def test_a_stream_that_fails_ends_with_an_event_that_says_so(
    served: Served, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    generate = served.engine.client.generate

    async def failing(*args: Any, **more: Any) -> AsyncGenerator[Any, None]:
        count = 0
        async for output in generate(*args, **more):
            count += 1
            if count == 3 and isinstance(error, Exception):
                raise error
            if count == 3:
                output.outputs[0].finish_reason = error
            yield output

    monkeypatch.setattr(served.engine.client, "generate", failing)
    with pytest.raises(openai.APIError):
        ask(served, "failing", "Where?", stream=True, max_output_tokens=8)


def test_no_answer_is_kept_whatever_the_environment_says(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever knew its id would read another tenant's."""
    from vllm import envs

    monkeypatch.setattr(envs, "VLLM_ENABLE_RESPONSES_API_STORE", True, raising=False)
    front = served.engine._front
    handler = OurResponses(
        front._responses.engine_client,
        front._responses.models,
        online_renderer=front._responses.online_renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
    )
    monkeypatch.setattr(front, "_responses", handler)
    with client(served, "responses") as api:
        answer = api.responses.create(model=served.model, input="Where?", max_output_tokens=1, store=True)
        assert not handler.response_store
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(answer.id)


def test_a_caller_that_leaves_aborts_in_the_engine(served: Served) -> None:
    body = {
        "model": served.model,
        "input": "The old ships",
        "max_output_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"http://{served.address}{RESPONSES_PATH}"
    with httpx.stream("POST", url, json=body, headers=served.headers("left"), timeout=60) as response:
        lines = response.iter_lines()  # kept: without a reader, httpx would leave at once
        assert next(line for line in lines if "output_text.delta" in line)
        assert served.engine.stats().running == 1
    check_nothing_runs(served)


def test_a_stream_is_sent_again_where_its_engine_dies_before_the_first_token(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = DyingEngine(served)
    monkeypatch.setattr(served.engine.client, "generate", dying.generate)
    more: Any = {"max_output_tokens": 8, "stream": True, "extra_body": {"ignore_eos": True}}
    *_, last = ask(served, "dying", "Where?", **more)
    assert (last.type, dying.tried) == ("response.completed", 2)
    with pytest.raises(openai.APIError, match="the engine has died"):
        ask(served, "dying", "Where?", **more)
    assert dying.tried == 3
