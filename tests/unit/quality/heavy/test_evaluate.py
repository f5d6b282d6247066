"""Evaluation: shapes of prompts and rows, over an engine whose quality is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.plan import Selection
from kintsugi.core.request import SelectorName
from kintsugi.engine.local import Prompt
from kintsugi.quality.evaluate import (
    FULL,
    REUSE,
    EvaluationGrid,
    evaluate,
    reshape_cases,
)
from kintsugi.quality.measure import Bench
from tests.unit.quality.fakes import FakeEngine, case

SELECTIONS = (Selection(0.1), Selection(0.3), Selection(0.2, SelectorName.QUERY))


def rows_of(selections: Sequence[Selection] = SELECTIONS, **values: Any) -> list[Any]:
    cases = [case(index, task="alias" if index % 2 else "code") for index in range(20)]
    return evaluate(FakeEngine(), cases, selections, EvaluationGrid(**values), "raw", None, 1)  # type: ignore[arg-type]


def test_chunks_are_cut_anew_and_counted() -> None:
    (one,) = reshape_cases([case(7)], 2, None)
    assert [chunk.token_ids for chunk in one.prompt.chunks] == [(1, 2), (3, 4), (17,)]
    (two,) = reshape_cases([case(7)], 2, 2)
    assert [chunk.token_ids for chunk in two.prompt.chunks] == [(1, 2), (3, 4)]
    assert two.prompt.question == (7, 7)
    assert reshape_cases([case(7)], None, None) == [case(7)]


def test_baselines_stand_beside_every_configuration() -> None:
    rows = rows_of()
    assert [row.method for row in rows] == [
        FULL,
        REUSE,
        "hkvd r=0.1 @1",
        "hkvd r=0.3 @1",
        "query r=0.2 @1",
    ]
    full, reuse, worse, better, _ = rows
    assert (full.cost, full.kl_mean, full.exact_match.mean) == (1.0, 0.0, 1.0)
    assert (reuse.cost, reuse.exact_match.mean) == (0.0, 0.5)
    assert worse.em_loss.mean == 0.5
    assert worse.em_loss.low > 0
    assert (better.exact_match.mean, better.em_loss.mean) == (1.0, 0.0)
    assert worse.by_task["code"]["exact_match"] == 1.0, "even indices are right, and odd ones are wrong"
    assert worse.by_task["alias"]["exact_match"] == 0.0
    assert full.setting.codec == "raw"


def test_every_setting_is_measured() -> None:
    rows = rows_of(SELECTIONS[:1], chunk_tokens=(2, None), chunks=(1, None), batches=(4, 8))
    assert len({row.setting for row in rows}) == 8
    assert len(rows) == 24
    engines = EvaluationGrid(codecs=("raw", "int8"), tiers=(None, 1e6)).engines()
    assert engines == [("raw", None), ("raw", 1e6), ("int8", None), ("int8", 1e6)]


@pytest.mark.parametrize(
    "values",
    [
        {"selectors": ()},
        {"ratios": ()},
        {"chunk_tokens": (0,)},
        {"chunks": (0,)},
        {"batches": (0,)},
        {"tiers": (0.0,)},
    ],
)
def test_an_impossible_grid_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidField):
        EvaluationGrid(**values)


def test_every_selector_is_tried_at_layers_that_make_a_difference() -> None:
    grid = EvaluationGrid(selectors=tuple(SelectorName), ratios=(0.1, 0.2))
    for depth, expected in ((8, {1, 2, 3}), (2, {1}), (32, {1, 4, 8, 12})):
        found = grid.selections(depth)
        assert {one.selector for one in found} == set(SelectorName)
        assert {one.check_layer for one in found if one.selector == SelectorName.HKVD} == expected
        assert {one.check_layer for one in found if one.selector == SelectorName.RANDOM} == {1}
    given = EvaluationGrid(selectors=("hkvd",), ratios=(0.1,), check_layers=(2, 5)).selections(8)
    assert [one.check_layer for one in given] == [2, 5]


def test_prompts_are_of_one_shape() -> None:
    bench = Bench(FakeEngine(), [case(1)], 3)  # type: ignore[arg-type]
    assert bench.prompt(0, None) == Prompt([0, 1, 2, 3, 4, 11, 7, 1], None, 3, top_logprobs=20)
    blend = bench.prompt(0, Selection(0.1), (5, 6))
    assert blend.params is not None
    assert (blend.max_tokens, blend.forced) == (2, (5, 6))
