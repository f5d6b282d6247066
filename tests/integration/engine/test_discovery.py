"""Passages that nobody declares: counted, saved while the engine is idle, and hit from then on."""

from __future__ import annotations

import re
import zlib
from typing import Any

import pytest

from kintsugi.core.namespaces import is_within
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import Span
from kintsugi.engine.local import Generation, LocalEngine, Prompt
from tests.integration.engine.conftest import (
    PREFIX,
    EngineSlot,
    ask,
    ask_cold,
    max_dlogprob,
    ram_store,
    random_tokens,
    save_discovered,
    when_discovering,
)

pytestmark = pytest.mark.engine("tiny-llama-discovery")

STORE = "discovery"
UNNAMED = "found"


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot) -> LocalEngine:
    config: dict[str, object] = {"store": f"ram://{STORE}", "discovery_namespace": UNNAMED}
    return when_discovering(engine_slot.get("tiny-llama", config))


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """Every test has its own."""
    return re.sub(r"\W+", "-", request.node.name)[:60].strip("-")


@pytest.fixture
def passages(engine: LocalEngine, namespace: str) -> list[list[int]]:
    """Three that end with a blank line, each cut into segments alone."""
    (line_break,) = engine.tokenizer("\n", add_special_tokens=False).input_ids
    seed = zlib.crc32(namespace.encode())
    return [[*random_tokens(300, seed + index), line_break, line_break] for index in range(3)]


def prompt_of(*passages: list[int], seed: int = 0) -> list[int]:
    return [*PREFIX, *(token for passage in passages for token in passage), *random_tokens(20, seed)]


def discover(namespace: str, **more: Any) -> KintsugiParams:
    return KintsugiParams(namespace, ratio=1.0, discover=True, **more)


def told(answer: Generation) -> dict[str, Any]:
    assert answer.accounting is not None
    return answer.accounting


def stored(namespace: str) -> int:
    """Tokens."""
    return sum(manifest.num_tokens for manifest in ram_store(STORE).list(namespace))


def see(engine: LocalEngine, token_ids: list[int], params: KintsugiParams | None = None) -> Generation:
    """A prompt whose recurring segments are then saved."""
    answer = ask_cold(engine, token_ids, params)
    save_discovered(engine)
    return answer


def test_what_recurs_is_hit_in_any_order_from_its_third_sight_on(
    engine: LocalEngine, passages: list[list[int]], namespace: str
) -> None:
    first, second, third = passages
    once = told(see(engine, prompt_of(first, second), discover(namespace)))
    assert once["segments_counted"] >= 2
    assert once["segments_queued"] == 0
    assert stored(namespace) == 0
    twice = told(see(engine, prompt_of(second, third, first, seed=1), discover(namespace)))
    assert twice["segments_queued"] >= 2
    assert stored(namespace) == len(first) + len(second)
    elsewhere = prompt_of(third, second, first, seed=2)
    full = ask_cold(engine, elsewhere)
    blended = ask_cold(engine, elsewhere, discover(namespace))
    assert told(blended)["outcome"] == "blended"
    assert told(blended)["tokens_discovered"] == len(first) + len(second)
    assert max_dlogprob(full, blended) <= 0.01


def test_a_request_that_names_nothing_is_discovered_and_told_nothing(
    engine: LocalEngine, passages: list[list[int]]
) -> None:
    before = stored(UNNAMED)
    for seed in range(2):
        assert see(engine, prompt_of(*passages, seed=seed)).accounting is None
    assert stored(UNNAMED) - before == sum(map(len, passages))
    engine.reset_prefix_cache()
    last = prompt_of(*reversed(passages), seed=9)
    assert ask(engine, last).num_cached_tokens == len(last) - 1


def test_cache_salts_part_what_is_found(engine: LocalEngine, passages: list[list[int]]) -> None:
    for salt in ("one", "two", "one"):
        engine.reset_prefix_cache()
        engine.generate([Prompt(prompt_of(*passages), None, 1, cache_salt=salt)])
        save_discovered(engine)
    spaces = {name for name, _ in ram_store(STORE)._chunks if is_within(name, UNNAMED) and name != UNNAMED}
    assert len(spaces) == 1


def test_the_same_secret_in_two_namespaces_is_seen_once_in_each(
    engine: LocalEngine, passages: list[list[int]], namespace: str
) -> None:
    for name in (f"{namespace}/a", f"{namespace}/b"):
        assert told(see(engine, prompt_of(*passages), discover(name)))["segments_queued"] == 0
    assert stored(f"{namespace}/a") == stored(f"{namespace}/b") == 0
    assert told(see(engine, prompt_of(*passages), discover(f"{namespace}/a")))["segments_queued"]
    theirs = told(see(engine, prompt_of(*passages, seed=1), discover(f"{namespace}/b")))
    assert theirs["tokens_hit"] == 0


