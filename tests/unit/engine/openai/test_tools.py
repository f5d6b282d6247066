"""Tools are refused where their calls are not parsed, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.engine.openai.tools import check_response_tools, check_tools

TOOLS = [{"type": "function", "function": {"name": "look_up"}}]
NAMESPACE = {"type": "namespace", "name": "maps", "tools": [{"type": "function", "name": "look_up"}]}
WITHIN = "tools[0].tools[1].type"


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "required"}])
def test_tools_that_cannot_be_called_are_refused_by_our_own_setting(choice: dict[str, Any]) -> None:
    body = {"tools": TOOLS, **choice}
    with pytest.raises(InvalidField, match=r"engines\.vllm\.tool_call_parser"):
        check_tools(body, parses_tools=False)
    check_tools(body, parses_tools=True)


@pytest.mark.parametrize(
    "body", [{}, {"tools": []}, {"tools": None}, {"tools": TOOLS, "tool_choice": "none"}]
)
def test_requests_that_call_no_tool_pass(body: dict[str, Any]) -> None:
    check_tools(body, parses_tools=False)


@pytest.mark.parametrize("kind", ["web_search", "custom", "local_shell", "x" * 500])
def test_tools_that_vllm_would_leave_out_are_refused(kind: str) -> None:
    with pytest.raises(InvalidField, match="is not supported; offer functions") as caught:
        check_response_tools({"tools": [{"type": "function", "name": "look_up"}, {"type": kind}]})
    assert caught.value.field == "tools[1].type"
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": 3}, "tools"),
        ({"tools": {"type": "function"}}, "tools"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "tools": [{"type": "function"}, {"type": "custom"}]}]}, WITHIN),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}}, "tool_choice.type"),
        ({"tool_choice": {"type": ["function"]}}, "tool_choice.type"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function", "name": ["look_up"]}}, "tool_choice.name"),
    ],
)
def test_what_a_response_cannot_offer_or_choose_names_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_response_tools(body)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "body",
    [
        *({"tools": tools} for tools in (None, [], [{"type": "function"}, NAMESPACE, 3])),
        *({"tool_choice": choice} for choice in (None, "auto", {"type": "function", "name": "look_up"})),
    ],
)
def test_everything_else_about_tools_is_left_to_vllm(body: dict[str, Any]) -> None:
    check_response_tools(body)
