"""What every selector promises: its quota, ascending indices, sets that only shrink, the stated cost."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kintsugi.core.request import SelectorName
from kintsugi.fusor.selectors import Selector, Signal, make_selector, quota, top

HKVD = [name for name in SelectorName if name is not SelectorName.RANDOM]
FLAT = [SelectorName.HKVD, SelectorName.HKVD_K, SelectorName.HKVD_V]
RATIOS = st.one_of(st.sampled_from([0.01, 0.15, 0.5, 0.99]), st.floats(0.001, 0.999))


def run(selector: Selector, positions: Tensor, seed: int = 0) -> list[Tensor]:
    """The set at each layer, with deviations drawn anew at each layer that measures."""
    generator = torch.Generator().manual_seed(seed)
    active, sets = positions, []
    for layer in range(selector.num_layers):
        signal = selector.signal_at(layer)
        if signal is not None:
            deviation = torch.rand(len(active), generator=generator) if signal else None
            kept = selector.keep(layer, active, deviation, len(positions))
            assert kept.dtype == torch.int64
            assert bool((kept.diff() > 0).all()), "ascending and unique"
            assert not len(kept) or 0 <= int(kept[0]) <= int(kept[-1]) < len(active)
            active = active[kept]
        sets.append(active)
    return sets


@given(
    name=st.sampled_from(list(SelectorName)),
    ratio=RATIOS,
    check_layer=st.integers(0, 12),
    layers=st.integers(1, 10),
    hits=st.integers(1, 300),
    seed=st.integers(0, 99),
)
def test_sets_only_shrink_and_meet_their_quota(
    name: SelectorName, ratio: float, check_layer: int, layers: int, hits: int, seed: int
) -> None:
    selector = make_selector(name, ratio, check_layer, layers)
    sets = run(selector, torch.arange(10, 10 + 3 * hits, 3), seed)
    full = selector.full_width_layers
    assert full <= layers - 1
    assert all(len(kept) == hits for kept in sets[:full])
    assert all(set(b.tolist()) <= set(a.tolist()) for a, b in itertools.pairwise(sets))
    if name is not SelectorName.HKVD_GRADUAL:
        assert all(len(kept) == quota(ratio, hits) for kept in sets[full:])


@given(ratio=st.floats(0.02, 0.98), check_layer=st.integers(0, 12), layers=st.integers(1, 48))
def test_gradual_costs_what_flat_costs(ratio: float, check_layer: int, layers: int) -> None:
    hits = 2000
    selector = make_selector(SelectorName.HKVD_GRADUAL, ratio, check_layer, layers)
    kept = [len(active) for active in run(selector, torch.arange(hits))][selector.full_width_layers :]
    assert sum(kept) / len(kept) == pytest.approx(ratio * hits, abs=1)
    if len(kept) > 1 and ratio < 0.9:
        assert kept[0] > kept[-1]


@pytest.mark.parametrize("name", list(SelectorName))
def test_ratio_extremes(name: SelectorName) -> None:
    candidates = torch.arange(50)
    for ratio, expected in ((0.0, 0), (1e-9, 1), (1.0, 50)):
        assert len(run(make_selector(name, ratio, 1, 4), candidates)[-1]) == expected
    assert len(run(make_selector(name, 0.5, 1, 4), candidates[:0])[-1]) == 0


@given(st.floats(0, 1), st.integers(1, 10_000))
def test_quota(ratio: float, hits: int) -> None:
    assert 0 <= quota(ratio, hits) <= hits
    assert (quota(ratio, hits) == 0) == (ratio == 0)
    assert abs(quota(ratio, hits) - ratio * hits) <= 1


@given(st.lists(st.integers(0, 4), max_size=40), st.integers(0, 50))
def test_top_takes_the_highest_and_the_earlier_of_equals(scores: list[int], count: int) -> None:
    expected = sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])
    assert top(torch.tensor(scores, dtype=torch.float32), count).tolist() == expected


@pytest.mark.parametrize("name", HKVD)
def test_equal_deviations_keep_the_earliest(name: SelectorName) -> None:
    selector = make_selector(name, 0.25, 0, 1)
    kept = selector.keep(0, torch.arange(40), torch.zeros(40), 40)
    assert kept.tolist() == list(range(10))


@pytest.mark.parametrize("name", FLAT)
def test_the_quota_counts_all_hit_tokens(name: SelectorName) -> None:
    """Not the candidates that are left."""
    kept = make_selector(name, 0.5, 1, 4).keep(1, torch.arange(60), torch.rand(60), 100)
    assert len(kept) == 50


@pytest.mark.parametrize(
    ("name", "signal"),
    [
        (SelectorName.HKVD, Signal.K | Signal.V),
        (SelectorName.HKVD_K, Signal.K),
        (SelectorName.HKVD_V, Signal.V),
    ],
)
def test_a_flat_selector_measures_once(name: SelectorName, signal: Signal) -> None:
    selector = make_selector(name, 0.15, 2, 5)
    assert [selector.signal_at(layer) for layer in range(5)] == [None, None, signal, None, None]


def test_gradual_measures_from_the_check_layer_on() -> None:
    selector = make_selector(SelectorName.HKVD_GRADUAL, 0.15, 2, 5)
    both = Signal.K | Signal.V
    assert [selector.signal_at(layer) for layer in range(5)] == [None, None, both, both, both]


def test_a_check_layer_beyond_the_model_is_its_last() -> None:
    assert make_selector(SelectorName.HKVD, 0.15, 99, 4).full_width_layers == 3


def test_random_depends_on_positions_alone() -> None:
    one, two = (make_selector(SelectorName.RANDOM, 0.3, check, 4) for check in (1, 3))
    positions = torch.arange(100, 900)
    assert one.full_width_layers == 0
    assert one.signal_at(0) is Signal.NONE
    assert one.signal_at(1) is None
    assert torch.equal(one.keep(0, positions, None, 800), two.keep(0, positions, None, 800))
    other = one.keep(0, positions + 5000, None, 800)
    assert not torch.equal(other, one.keep(0, positions, None, 800))


@given(st.integers(0, 100_000), st.integers(200, 4000))
def test_random_spreads_over_the_prompt(start: int, count: int) -> None:
    selector = make_selector(SelectorName.RANDOM, 0.25, 1, 4)
    kept = selector.keep(0, torch.arange(start, start + count), None, count)
    quarters = torch.histc(kept.float(), bins=4, min=0, max=count) / len(kept)
    assert bool(((quarters > 0.15) & (quarters < 0.35)).all())


def test_every_name_has_a_selector() -> None:
    for name in SelectorName:
        assert isinstance(make_selector(name, 0.15, 1, 4), Selector)
