"""Costs of configurations, by hand. That a pass counts the same is tested where passes are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.core.plan import Selection
from kintsugi.core.request import SelectorName
from kintsugi.fusor.control.cost import PassWorkload, configuration_cost, pass_work
from kintsugi.fusor.selectors import HYBRID_WIDTH

SIX = PassWorkload(hit_tokens=1000, other_tokens=0, num_layers=6, projection_share=0.0)
EIGHT = PassWorkload(hit_tokens=2000, other_tokens=100, num_layers=8, projection_share=0.25)


@pytest.mark.parametrize(("check_layer", "cost"), [(1, 0.2917), (2, 0.4333), (3, 0.575)])
def test_layers_at_full_width_are_what_makes_hkvd_dear(check_layer: int, cost: float) -> None:
    assert configuration_cost(Selection(0.15, check_layer=check_layer), SIX) == pytest.approx(cost, abs=1e-4)


def test_by_hand() -> None:
    every = 8 * 2100
    assert pass_work(Selection(0.0), EIGHT).token_layers == 8 * 100
    assert pass_work(Selection(1.0), EIGHT).token_layers == every
    assert configuration_cost(Selection(1.0), EIGHT) == 1
    random = Selection(0.1, SelectorName.RANDOM)
    assert pass_work(random, EIGHT).token_layers == 8 * (100 + 200)
    hkvd = Selection(0.1, SelectorName.HKVD, check_layer=2)
    assert pass_work(hkvd, EIGHT).token_layers == 2 * 2100 + 0.25 * 2100 + 6 * 300
    query = Selection(0.1, SelectorName.QUERY, query_layers=(1, 3))
    assert pass_work(query, EIGHT).token_layers == 8 * 300 + 101 * (3 + 0.25)
    hybrid = Selection(0.1, SelectorName.HYBRID, check_layer=2, query_layers=(3,))
    wide = 100 + HYBRID_WIDTH * 200
    assert pass_work(hybrid, EIGHT).token_layers == 2 * wide + 0.25 * wide + 6 * 300 + 101 * 3.25


def test_a_prompt_without_hits_is_a_full_prefill() -> None:
    assert configuration_cost(Selection(0.1, SelectorName.QUERY), PassWorkload(0, 50, 8, 0.25)) == 1


@given(
    selector=st.sampled_from(SelectorName),
    ratio=st.floats(0, 1),
    check_layer=st.integers(0, 9),
    layers=st.integers(1, 12),
    hits=st.integers(1, 4000),
)
def test_nothing_costs_less_than_its_ratio(
    selector: SelectorName, ratio: float, check_layer: int, layers: int, hits: int
) -> None:
    selection = Selection(ratio, selector, check_layer)
    cost = configuration_cost(selection, PassWorkload(hits, 64, layers, 0.2))
    assert cost >= (64 + ratio * hits - 1) / (64 + hits) - 1e-9
    assert cost <= 2.5
