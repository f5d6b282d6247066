"""Calibration over an engine whose quality is known: what is chosen, how often it asks, what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.prompt import LengthRange
from kintsugi.core.report import REPORT_BYTES_MAX, CalibrationReport, Quantity, Thresholds
from kintsugi.core.request import SelectorName
from kintsugi.discovery.segments import TOKENS_MAX, TOKENS_MIN
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.models.prompt_form import PromptForm
from kintsugi.quality import grid, reports
from kintsugi.quality.calibrate import (
    Budget,
    Calibration,
    calibrate,
    count_affordable_finalists,
    prepare_bench,
    race_prompts,
)
from kintsugi.quality.measure import Bench
from kintsugi.quality.questions import INSTRUCTION, make_passage_questions, make_segment_questions
from tests.fakes.chat_templates import CHATML, tokenizer_with
from tests.unit.core.test_report import BINDING
from tests.unit.quality.fakes import FakeEngine, case

MINUTES_SHORT = 8.0
"""Enough for some prompts and not for a decision, where each answer takes a second."""
BUDGET = Budget(ratios=(0.05, 0.15, 0.3), selectors=tuple(SelectorName), cost_max=2.0)
LAYERS = 8
COUNT = 400


def run(
    engine: FakeEngine,
    count: int = COUNT,
    budget: Budget = BUDGET,
    answered: bool = True,
    clock_s: Callable[[], float] = lambda: 0.0,
    notify: Callable[[str], None] = lambda text: None,
) -> Calibration:
    cases = [case(index, ("w5",) if answered else ()) for index in range(count)]
    return calibrate(
        Bench(engine, cases, 1),
        LAYERS,
        BINDING,
        budget,
        Thresholds(),
        "test",
        "2026-01-01",
        "plain",
        notify,
        clock_s=clock_s,
    )


def blended(engine: FakeEngine) -> list[int]:
    """The cases that were blended, in order."""
    return [prompt.token_ids[-1] for prompt in engine.submitted if prompt.params is not None]


def test_the_cheapest_good_configuration_is_found_and_bounds_stand_beside_it() -> None:
    report = run(FakeEngine()).report
    assert report.choice.selection is not None
    assert report.choice.selection.ratio == 0.15
    assert list(report.choice.limits.values()) == [report.choice.selection], "nothing else was confirmed"
    (chosen,) = [entry for entry in report.entries if entry.selection == report.choice.selection]
    assert (chosen.exact_match, chosen.exact_match_full, chosen.f1, chosen.f1_full) == (1.0, 1.0, 1.0, 1.0)
    bounds = {bound.quantity: bound for bound in chosen.bounds}
    assert set(bounds) == set(Quantity)
    assert all(bound.mean == 0.0 < bound.upper <= 0.1 for bound in bounds.values())
    assert bounds[Quantity.EXACT_MATCH].upper <= 0.03
    assert report.search.confirmed >= 1
    assert report.search.candidates > report.search.confirmed
    assert CalibrationReport.from_bytes(report.to_bytes()) == report


def test_what_only_looks_good_on_the_screening_prompts_is_not_trusted() -> None:
    """0.15 is right on the prompts that screening draws with this seed, and wrong on others."""
    probe, engine = FakeEngine(), FakeEngine()
    run(probe)
    seen = set(blended(probe)[:32])
    engine.right_from = lambda selection, index: (
        selection.ratio >= 0.3 or (selection.ratio >= 0.15 and index in seen)
    )
    report = run(engine).report
    assert report.choice.selection is None or report.choice.selection.ratio == 0.3
    assert all(entry.exact_match != 1.0 for entry in report.entries if entry.selection.ratio == 0.15)


def test_the_same_seed_decides_alike_and_another_draws_others() -> None:
    first, again = run(FakeEngine()), run(FakeEngine())
    assert first.report.to_bytes() == again.report.to_bytes()
    one, other = FakeEngine(), FakeEngine()
    run(one)
    run(other, budget=dataclasses.replace(BUDGET, seed=1))
    assert one.submitted[0].token_ids != other.submitted[0].token_ids


def test_a_model_that_no_blend_fits_gets_a_failing_report() -> None:
    engine = FakeEngine()
    engine.right_from = lambda selection, index: False
    report = run(engine).report
    assert report.choice.selection is None
    assert "looked good enough to confirm" in report.choice.why
    assert report.search.confirmed == 0


def test_the_minutes_end_the_search_and_the_undecided_says_how_many_more_it_takes() -> None:
    engine = FakeEngine()
    budget = dataclasses.replace(BUDGET, minutes=MINUTES_SHORT)
    report = run(engine, budget=budget, clock_s=lambda: float(len(engine.submitted))).report
    assert report.choice.selection is None
    assert report.search.confirmed > 0
    assert report.search.more_minutes is not None
    missing = [entry.prompts_missing for entry in report.entries if entry.place is not None]
    assert all(count and count > 0 for count in missing)
    assert "more prompts like these would decide it" in report.choice.why
    assert MINUTES_SHORT <= report.search.minutes < 1.1 * MINUTES_SHORT


@pytest.mark.parametrize(("screening_max", "expected"), [(float("inf"), 8), (1e6, 8), (170.0, 3), (3.0, 3)])
def test_as_many_finalists_as_there_is_time_to_decide_about(screening_max: float, expected: int) -> None:
    assert count_affordable_finalists(screening_max) == expected


def test_progress_names_what_is_tried_and_what_leads() -> None:
    lines: list[str] = []
    run(FakeEngine(), notify=lines.append)
    assert lines[:2] == ["storing the chunks of 32 prompts", "full prefill of 32 prompts"]
    assert any(line.startswith("screening 1 of ") for line in lines)
    assert any(line.startswith("confirming ") for line in lines)


def test_the_report_says_what_it_holds_for() -> None:
    domain = run(FakeEngine()).report.domain
    assert domain.form == "plain"
    assert (domain.prompt_tokens, domain.chunks) == (LengthRange(8, 8), LengthRange(2, 2))
    assert (domain.chunk_tokens, domain.answer_tokens) == (LengthRange(2, 2), LengthRange(1, 1))


def test_a_form_that_full_prefill_cannot_answer_is_refused_with_an_example() -> None:
    with pytest.raises(InvalidField, match=r"rarely right: it scores 0.00 .* answered 'w1' where 'w5' was"):
        run(FakeEngine(full_is_right=False))


def test_too_few_prompts_are_refused_and_few_are_warned_about() -> None:
    with pytest.raises(InvalidField, match="31 prompts are too few; allow at least 32"):
        run(FakeEngine(), 60, Budget(31))
    with pytest.raises(InvalidField, match="31 fit the model, but a calibration needs 32"):
        run(FakeEngine(), 31)
    with pytest.raises(InvalidField, match="minutes"):
        run(FakeEngine(), budget=Budget(minutes=0.0))
    few = run(FakeEngine(), 80)
    assert few.report.choice.selection is None
    assert "even a blend without any loss needs" in few.warnings[-1]


def test_questions_without_answers_are_measured_by_agreement_alone() -> None:
    calibration = run(FakeEngine(full_is_right=False), answered=False)
    assert all(entry.exact_match is None for entry in calibration.report.entries)
    assert calibration.report.choice.selection is not None
    assert "no question has an answer" in calibration.warnings[0]


def test_partly_answered_and_hard_questions_are_warned_about() -> None:
    cases = [
        case(index, ("w5",) if index % 10 < 4 else ("no",) if index % 10 < 9 else ())
        for index in range(COUNT)
    ]
    bench = Bench(FakeEngine(), cases, 1)
    warnings = calibrate(bench, LAYERS, BINDING, BUDGET, Thresholds(), "test", "now", "plain").warnings
    assert len(warnings) == 2
    assert "full prefill itself scores 0." in warnings[0]
    assert "40 of 400 questions have no answer" in warnings[1]
    some = [case(index, ("w5",) if index < 20 else ()) for index in range(COUNT)]
    few = calibrate(
        Bench(FakeEngine(), some, 1), LAYERS, BINDING, BUDGET, Thresholds(), "test", "now", "plain"
    )
    assert "only 20 of 400 questions have an answer" in few.warnings[0]
    assert few.report.choice.selection is not None


def test_tasks_and_halves_of_lengths_are_judged_on_their_own() -> None:
    cases = [case(index, task="alias" if index % 2 else "code") for index in range(6)]
    longer = dataclasses.replace(cases[0].prompt, question=(7,) * 9)
    cases = [dataclasses.replace(one, prompt=longer) if index > 3 else one for index, one in enumerate(cases)]
    asked = race_prompts(cases, frozenset(Quantity))
    assert [one.task for one in asked[:2]] == ["task code", "task alias"]
    assert {one.lengths for one in asked[:4]} == {("prompts up to 8 tokens",)}
    assert {one.lengths for one in asked[4:]} == {("prompts over 8 tokens",)}
    answers = [dataclasses.replace(one, answer_ids=(5,) * (1 + index % 2)) for index, one in enumerate(cases)]
    assert race_prompts(answers, frozenset(Quantity))[1].lengths[1] == "answers over 1 tokens"
    assert race_prompts(cases[:4:2], frozenset(Quantity))[0].strata == (), "one task, one length"


def test_every_selector_is_tried_at_layers_that_make_a_difference() -> None:
    assert grid.check_layers(8) == [1, 2, 3]
    assert grid.check_layers(2) == [1]
    assert grid.check_layers(32) == [1, 4, 8, 12]
    found = grid.selections(list(SelectorName), (0.1, 0.2), 8)
    assert {one.selector for one in found} == set(SelectorName)
    layers = {name: {one.check_layer for one in found if one.selector is name} for name in SelectorName}
    assert layers[SelectorName.HKVD] == {1, 2, 3}
    assert layers[SelectorName.RANDOM] == {1}


def test_query_layers_and_adaptive_ratios_are_tried_where_they_are_used() -> None:
    found = grid.candidates([SelectorName.HKVD, SelectorName.QUERY, SelectorName.CHUNK_HEAD], (0.1, 0.3), 8)
    layers = {name: {one.query_layers for one in found if one.selector is name} for name in SelectorName}
    assert layers[SelectorName.QUERY] == {(), (3, 4, 5), tuple(range(8))}
    assert layers[SelectorName.HKVD] == {()}
    adaptive = {one.selector for one in found if one.adaptive_mass is not None}
    assert adaptive == {SelectorName.HKVD, SelectorName.QUERY}
    assert {one.ratio for one in found if one.adaptive_mass is not None} == {0.3}
    assert len(set(found)) == len(found)


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
    enough = [case(index, ("w5",) if index < 60 else ()) for index in range(COUNT)]
    warned = calibrate(
        Bench(FakeEngine(), enough, 1), LAYERS, BINDING, BUDGET, Thresholds(), "test", "now", "plain"
    )
    assert warned.report.choice.selection is None
    assert "questions with answers are left for the confirmation" in warned.warnings[-1]


def test_questions_for_segments_vary_in_number_and_length() -> None:
    questions = make_segment_questions(lambda text: len(text.split()), 3000, 400, seed=3)
    assert {question.chunks[0] for question in questions} == {INSTRUCTION}
    words = [{len(chunk.split()) for chunk in question.chunks[1:]} for question in questions]
    assert {max(sizes) for sizes in words} >= {80, 160, 360}
    assert all(len(sizes) == 1 for sizes in words if max(sizes) <= 360), "a prompt's passages are alike"
    assert {len(question.chunks) - 1 for question in questions} == set(range(1, 10))
    assert all(sum(map(len, map(str.split, question.chunks[1:]))) <= 3000 for question in questions)
    assert all(chunk.endswith("\n\n") for question in questions for chunk in question.chunks)
    assert questions == make_segment_questions(lambda text: len(text.split()), 3000, 400, seed=3)


def test_a_model_without_room_for_a_segment_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"segments: a prompt has room for 79 tokens .* max_model_len"):
        make_segment_questions(lambda text: len(text.split()), 79, 400, seed=0)


def test_a_calibration_on_segments_holds_for_one_to_many_of_most_lengths() -> None:
    form = PromptForm.of(tokenizer_with(CHATML))
    engine: Any = SimpleNamespace(max_model_len=4096)
    whole, _ = prepare_bench(engine, form, None, Budget())
    cut, warnings = prepare_bench(engine, form, None, Budget(), segments=True)
    assert not warnings
    cases = [len(one.prompt.chunks) for one in cut.cases]
    assert min(cases) == 1
    assert max(cases) > 10
    means = [sum(len(c.token_ids) for c in one.prompt.chunks) / len(one.prompt.chunks) for one in cut.cases]
    assert min(means) <= 80
    assert max(means) >= 350
    assert {len(one.prompt.chunks) for one in whole.cases} == {4}
    assert all(len(c.token_ids) >= 64 for one in cut.cases for c in one.prompt.chunks)
    assert all(one.prompt.chunks[0].separator for one in cut.cases), "none is exact as loaded"


def test_the_report_of_the_tiny_model_admits_no_segment() -> None:
    """As docs/howto/vllm.md says."""
    domain = reports.read(bundled_checkpoint() / "calibration.json").domain
    assert not any(map(domain.holds_chunk, range(TOKENS_MIN, TOKENS_MAX + 1)))


def test_a_report_too_large_for_a_store_is_refused_before_the_search() -> None:
    """Names count, too: here each task's is as long as a path."""
    name = "a folder of questions/" * 10

    def calibrated(tasks: int, budget: Budget) -> CalibrationReport:
        cases = [case(index, task=f"{name}{index % tasks}") for index in range(80 * tasks)]
        arguments = (LAYERS, BINDING, budget, Thresholds(), "test", "2026-01-01", "plain")
        return calibrate(Bench(engine, cases, 1), *arguments, clock_s=lambda: 0.0).report

    engine = FakeEngine()
    with pytest.raises(
        InvalidField, match=r"^questions: 100 kinds .* only 1015808 are available; use at most \d\d "
    ):
        calibrated(100, Budget(prompts=8000))
    assert not blended(engine)
    engine.right_from = lambda selection, index: True
    report = calibrated(80, Budget(prompts=6400))
    assert len({bound.stratum for entry in report.entries for bound in entry.bounds}) > 80
    assert len(report.to_bytes()) < REPORT_BYTES_MAX
