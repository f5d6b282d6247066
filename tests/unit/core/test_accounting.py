"""What a response says a request cost."""

from __future__ import annotations

import json

from kintsugi.core.accounting import Accounting, LayerTiming, Outcome


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
