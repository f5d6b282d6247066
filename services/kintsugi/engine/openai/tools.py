"""Refuses tools where tool calls are not parsed, in words that name our own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kintsugi.core.errors import InvalidField


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
