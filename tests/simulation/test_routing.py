"""The router among many engines, as `benchmarks/routing.py` simulates them."""

from __future__ import annotations

import pytest

from benchmarks.support.routed import Arrival, Fleet, Ours, RoundRobin, TwoChoices, retrievals, simulate
from kintsugi.serving.routing import RouteCosts

pytestmark = pytest.mark.simulation

FLEET = Fleet(8, 4, 20_000.0, remote_s_per_token=21e-6, local_s_per_token=2e-6)
COSTS = RouteCosts(hit_share=0.25, remote_ms_per_token=0.02)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_under_load_nobody_waits_longer_than_with_the_others(seed: int) -> None:
    arrivals = retrievals(2_000, rate_per_s=140.0, seed=seed)
    ours = simulate(arrivals, FLEET, Ours(COSTS), seed)
    for other in (TwoChoices(seed), RoundRobin()):
        theirs = simulate(arrivals, FLEET, other, seed)
        for share in (0.5, 0.95):
            assert ours.percentile(share) < theirs.percentile(share), f"seed {seed}"


def test_conversations_stay_where_their_beginning_is() -> None:
    """Twenty conversations whose turns grow, on eight engines that are mostly idle."""
    arrivals = [
        Arrival(
            turn * 60.0 + conversation * 1.5,
            256 * (turn + 1),
            tuple(1000 * conversation + n for n in range(2 * (turn + 1))),
        )
        for turn in range(6)
        for conversation in range(20)
    ]
    ours = simulate(arrivals, FLEET, Ours(COSTS), seed=1)
    theirs = simulate(arrivals, FLEET, TwoChoices(1), seed=1)
    assert ours.hit_share == pytest.approx(
        15 / 21
    )  # all but the last turn's own tokens, of 21 parts in 6 turns
    assert theirs.hit_share < 0.5 * ours.hit_share
