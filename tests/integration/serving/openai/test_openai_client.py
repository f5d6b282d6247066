"""OpenAI's own client against the front end, the engine and the store, all real."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import httpx
import openai
import pytest

from kintsugi.core.exchange import CHAT_PATH, OpenAICall
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway.requests import RESIDENCY_PATH
from kintsugi.models.bundled import BUNDLED_NAME, bundled_checkpoint, showcase
from tests.integration.serving.openai.conftest import HUB_NAME, DyingEngine, Served, check_nothing_runs

pytestmark = pytest.mark.engine

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Lima"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
FILL_S = 60.0


def client(served: Served, namespace: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=served.url, api_key="none", default_headers=served.headers(namespace), max_retries=0
    )


def question(namespace: str, served: Served, content: Any, **more: Any) -> Any:
    return client(served, namespace).chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": content}],
        max_tokens=2,
        temperature=0,
        **more,
    )


def accounting_of(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.kv_transfer_params["kintsugi"]
    return found


def reused(served: Served, accounting: dict[str, Any]) -> int:
    """Tokens of chunks that were not computed: from the store, or the exact beginning of the first one, which
    storing it has left in vLLM's prefix cache."""
    prefix = len(served.info.prefix_token_ids)
    return int(accounting["tokens_hit"] + max(accounting["tokens_prefix_cached"] - prefix, 0))


def test_known_chunks_in_a_message_are_hit_and_the_answer_is_right(served: Served) -> None:
    show = showcase()
    stored = served.store("known", show.chunks)
    answer = question("known", served, "".join(show.chunks) + show.question)
    assert answer.choices[0].message.content.strip().startswith(show.answer)
    accounting = accounting_of(answer)
    assert (accounting["outcome"], reused(served, accounting)) == ("blended", stored)
    assert answer.usage.prompt_tokens_details.cached_tokens >= stored


@pytest.mark.parametrize("name", [BUNDLED_NAME, HUB_NAME, str(bundled_checkpoint())])
def test_the_engine_answers_to_each_of_the_models_names(served: Served, name: str) -> None:
    """vLLM looks the name up again, after the gateway."""
    asked = client(served, "named")
    messages: Any = [{"role": "user", "content": "What is it?"}]
    answer = asked.chat.completions.create(model=name, messages=messages, max_tokens=2)
    assert answer.model == BUNDLED_NAME, "whatever it was asked for as"
    assert asked.completions.create(model=name, prompt="One, two,", max_tokens=2).usage is not None
    assert asked.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        asked.completions.create(model=f"{name}/another", prompt="One", max_tokens=2)


def test_routers_see_what_lies_of_a_chat_that_declares_nothing(served: Served) -> None:
    """An engine renders it, as it will when it is asked, and finds what the gateway was never told of."""
    content = "".join(showcase().chunks)
    body = {"model": served.model, "messages": [{"role": "user", "content": content}]}
    call = OpenAICall("rendered", CHAT_PATH, body, KintsugiParams("routed"))
    (ids,) = served.run(served.engine._front.render(call))
    saved = ids[40:140]
    (outcome,) = served.run(served.engine.save("saved", "routed", [saved]))
    assert outcome.is_saved, outcome.reason
    residency = served.post(RESIDENCY_PATH, body, "routed").json()
    (chunk,) = residency["chunks"]
    assert chunk["key"] == ChunkKey.of(served.space("routed"), saved).hex
    assert (chunk["num_tokens"], chunk["resident"], chunk["namespace"]) == (100, True, "routed")
    answer = question("routed", served, content)
    assert answer.usage.prompt_tokens == len(ids)
    assert accounting_of(answer)["chunks_hit"] == 1, "the answer is made from what was told"
    assert served.post(RESIDENCY_PATH, body, "another").json()["chunks"] == []
    assert served.post(RESIDENCY_PATH, {**body, "model": "another"}, "routed").status_code == 404
    endless = [{"role": "user", "content": content * 100}]
    refused = served.post(RESIDENCY_PATH, {**body, "messages": endless}, "routed")
    assert refused.status_code == 400
    assert str(served.info.max_model_len) in refused.json()["error"]["message"]


