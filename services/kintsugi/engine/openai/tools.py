"""Refuses tools that vLLM would not show to the model, or whose calls it would not parse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kintsugi.core.errors import InvalidField

FUNCTION, NAMESPACE = "function", "namespace"
"""Types of tools that every version of vLLM shows to the model: functions, and namespaces of functions."""
SHOWN_CHARS_MAX = 40


def check_tools(body: Mapping[str, Any], parses_tools: bool) -> None:
    """Raise `InvalidField` if the JSON body of a chat or of the Responses API offers tools that cannot be
    called. vLLM's own message names flags of its server, which is not running."""
    if parses_tools or not body.get("tools") or body.get("tool_choice") == "none":
        return
    raise InvalidField(
        "tools",
        "cannot be called; set engines.vllm.tool_call_parser in the service's configuration to the parser "
        "of this model, such as hermes, or send tool_choice none",
    )


def check_response_tools(body: Mapping[str, Any]) -> None:
    """Raise `InvalidField` if the JSON body of the Responses API offers or chooses a tool that vLLM would
    drop silently, such as a web search."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not isinstance(tools, list | None):
        raise InvalidField("tools", "must be a list")
    for index, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping):
            continue
        _check_type(tool.get("type"), f"tools[{index}].type", FUNCTION, NAMESPACE)
        inner = tool.get("tools") if tool.get("type") == NAMESPACE else None
        for at, one in enumerate(inner if isinstance(inner, list) else ()):
            kind = one.get("type") if isinstance(one, Mapping) else None
            _check_type(kind, f"tools[{index}].tools[{at}].type", FUNCTION)
    if isinstance(choice, Mapping):
        _check_type(choice.get("type"), "tool_choice.type", FUNCTION)
        if not isinstance(choice.get("name"), str):
            raise InvalidField("tool_choice.name", "must be the name of a tool")


def _check_type(kind: Any, where: str, *known: str) -> None:
    if kind not in known:
        raise InvalidField(where, f"{repr(kind)[:SHOWN_CHARS_MAX]} is not supported; offer functions")
