"""LangChain, LlamaIndex and an agent framework against `kintsugi serve`, unmodified."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest

from tests.integration.clients.conftest import ServiceUnderTest, require, run_client

pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

QUESTION = "What is the capital of Peru?"


class City(pydantic.BaseModel):
    """A city."""

    city: Literal["Lima"]


@pytest.fixture(autouse=True)
def own_loop() -> Iterator[None]:
    """LlamaIndex makes this thread a loop if it has none, and leaves it open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture
def langchain(service: ServiceUnderTest) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=service.url,
        api_key="none",
        model=service.model,
        max_tokens=128,
        temperature=0,
        max_retries=0,
        logit_bias=service.no_blanks,
    )


def test_langchain_invokes_streams_and_batches(langchain: Any) -> None:
    short = langchain.bind(max_tokens=6)
    whole = short.invoke(QUESTION)
    assert whole.content
    assert whole.usage_metadata["output_tokens"] <= 6
    assert "".join(piece.content for piece in short.stream(QUESTION)) == whole.content
    assert len(short.batch([QUESTION, "And of Chile?"])) == 2
    assert asyncio.run(short.ainvoke(QUESTION)).content == whole.content


def test_langchain_asks_for_responses(langchain: Any) -> None:
    responses = langchain.model_copy(update={"use_responses_api": True, "logit_bias": None, "max_tokens": 6})
    whole = responses.invoke(QUESTION)
    assert whole.text
    assert whole.usage_metadata["output_tokens"] <= 6
    assert "".join(piece.text for piece in responses.stream(QUESTION)) == whole.text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_structured_output(langchain: Any, method: str) -> None:
    structured = langchain.with_structured_output(City, method=method, strict=True)
    assert structured.invoke(QUESTION) == City(city="Lima")


def test_langchain_calls_a_tool_and_goes_on(langchain: Any) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    @tool(args_schema=City)
    def look_up(city: str) -> str:
        """Looks a city up."""
        return f"{city} is the capital of Peru."

    asked = HumanMessage(QUESTION)
    called = langchain.bind_tools([look_up], tool_choice="look_up", strict=True).invoke([asked])
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [("look_up", {"city": "Lima"})]
    result = look_up.invoke(called.tool_calls[0])
    assert result.content == "Lima is the capital of Peru."
    after = langchain.bind_tools([look_up]).bind(max_tokens=4).invoke([asked, called, result])
    assert after.usage_metadata["input_tokens"] > called.usage_metadata["input_tokens"]


@pytest.fixture
def llama_index(service: ServiceUnderTest) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=service.model,
        api_base=service.url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        max_tokens=128,
        temperature=0,
        max_retries=0,
        strict=True,
        additional_kwargs={"logit_bias": service.no_blanks},
    )


def test_llama_index_completes_chats_and_streams(llama_index: Any) -> None:
    from llama_index.core.llms import ChatMessage

    assert llama_index.complete(QUESTION, max_tokens=6).text
    whole = llama_index.chat([ChatMessage(role="user", content=QUESTION)], max_tokens=6).message.content
    pieces = llama_index.stream_chat([ChatMessage(role="user", content=QUESTION)], max_tokens=6)
    assert "".join(piece.delta for piece in pieces) == whole
    plain = llama_index.model_copy(update={"is_chat_model": False})
    assert plain.complete(QUESTION, max_tokens=4).text


def test_llama_index_calls_a_tool_and_gets_structured_output(llama_index: Any) -> None:
    from llama_index.core.tools import FunctionTool

    def look_up(city: str) -> str:
        """Looks a city up."""
        return f"{city} is the capital of Peru."

    tool = FunctionTool.from_defaults(fn=look_up, fn_schema=City)
    found = llama_index.predict_and_call([tool], QUESTION, tool_required=True)
    assert str(found) == "Lima is the capital of Peru."
    assert llama_index.as_structured_llm(City).complete(QUESTION).raw == City(city="Lima")
    # As the documents say for a service without a tool parser.
    update = {"is_function_calling_model": False, "should_use_structured_outputs": True}
    by_format = llama_index.model_copy(update=update)
    assert by_format.as_structured_llm(City).complete(QUESTION).raw == City(city="Lima")


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
def test_an_agent_reads_what_its_tool_found(
    service: ServiceUnderTest, clients_python: str, tmp_path: Path, api: str
) -> None:
    require(clients_python, "agents")
    program = str(Path(__file__).parent / "agent.py")
    output = run_client(
        [clients_python, program, api, service.url, service.model, json.dumps(service.no_blanks)], tmp_path
    )
    assert output.splitlines()[-2:] == ["run: ['Lima']", "streamed: ['Lima', 'Lima']"]
