"""Probing contexts over engines whose quality is known: which prompts are used, and what they cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.report import CalibrationReport, Thresholds
from kintsugi.quality import calibrate as calibration
from kintsugi.quality.calibrate import Budget, calibrate
from kintsugi.quality.contexts import PROMPTS_MAX, PROMPTS_MIN, ContextProber
from kintsugi.quality.measure import Bench
from kintsugi.quality.racing import Ask
from tests.unit.core.test_report import BINDING
from tests.unit.quality.fakes import FakeEngine, case

LAYERS = 8
BUDGET = Budget(ratios=(0.15, 0.3), cost_max=2.0)
CASES = [case(index) for index in range(400)]


def engine_of(wrong: int) -> FakeEngine:
    """Its blends are wrong on every so many-th prompt."""
    engine = FakeEngine()
    engine.right_from = lambda selection, index: index % wrong != 0
    return engine


def prober_of(
    count: int = 2, budget: Budget = BUDGET, clock_s: Callable[[], float] = lambda: 0.0
) -> ContextProber:
    return ContextProber(count, budget, Thresholds(), "plain", clock_s)


def report_of(bench: Bench) -> CalibrationReport:
    arguments = (LAYERS, BINDING, BUDGET, Thresholds(), "test", "2026-01-01", "plain")
    return calibrate(bench, *arguments, clock_s=lambda: 0.0).report


def blended(engine: FakeEngine) -> set[int]:
    """The cases that were blended."""
    return {prompt.token_ids[-1] for prompt in engine.submitted if prompt.params is not None}


def test_the_context_behind_which_probes_are_nearest_to_full_prefill_wins() -> None:
    bench = Bench(FakeEngine(), CASES, 1)
    prober = prober_of()
    prober.probe("none", bench.on_engine(engine_of(2)), LAYERS)
    prober.probe("bundled", bench.on_engine(engine_of(100)), LAYERS)
    choice = prober.choose()
    assert (choice.context, choice.num_prompts) == ("bundled", PROMPTS_MAX)


def test_the_confirmation_never_sees_a_prompt_that_was_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    confirmed: set[int] = set()

    keep = calibration._RaceRunner._keep

    def record(runner: Any, asked: Ask, indices: Sequence[int], measured: Any) -> None:
        if asked.is_confirmation:
            confirmed.update(indices)
        keep(runner, asked, indices, measured)

    monkeypatch.setattr(calibration._RaceRunner, "_keep", record)
    probed = FakeEngine()
    bench = Bench(probed, CASES, 1)
    prober_of(1).probe("none", bench, LAYERS)
    report = report_of(bench.on_engine(FakeEngine()))
    assert len(blended(probed)) == PROMPTS_MAX
    assert confirmed
    assert not confirmed & blended(probed)
    assert report.to_bytes() == report_of(Bench(FakeEngine(), CASES, 1)).to_bytes()


def test_full_prefill_is_computed_once_for_all_contexts() -> None:
    first, second = FakeEngine(), FakeEngine()
    bench = Bench(first, CASES, 1)
    prober = prober_of()
    prober.probe("none", bench.on_engine(first), LAYERS)
    prober.probe("bundled", bench.on_engine(second), LAYERS)
    assert len([prompt for prompt in first.submitted if prompt.params is None]) == 32
    assert all(prompt.params is not None for prompt in second.submitted)
    assert set(second.saved) <= set(first.saved), "each context has chunks of its own"
    assert second.saved


def test_each_context_has_its_share_of_half_the_minutes_and_at_least_one_batch() -> None:
    now = [0.0]

    class SlowEngine(FakeEngine):
        def generate(self, prompts: Any) -> Any:
            now[0] += 20.0
            return super().generate(prompts)

    budget = dataclasses.replace(BUDGET, minutes=4.0)
    bench = Bench(SlowEngine(), CASES, 1)
    prober = prober_of(2, budget, lambda: now[0])
    prober.probe("none", bench.on_engine(SlowEngine()), LAYERS)
    assert 1.0 <= prober.minutes < 2.0
    now[0] += 600.0
    prober.probe("bundled", bench.on_engine(SlowEngine()), LAYERS)
    assert prober.choose().num_prompts == PROMPTS_MIN
    assert prober_of(1, dataclasses.replace(BUDGET, minutes=None)).minutes == 0.0


def test_without_a_limit_every_screening_prompt_may_be_probed() -> None:
    ticks = iter(range(10**9))
    prober = prober_of(1, dataclasses.replace(BUDGET, minutes=None), lambda: 600.0 * next(ticks))
    prober.probe("none", Bench(FakeEngine(), CASES, 1), LAYERS)
    assert prober.choose().num_prompts == PROMPTS_MAX
    few = prober_of(1)
    few.probe("none", Bench(FakeEngine(), CASES[:40], 1), LAYERS)
    assert few.choose().num_prompts == 8, "40 prompts leave two rounds of four for screening"


def test_a_form_that_does_not_work_and_too_few_questions_are_refused_before_anything_is_probed() -> None:
    wrong = FakeEngine(full_is_right=False)
    with pytest.raises(InvalidField, match="rarely right"):
        prober_of().probe("none", Bench(wrong, CASES, 1), LAYERS)
    assert not blended(wrong)
    with pytest.raises(InvalidField, match="a calibration needs 32"):
        prober_of().probe("none", Bench(FakeEngine(), CASES[:31], 1), LAYERS)


def test_progress_names_the_probe_and_its_prompts() -> None:
    lines: list[str] = []
    prober_of(1).probe("none", Bench(FakeEngine(), CASES, 1), LAYERS, lines.append)
    assert lines[:3] == [
        "storing the chunks of 32 prompts",
        "full prefill of 32 prompts",
        "storing the chunks of 8 prompts",
    ]
    assert "query r=0.15 @1 on prompts 9-16" in lines
