"""The router among many simulated engines, against Serve's own router and round robin."""

from __future__ import annotations

import pytest

pytest.importorskip("ray.serve", reason="install the extra `serving`")

from kintsugi.serving.routing import BLOCK_TOKENS
from tests.fakes.engine_fleet import (
    CHUNK_TOKENS,
    CHUNKS,
    QUESTION_TOKENS,
    Arrival,
    Fleet,
    ForecastRouter,
    Hardware,
    RoundRobin,
    TwoChoices,
    draw_retrievals,
    simulate,
)

pytestmark = pytest.mark.simulation

FLEET = Fleet(8, 4)
LOADED = CHUNKS * CHUNK_TOKENS


def test_a_simulated_blend_gains_what_a_real_one_does() -> None:
    """Six chunks from the same host: 4.0 times as fast as a prefill (benchmarks/results/ttft-*.json)."""
    hardware = Hardware()
    prefill_s = hardware.first_token_s(LOADED + QUESTION_TOKENS)
    blend_s = hardware.first_token_s(QUESTION_TOKENS, same_host=LOADED)
    assert prefill_s / blend_s == pytest.approx(4.0, rel=0.15)
    assert hardware.first_token_s(QUESTION_TOKENS, remote=LOADED) > 2 * blend_s, "the network is the limit"
    assert hardware.first_token_s(2048) > hardware.first_token_s(1024, resident=1024)
    assert hardware.first_token_s(32_768) > 2 * hardware.first_token_s(16_384), "attention is quadratic"


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("utilisation", [0.5, 0.8])
def test_under_load_nobody_waits_longer_than_with_the_others(seed: int, utilisation: float) -> None:
    one_s = FLEET.hardware.first_token_s(QUESTION_TOKENS, same_host=LOADED // 4, remote=LOADED * 3 // 4)
    arrivals = draw_retrievals(2_000, utilisation * FLEET.engines / one_s, seed)
    ours = simulate(arrivals, FLEET, ForecastRouter(FLEET.shards()), seed)
    for other in (TwoChoices(seed), RoundRobin()):
        theirs = simulate(arrivals, FLEET, other, seed)
        for share in (0.5, 0.95):
            assert ours.percentile(share) < theirs.percentile(share), f"seed {seed}"


def test_conversations_stay_where_their_beginning_is() -> None:
    """Twenty conversations whose turns grow, on eight engines that are mostly idle."""
    arrivals = [
        Arrival(
            turn * 60.0 + conversation * 1.5,
            2 * BLOCK_TOKENS * (turn + 1),
            tuple(1000 * conversation + n for n in range(2 * (turn + 1))),
        )
        for turn in range(6)
        for conversation in range(20)
    ]
    ours = simulate(arrivals, FLEET, ForecastRouter(FLEET.shards()), seed=1)
    theirs = simulate(arrivals, FLEET, TwoChoices(1), seed=1)
    # All but the last turn's own tokens, of 21 parts in 6 turns.
    assert ours.resident_share == pytest.approx(15 / 21)
    assert theirs.resident_share < 0.5 * ours.resident_share
