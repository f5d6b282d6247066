"""Calibration over an engine whose quality is known: what passes, when it ends, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.evidence import Quality
from kintsugi.core.plan import Selection
from kintsugi.core.report import FILE, LADDER, Cell, Report
from kintsugi.models.prompt_form import PromptForm
from kintsugi.quality import reports
from kintsugi.quality.calibrate import BATCH, calibrate, identify_evidence, prepare_bench
from kintsugi.quality.measure import Bench
from kintsugi.quality.questions import INSTRUCTION, Question, make_passage_questions, shape_segments
from kintsugi.quality.reports import ReportKeeper
from kintsugi.quality.stream import list_undecided
from kintsugi.store.client.ram import RamStore
from tests.fakes.chat_templates import CHATML, tokenizer_with
from tests.fakes.reports import BINDING, VERSIONS, fetch_report
from tests.unit.quality.fakes import FakeEngine, case

COUNT = 400
CELL = Cell.of(False, 8)


class Run:
    """One calibration."""

    def __init__(
        self,
        engine: FakeEngine,
        count: int = COUNT,
        answers: tuple[str, ...] = (),
        minutes: float | None = None,
        clock_s: Callable[[], float] = lambda: 0.0,
        segments: bool = False,
        seed: int = 0,
    ) -> None:
        self.lines: list[str] = []
        bench = Bench(engine, [case(index, answers) for index in range(count)], 1, BATCH)  # type: ignore[arg-type]
        keeper = ReportKeeper(None, BINDING, VERSIONS, Quality.BALANCED)
        calibrate(
            bench,
            keeper,
            Quality.BALANCED,
            "plain",
            segments,
            minutes,
            seed,
            self.lines.append,
            clock_s,
        )
        self.report: Report = keeper.report
        self.standing = self.report.standing(CELL, FILE, Quality.BALANCED)
        self.is_over = not list_undecided(self.report, CELL, FILE, Quality.BALANCED)

    def pairs(self, selection: Selection) -> int:
        return self.report.tally(CELL, FILE, selection).pairs


def blended(engine: FakeEngine) -> list[int]:
    """The cases that were blended, in order."""
    return [prompt.token_ids[-1] for prompt in engine.submitted if prompt.params is not None]


def test_everything_passes_where_nothing_is_lost() -> None:
    engine = FakeEngine()
    engine.right_from = lambda selection, index: True
    run = Run(engine)
    assert (run.report.cells, run.standing.passed, run.is_over) == ([CELL], LADDER, True)
    assert all(run.pairs(one) < 100 for one in LADDER), "it ends once all have passed"
    assert run.report.allowance(CELL, "anyone", Quality.BALANCED, VERSIONS) is not None


def test_what_loses_too_much_ends_it_after_few_prompts() -> None:
    """Every second answer is wrong below a ratio of 0.15."""
    run = Run(FakeEngine())
    assert run.standing.passed == LADDER[:3]
    assert (run.standing.next, run.is_over) == (LADDER[3], True)
    assert run.pairs(LADDER[3]) < 100


def test_a_model_that_no_blend_fits_passes_nothing_and_says_so_soon() -> None:
    engine = FakeEngine()
    engine.right_from = lambda selection, index: False
    run = Run(engine)
    assert (run.standing.passed, run.is_over) == ((), True)
    assert len(set(blended(engine))) <= 2 * BATCH
    assert run.pairs(LADDER[2]) == 0, "only the next one and the one after it are measured"


def test_answers_are_tested_where_they_are_given() -> None:
    engine = FakeEngine()
    engine.right_from = lambda selection, index: True
    run = Run(engine, answers=("w5",))
    tally = run.report.tally(CELL, FILE, LADDER[0])
    assert tally.answers == ((0, tally.pairs),)
    assert tally.pairs > 150, "a loss of three points takes more answers"
    assert run.standing.passed == LADDER


def test_the_evidence_is_kept_while_it_grows_and_never_counts_twice() -> None:
    """A calibration that is killed, and one that is run again on the same questions."""
    store, engine = RamStore(), FakeEngine()
    engine.right_from = lambda selection, index: True
    kept: list[int] = []

    def publish(report: Report) -> None:
        reports.publish(store, report)
        stored = fetch_report(store, BINDING)
        assert stored is not None
        kept.append(stored.tally(CELL, FILE, LADDER[0]).pairs)
        if len(kept) == 3:
            raise KeyboardInterrupt

    bench = Bench(engine, [case(index, ()) for index in range(COUNT)], 1, BATCH)  # type: ignore[arg-type]
    for _ in range(2):
        keeper = ReportKeeper(None, BINDING, VERSIONS, Quality.BALANCED, writer=identify_evidence(bench))
        with suppress(KeyboardInterrupt):
            calibrate(bench, keeper, Quality.BALANCED, "plain", keep=publish)
    assert kept[:3] == [BATCH, 2 * BATCH, 3 * BATCH]
    assert len(kept) > 3
    assert kept == sorted(kept), "measuring again takes nothing back"
    stored = fetch_report(store, BINDING)
    assert stored is not None
    once = Run(engine).report
    assert [stored.tally(CELL, FILE, one) for one in LADDER] == [
        once.tally(CELL, FILE, one) for one in LADDER
    ]
    other = Bench(engine, bench.cases[1:], 1, BATCH)  # type: ignore[arg-type]
    assert identify_evidence(other) != identify_evidence(bench)


def test_time_ends_it_and_keeps_the_evidence() -> None:
    engine = FakeEngine()
    run = Run(engine, minutes=1.2, clock_s=lambda: float(len(engine.submitted)))
    assert (run.standing.passed, run.standing.next, run.is_over) == ((), LADDER[0], False)
    assert run.pairs(LADDER[0]) == 2 * BATCH
    assert run.standing.missing is not None


def test_the_same_seed_measures_alike_and_another_draws_others() -> None:
    one, again, other = FakeEngine(), FakeEngine(), FakeEngine()
    first = Run(one)
    assert Run(again).report.tally(CELL, FILE, LADDER[0]) == first.report.tally(CELL, FILE, LADDER[0])
    Run(other, seed=1)
    assert blended(one) == blended(again) != blended(other)


def test_a_prompt_is_measured_once_with_each_configuration() -> None:
    engine = FakeEngine()
    engine.right_from = lambda selection, index: True
    Run(engine, 48)
    used = [(prompt.token_ids[-1], prompt.params.trial.ratio) for prompt in engine.submitted if prompt.params]  # type: ignore[union-attr]
    assert len(used) == len(set(used))


def test_discovered_prompts_are_cells_of_their_own() -> None:
    run = Run(FakeEngine(), segments=True)
    assert run.report.cells == [Cell.of(True, 8)]
    assert run.pairs(LADDER[0]) == 0


def test_progress_names_what_is_measured_and_what_passes() -> None:
    lines = Run(FakeEngine()).lines
    assert lines[0] == "full prefill of 32 prompts"
    assert lines[1] == "query r=0.75 @1, 16 of at most 400 prompts"
    assert any(line.endswith("; query r=0.75 @1 passes") for line in lines)


def test_a_form_that_full_prefill_cannot_answer_is_refused_with_an_example() -> None:
    with pytest.raises(InvalidField, match=r"rarely right: it scores 0.00 .* answered 'w1' where 'w5' was"):
        Run(FakeEngine(full_is_right=False), answers=("w5",))
    assert Run(FakeEngine(full_is_right=False)).report.cells, "without answers it may say anything"


def test_too_few_prompts_are_refused() -> None:
    form = PromptForm.of(tokenizer_with(CHATML))
    engine: Any = SimpleNamespace(max_model_len=4096)
    few = make_passage_questions(len, {600: (4,)}, 39, seed=3)
    with pytest.raises(InvalidField, match="39 fit the model, but a calibration needs 40"):
        prepare_bench(engine, form, few)


def test_bundled_passages_make_questions_without_answers() -> None:
    questions = make_passage_questions(len, {600: (4,)}, 20, seed=3)
    assert len(questions) == 20
    assert len({question.chunks for question in questions}) > 15
    assert all(len(question.chunks) == 4 and not question.answers for question in questions)
    assert all(len(chunk) < 900 for question in questions for chunk in question.chunks)
    assert questions == make_passage_questions(len, {600: (4,)}, 20, seed=3)


def test_questions_for_segments_vary_in_number_and_length() -> None:
    def make() -> list[Question]:
        shapes = shape_segments(3000)
        return make_passage_questions(lambda text: len(text.split()), shapes, 400, 3, (INSTRUCTION,))

    questions = make()
    assert {question.chunks[0] for question in questions} == {INSTRUCTION}
    words = [{len(chunk.split()) for chunk in question.chunks[1:]} for question in questions]
    assert {max(sizes) for sizes in words} >= {80, 160, 360}
    assert all(len(sizes) == 1 for sizes in words if max(sizes) <= 360), "a prompt's passages are alike"
    assert {len(question.chunks) - 1 for question in questions} == set(range(1, 10))
    assert all(sum(map(len, map(str.split, question.chunks[1:]))) <= 3000 for question in questions)
    assert all(chunk.endswith("\n\n") for question in questions for chunk in question.chunks)
    assert questions == make()


def test_a_model_without_room_for_a_segment_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"segments: a prompt has room for 79 tokens .* max_model_len"):
        shape_segments(79)


def test_bundled_passages_are_prompts_of_whole_passages_or_of_segments() -> None:
    form = PromptForm.of(tokenizer_with(CHATML))
    engine: Any = SimpleNamespace(max_model_len=4096)
    whole, _ = prepare_bench(engine, form, None)
    cut, warnings = prepare_bench(engine, form, None, segments=True)
    assert not warnings
    assert {len(one.prompt.chunks) for one in whole.cases} == {4}
    counts = [len(one.prompt.chunks) for one in cut.cases]
    assert min(counts) == 1
    assert max(counts) > 10
    assert all(len(chunk.token_ids) >= 64 for one in cut.cases for chunk in one.prompt.chunks)
    assert all(one.prompt.chunks[0].separator for one in cut.cases), "none is exact as loaded"
