"""Calibration over an engine whose quality is known: what is chosen, how often it asks, what it refuses."""

from __future__ import annotations

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.report import Thresholds
from kintsugi.core.request import SelectorName
from kintsugi.quality import grid
from kintsugi.quality.calibrate import Budget, Calibration, calibrate, make_passage_questions
from kintsugi.quality.measure import Bench
from tests.unit.core.test_report import BINDING
from tests.unit.quality.fakes import FakeEngine, case

BUDGET = Budget(
    prompts=60, screened=10, ratios=(0.05, 0.15, 0.3), selectors=tuple(SelectorName), cost_max=2.0
)
LAYERS = 8


def run(engine: FakeEngine, count: int = 60, budget: Budget = BUDGET, answered: bool = True) -> Calibration:
    cases = [case(index, ("w5",) if answered else ()) for index in range(count)]
    bench = Bench(engine, cases, 1)
    return calibrate(bench, LAYERS, BINDING, budget, Thresholds(), "test", "2026-01-01")


def test_the_cheapest_good_configuration_is_found_for_every_selector() -> None:
    report = run(FakeEngine()).report
    assert report.choice.selection is not None
    assert report.choice.selection.ratio == 0.15
    assert {name: one.ratio for name, one in report.choice.limits.items()} == dict.fromkeys(
        (name.value for name in SelectorName), 0.15
    )


def test_what_only_looks_good_on_the_screening_prompts_is_not_trusted() -> None:
    """0.15 is right on the prompts that screening draws with this seed, and wrong on others."""
    probe, engine = FakeEngine(), FakeEngine()
    run(probe)
    seen = [prompt.token_ids[-1] for prompt in probe.submitted if prompt.params is not None][:10]
    engine.right_from = lambda selection, index: (
        selection.ratio >= 0.3 or (selection.ratio >= 0.15 and index in seen)
    )
    report = run(engine).report
    assert report.choice.selection is not None
    assert report.choice.selection.ratio == 0.3


def test_ratios_that_fail_late_at_every_check_layer_leave_the_next_its_chance() -> None:
    """0.05 and 0.15 look right at all check layers of a selector, and are not."""
    probe, engine = FakeEngine(), FakeEngine()
    run(probe)
    seen = [prompt.token_ids[-1] for prompt in probe.submitted if prompt.params is not None][:10]
    engine.right_from = lambda selection, index: selection.ratio >= 0.3 or index in seen
    limits = run(engine).report.choice.limits
    assert {name: one.ratio for name, one in limits.items()} == dict.fromkeys(
        (name.value for name in SelectorName), 0.3
    )


def test_the_same_seed_decides_alike_and_another_draws_others() -> None:
    first, again = run(FakeEngine(), 90), run(FakeEngine(), 90)
    assert first.report.to_bytes() == again.report.to_bytes()
    one, other = FakeEngine(), FakeEngine()
    run(one, 90)
    run(other, 90, Budget(60, 10, seed=1, ratios=BUDGET.ratios))
    assert one.submitted[0].token_ids != other.submitted[0].token_ids


def test_a_model_that_no_blend_fits_gets_a_failing_report() -> None:
    engine = FakeEngine()
    engine.right_from = lambda selection, index: False
    calibration = run(engine)
    assert calibration.report.choice.selection is None
    assert "nearest is" in calibration.report.choice.why


def test_a_model_that_answers_nothing_right_is_refused() -> None:
    with pytest.raises(InvalidField, match="full prefill answers none of 60 correctly"):
        run(FakeEngine(full_is_right=False))


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(InvalidField, match="31 prompts are too few; allow at least 32"):
        run(FakeEngine(), 60, Budget(31))


def test_too_few_questions_are_refused() -> None:
    with pytest.raises(InvalidField, match="31 fit the model, but a calibration needs 32"):
        run(FakeEngine(), 31)


def test_questions_without_answers_are_measured_by_agreement_alone() -> None:
    calibration = run(FakeEngine(full_is_right=False), answered=False)
    assert all(entry.accuracy is None for entry in calibration.report.entries)
    assert calibration.report.choice.selection is not None
    assert "no question has an answer" in calibration.warnings[0]


def test_partly_answered_and_hard_questions_are_warned_about() -> None:
    cases = [case(index, ("w5",) if index < 20 else ("no",) if index < 50 else ()) for index in range(60)]
    bench = Bench(FakeEngine(), cases, 1)
    warnings = calibrate(bench, LAYERS, BINDING, BUDGET, Thresholds(), "test", "now").warnings
    assert len(warnings) == 2
    assert "10 of 60 questions have no answer" in warnings[0]
    assert "own accuracy is 0.40" in warnings[1]


def test_every_selector_is_tried_at_layers_that_make_a_difference() -> None:
    assert grid.check_layers(8) == [1, 2, 3]
    assert grid.check_layers(2) == [1]
    assert grid.check_layers(32) == [1, 4, 8, 12]
    found = grid.selections(list(SelectorName), (0.1, 0.2), 8)
    assert {one.selector for one in found} == set(SelectorName)
    layers = {name: {one.check_layer for one in found if one.selector is name} for name in SelectorName}
    assert layers[SelectorName.HKVD] == {1, 2, 3}
    assert layers[SelectorName.RANDOM] == {1}


def test_what_costs_too_much_is_not_tried() -> None:
    candidates = grid.selections([SelectorName.HKVD], (0.05, 0.9), 8)
    work = grid.workload_of([case(0)], 8)
    kept = grid.affordable(candidates, work, 0.6)
    assert kept
    assert all(one.ratio == 0.05 for one in kept)


def test_bundled_passages_make_questions_without_answers() -> None:
    questions = make_passage_questions(lambda text: len(text), 600, 20, seed=3)
    assert len(questions) == 20
    assert len({question.chunks for question in questions}) > 15
    assert all(len(question.chunks) == 4 and not question.answers for question in questions)
    assert all(len(chunk) < 900 for question in questions for chunk in question.chunks)
    assert questions == make_passage_questions(lambda text: len(text), 600, 20, seed=3)
