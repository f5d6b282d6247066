"""The calibrated deviations that shadowing compares with: by prompt, over the first positions."""

from __future__ import annotations

import dataclasses

import pytest

from kintsugi.core.baseline import POSITIONS_MAX, PROMPTS_MAX, Baseline, Deviation
from kintsugi.core.errors import InvalidField
from kintsugi.core.report import REPORT_BYTES_MAX, CalibrationReport
from tests.unit.core.test_report import entry, report

SMALL = Baseline.of([[0.2, 0.0, 0.4], [0.0, 1.0]], [[True, False, True], [False, True]])


def test_deviations_over_the_first_positions() -> None:
    assert SMALL.deviations(1) == [Deviation(0.2, 1.0, 1), Deviation(0.0, 0.0, 1)]
    whole = SMALL.deviations(3)
    assert [one.kl for one in whole] == pytest.approx([0.2, 0.5])
    assert [one.disagreement for one in whole] == pytest.approx([2 / 3, 1 / 2])
    assert [one.positions for one in whole] == [3, 2], "a shorter answer counts as far as it goes"


@pytest.mark.parametrize(
    ("lengths", "positions"), [([3, 3, 3, 3], 3), ([1, 1, 3, 3], 3), ([1, 1, 1, 3], 1), ([5], 5)]
)
def test_positions_that_few_answers_reach_are_not_compared(lengths: list[int], positions: int) -> None:
    rows = [[0.0] * length for length in lengths]
    assert Baseline.of(rows, [[False] * length for length in lengths]).positions == positions


def test_the_largest_baseline_fits_in_a_report() -> None:
    rows, positions = PROMPTS_MAX + 5, POSITIONS_MAX + 5
    large = Baseline.of([[12.345678] * positions] * rows, [[True] * positions] * rows)
    assert (len(large.kl), large.positions) == (PROMPTS_MAX, POSITIONS_MAX)
    document = dataclasses.replace(report(entry()), baseline=large).to_bytes()
    assert len(document) < REPORT_BYTES_MAX


def test_a_report_keeps_its_baseline_and_one_without_is_read_as_before() -> None:
    without = report(entry())
    assert CalibrationReport.from_bytes(without.to_bytes()).baseline is None
    with_one = dataclasses.replace(without, baseline=SMALL)
    assert CalibrationReport.from_bytes(with_one.to_bytes()) == with_one


@pytest.mark.parametrize(
    ("kl", "differing"),
    [
        ((), ()),
        (((0.1,),), ()),
        (((),), ((),)),
        (((-0.1,),), ((),)),
        (((float("nan"),),), ((),)),
        (((0.1,),), ((1,),)),
        (((0.1,) * (POSITIONS_MAX + 1),), ((),)),
    ],
)
def test_what_is_no_baseline_is_refused(
    kl: tuple[tuple[float, ...], ...], differing: tuple[tuple[int, ...], ...]
) -> None:
    with pytest.raises(InvalidField):
        Baseline(kl, differing)


@pytest.mark.parametrize("values", [(-1.0, 0.0, 1), (float("inf"), 0.0, 1), (0.0, 1.1, 1), (0.0, 0.0, 0)])
def test_what_is_no_deviation_is_refused(values: tuple[float, float, int]) -> None:
    with pytest.raises(InvalidField):
        Deviation(*values)
    with pytest.raises(InvalidField):
        Deviation.of([], [])
