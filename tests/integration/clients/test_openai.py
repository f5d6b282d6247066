"""OpenAI's own client against `kintsugi serve`, unmodified."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.integration.clients.conftest import ServiceUnderTest

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]

ASKED: Any = [{"role": "user", "content": "What is the capital of Peru?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "strict": True,
        "description": "Looks a city up.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Lima"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "look_up"}}


class City(pydantic.BaseModel):
    city: Literal["Lima"]


@pytest.fixture
def client(service: ServiceUnderTest) -> openai.OpenAI:
    return openai.OpenAI(base_url=service.url, api_key="none", max_retries=0)


def test_the_model_is_listed_and_retrieved(client: openai.OpenAI, service: ServiceUnderTest) -> None:
    assert service.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(service.model).id == service.model
    with pytest.raises(openai.NotFoundError, match="request one of"):
        client.models.retrieve("another")


def test_several_answers_with_logprobs(client: openai.OpenAI, service: ServiceUnderTest) -> None:
    answer = client.chat.completions.create(
        model=service.model, messages=ASKED, n=2, logprobs=True, top_logprobs=2, max_tokens=4, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert [len(token.top_logprobs) for token in choice.logprobs.content or ()] == [2] * 4


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI, service: ServiceUnderTest) -> None:
    asked: dict[str, Any] = {
        "model": service.model,
        "messages": ASKED,
        "max_completion_tokens": 8,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked)
    events = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    pieces = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 2
    assert events[-1].usage is not None
    assert whole.usage is not None
    assert events[-1].usage.total_tokens == whole.usage.total_tokens


def test_an_answer_has_the_structure_that_was_asked_for(
    client: openai.OpenAI, service: ServiceUnderTest
) -> None:
    asked: dict[str, Any] = {"model": service.model, "messages": ASKED, "response_format": City}
    answer = client.chat.completions.parse(**asked, max_tokens=64)
    assert answer.choices[0].message.parsed == City(city="Lima")
    with client.chat.completions.stream(**asked, max_tokens=64) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == City(city="Lima")
    assert {"chunk", "content.delta", "content.done"} <= kinds


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_tool_is_called_and_its_result_read(
    client: openai.OpenAI, service: ServiceUnderTest, choice: Any
) -> None:
    answer = client.chat.completions.create(
        model=service.model,
        messages=ASKED,
        tools=[TOOL],
        tool_choice=choice,
        max_tokens=128,
        stop=["</tool_call>"],  # random weights would call it again and again
        logit_bias=service.no_blanks,
    )
    message: Any = answer.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"city": "Lima"})
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "Lima is the capital of Peru."}
    after = client.chat.completions.create(
        model=service.model,
        messages=[*ASKED, message, result],
        tools=[TOOL],
        tool_choice="auto",
        max_tokens=4,
    )
    assert after.choices[0].message.role == "assistant"
    assert after.usage is not None
    assert answer.usage is not None
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens


def test_a_tool_call_is_streamed(client: openai.OpenAI, service: ServiceUnderTest) -> None:
    events = client.chat.completions.create(
        model=service.model,
        messages=ASKED,
        tools=[TOOL],
        tool_choice=NAMED,
        max_tokens=128,
        logit_bias=service.no_blanks,
        stream=True,
    )
    calls = [call for event in events if event.choices for call in event.choices[0].delta.tool_calls or ()]
    functions = [call.function for call in calls if call.function is not None]
    assert "".join(function.name or "" for function in functions) == "look_up"
    assert json.loads("".join(function.arguments or "" for function in functions)) == {"city": "Lima"}


def test_a_response_whole_and_in_pieces(client: openai.OpenAI, service: ServiceUnderTest) -> None:
    asked: dict[str, Any] = {"model": service.model, "input": ASKED, "max_output_tokens": 6, "temperature": 0}
    whole = client.responses.create(**asked, instructions="Answer in one word.")
    assert whole.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens <= 6
    with client.responses.stream(**asked, instructions="Answer in one word.") as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == whole.output_text
    assert "".join(pieces) == whole.output_text
    likely = client.responses.create(**asked, include=["message.output_text.logprobs"], top_logprobs=2)
    (message,) = likely.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert [len(token.top_logprobs) for token in part.logprobs or ()] == [2] * 6


def test_a_response_has_the_structure_that_was_asked_for(
    client: openai.OpenAI, service: ServiceUnderTest
) -> None:
    answer = client.responses.parse(
        model=service.model, input=ASKED, text_format=City, max_output_tokens=64, temperature=0
    )
    assert answer.output_parsed == City(city="Lima")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_calls_a_tool_and_reads_its_result(
    client: openai.OpenAI, service: ServiceUnderTest, stream: bool
) -> None:
    tool: Any = {"type": "function", **TOOL["function"]}
    asked: dict[str, Any] = {"model": service.model, "tools": [tool], "temperature": 0}
    more: dict[str, Any] = {
        "tool_choice": {"type": "function", "name": "look_up"},
        "max_output_tokens": 128,
        "extra_body": {"logit_bias": service.no_blanks},
    }
    if stream:
        *_, last = client.responses.create(input=ASKED, stream=True, **asked, **more)
        assert last.type == "response.completed"
        answer = last.response
    else:
        answer = client.responses.create(input=ASKED, **asked, **more)
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("look_up", {"city": "Lima"})
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": "Lima is the capital of Peru.",
    }
    said: Any = [*ASKED, call.model_dump(), result]
    after = client.responses.create(input=said, max_output_tokens=4, **asked)
    assert after.usage is not None
    assert answer.usage is not None
    assert after.usage.input_tokens > answer.usage.input_tokens


def test_plain_completions(client: openai.OpenAI, service: ServiceUnderTest) -> None:
    asked: dict[str, Any] = {"model": service.model, "prompt": "The capital of Peru is", "temperature": 0}
    answer = client.completions.create(**asked, max_tokens=3, n=1, logprobs=2, echo=True)
    assert answer.choices[0].text.startswith("The capital of Peru is")
    assert answer.choices[0].logprobs is not None
    two = client.completions.create(model=service.model, prompt=["One", "Two"], max_tokens=2)
    assert [choice.index for choice in two.choices] == [0, 1]
    whole = client.completions.create(**asked, max_tokens=6)
    pieces = [
        event.choices[0].text for event in client.completions.create(**asked, max_tokens=6, stream=True)
    ]
    assert "".join(pieces) == whole.choices[0].text


def test_what_is_asked_of_openais_own_cache_is_accepted(
    client: openai.OpenAI, service: ServiceUnderTest
) -> None:
    answer = client.chat.completions.create(
        model=service.model,
        messages=ASKED,
        max_tokens=2,
        prompt_cache_key="one",
        prompt_cache_retention="24h",
        prompt_cache_options={"mode": "implicit", "ttl": "30m"},
    )
    assert answer.choices[0].message.role == "assistant"


@pytest.mark.parametrize("headers", [{"x-tenant-id": "acme"}, {"x-session-id": "one"}])
def test_parts_of_a_namespace_are_answered_by_both_endpoints(
    client: openai.OpenAI, service: ServiceUnderTest, headers: dict[str, str]
) -> None:
    chat = client.chat.completions.create(
        model=service.model, messages=ASKED, max_tokens=2, extra_headers=headers
    )
    assert chat.choices[0].message.role == "assistant"
    completion = client.completions.create(
        model=service.model, prompt="One, two,", max_tokens=2, extra_headers=headers
    )
    assert completion.usage is not None


def test_what_is_not_served_says_what_is(client: openai.OpenAI, service: ServiceUnderTest) -> None:
    with pytest.raises(
        openai.NotFoundError, match=r"POST /v1/embeddings is not served here.*/v1/chat/completions"
    ):
        client.embeddings.create(model=service.model, input="text")
    with pytest.raises(openai.NotFoundError, match=r"GET /v1/responses/one is not served.*/v1/responses"):
        client.responses.retrieve("one")
    with pytest.raises(
        openai.BadRequestError, match=r"previous_response_id: names an answer, but none is stored"
    ):
        client.responses.create(model=service.model, input="text", previous_response_id="one")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="another", messages=ASKED)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=service.model, messages=ASKED, temperature=-1)
