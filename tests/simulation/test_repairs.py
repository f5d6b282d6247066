"""What a person or the cluster breaks, the next good spec mends: random histories of a BlendService."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.histories import FAILURES, MISTAKES, History

pytestmark = pytest.mark.simulation

SEEDS = 1000
QUICK = range(100)
PART = 10
"""Histories in one test."""


def check(seeds: range) -> None:
    found = {seed: why for seed in seeds if (why := History(seed).play())}
    assert not found, f"seeds {sorted(found)}: {found[min(found)]}"


@pytest.mark.parametrize("first", QUICK[::PART])
def test_every_history_that_ends_with_a_good_spec_ends_well(first: int) -> None:
    check(range(first, first + PART))


@pytest.mark.full
@pytest.mark.parametrize("first", range(QUICK.stop, SEEDS, PART))
def test_more_histories_end_well(first: int) -> None:
    check(range(first, first + PART))


def test_the_alphabet_is_as_the_page_lists_it() -> None:
    page = (Path(__file__).parents[2] / "docs/operate/repairs.md").read_text()
    lines = [line.strip("- ") for line in page.splitlines() if line.startswith("- ")]
    assert lines == [*MISTAKES, *FAILURES]
