"""Refuses tools that nobody would call or run, in words that name our own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kintsugi.core.errors import InvalidField

CALLERS_TOOLS = ("function", "custom", "namespace")
"""Types of tools that a caller runs."""
KIND_CHARS_MAX = 40


def check_tools(body: Mapping[str, Any], parses_tools: bool) -> None:
    """``body`` is a chat request's JSON. Raises `InvalidField` if it offers tools that cannot be called: vLLM
    would name flags of its own server, which nobody has started."""
    if parses_tools or not body.get("tools") or body.get("tool_choice") == "none":
        return
    raise InvalidField(
        "tools",
        "cannot be called: set engines.openai.tool_call_parser in the service's configuration to the parser "
        "of this model, such as hermes, or send tool_choice none",
    )


def check_tools_are_callers(body: Mapping[str, Any]) -> None:
    """``body`` is JSON of the Responses API. Raises `InvalidField` for a tool that the server is to run, such
    as a web search: vLLM would leave it out silently."""
    tools = body.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind not in CALLERS_TOOLS:
            raise InvalidField(
                f"tools[{index}].type",
                f"{kind[:KIND_CHARS_MAX]!r} is run by nobody here; offer functions, and run them yourself",
            )