@pytest.mark.parametrize("usage", [True, False])
def test_a_stream_ends_with_the_accounting(served: Served, usage: bool) -> None:
    show = showcase()
    stored = served.store(f"stream-{usage}", show.chunks)
    options = {"stream_options": {"include_usage": True}} if usage else {}
    events = list(
        question(f"stream-{usage}", served, "".join(show.chunks) + show.question, stream=True, **options)
    )
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text.strip().startswith(show.answer)
    assert [hasattr(event, "kv_transfer_params") for event in events] == [False] * (len(events) - 1) + [True]
    assert reused(served, accounting_of(events[-1])) == stored
    assert (events[-1].usage is not None) is usage


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_have_one_accounting_in_any_order(served: Served, stream: bool) -> None:
    """As `usage`, it is the sum."""
    show = showcase()
    found = []
    for order in (1, -1):
        namespace = f"several-{stream}-{order}"
        served.store(namespace, show.chunks)
        prompts = ["".join(show.chunks) + show.question, "Nothing of this is known here. " * 8][::order]
        options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer: Any = client(served, namespace).completions.create(
            model=served.model, prompt=prompts, max_tokens=2, temperature=0, **options
        )
        last = list(answer)[-1] if stream else answer
        accounting = accounting_of(last)
        names = (
            "outcome",
            "reason",
            "chunks_hit",
            "tokens_hit",
            "token_layers_total",
            "tokens_prefix_cached",
        )
        found.append({name: accounting[name] for name in names})
        cached = accounting["tokens_hit"] + accounting["tokens_prefix_cached"]
        assert last.usage.prompt_tokens_details.cached_tokens == cached
    assert found[0] == found[1]
    assert found[0]["outcome"] == "mixed"
    assert found[0]["reason"] == "several_prompts: 1 blended, 1 declined (no_chunk_cached)"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [0, 1], ids=["first token", "later"])
def test_an_answer_that_a_stop_string_ends_has_its_accounting(served: Served, stream: bool, at: int) -> None:
    """vLLM's core is told to abort such a request, and what it says of it then is dropped."""
    show = showcase()
    namespace = f"stopped-{stream}-{at}"
    stored = served.store(namespace, show.chunks)
    content = "".join(show.chunks) + show.question
    whole = question("stopped", served, content, logprobs=True).choices[0]
    stop = whole.logprobs.content[at].token
    answer = question(namespace, served, content, stop=[stop], stream=stream)
    if stream:
        *_, last = answer
        reason, accounting = last.choices[0].finish_reason, accounting_of(last)
    else:
        reason, accounting = answer.choices[0].finish_reason, accounting_of(answer)
    assert reason == "stop"
    assert (accounting["outcome"], reused(served, accounting)) == ("blended", stored)
    assert accounting["ttft_ms"] > 0
    unused = question(namespace, served, content, stop=["\x00"]).kv_transfer_params["kintsugi"]
    assert unused["outcome"] in ("blended", "prefix_hit")
    assert not served.engine.watched._told._expected


def test_marked_chunks_that_are_missed_twice_are_stored_and_then_hit(served: Served) -> None:
    """Each time in another order: vLLM's prefix cache would have the whole prompt otherwise."""
    show = showcase()
    orders = itertools.permutations(show.chunks)

    def accounting(marked: bool) -> dict[str, Any]:
        chunks = next(orders)
        if not marked:
            return accounting_of(question("marked", served, "".join(chunks) + show.question))
        parts = [{"type": "text", "text": chunk, "kintsugi": {"chunk": True}} for chunk in chunks]
        return accounting_of(question("marked", served, [*parts, {"type": "text", "text": show.question}]))

    for _ in range(2):
        assert accounting(marked=True)["reason"].startswith("no_chunk_cached")
    tokens = sum(len(served.chunker.token_ids(chunk)) for chunk in show.chunks)
    deadline_s = time.monotonic() + FILL_S
    while (found := accounting(marked=True))["chunks_hit"] < len(show.chunks):
        assert time.monotonic() < deadline_s, f"{found['chunks_hit']} of {len(show.chunks)} chunks are stored"
    assert reused(served, found) == tokens
    assert reused(served, accounting(marked=False)) == tokens


def test_documents_are_chunks(served: Served) -> None:
    show = showcase()
    stored = served.store("documents", show.chunks)
    answer = question(
        "documents", served, show.question, extra_body={"documents": [{"text": c} for c in show.chunks]}
    )
    assert reused(served, accounting_of(answer)) == stored


def test_chunks_inside_a_tool_message_are_hit(served: Served) -> None:
    show = showcase()
    stored = served.store("tool", show.chunks)
    call: Any = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    answer = client(served, "tool").chat.completions.create(
        model=served.model,
        messages=[
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "found:\n" + "\n\n".join(show.chunks)},
            {"role": "user", "content": show.question},
        ],
        max_tokens=2,
    )
    assert reused(served, accounting_of(answer)) == stored