@pytest.mark.parametrize("params", [{"no_store": True}, {"discover": False}])
def test_nothing_is_counted_that_is_not_to_be(
    engine: LocalEngine, passages: list[list[int]], namespace: str, params: dict[str, Any]
) -> None:
    for seed in range(3):
        quiet = KintsugiParams(f"{namespace}/quiet", **{"discover": True, **params})
        assert told(see(engine, prompt_of(*passages, seed=seed), quiet))["segments_counted"] == 0
    assert stored(f"{namespace}/quiet") == 0


def test_equal_prompts_at_the_same_time_count_once(
    engine: LocalEngine, passages: list[list[int]], namespace: str
) -> None:
    engine.reset_prefix_cache()
    same = Prompt(prompt_of(*passages), discover(namespace), 4)
    answers = engine.generate([same, same, same])
    assert sorted(bool(told(one)["segments_counted"]) for one in answers) == [False, False, True]
    save_discovered(engine)
    assert stored(namespace) == 0


def test_one_token_repeated_costs_one_segment(engine: LocalEngine, namespace: str) -> None:
    for length in (3000, 3500, 2500):
        see(engine, [*PREFIX, *[77] * length], discover(namespace))
    assert stored(namespace) <= 2048


def test_an_exact_prefix_is_not_given_up_for_chunks(
    engine: LocalEngine, passages: list[list[int]], namespace: str
) -> None:
    """A chat's history is in vLLM's prefix cache, exactly: only what comes behind it is blended."""
    history, tool = prompt_of(*passages[:2]), passages[2]
    for seed in range(2):
        see(engine, prompt_of(*passages, seed=seed), discover(namespace))
    engine.reset_prefix_cache()
    off = KintsugiParams(namespace)
    first = engine.generate([Prompt(history, None, 1, cache_salt=namespace)])[0]
    assert first.num_cached_tokens == 0
    answer = told(ask(engine, [*history, *tool, *random_tokens(5, 3)], discover(namespace)))
    assert answer["outcome"] == "blended"
    assert answer["tokens_prefix_cached"] >= len(history) - 32
    assert answer["tokens_hit"] == len(tool)
    again = told(ask(engine, [*history, *random_tokens(5, 4)], off))
    assert again["outcome"] == "prefix_hit"


def naming(namespace: str, before: list[int], named: list[int]) -> KintsugiParams:
    """Parameters that name the chunk behind a text."""
    start = len(PREFIX) + len(before)
    return discover(namespace, spans=(Span(start, start + len(named)),))


def test_text_around_named_chunks_is_discovered_and_hit(
    engine: LocalEngine, passages: list[list[int]], namespace: str
) -> None:
    before, named, behind = passages
    engine.save(PREFIX, [named], namespace)
    params = naming(namespace, before, named)
    queued = [
        told(see(engine, prompt_of(before, named, behind, seed=seed), params))["segments_queued"] > 0
        for seed in range(2)
    ]
    assert queued == [False, True]
    assert stored(namespace) == sum(map(len, passages))
    prompt = prompt_of(before, named, behind, seed=2)
    full, blended = ask_cold(engine, prompt), ask_cold(engine, prompt, params)
    assert told(blended)["outcome"] == "blended"
    assert (told(blended)["chunks_hit"], told(blended)["chunks_missed"]) == (3, 0)
    assert told(blended)["tokens_discovered"] == len(before) + len(behind)
    assert max_dlogprob(full, blended) <= 0.01


@pytest.mark.parametrize("stored_first", [1, 2, 3])
def test_what_is_discovered_later_gives_up_no_cached_blend_of_named_chunks(
    engine: LocalEngine, passages: list[list[int]], namespace: str, stored_first: int
) -> None:
    """A chat about documents: what was said recurs in each turn, behind blocks that are cached already. Some
    of it is stored from the beginning."""
    before, named, behind = passages
    engine.save(PREFIX, [named, behind, before][:stored_first], namespace)
    params = naming(namespace, before, named)
    engine.reset_prefix_cache()
    turn = prompt_of(before, named, behind)
    outcomes = []
    for _ in range(4):
        outcomes.append(told(ask(engine, turn, params))["outcome"])
        save_discovered(engine)
        turn = [*turn, *random_tokens(40, len(turn))]
    assert stored(namespace) >= sum(map(len, passages)), "after the second turn all of it was saved"
    assert outcomes == ["blended", "prefix_hit", "prefix_hit", "prefix_hit"]


def test_an_erased_namespace_begins_anew(
    engine: LocalEngine, passages: list[list[int]], namespace: str
) -> None:
    see(engine, prompt_of(*passages), discover(namespace))
    ram_store(STORE).erase(namespace, None, 0.0)
    engine._scheduler.salts.refresh()
    answer = told(see(engine, prompt_of(*passages, seed=1), discover(namespace)))
    assert answer["segments_counted"]
    assert answer["segments_queued"] == 0


def test_saving_leaves_no_cache_blocks_behind(
    engine: LocalEngine, passages: list[list[int]], namespace: str
) -> None:
    for seed in range(2):
        see(engine, prompt_of(*passages, seed=seed), discover(namespace))
    assert stored(namespace)
    engine.reset_prefix_cache()  # refused while blocks are in use
