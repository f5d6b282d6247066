"""What of an OpenAI request is ours, and what is passed on."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField, UnknownField
from kintsugi.core.exchange import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH, OpenAICall
from kintsugi.core.request import SPANS_MAX, Op, SelectorName
from kintsugi.gateway.fronts.openai_request import find_requested_namespace, parse_openai_call

KNOWN = ("Salt is mined in the north.", "Tea came by sea.")


def find(text: str) -> list[tuple[int, int]]:
    spans = [(text.find(known), text.find(known) + len(known)) for known in KNOWN if known in text]
    return sorted(spans)


def parsed(body: dict[str, Any], path: str = CHAT_PATH) -> OpenAICall:
    before = copy.deepcopy(body)
    call = parse_openai_call("r1", path, body, "acme", find)
    assert body == before
    return call


def chat(*contents: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": one} for one in contents], **more}


def test_a_request_without_anything_of_ours_is_passed_on_as_it_is() -> None:
    body = chat("hello", temperature=0.5, tools=[{"type": "function"}], frobnicate=True)
    call = parsed(body)
    assert (call.body, call.chunk_texts) == (body, ())
    assert (call.params.namespace, call.params.op, call.params.spans) == ("acme", Op.BLEND, None)


def test_known_texts_are_found_in_every_message() -> None:
    body = chat(f"Context:\n{KNOWN[1]}\n\nWhat?")
    body["messages"].append({"role": "tool", "tool_call_id": "1", "content": f"found: {KNOWN[0]}"})
    body["messages"].append({"role": "user", "content": [{"type": "text", "text": KNOWN[1]}]})
    assert parsed(body).chunk_texts == (KNOWN[1], KNOWN[0])
    prompt = {"prompt": ["a", f"b {KNOWN[0]}"]}
    assert parsed(prompt, COMPLETIONS_PATH).chunk_texts == (KNOWN[0],)
    assert parsed({"prompt": [1, 2, 3]}, COMPLETIONS_PATH).chunk_texts == ()


def test_marked_parts_are_chunks_and_lose_their_mark() -> None:
    parts = [
        {"type": "text", "text": "new one", "kintsugi": {"chunk": True}},
        {"type": "text", "text": "no chunk", "kintsugi": {"chunk": False}},
        {"type": "image_url", "image_url": {"url": "x"}},
        "not even a part",
    ]
    call = parsed(chat(parts))
    assert call.chunk_texts == ("new one",)
    assert call.body["messages"][0]["content"] == [
        {"type": "text", "text": "new one"},
        {"type": "text", "text": "no chunk"},
        {"type": "image_url", "image_url": {"url": "x"}},
        "not even a part",
    ]


def test_what_a_response_is_asked_for_is_searched_too() -> None:
    """Instructions, messages and the results of tools, which have no content but an output."""
    part = {"type": "input_text", "text": "new one", "kintsugi": {"chunk": True}}
    items = [
        {"role": "user", "content": f"see {KNOWN[1]}"},
        {"type": "function_call", "call_id": "1", "name": "look_up", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": f"found: {KNOWN[0]}"},
        {"type": "function_call_output", "call_id": "2", "output": [part]},
        "not even an item",
    ]
    empty = {"background": False, "conversation": None, "previous_response_id": ""}
    call = parsed({"input": items, **empty}, RESPONSES_PATH)
    assert set(call.body) == {"input"}, "some clients send what they leave empty"
    assert call.chunk_texts == (KNOWN[1], KNOWN[0], "new one")
    assert call.body["input"][:3] == items[:3]
    assert call.body["input"][3]["output"] == [{"type": "input_text", "text": "new one"}]
    said = parsed({"instructions": KNOWN[0], "input": f"{KNOWN[1]} Why?"}, RESPONSES_PATH)
    assert said.chunk_texts == KNOWN
    assert parsed({"input": 3}, RESPONSES_PATH).body == {"input": 3}, "vLLM says what is wrong"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"previous_input_messages": [{"role": "user"}]}, "previous_input_messages"),
        ({"max_output_tokens": "3000"}, "max_output_tokens"),
        ({"documents": ["one"]}, "documents"),
        ({"input": [{"content": [{"text": "", "kintsugi": {"chunk": True}}]}]}, "input[0].content[0].text"),
    ],
)
def test_a_response_needs_nothing_that_is_kept(more: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parsed({"input": "Why?", **more}, RESPONSES_PATH)
    assert caught.value.field == field


def test_documents_are_chunks_in_the_form_that_templates_read() -> None:
    call = parsed(chat("q", documents=["one", {"title": "T", "text": "two"}, {"contents": "three"}]))
    assert call.chunk_texts == ("one", "two", "three")
    assert call.body["documents"] == [
        {"text": "one"},
        {"title": "T", "text": "two"},
        {"contents": "three", "text": "three"},
    ]


def test_constraints_of_the_blend() -> None:
    call = parsed(chat("q", kintsugi={"ratio": 0.3, "selector": "hkvd", "op": "off", "explain": True}))
    params = call.params
    assert (params.ratio, params.selector, params.op, params.explain) == (
        0.3,
        SelectorName.HKVD,
        Op.OFF,
        True,
    )
    assert "kintsugi" not in call.body


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (chat("q", kintsugi=3), "kintsugi"),
        (chat("q", kintsugi={"ratio": 2}), "kintsugi.ratio"),
        (chat("q", kintsugi={"ratio": True}), "kintsugi.ratio"),
        (chat("q", kintsugi={"selector": "best"}), "kintsugi.selector"),
        (chat("q", kintsugi={"spans": [[0, 1]]}), "kintsugi.spans"),
        (chat("q", kintsugi={"op": "delete"}), "kintsugi.op"),
        (chat("q", kv_transfer_params={"a": 1}), "kv_transfer_params"),
        (chat([{"type": "text", "text": "a", "kintsugi": True}]), "messages[0].content[0].kintsugi"),
        (chat([{"type": "text", "text": 3, "kintsugi": {"chunk": True}}]), "messages[0].content[0].text"),
        (chat([{"type": "text", "text": "", "kintsugi": {"chunk": True}}]), "messages[0].content[0].text"),
        (chat("q", documents="one"), "documents"),
        (chat("q", documents=[{"title": "no text"}]), "documents[0]"),
        (chat("q", documents=[{"text": 3}]), "documents[0]"),
        (chat("q", documents=[f"d{i}" for i in range(SPANS_MAX + 1)]), f"documents[{SPANS_MAX}]"),
    ],
)
def test_what_is_ours_and_wrong_names_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parsed(body)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("op", "whose"), [("save", "save belongs to PutChunk"), ("audit", "audit belongs to the engine")]
)
def test_chunks_are_neither_saved_nor_audited_by_a_question(op: str, whose: str) -> None:
    with pytest.raises(InvalidField, match=whose) as caught:
        parsed(chat("q", kintsugi={"op": op}))
    assert caught.value.field == "kintsugi.op"


def test_a_misspelt_constraint_names_the_nearest() -> None:
    with pytest.raises(UnknownField, match="did you mean 'ratio'"):
        parsed(chat("q", kintsugi={"rato": 0.1}))


@pytest.mark.parametrize("priority", [-1, -(1 << 62), "-3", -3.0, 1.0, [1]])
def test_nobody_goes_before_others(priority: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        parsed(chat("q", priority=priority))
    assert caught.value.field == "priority"
    for fine in (0, 5, None):
        body = chat("q", priority=fine)
        assert parsed(body).body == body


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
@pytest.mark.parametrize("asked", [True, 1, "true", "yes", [False]])
def test_beam_search_is_refused(path: str, asked: Any) -> None:
    with pytest.raises(InvalidField, match="sample `n` answers") as caught:
        parsed({"prompt": "q", "messages": [], "use_beam_search": asked, "n": 2}, path)
    assert caught.value.field == "use_beam_search"
    for fine in (False, None):
        assert parsed({"prompt": "q", "use_beam_search": fine}, path).body["use_beam_search"] is fine


def test_documents_need_a_template() -> None:
    with pytest.raises(InvalidField, match="chat/completions"):
        parsed({"prompt": "q", "documents": ["one"]}, COMPLETIONS_PATH)


@pytest.mark.parametrize("messages", [None, 3, [3, None, {"content": 4}], [{"role": "user"}]])
def test_malformed_messages_are_left_to_the_engine(messages: Any) -> None:
    assert parsed({"messages": messages}).body["messages"] == messages


def test_the_namespace_is_named_once() -> None:
    assert find_requested_namespace({}, None) is None
    assert find_requested_namespace({"kintsugi": {"namespace": "a"}}, None) == "a"
    assert find_requested_namespace({"kintsugi": {"namespace": "a"}}, "a") == "a"
    assert find_requested_namespace({"kintsugi": "nonsense"}, "b") == "b"
    for body, header in (({"kintsugi": {"namespace": "a"}}, "b"), ({"kintsugi": {"namespace": 3}}, None)):
        with pytest.raises(InvalidField):
            find_requested_namespace(body, header)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "x", "n": 257}, "n"),
        ({"prompt": ["x"] * 257}, "prompt"),
        ({"prompt": [[5]] * 257}, "prompt"),
        ({"prompt": ["x"] * 65, "n": 4}, "prompt"),
    ],
)
def test_answers_of_one_request_are_bounded(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField, match="at most 256 are allowed") as caught:
        parse_openai_call("r", COMPLETIONS_PATH, body, "acme", lambda text: ())
    assert caught.value.field == field
    for fine in ({"prompt": [5] * 1000}, {"prompt": ["x"] * 64, "n": 4}, {"n": None}):
        parse_openai_call("r", COMPLETIONS_PATH, fine, "acme", lambda text: ())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, True) for name in ("seed", "top_k", "min_tokens", "max_tokens", "logprobs", "temperature")),
        *((name, "1") for name in ("seed", "top_p", "repetition_penalty", "presence_penalty", "min_p")),
        *(("prompt", ids) for ids in ([True], [1, False], [[1], [1, True]])),
    ],
)
def test_a_number_of_another_type_is_refused(name: str, value: Any) -> None:
    """vLLM's models read a number from `true` and from text."""
    with pytest.raises(InvalidField) as caught:
        parsed({"prompt": "q", name: value}, COMPLETIONS_PATH)
    assert caught.value.field == name


def test_numbers_of_sampling_are_passed_on() -> None:
    body = {"messages": [], "seed": 1 << 40, "top_k": -1, "temperature": 0, "logprobs": True, "top_p": None}
    assert parsed(body, CHAT_PATH).body == body


@pytest.mark.parametrize("n", ["10000", 10000.0, 1.0, "many", [1]])
@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
def test_answers_are_counted_before_anybody_reads_another_number_there(path: str, n: Any) -> None:
    """vLLM's models read a number from text, and a whole one from a fraction of zero."""
    with pytest.raises(InvalidField, match="whole number") as caught:
        parsed({"messages": [], "prompt": "q", "n": n}, path)
    assert caught.value.field == "n"