def test_completions_hit_what_their_prompt_holds(served: Served) -> None:
    show = showcase()
    stored = served.store("completions", show.chunks)
    prompt = "".join(show.chunks) + show.question
    api = client(served, "completions").completions
    answer = api.create(model=served.model, prompt=prompt, max_tokens=1, temperature=0, logprobs=2)
    assert answer.choices[0].text.strip() == show.answer
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.top_logprobs[0]) >= 2
    assert reused(served, accounting_of(answer)) == stored
    both = api.create(model=served.model, prompt=[show.question, prompt], max_tokens=1, temperature=0)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[1].text.strip() == show.answer
    ids = [*served.info.prefix_token_ids, *(i for c in show.chunks for i in served.chunker.token_ids(c))]
    by_ids = api.create(
        model=served.model, prompt=[*ids, *served.chunker.token_ids(show.question)], max_tokens=1
    )
    accounting = accounting_of(by_ids)
    assert accounting["tokens_hit"] + accounting["tokens_prefix_cached"] >= stored - len(ids) % 16


def test_a_tool_that_was_named_is_called(served: Served) -> None:
    """The model knows nothing of tools: vLLM's grammar makes it call one. JSON allows blanks without end, and
    this model would write them."""
    blanks = {token for blank in (" ", "\n", "\t", "\r") for token in served.chunker.token_ids(blank)}
    answer = client(served, "tools").chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": "Where?"}],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "look_up"}},
        logit_bias={str(token): -100 for token in blanks},
        max_tokens=200,
        temperature=0,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"city": "Lima"})


def test_one_namespace_does_not_find_anothers_chunks(served: Served) -> None:
    show = showcase()
    served.store("mine", show.chunks)
    answer = question("theirs", served, "".join(show.chunks) + show.question)
    assert accounting_of(answer)["tokens_hit"] == 0


def test_constraints_of_the_blend_are_passed_on(served: Served) -> None:
    show = showcase()
    served.store("constraints", show.chunks)
    content = "".join(show.chunks) + show.question
    off = question("constraints", served, content, extra_body={"kintsugi": {"op": "off"}})
    assert off.kv_transfer_params is None
    whole = question("constraints", served, content, extra_body={"kintsugi": {"ratio": 1.0}})
    assert whole.choices[0].message.content == off.choices[0].message.content
    below = question("constraints", served, content, extra_body={"kintsugi": {"ratio": 0.0}})
    assert accounting_of(below)["reason"].startswith("BelowMinimum")


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"model": "another"}, 404, "model"),
        ({"messages": [{"role": "user", "content": "a " * 4200}]}, 400, "input_tokens"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"temperature": -1, "stream": True}, 400, "temperature"),
        ({"messages": "none"}, 400, "messages"),
        ({"kintsugi": {"ratio": 7}}, 400, "kintsugi.ratio"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, 400, "kv_transfer_params"),
        ({"documents": [{"text": "a"}], "messages": []}, 400, "documents"),
    ],
)
def test_bad_input_is_refused_and_the_next_request_is_served(
    served: Served, change: dict[str, Any], status: int, field: str
) -> None:
    body = {"model": served.model, "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 1}
    refused = served.post("/v1/chat/completions", {**body, **change})
    assert refused.status_code == status
    assert refused.json()["error"]["param"] == field
    fine = served.post("/v1/chat/completions", {**body, "an_unknown_field": 1})
    assert fine.status_code == 200


def test_a_caller_that_leaves_aborts_in_the_engine(served: Served) -> None:
    body = {
        "model": served.model,
        "prompt": "The old ships",
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream(
        "POST", f"{served.url}/completions", json=body, headers=served.headers("left"), timeout=60
    ) as response:
        lines = response.iter_lines()  # kept: without a reader, httpx would leave at once
        first = json.loads(next(lines).removeprefix("data: "))
        assert (first.get("choices") or [{}])[0].get("finish_reason", "none") is None, first
        assert served.engine.stats().running == 1
    check_nothing_runs(served)


def test_a_stream_is_sent_again_where_its_engine_dies_before_the_first_token(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes an event of a dead core: neither an answer nor a reason to stay with it."""
    dying = DyingEngine(served)
    monkeypatch.setattr(served.engine.client, "generate", dying.generate)
    body = {"model": served.model, "prompt": "Where?", "max_tokens": 8, "ignore_eos": True, "stream": True}
    again = served.post("/v1/completions", body)
    assert (again.status_code, dying.tried) == (200, 2)
    assert "error" not in again.text
    begun = served.post("/v1/completions", body)
    assert (begun.status_code, dying.tried) == (200, 3)
    *_, error, done = begun.text.strip().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
    assert done == "data: [DONE]"


def test_the_model_is_listed(served: Served) -> None:
    (model,) = client(served, "default").models.list().data
    assert model.id == served.model
    assert model.to_dict()["max_model_len"] == 4096
    assert httpx.get(f"http://{served.address}/readyz").json()["blending"] == "on"
