"""Tools are refused where their calls are not parsed, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.engine.openai.tools import check_tools, check_tools_are_callers

TOOLS = [{"type": "function", "function": {"name": "look_up"}}]


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "required"}])
def test_tools_that_cannot_be_called_are_refused_by_our_own_setting(choice: dict[str, Any]) -> None:
    body = {"tools": TOOLS, **choice}
    with pytest.raises(InvalidField, match=r"engines\.openai\.tool_call_parser"):
        check_tools(body, parses_tools=False)
    check_tools(body, parses_tools=True)


@pytest.mark.parametrize(
    "body", [{}, {"tools": []}, {"tools": None}, {"tools": TOOLS, "tool_choice": "none"}]
)
def test_requests_that_call_no_tool_pass(body: dict[str, Any]) -> None:
    check_tools(body, parses_tools=False)


@pytest.mark.parametrize("kind", ["web_search", "file_search", "mcp", "code_interpreter", "x" * 500])
def test_tools_that_a_server_would_run_are_refused(kind: str) -> None:
    """vLLM would answer as if they had not been offered."""
    with pytest.raises(InvalidField, match="run by nobody here") as caught:
        check_tools_are_callers({"tools": [{"type": "function", "name": "look_up"}, {"type": kind}]})
    assert caught.value.field == "tools[1].type"
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("tools", [None, [], "none", [{"type": "function"}, {"type": "custom"}, {}, 3]])
def test_what_is_no_such_tool_is_left_to_vllm(tools: Any) -> None:
    check_tools_are_callers({"tools": tools})
