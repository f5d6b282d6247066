"""One accounting for all prompts of a request, at the same place in whole answers and in streams."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.exchange import COMPLETIONS_PATH, OpenAICall
from kintsugi.core.request import KintsugiParams
from kintsugi.engine.openai.serving import CallState, EventsWithAccounting

BLENDED = Accounting(Outcome.BLENDED, chunks_hit=2, tokens_hit=60, tokens_prefix_cached=16).to_mapping()
DECLINED = Accounting(Outcome.DECLINED, reason="no_chunk_cached: none", chunks_missed=1).to_mapping()
USAGE = {"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": 99}}


def state_of(*accountings: dict[str, Any] | None) -> CallState:
    """The state of a call whose prompts have ended; vLLM reports 99 tokens of each as cached."""
    state = CallState(OpenAICall("one", COMPLETIONS_PATH, {}, KintsugiParams("acme")))
    for one in accountings:
        params = None if one is None else {"kintsugi": one}
        state.note(SimpleNamespace(finished=False, kv_transfer_params=None, num_cached_tokens=99))
        state.note(SimpleNamespace(finished=True, kv_transfer_params=params, num_cached_tokens=99))
    return state


@pytest.mark.parametrize("order", [(BLENDED, DECLINED), (DECLINED, BLENDED)])
def test_a_stream_and_a_whole_answer_have_the_same_sum(order: tuple[dict[str, Any], ...]) -> None:
    state = state_of(*order)
    whole = json.loads(state.account(json.dumps({"id": "é", "usage": USAGE})))
    events = EventsWithAccounting(state)
    last = {"choices": [], "usage": USAGE}
    sent = [*events.pass_on(f"data: {json.dumps(last)}\n\n"), *events.pass_on("data: [DONE]\n\n")]
    assert sent[1:] == ["data: [DONE]\n\n"]
    found = json.loads(sent[0].removeprefix("data: "))
    for one in (whole, found):
        accounting = one["kv_transfer_params"]["kintsugi"]
        assert (accounting["outcome"], accounting["chunks_hit"], accounting["chunks_missed"]) == (
            "mixed",
            2,
            1,
        )
        assert one["usage"]["prompt_tokens_details"]["cached_tokens"] == 76 + 99


def test_a_response_s_last_event_has_it_within_the_response() -> None:
    events = EventsWithAccounting(state_of(BLENDED))
    last = {
        "type": "response.completed",
        "response": {"usage": {"input_tokens_details": {"cached_tokens": 99}}},
    }
    assert events.pass_on(f"event: response.completed\ndata: {json.dumps(last)}\n\n") == []
    (event,) = events.end()
    head, text = event.split("\n", 1)
    response = json.loads(text.removeprefix("data: "))["response"]
    assert head == "event: response.completed"
    assert response["kv_transfer_params"]["kintsugi"] == BLENDED
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 76


def test_an_answer_without_accounting_is_passed_on() -> None:
    state = state_of(None)
    assert json.loads(state.account('{"usage": null}')) == {"usage": None}
    event = 'data: {"choices": []}\n\n'
    assert EventsWithAccounting(state).pass_on(event) == [event]
