"""Refuses tools that a model would not be told of, or whose calls nobody would parse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kintsugi.core.errors import InvalidField

TOOLS, CHOSEN_TOOLS = ("function", "custom", "namespace"), ("function", "custom")
"""Types that a model is told of, and those that a request may have it call."""
SHOWN_CHARS_MAX = 40


def check_tools(body: Mapping[str, Any], parses_tools: bool) -> None:
    """``body`` is JSON of a chat or of the Responses API. Raises `InvalidField` if it offers tools that can
    not be called: vLLM would name flags of its own server, which nobody has started."""
    if parses_tools or not body.get("tools") or body.get("tool_choice") == "none":
        return
    raise InvalidField(
        "tools",
        "cannot be called: set engines.openai.tool_call_parser in the service's configuration to the parser "
        "of this model, such as hermes, or send tool_choice none",
    )


def check_response_tools(body: Mapping[str, Any]) -> None:
    """``body`` is JSON of the Responses API. Raises `InvalidField` for a tool, and for a choice of one, that
    vLLM would leave out silently, such as a web search."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not isinstance(tools, list | None):
        raise InvalidField("tools", "must be a list")
    for index, tool in enumerate(tools or ()):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind not in TOOLS:
            raise InvalidField(f"tools[{index}].type", f"{_clip(kind)} is not served here; offer functions")
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        if kind not in CHOSEN_TOOLS:
            raise InvalidField("tool_choice.type", f"{_clip(kind)} is not served here; name a function")
        if not isinstance(choice.get("name"), str):
            raise InvalidField("tool_choice.name", "must be the name of a tool")


def _clip(value: Any) -> str:
    return repr(value)[:SHOWN_CHARS_MAX]
