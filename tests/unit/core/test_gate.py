"""What a stored document allows an engine."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kintsugi.core.errors import BelowMinimum, NotBlendable
from kintsugi.core.gate import GateState, decide
from kintsugi.core.plan import Selection
from kintsugi.core.prompt import PromptShape
from kintsugi.core.report import CalibrationReport
from kintsugi.core.request import BlendOptions, SelectorName
from tests.unit.core.test_report import BARS, BINDING, DOMAIN, HKVD, QUIET, RANDOM, SEARCH, entry, report

FALLBACK = Selection(0.15, HKVD)
PASSING = report(entry(0.1, check_layer=3), entry(0.3, RANDOM))


def test_a_passing_report_opens_the_gate_and_sets_the_default() -> None:
    state = decide(PASSING.to_bytes(), BINDING)
    assert state.is_open
    assert state.resolve(FALLBACK, BlendOptions()) == Selection(0.1, HKVD, 3)
    assert state.resolve(FALLBACK, BlendOptions(ratio=0.5)) == Selection(0.5, HKVD, 3)
    assert state.resolve(FALLBACK, BlendOptions(selector=RANDOM)) == Selection(0.3, RANDOM)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (None, "not_calibrated"),
        (b"{}", "calibration_outdated"),
        (b"[]", "calibration_unreadable"),
        (json.dumps({**json.loads(PASSING.to_bytes()), "version": 1}).encode(), "calibration_outdated"),
        (PASSING.to_bytes().replace(b'"seed": 7', b'"seed": 8'), "calibration_unreadable"),
        (report(entry(kl_mean=1.0)).to_bytes(), "calibration_failed"),
        (PASSING.as_tripped("KL rose", "now").to_bytes(), "drift"),
        *(
            (
                dataclasses.replace(
                    PASSING, binding=dataclasses.replace(BINDING, **{name: "ff" * 32})
                ).to_bytes(),
                "calibration_of_another",
            )
            for name in ("fingerprint", "prefix", "codec", "vllm", "kintsugi")
        ),
    ],
)
def test_anything_else_closes_it_and_says_why(document: bytes | None, reason: str) -> None:
    state = decide(document, BINDING)
    assert not state.is_open
    assert state.reason == reason
    with pytest.raises(NotBlendable) as caught:
        state.resolve(FALLBACK, BlendOptions(ratio=1.0))
    assert caught.value.reason == reason
    assert reason == "calibration_failed" or "kintsugi calibrate" in state.detail


def test_a_ratio_below_the_minimum_is_refused_with_the_minimum_named() -> None:
    state = decide(PASSING.to_bytes(), BINDING)
    with pytest.raises(BelowMinimum, match=r"0\.05 is below 0\.1"):
        state.resolve(FALLBACK, BlendOptions(ratio=0.05))
    with pytest.raises(BelowMinimum, match=r"below 0\.3"):
        state.resolve(FALLBACK, BlendOptions(ratio=0.1, selector=RANDOM))
    assert state.resolve(FALLBACK, BlendOptions(ratio=0.1)).ratio == 0.1


def test_an_adaptive_ratio_may_not_undercut_what_was_measured() -> None:
    plain = decide(PASSING.to_bytes(), BINDING)
    with pytest.raises(BelowMinimum, match=r"adaptive_mass: 0\.5 is below 1"):
        plain.resolve(FALLBACK, BlendOptions(adaptive_mass=0.5))
    assert plain.resolve(FALLBACK, BlendOptions(adaptive_mass=1.0)).adaptive_mass == 1.0
    measured = dataclasses.replace(Selection(0.2, HKVD), adaptive_mass=0.6)
    adaptive = decide(report(dataclasses.replace(entry(), selection=measured)).to_bytes(), BINDING)
    assert adaptive.resolve(FALLBACK, BlendOptions()).adaptive_mass == 0.6
    assert adaptive.resolve(FALLBACK, BlendOptions(adaptive_mass=0.7)).adaptive_mass == 0.7
    with pytest.raises(BelowMinimum, match=r"0\.5 is below 0\.6"):
        adaptive.resolve(FALLBACK, BlendOptions(adaptive_mass=0.5))


def test_a_selector_that_never_passed_is_refused_but_for_a_full_ratio() -> None:
    state = decide(PASSING.to_bytes(), BINDING)
    with pytest.raises(NotBlendable, match=r"selector_not_calibrated: .*: hkvd, random"):
        state.resolve(FALLBACK, BlendOptions(ratio=0.9, selector=SelectorName.QUERY))
    assert state.resolve(FALLBACK, BlendOptions(ratio=1.0, selector=SelectorName.QUERY)).ratio == 1.0


@pytest.mark.parametrize(
    ("shape", "departure"),
    [
        (PromptShape(250, (60, 60)), None),
        (PromptShape(80, (20,)), None),
        (PromptShape(500, (125, 125, 125)), None),
        (PromptShape(501, (100, 100)), "501 tokens, calibrated with 100 to 400"),
        (PromptShape(79, (30,)), "79 tokens"),
        (PromptShape(400, (30,) * 6), "6 chunks, calibrated with 2 to 4"),
        (PromptShape(300, (200, 60)), "130 tokens per chunk"),
        (PromptShape(300, (4, 6)), "5 tokens per chunk, calibrated with 20 to 100"),
    ],
)
def test_a_prompt_unlike_the_calibrated_ones_is_refused(shape: PromptShape, departure: str | None) -> None:
    state = decide(PASSING.to_bytes(), BINDING)
    if departure is None:
        state.check_shape(shape)
        return
    with pytest.raises(NotBlendable, match=f"outside_calibration: the prompt has {departure}"):
        state.check_shape(shape)
    GateState(None, "allow_uncalibrated").check_shape(shape)


def test_without_calibration_the_engines_own_configuration_decides() -> None:
    state = GateState(None, "told to")
    assert state.resolve(FALLBACK, BlendOptions()) == FALLBACK
    assert state.resolve(FALLBACK, BlendOptions(ratio=0.0, selector=RANDOM)) == Selection(0.0, RANDOM)


def test_the_report_of_nothing_fails() -> None:
    empty = CalibrationReport.of(BINDING, "now", "test", 7, QUIET, BARS, DOMAIN, SEARCH, [])
    assert decide(empty.to_bytes(), BINDING).reason == "calibration_failed"
