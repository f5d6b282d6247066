"""Which engine answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.core.exchange import CHAT_PATH, OpenAICall
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey, Span, TokenIds
from kintsugi.gateway.fronts.openai_request import PROMPT_FIELDS
from kintsugi.serving.routing import (
    BLOCK_TOKENS,
    BLOCKS_MAX,
    EngineView,
    PrefixMemory,
    Wanted,
    cost_ms,
    estimate_wanted,
    prefix_digests,
    rank_engines,
    text_digests,
    tokens_by_host,
)
from kintsugi.store.client.directory import ShardAddress, ShardMap

PROMPT = TokenIds.of(range(1000))


def test_digests_are_of_whole_blocks_and_of_one_namespace() -> None:
    digests = prefix_digests("acme", PROMPT)
    assert len(digests) == len(PROMPT) // BLOCK_TOKENS
    assert prefix_digests("acme", PROMPT[: 3 * BLOCK_TOKENS + 5]) == digests[:3]
    assert not set(prefix_digests("other", PROMPT)) & set(digests)
    assert prefix_digests("acme", PROMPT[: BLOCK_TOKENS - 1]) == ()
    assert len(prefix_digests("acme", TokenIds.of(range(10 * BLOCKS_MAX * BLOCK_TOKENS)))) == BLOCKS_MAX


def test_a_prefix_is_resident_up_to_the_first_block_that_differs() -> None:
    memory = PrefixMemory()
    memory.record_route(prefix_digests("acme", PROMPT), "a")
    other = TokenIds.of([*PROMPT[:300], *range(5000, 5700)])
    assert memory.resident_tokens(prefix_digests("acme", other), "a") == 2 * BLOCK_TOKENS
    assert memory.resident_tokens(prefix_digests("acme", other), "b") == 0
    memory.forget("a")
    assert memory.resident_tokens(prefix_digests("acme", PROMPT), "a") == 0


def test_memory_is_bounded() -> None:
    memory = PrefixMemory(remembered_max=10)
    for index in range(100):
        memory.record_route([index], "a")
    assert memory.resident_tokens([0], "a") == 0
    assert memory.resident_tokens([99], "a") == BLOCK_TOKENS


def test_an_idle_engine_wins_over_a_busy_one() -> None:
    views = {"busy": EngineView(5000, 10_000.0), "idle": EngineView(0, 10_000.0)}
    assert rank_engines(views, Wanted(1000), PrefixMemory()) == ["idle", "busy"]


def test_a_resident_prefix_is_worth_waiting_for_as_long_as_computing_it_would_take() -> None:
    digests = prefix_digests("acme", PROMPT)
    memory = PrefixMemory()
    memory.record_route(digests, "warm")
    wanted = Wanted(len(PROMPT), digests)
    for waiting, first in ((800, "warm"), (1000, "cold")):
        views = {"warm": EngineView(waiting, 10_000.0), "cold": EngineView(0, 10_000.0)}
        assert rank_engines(views, wanted, memory)[0] == first


def test_chunks_on_the_same_host_decide_between_equals() -> None:
    views = {"here": EngineView(host="1"), "there": EngineView(host="2")}
    assert rank_engines(views, Wanted(1000, chunks={"1": 900, "2": 100}), PrefixMemory())[0] == "here"
    assert rank_engines(views, Wanted(1000, chunks={"1": 100, "2": 900}), PrefixMemory())[0] == "there"


def test_equals_share_prompts_that_nobody_holds() -> None:
    views = {name: EngineView() for name in "abcd"}
    firsts = [
        rank_engines(
            views, Wanted(500, prefix_digests("acme", TokenIds.of(range(n, n + 500)))), PrefixMemory()
        )[0]
        for n in range(200)
    ]
    assert all(firsts.count(name) > 20 for name in "abcd")


def test_while_a_model_is_exchanged_an_engine_of_the_prompts_model_goes_first() -> None:
    views = {"old": EngineView(fingerprint="aa"), "new": EngineView(900_000, fingerprint="bb")}
    wanted = Wanted(100, fingerprint="bb")
    assert rank_engines(views, wanted, PrefixMemory()) == ["new", "old"]


def test_the_beginning_of_a_text_counts_as_the_beginning_of_a_prompt() -> None:
    text = "x" * 3000
    assert len(text_digests("acme", text)) == 3000 // (4 * BLOCK_TOKENS)
    assert text_digests("acme", text[:1100]) == text_digests("acme", text)[:2]
    assert not set(text_digests("other", text)) & set(text_digests("acme", text))


LONG = "ab" * 300


@pytest.mark.parametrize(
    ("body", "beginning"),
    [
        ({"prompt": LONG + "c" * 424}, LONG + "c" * 424),
        ({"prompt": [LONG, "c" * 424]}, LONG + "c" * 424),
        (
            {
                "messages": [
                    {"role": "user", "content": LONG},
                    {"content": [{"type": "text", "text": "c" * 424}]},
                ]
            },
            LONG + "c" * 424,
        ),
        ({"input": "c" * 424, "instructions": LONG}, LONG + "c" * 424),
        (
            {
                "instructions": None,
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": LONG}]},
                    {"type": "function_call_output", "call_id": "1", "output": "c" * 424},
                    {"type": "function_call_output", "call_id": "2", "output": [{"text": "d" * 88}]},
                ],
            },
            LONG + "c" * 424 + "d" * 88,
        ),
        ({"messages": [{"content": None}, 7, [[[[[["deep"]]]]]]]}, "deep"),
        ({"prompt": [[1, 2, 3]]}, ""),
        ({}, ""),
    ],
)
def test_texts_of_a_body_are_found_and_oddities_passed_over(body: dict[str, Any], beginning: str) -> None:
    digests = text_digests("acme", beginning)
    assert len(digests) == len(beginning) // 512
    path = next((path for path, names in PROMPT_FIELDS.items() if set(names) & set(body)), CHAT_PATH)
    call = OpenAICall("r", path, body, KintsugiParams("acme"))
    assert estimate_wanted(call) == Wanted(len(beginning) // 4 + 1, digests)


def test_chunks_are_counted_by_the_host_of_their_shard() -> None:
    keys = [ChunkKey(bytes([n]) * 32) for n in range(32)]
    spans = [Span(10 * n, 10 * n + 10, key) for n, key in enumerate(keys)] + [Span(500, 600)]
    two = ShardMap(1, (ShardAddress("a", "h1:1"), ShardAddress("b", "h2:1"), ShardAddress("c", "h2:2")))
    found = tokens_by_host(spans, two)
    expected = {"h1": 0, "h2": 0}
    for key in keys:
        expected[two.owners(key)[0].address.partition(":")[0]] += 10
    assert found == expected
    assert all(found.values())
    assert tokens_by_host(spans, ShardMap(1, (ShardAddress("a", "h:1"), ShardAddress("b", "h:2")))) == {}


views = st.builds(
    EngineView,
    waiting_tokens=st.integers(0, 10**6),
    tokens_per_s=st.just(0.0) | st.floats(1, 1e6),
    host=st.sampled_from(["1", "2", ""]),
)
requests = st.builds(
    Wanted,
    num_tokens=st.integers(0, 10**5),
    chunks=st.dictionaries(st.sampled_from(["1", "2"]), st.integers(0, 10**5)),
)


@given(view=views, wanted=requests, resident=st.integers(0, 10**5), more=st.integers(0, 10**5))
def test_cost_grows_with_the_queue_and_falls_with_what_is_resident(
    view: EngineView, wanted: Wanted, resident: int, more: int
) -> None:
    cost = cost_ms(view, wanted, resident)
    longer = EngineView(view.waiting_tokens + more, view.tokens_per_s, view.host)
    assert 0.0 <= cost <= cost_ms(longer, wanted, resident)
    assert cost_ms(view, wanted, resident + more) <= cost * (1 + 1e-12) + 1e-9


@given(st.dictionaries(st.text(max_size=3), views, max_size=8), requests)
def test_every_engine_is_ranked_once_and_the_first_costs_least(
    engines: dict[str, EngineView], wanted: Wanted
) -> None:
    order = rank_engines(engines, wanted, PrefixMemory())
    assert sorted(order) == sorted(engines)
    costs = [round(cost_ms(engines[name], wanted, 0), 3) for name in order]
    assert costs == sorted(costs)
