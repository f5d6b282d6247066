"""The arguments of `vllm serve` that concern prompts and tools, which `AsyncEngineArgs` does not take."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from kintsugi.core.schema import STRICT


@dataclass(frozen=True)
class OpenAIOptions:
    """Options of vLLM's OpenAI server."""

    __pydantic_config__: ClassVar = STRICT

    chat_template: str | None = None
    """A file, or the template itself. None: the model's own."""
    tool_call_parser: str | None = None
    """vLLM's name of a parser of tool calls: requests may then offer tools. None: they may not."""
    reasoning_parser: str = ""
    """vLLM's name of a parser that separates what a model thinks from what it answers."""


OPENAI_OPTIONS = frozenset(one.name for one in fields(OpenAIOptions))
