"""Discovered chunks of a model with several cache groups, some of which keep a window only."""

from __future__ import annotations

import pytest

from kintsugi.core.request import KintsugiParams
from kintsugi.engine.local import LocalEngine
from tests.integration.engine.conftest import (
    PREFIX,
    EngineSlot,
    ask_cold,
    max_dlogprob,
    ram_store,
    random_tokens,
    save_discovered,
    when_discovering,
)

pytestmark = [pytest.mark.engine("tiny-gemma3-discovery"), pytest.mark.full]

STORE = "discovery-windows"
NAMESPACE = "windows"
CONTEXT = random_tokens(40, 50)


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot) -> LocalEngine:
    config: dict[str, object] = {"store": f"ram://{STORE}", "context_token_ids": CONTEXT}
    return when_discovering(engine_slot.get("tiny-gemma3", config))


def test_what_recurs_is_saved_in_both_copies_and_hit(engine: LocalEngine) -> None:
    (line_break,) = engine.tokenizer("\n", add_special_tokens=False).input_ids
    passages = [[*random_tokens(300, seed), line_break, line_break] for seed in range(3)]
    params = KintsugiParams(NAMESPACE, ratio=1.0, discover=True)

    def prompt_of(*order: int) -> list[int]:
        chosen = [token for number in order for token in passages[number]]
        return [*PREFIX, *chosen, *random_tokens(20, sum(order))]

    for order in ((0, 1), (1, 2, 0)):
        ask_cold(engine, prompt_of(*order), params)
        save_discovered(engine)
    manifests = ram_store(STORE).list(NAMESPACE)
    assert sum(manifest.num_tokens for manifest in manifests) == 2 * (len(passages[0]) + len(passages[1]))
    elsewhere = prompt_of(2, 1, 0)
    full, blended = ask_cold(engine, elsewhere), ask_cold(engine, elsewhere, params)
    assert blended.accounting is not None
    assert blended.accounting["outcome"] == "blended"
    assert blended.accounting["tokens_discovered"] == len(passages[0]) + len(passages[1])
    assert max_dlogprob(full, blended) <= 0.01
    engine.reset_prefix_cache()  # refused while blocks are in use
