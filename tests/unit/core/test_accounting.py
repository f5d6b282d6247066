"""What a response says a request cost."""

from __future__ import annotations

import json
from typing import Any

from kintsugi.core.accounting import Accounting, LayerTiming, Outcome, add_up


def test_cost_is_the_share_of_token_layers() -> None:
    assert Accounting(Outcome.BLENDED, token_layers_computed=24.5, token_layers_total=98).cost == 0.25


def test_an_unmeasured_request_cost_a_full_prefill() -> None:
    assert Accounting(Outcome.DECLINED, reason="lora").cost == 1.0


def test_the_json_form_leaves_out_what_says_nothing() -> None:
    wire = Accounting(Outcome.DECLINED, reason="lora").to_mapping()
    assert wire["outcome"] == "declined"
    assert wire["reason"] == "lora"
    assert wire["chunks_hit"] == 0
    assert not {"selector", "ratio", "transport", "recomputed_positions", "timeline"} & set(wire)


def test_the_json_form_survives_json() -> None:
    wire = Accounting(
        Outcome.BLENDED,
        selector="hkvd",
        ratio=0.15,
        token_layers_computed=1.0,
        token_layers_total=3,
        recomputed_positions={0: [1, 2], 1: [2]},
        timeline=[LayerTiming(0.0, 1.0, 1.0, 2.5)],
    ).to_mapping()
    read = json.loads(json.dumps(wire))
    assert read["cost"] == 0.3333
    assert read["recomputed_positions"] == {"0": [1, 2], "1": [2]}
    assert read["timeline"][0]["compute_end_ms"] == 2.5


def blended(hit: int) -> dict[str, Any]:
    work = {"token_layers_computed": 10.0 * hit, "token_layers_total": 40 * hit, "selector": "query"}
    return Accounting(Outcome.BLENDED, chunks_hit=hit, ttft_ms=5.0 * hit, ratio=0.2, **work).to_mapping()  # type: ignore[arg-type]


DECLINED = Accounting(
    Outcome.DECLINED,
    reason="no_chunk_cached: none",
    chunks_missed=1,
    ttft_ms=7.0,
    token_layers_computed=40,
    token_layers_total=40,
).to_mapping()


def test_the_accounting_of_several_prompts_is_their_sum_in_any_order() -> None:
    total = add_up([blended(1), DECLINED])
    assert total == add_up([DECLINED, blended(1)])
    assert (total["chunks_hit"], total["chunks_missed"], total["ttft_ms"]) == (1, 1, 7.0)
    assert total["cost"] == round(50 / 80, 4)
    assert total["outcome"] == "mixed"
    assert total["reason"] == "several_prompts: 1 blended, 1 declined (no_chunk_cached)"


def test_prompts_of_one_outcome_have_that_outcome() -> None:
    total = add_up([blended(1), blended(2)])
    assert (total["outcome"], total["chunks_hit"], total["ratio"], total["cost"]) == ("blended", 3, 0.2, 0.25)
    assert "reason" not in total
    other = {**DECLINED, "reason": "no_chunk_cached: neither"}
    assert add_up([other, DECLINED])["reason"] == add_up([DECLINED, other])["reason"]
    assert add_up([DECLINED, {**DECLINED, "reason": "busy: wait"}])["outcome"] == "declined"


def test_the_accounting_of_one_prompt_is_kept_as_it_is() -> None:
    assert add_up([{**DECLINED, "timeline": [1]}]) == {**DECLINED, "timeline": [1]}
