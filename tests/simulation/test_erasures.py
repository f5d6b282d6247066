"""Erasures end, leave nothing from before them, and spare what comes after them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.erasures import simulate

QUICK, FULL = range(6), range(6, 200)


@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.full) for seed in FULL)])
@pytest.mark.parametrize("gateways", [2, 3])
def test_an_erasure_is_made_once_and_is_complete(tmp_path: Path, seed: int, gateways: int) -> None:
    judgement = simulate(tmp_path, seed, gateways)
    assert judgement.made == judgement.asked, f"seed {seed}"
    assert not judgement.residue, f"seed {seed}"
    assert not judgement.lost, f"seed {seed}"
