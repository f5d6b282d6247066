"""Arguments of `vllm serve` for prompts and tools, which are not part of `AsyncEngineArgs`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from kintsugi.core.schema import STRICT


@dataclass(frozen=True)
class OpenAIOptions:
    """Options of vLLM's OpenAI server."""

    __pydantic_config__: ClassVar = STRICT

    chat_template: str | None = None
    """Path of a chat template, or the template itself. None: the model's own."""
    tool_call_parser: str | None = None
    """vLLM's name of the parser of tool calls. None: requests may not offer tools."""
    reasoning_parser: str = ""
    """vLLM's name of the parser that separates a model's reasoning from its answer."""


OPENAI_OPTIONS = frozenset(one.name for one in fields(OpenAIOptions))
