"""What the benchmark of several hosts makes of what it sees. The hosts themselves need root: `make
test-cluster-bed`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cluster
from benchmarks.support.cluster.scenarios import SCENARIOS, Outcome
from benchmarks.support.cluster.traffic import Asked, failover_s, first_good_s

LOST_S = 100.0


def good(began_s: float, took_s: float = 0.1) -> Asked:
    return Asked(began_s, began_s + took_s, "", False)


def failed(began_s: float, took_s: float = 0.1) -> Asked:
    return Asked(began_s, began_s + took_s, "Unavailable: no engine", False)


@pytest.mark.parametrize(
    ("asked", "first_s", "settled_s"),
    [
        ([good(99), good(100.5)], 0.6, 0.6),
        ([good(100.5), failed(101), good(103)], 0.6, 1.1),
        # Asked before the loss, answered long after it: disturbed, although the answer is good.
        ([good(99.5, 20.0), good(100.5)], 0.6, None),
        ([good(99.5, 20.0), good(100.5), good(121)], 0.6, 19.5),
        ([good(99), failed(101)], None, None),
        ([failed(90), good(101)], 1.1, 1.1),
    ],
)
def test_a_failover_lasts_until_the_last_disturbed_question(
    asked: list[Asked], first_s: float | None, settled_s: float | None
) -> None:
    for found, wanted in ((first_good_s(asked, LOST_S), first_s), (failover_s(asked, LOST_S), settled_s)):
        assert found == (None if wanted is None else pytest.approx(wanted))


def test_figures_name_the_worst_failover_and_what_failed() -> None:
    outcomes = [
        Outcome("kill_shard", failover_s=2.0, asked=10, errors=1),
        Outcome("cut_shard", failover_s=31.0, asked=10),
        Outcome("kill_head", failover_s=0.5, wrong=1, lost=2, problem="1 wrong answers"),
    ]
    figures = {one.name: one for one in cluster.figures_of(outcomes)}
    assert (figures["cluster_bed_scenarios"].value, figures["cluster_bed_scenarios"].holds) == (2, False)
    assert "kill_head: 1 wrong answers" in figures["cluster_bed_scenarios"].detail
    assert (figures["cluster_bed_wrong_answers"].value, figures["cluster_bed_lost_chunks"].value) == (1, 2)
    assert not figures["cluster_bed_wrong_answers"].holds
    assert not figures["cluster_bed_lost_chunks"].holds
    worst = figures["failover_s"]
    assert (worst.value, worst.holds, worst.detail) == (31.0, False, "cut_shard")
    assert figures["failover_shard_s"].value == 31.0
    assert figures["failover_head_s"].value == 0.5


def test_a_recorded_scenario_is_not_run_again(tmp_path: Path) -> None:
    outcomes = [Outcome(name, asked=3) for name in SCENARIOS]
    for one in outcomes:
        cluster._keep(tmp_path, one)
    assert cluster.run(list(SCENARIOS), tmp_path) == outcomes  # without a bed
