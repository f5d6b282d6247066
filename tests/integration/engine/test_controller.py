"""The loading controller in a real engine: a store that is too slow is left alone, a fast one is used.

Nothing is timed against a clock here. The engine's estimates are set to what makes the case, or come from
a store throttled by orders of magnitude; benchmarks/loading.py measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kintsugi.core.request import KintsugiParams
from kintsugi.engine.local import Generation, LocalEngine
from kintsugi.engine.scheduler.stats import REFUSALS_PER_PROBE, TRIAL_FIRST
from kintsugi.store.client.ram import RamStore
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    Rag,
    ask_cold,
    chunks_of,
    rag,
    ram_store,
    random_tokens,
)

pytestmark = pytest.mark.engine

SHAPE = "tiny-llama"
FAST, SLOW = 1e12, 300e3
"""Bytes per second. At the slow rate a prompt's chunks take seconds, its prefill milliseconds."""


@pytest.fixture(scope="module")
def started(engine_slot: EngineSlot) -> LocalEngine:
    extra: dict[str, object] = {
        "loading_controller": True,
        "store": f"ram://controlled?bytes_per_s={FAST:.0f}",
    }
    return engine_slot.get(SHAPE, extra)


@pytest.fixture
def engine(started: LocalEngine) -> Iterator[LocalEngine]:
    """With chunks stored and nothing learnt."""
    from kintsugi.engine.scheduler.stats import Timing

    started.save(PREFIX, CHUNKS, NAMESPACE)
    started._scheduler._timing = Timing()
    yield started
    throttle(FAST)


CHUNKS = chunks_of(300, 200, 250, seed=7)


def throttle(bytes_per_s: float) -> None:
    store = ram_store("controlled")
    assert isinstance(store, RamStore)
    store.bytes_per_s = bytes_per_s


def asked(engine: LocalEngine, params: KintsugiParams | None, prompt: Rag | None = None) -> Generation:
    return ask_cold(engine, (prompt or rag(*CHUNKS)).token_ids, params, max_tokens=2)


def accounting_of(generation: Generation) -> dict[str, Any]:
    assert generation.accounting is not None
    return generation.accounting


def learn_prefills(engine: LocalEngine) -> None:
    for size in (100, 400, 800, 800):
        asked(engine, None, Rag([("gap", random_tokens(size, size))]))


def test_what_a_prefill_costs_is_learnt_from_plain_requests(engine: LocalEngine) -> None:
    assert engine._scheduler._timing.measured.step is None
    learn_prefills(engine)
    assert engine._scheduler._timing.measured.step is not None


def test_the_first_prompts_are_blended_and_teach(engine: LocalEngine) -> None:
    learn_prefills(engine)
    params = rag(*CHUNKS).params(0.2)
    first = accounting_of(asked(engine, params))
    assert first["outcome"] == "blended"
    assert first["ttft_ms"] > 0
    measured = engine._scheduler._timing.measured
    ((source, link),) = measured.links.items()
    assert source.tier == "ram"
    assert 0 < link.s_per_byte < 1e-6
    assert measured.decode_s_per_byte == 0  # the first pass prepared kernels
    for _ in range(TRIAL_FIRST + 1):  # one of them is blended, whatever is thought of it
        asked(engine, params)
    assert engine._scheduler._timing.measured.decode_s_per_byte > 0


def test_a_store_far_below_break_even_is_not_waited_for(engine: LocalEngine) -> None:
    learn_prefills(engine)
    throttle(SLOW)
    params = rag(*CHUNKS).params(0.2)
    taught = accounting_of(asked(engine, params))
    assert taught["outcome"] == "blended"
    refused = asked(engine, params)
    accounting = accounting_of(refused)
    assert accounting["outcome"] == "declined"
    assert str(accounting["reason"]).startswith("loading_is_slower: ")
    assert accounting["chunks_hit"] == 3
    assert accounting["predicted_ttft_ms"] < taught["ttft_ms"]
    assert refused.ttft_s < 0.5 * float(str(taught["ttft_ms"])) / 1e3
    assert refused.token_ids == asked(engine, None).token_ids


def test_a_store_that_became_fast_is_used_again(engine: LocalEngine) -> None:
    """By chunks that are read beside refused prompts, which do not wait for them."""
    learn_prefills(engine)
    throttle(SLOW)
    params = rag(*CHUNKS).params(0.2)
    asked(engine, params)
    assert accounting_of(asked(engine, params))["outcome"] == "declined"
    throttle(FAST)
    reasons: list[str] = []
    for _ in range(40 * REFUSALS_PER_PROBE):
        accounting = accounting_of(asked(engine, params))
        reasons.append(str(accounting.get("reason", "")).split(":")[0])
        if reasons[-1] != "loading_is_slower":
            break
    assert reasons[-1] != "loading_is_slower"
    assert len(reasons) > 1


def test_a_chunk_in_a_slow_place_is_computed_instead(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner is told so; the engine has to do it, and to say it."""
    from kintsugi.core.plan import BlendPlan
    from kintsugi.fusor.control.controller import LoadingController

    def without_the_second(self: LoadingController, request: object) -> BlendPlan:
        hits = request.hits  # type: ignore[attr-defined]
        return BlendPlan((hits[0], hits[2]), self.selection)

    monkeypatch.setattr(LoadingController, "plan", without_the_second)
    accounting = accounting_of(asked(engine, rag(*CHUNKS).params(0.0)))
    assert accounting["outcome"] == "blended"
    assert (accounting["chunks_hit"], accounting["chunks_recomputed"]) == (3, 1)
    assert accounting["tokens_hit"] == 550


def test_a_higher_ratio_than_the_minimum_needs_no_name_of_its_own(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later turn finds what was blended at a raised ratio."""
    from dataclasses import replace

    from kintsugi.core.plan import BlendPlan
    from kintsugi.fusor.control.controller import LoadingController, Planner, PlanRequest
    from tests.integration.engine.conftest import ask

    def raised(self: LoadingController, request: PlanRequest) -> BlendPlan:
        plan = Planner(self.selection).plan(request)
        return replace(plan, selection=replace(plan.selection, ratio=0.4))

    prompt = rag(*CHUNKS)
    with monkeypatch.context() as patched:
        patched.setattr(LoadingController, "plan", raised)
        first = accounting_of(asked(engine, prompt.params(None)))
    assert first["ratio"] == 0.4
    again = accounting_of(ask(engine, prompt.token_ids, prompt.params(None)))
    assert again["tokens_prefix_cached"] >= 700
