"""The records behind the figures of `evidence`, and one resampled calibration."""

from __future__ import annotations

import pytest

from benchmarks.support.evidence import MARGIN, QUIET, World, resample
from benchmarks.support.outcomes import SELECTIONS, read_records
from kintsugi.core.plan import Selection
from kintsugi.core.report import Quantity, Thresholds
from kintsugi.core.request import SelectorName


@pytest.fixture(scope="module")
def world() -> World:
    return World.of(read_records())


def test_every_configuration_is_recorded_on_the_same_fresh_questions(world: World) -> None:
    assert len(world.prompts) >= 1800
    assert set(world.losses) == set(SELECTIONS)
    assert {len(losses) for losses in world.losses.values()} == {len(world.prompts)}


def test_the_truth_is_the_worst_of_all_tasks(world: World) -> None:
    """`hybrid` at 0.05 loses 27 % of one task, 4 % of all."""
    cheap, sure = Selection(0.05, SelectorName.HYBRID, 2), Selection(0.25, SelectorName.HKVD, 2)
    thresholds = Thresholds()
    lost = [one.by_quantity[Quantity.EXACT_MATCH] for one in world.losses[cheap]]
    chain = [loss for prompt, loss in zip(world.prompts, lost, strict=True) if prompt.task == "chain"]
    of_task = sum(chain) / len(chain) / thresholds.highest(Quantity.EXACT_MATCH, "chain", QUIET)
    assert world.worst(cheap, thresholds) == pytest.approx(of_task)
    assert of_task > 4 > sum(lost) / len(lost) / thresholds.exact_match_loss_max
    assert world.worst(sure, thresholds) < MARGIN


def test_a_resampled_calibration_follows_from_its_seed(world: World) -> None:
    first, again = (resample(world, Thresholds(), 1) for _ in range(2))
    passed = [one.selection for one in first.finalists if one.error is not None]
    assert passed == [one.selection for one in again.finalists if one.error is not None]
    assert all(world.worst(one, Thresholds()) <= 1 for one in passed)
