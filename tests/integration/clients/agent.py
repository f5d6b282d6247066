"""An agent of OpenAI's agent framework that calls a tool and reads its result.

    agent.py API URL MODEL LOGIT_BIAS

API is `responses`, as the framework has it unless it is told otherwise, or `chat_completions`.
A program of its own, because the framework is not among our requirements.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

TURNS_MAX = 3
MODELS = {"responses": OpenAIResponsesModel, "chat_completions": OpenAIChatCompletionsModel}
STOP = {"stop": ["b", "d", "f", "h"], "include_stop_str_in_output": True}
"""Random weights end no answer by themselves, and the framework takes one that is cut off for a failure. What
calls the tool has none of these letters."""
cities: list[str] = []


@function_tool
def look_up(city: Literal["Lima"]) -> str:
    """Looks a city up."""
    cities.append(city)
    return f"{city} is the capital of Peru."


async def main(api: str, url: str, model: str, logit_bias: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    # The first turn must call the tool; the framework lets the model choose in the turns behind it.
    settings = ModelSettings(
        tool_choice="look_up",
        max_tokens=128,
        temperature=0,
        extra_body={"logit_bias": json.loads(logit_bias), **STOP},
    )
    agent = Agent(
        name="geographer",
        instructions="Look cities up.",
        model=MODELS[api](model=model, openai_client=client),
        tools=[look_up],
        model_settings=settings,
    )
    result = await Runner.run(agent, "What is the capital of Peru?", max_turns=TURNS_MAX)
    assert isinstance(result.final_output, str)
    print(f"run: {cities}")
    streamed = Runner.run_streamed(agent, "What is the capital of Peru?", max_turns=TURNS_MAX)
    kinds = {event.type async for event in streamed.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    print(f"streamed: {cities}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
