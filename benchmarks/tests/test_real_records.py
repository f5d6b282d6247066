"""Records of the real model's measurement, what is chosen by them, and the figures that they give."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.support.real import figures
from benchmarks.support.real.calibration import CALIBRATED, calibrated, cheapest
from benchmarks.support.real.corpus import PassageSet
from benchmarks.support.real.questions import QUOTE, Asked
from benchmarks.support.real.records import Records
from benchmarks.support.real.rows import (
    BUDGETS,
    CHOOSING,
    JUDGED,
    OPEN,
    REUSE,
    SAMPLE,
    Choice,
    Configuration,
    Item,
    baselines,
    blend_items,
    candidates,
    choose,
    full_items,
    kinds_right,
    kinds_that_stay,
    questions_per_kind,
)
from kintsugi.core.errors import InvalidField
from kintsugi.core.evidence import STEPS, Tally
from kintsugi.core.plan import Selection
from kintsugi.core.report import LADDER, Binding
from kintsugi.core.request import SelectorName
from kintsugi.fusor.control.cost import PassWorkload, configuration_cost
from kintsugi.models.context import NONE
from tests.fakes.reports import passing_report

HEADER = {"model": "toy"}
WORK = PassWorkload(3600, 80, 30, 0.05, 600)
QUERY = Configuration(SAMPLE, Selection(0.2, SelectorName.QUERY))
CHEAP = Configuration(SAMPLE, Selection(0.05, SelectorName.QUERY))
PREPARED = Configuration(SAMPLE, Selection(0.0))


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "records.jsonl", HEADER)


def add_open(records: Records, part: str, one: Configuration, kls: dict[int, float], cost: float) -> None:
    for number, kl in kls.items():
        values = {"kl": kl, "same_top": 30, "positions": 32, "cost": cost}
        records.add(Item(part, number, OPEN, one).key, values)


def add_answer(
    records: Records, part: str, number: int, question: int, right: bool, of: Configuration | None = None
) -> None:
    item = Item(part, number, question, of)
    records.add(item.key, {"kind": f"kind{question}", "right": right, "cost": 0.2})


def test_a_later_run_finds_the_records_of_an_earlier_one(tmp_path: Path, records: Records) -> None:
    records.add(("full", 3, OPEN), {"text": "ja\n„so“"})
    again = Records(tmp_path / "records.jsonl", HEADER)
    assert ("full", 3, OPEN) in again
    assert again["full", 3, OPEN] == {"text": "ja\n„so“"}
    assert again.below("full") == {(3, OPEN): {"text": "ja\n„so“"}}
    assert not again.below("full", 4)


def test_a_line_that_was_cut_is_measured_again(tmp_path: Path, records: Records) -> None:
    records.add(("full", 1), {"right": True})
    records.add(("full", 2), {"right": True})
    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    again = Records(path, HEADER)
    assert (("full", 1) in again, ("full", 2) in again) == (True, False)
    again.add(("full", 2), {"right": False})
    assert Records(path, HEADER)["full", 2] == {"right": False}


def test_records_of_another_measurement_are_refused_and_kept(tmp_path: Path, records: Records) -> None:
    records.add(("full", 1), {})
    before = (tmp_path / "records.jsonl").read_bytes()
    with pytest.raises(InvalidField, match=r"another measurement.*name another folder"):
        Records(tmp_path / "records.jsonl", {"model": "other"})
    assert (tmp_path / "records.jsonl").read_bytes() == before


def test_candidates_stay_within_their_budgets() -> None:
    tried = candidates([NONE, SAMPLE], WORK)
    assert len(set(tried)) == len(tried)
    assert {one.context for one in tried} == {NONE, SAMPLE}
    for budget in BUDGETS:
        costs = [configuration_cost(one.selection, WORK) for one in tried]
        assert any(0.9 * budget < cost <= budget for cost in costs)
        assert configuration_cost(baselines(WORK)[budget].selection, WORK) <= budget
    assert {one.selection.selector for one in baselines(WORK).values()} == {SelectorName.HKVD}
    assert {one.context for one in baselines(WORK).values()} == {NONE}


def test_the_lowest_kl_within_the_budget_is_chosen(records: Records) -> None:
    add_open(records, CHOOSING, REUSE, {0: 4.0, 1: 4.0}, 0.03)
    add_open(records, CHOOSING, PREPARED, {0: 2.5, 1: 2.5}, 0.03)
    add_open(records, CHOOSING, CHEAP, {0: 2.0, 1: 2.0}, 0.09)
    add_open(records, CHOOSING, QUERY, {0: 1.0, 1: 1.0}, 0.19)
    choice = choose(records, [REUSE, PREPARED, CHEAP, QUERY], WORK)
    assert choice.by_budget == {0.1: CHEAP, 0.2: QUERY}
    assert (choice.reuse, choice.nothing) == (REUSE, PREPARED)


def test_a_configuration_that_costs_more_than_predicted_is_not_chosen(records: Records) -> None:
    add_open(records, CHOOSING, REUSE, {0: 4.0}, 0.03)
    add_open(records, CHOOSING, CHEAP, {0: 1.0}, 0.11)
    add_open(records, CHOOSING, QUERY, {0: 0.5}, 0.21)
    assert choose(records, [REUSE, CHEAP, QUERY], WORK).by_budget == {0.1: REUSE, 0.2: CHEAP}


def test_nothing_is_chosen_by_prompts_that_others_did_not_answer(records: Records) -> None:
    add_open(records, CHOOSING, REUSE, {0: 2.0, 1: 2.0}, 0.03)
    add_open(records, CHOOSING, CHEAP, {0: 1.0, 2: 90.0}, 0.09)
    assert choose(records, [REUSE, CHEAP], WORK).by_budget[0.1] == CHEAP
    with pytest.raises(LookupError, match="measure on"):
        choose(records, [REUSE, QUERY], WORK)


def test_only_full_prefill_decides_which_kinds_stay(records: Records) -> None:
    for number in range(10):
        add_answer(records, CHOOSING, number, 0, number < 7)
        add_answer(records, CHOOSING, number, 1, number < 6)
        add_answer(records, CHOOSING, number, 0, False, QUERY)
        add_answer(records, CHOOSING, number, 1, True, QUERY)
        add_answer(records, JUDGED, number, 1, True)
    right = kinds_right(records)
    assert (right["kind0"].share, right["kind1"].share) == (0.7, 0.6)
    assert kinds_that_stay(right) == ["kind0"]


def test_items_are_the_questions_of_the_kinds_that_stay() -> None:
    asked = tuple(Asked(kind, "What?", QUOTE, "1994", "") for kind in ("year", "word", "word"))
    items = full_items(JUDGED, [PassageSet(5, (), "Why?", asked)], ["word"], 1)
    assert [(item.number, item.question) for item in items] == [(5, OPEN), (5, 1)]
    assert len({item.key for item in (*items, *blend_items(items, [REUSE, QUERY]))}) == 6


@pytest.mark.parametrize(
    ("sets", "kinds", "each"), [(112, 3, 1), (112, 2, 2), (100, 3, 1), (99, 3, 2), (9, 0, 0)]
)
def test_enough_questions_are_asked(sets: int, kinds: int, each: int) -> None:
    assert questions_per_kind(sets, kinds) == each


def test_a_share_of_kl_is_a_ratio_of_sums_over_common_prompts(records: Records) -> None:
    add_open(records, JUDGED, REUSE, {0: 1.0, 1: 3.0, 2: 50.0}, 0.03)
    add_open(records, JUDGED, QUERY, {0: 0.5, 1: 0.5}, 0.2)
    interval, detail = figures.kl_share(records, QUERY)
    assert interval.mean == pytest.approx(1.0 / 4.0)
    assert interval.low == pytest.approx(0.5 / 3.0)
    assert interval.high == pytest.approx(0.5)
    assert "cost 0.200" in detail
    assert "n=2" in detail


def test_kl_figures_have_bars_in_a_full_run_alone(records: Records) -> None:
    ones = (REUSE, PREPARED, CHEAP, QUERY)
    for one, kl in zip(ones, (4.0, 2.0, 1.6, 1.2), strict=True):
        add_open(records, JUDGED, one, {0: kl, 1: kl}, 0.1)
    choice = Choice(REUSE, PREPARED, {0.1: CHEAP, 0.2: QUERY})
    found = {one.name: one for one in figures.kl_figures(records, choice, bars=True)}
    assert {name: one.holds for name, one in found.items()} == {
        "real_kl_share_cost20": False,
        "real_kl_share_cost10": True,
        "real_kl_share_r0": True,
    }
    assert {one.holds for one in figures.kl_figures(records, choice, bars=False)} == {None}


def test_the_task_share_counts_questions_and_resamples_prompts(records: Records) -> None:
    for number in range(20):
        for question in (0, 1, 2):
            add_answer(records, JUDGED, number, question, True)
            add_answer(records, JUDGED, number, question, number > 0, QUERY)
            add_answer(records, JUDGED, number, question, number > 4, REUSE)
    (share,) = figures.task_figures(records, QUERY, ["kind0", "kind1"], "", bars=True)
    (gap,) = figures.gap_figures(records, ["kind0", "kind1"])
    assert share.value == pytest.approx(38 / 40)
    assert share.holds is False  # its lower bound is below .93, as one of twenty prompts lost all
    assert "40 questions on 20 prompts" in share.detail
    assert gap.value == pytest.approx(100 * 10 / 40)
    assert "kind1 20/15 of 20" in gap.detail


def test_a_prompt_whose_questions_are_not_all_answered_does_not_count(records: Records) -> None:
    for number, answered in ((0, (0, 1)), (1, (0,))):
        for question in (0, 1):
            add_answer(records, JUDGED, number, question, True)
        for question in answered:
            add_answer(records, JUDGED, number, question, number == 0, QUERY)
            add_answer(records, JUDGED, number, question, number == 0, REUSE)
    assert figures.task_figures(records, CHEAP, ["kind0", "kind1"], "", bars=False) == []
    (share,) = figures.task_figures(records, QUERY, ["kind0", "kind1"], "_cost20", bars=False)
    (gap,) = figures.gap_figures(records, ["kind0", "kind1"])
    assert (share.name, share.value, share.holds) == ("real_task_share_cost20", 1.0, None)
    assert gap.value == 0.0


def test_points_lost_are_bounded_over_all_and_in_the_worse_half_of_the_lengths(records: Records) -> None:
    for number in range(40):
        add_answer(records, JUDGED, number, 0, True)
        add_answer(records, JUDGED, number, 0, number % 10 != 9 or number < 20, QUERY)
    lengths = {number: 3000 + number for number in range(40)}
    assert figures.loss_figures(records, CHEAP, ["kind0"], lengths, "", bars=True) == []
    pooled, worst = figures.loss_figures(records, QUERY, ["kind0"], lengths, "", bars=True)
    assert "5.000" in pooled.detail  # two of forty
    assert "10.000" in worst.detail  # both in the longer half
    assert "3020-3039 tokens" in worst.detail
    assert pooled.value is not None
    assert worst.value is not None
    assert 5.0 < pooled.value < worst.value
    assert (pooled.holds, worst.holds) == (False, False)


CELLS = [
    {
        "prompts": "prompts of 2049 to 8192 tokens with declared chunks",
        "configurations": [{"configuration": "query r=0.2 @1", "loss": 0.04, "pairs": 80}],
    }
]


def test_a_calibration_is_a_record_of_what_passed(records: Records) -> None:
    assert calibrated(records) is None
    assert figures.calibration_figures(records, bars=True) == []
    selection = asdict(Selection(0.2, SelectorName.QUERY, query_layers=(4, 5)))
    found = {"minutes": 14.0, "selection": selection, "context": SAMPLE, "cells": CELLS}
    records.add(CALIBRATED, json.loads(json.dumps(found)))
    assert calibrated(records) == Configuration(
        SAMPLE, Selection(0.2, SelectorName.QUERY, query_layers=(4, 5))
    )
    (minutes,) = figures.calibration_figures(records, bars=True)
    assert (minutes.value, minutes.holds) == (14.0, True)
    assert minutes.detail.endswith("with declared chunks: query r=0.2 @1 loses 0.04 in 80")


def test_what_passes_passes_at_every_length() -> None:
    binding = Binding("00" * 32, "", "raw")
    report = passing_report(binding, LADDER[:1])
    assert cheapest(report) == LADDER[0]
    (part,) = report.parts
    tally = Tally(losses=((STEPS, 40),))
    lost = [replace(entry, tally=tally) if entry.cell.band == 1 else entry for entry in part.entries]
    assert cheapest(replace(report, parts=(replace(part, entries=tuple(lost)),))) is None
    assert cheapest(replace(report, parts=())) is None


def test_a_calibration_may_pass_nothing(records: Records) -> None:
    found = {"minutes": 16.0, "selection": None, "context": NONE, "cells": CELLS}
    records.add(CALIBRATED, found)
    assert calibrated(records) is None
    (minutes,) = figures.calibration_figures(records, bars=True)
    assert minutes.holds is False
    assert minutes.detail.startswith("nothing passes; prompts of 2049")


def test_the_speed_up_is_one_of_medians(records: Records) -> None:
    assert figures.speed_figures(records, QUERY, "", bars=True) == []
    for number, (full, blend) in enumerate([(5.0, 1.0), (6.0, 2.0), (70.0, 1.5)]):
        records.add(("ttft", QUERY.name, number), {"full": full, "blend": blend, "cost": 0.18})
    (found,) = figures.speed_figures(records, QUERY, "", bars=True)
    assert (found.value, found.holds) == (4.0, True)
    assert "3 prompts" in found.detail


def test_answers_that_the_prefix_cache_changed_are_counted(records: Records) -> None:
    for number, (same, same_right) in enumerate([(True, True), (False, True), (False, False)]):
        records.add(("uncached", JUDGED, number, 0), {"same": same, "same_right": same_right})
    found = figures.cache_figure(records)
    assert (found.value, found.detail) == (1, "of 3 answers; 2 differ in some token")
