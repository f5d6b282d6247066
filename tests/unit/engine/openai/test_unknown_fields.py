"""vLLM's requests accept what OpenAI's have and they do not, as nothing else here takes it out."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

OPENAIS_CACHE = {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}
MARKED = {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [MARKED]}]}),
        (CompletionRequest, {"prompt": "x"}),
        (ResponsesRequest, {"input": "x"}),
    ],
)
def test_what_is_asked_of_openais_own_cache_is_accepted(kind: Any, asked: dict[str, Any]) -> None:
    assert kind.model_validate({"model": "m", **asked, **OPENAIS_CACHE}).model == "m"
