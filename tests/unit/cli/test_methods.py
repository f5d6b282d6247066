"""The comparison runs each method from a cold cache and says what it cost."""

from __future__ import annotations

import pytest

from kintsugi.cli.methods import Method, blend_once, compare
from kintsugi.core.request import KintsugiParams, SelectorName
from tests.unit.cli.fakes import PROMPT, FakeEngine

CHOICE = KintsugiParams("tenant", ratio=0.3, selector=SelectorName.RANDOM)


def test_every_method_is_measured_against_full_prefill() -> None:
    engine = FakeEngine()
    measurements = compare(engine, PROMPT, CHOICE, max_tokens=4, repeat=3)
    assert [m.method for m in measurements] == list(Method)
    assert [m.cost for m in measurements] == [1.0, 1.0, 0.01, 0.4]
    assert [m.fell_back_because for m in measurements] == [None] * 4
    assert engine.resets == (1 + 3) * len(Method), "each run starts from a cold prefix cache"


def test_requests_carry_what_the_user_chose() -> None:
    engine = FakeEngine()
    compare(engine, PROMPT, CHOICE, max_tokens=4)
    params = [prompt.params for prompt in engine.prompts if prompt.params is not None]
    assert [p.ratio if p.trial is None else p.trial.ratio for p in params] == [0.0, 0.3] * 2
    assert {p.selector for p in params if p.trial is None} == {SelectorName.RANDOM}
    assert all(p.spans == PROMPT.spans for p in params)
    warm_ups = [prompt for prompt in engine.prompts if list(prompt.token_ids) == [0, 10, 11, 12]]
    assert len(warm_ups) == 2, "prefix caching is given the first chunk"


@pytest.mark.parametrize("reason", ["lora: no", "self_test_failed: shifted keys"])
def test_a_fallback_gives_its_reason(reason: str) -> None:
    blend = blend_once(FakeEngine(reason), PROMPT, CHOICE, max_tokens=4)
    assert blend.fell_back_because == reason
    assert blend.cost == 1.0


def test_the_json_form_has_the_speed_up() -> None:
    measurements = compare(FakeEngine(), PROMPT, CHOICE, max_tokens=4)
    blend = measurements[-1].to_mapping(measurements[0].ttft_s)
    assert (blend["method"], blend["ttft_ms"], blend["speedup"]) == ("blend", 250.0, 4.0)
