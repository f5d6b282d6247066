"""What every selector promises: its quota, ascending indices, sets that only shrink, the stated cost."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kintsugi.core.plan import Selection
from kintsugi.core.plugins import SELECTORS
from kintsugi.core.request import SelectorName
from kintsugi.fusor.selectors import (
    HYBRID_HEAD_SHARE,
    HYBRID_WIDTH,
    Candidates,
    Selector,
    Signal,
    depends_on_question,
    make_selector,
    quota,
    splitmix64,
    top,
)
from tests.fakes.plugins import code_of, install

HKVD = [SelectorName.HKVD, SelectorName.HKVD_GRADUAL]
FROM_THE_START = [SelectorName.CHUNK_HEAD, SelectorName.QUERY, SelectorName.RANDOM]
CHUNK = 50
RATIOS = st.one_of(st.sampled_from([0.01, 0.15, 0.5, 0.99]), st.floats(0.001, 0.999))


def selector_of(name: SelectorName, ratio: float, check_layer: int = 1, layers: int = 4) -> Selector:
    return make_selector(Selection(ratio, name, check_layer), layers)


def candidates_of(positions: Tensor, hits: int | None = None, **signals: Tensor) -> Candidates:
    """Tokens of chunks of `CHUNK` tokens each."""
    return Candidates(positions, positions % CHUNK, len(positions) if hits is None else hits, **signals)


def run(selector: Selector, positions: Tensor, seed: int = 0) -> list[Tensor]:
    """The set at each layer, with deviations drawn anew at each layer that measures."""
    generator = torch.Generator().manual_seed(seed)
    attention = torch.rand(len(positions), generator=generator)
    active, sets = torch.arange(len(positions)), []
    for layer in range(selector.num_layers):
        signal = selector.signal_at(layer)
        if signal is not None:
            known: dict[str, Tensor] = {}
            if signal:
                known["deviation"] = torch.rand(len(active), generator=generator)
            if selector.query_layers:
                known["attention"] = attention[active]
            kept = selector.keep(layer, candidates_of(positions[active], len(positions), **known))
            assert kept.dtype == torch.int64
            assert bool((kept.diff() > 0).all()), "ascending and unique"
            assert not len(kept) or 0 <= int(kept[0]) <= int(kept[-1]) < len(active)
            active = active[kept]
        sets.append(positions[active])
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
    selector = selector_of(name, ratio, check_layer, layers)
    sets = run(selector, torch.arange(10, 10 + 3 * hits, 3), seed)
    check = min(check_layer, layers - 1)
    wide = {SelectorName.HYBRID: quota(min(1.0, HYBRID_WIDTH * ratio), hits)}
    below = quota(ratio, hits) if name in FROM_THE_START else wide.get(name, hits)
    assert all(len(kept) == below for kept in sets[:check])
    assert all(set(b.tolist()) <= set(a.tolist()) for a, b in itertools.pairwise(sets))
    if name is not SelectorName.HKVD_GRADUAL:
        assert all(len(kept) == quota(ratio, hits) for kept in sets[check:])
    for layer, kept in enumerate(sets):
        assert len(kept) <= quota(selector.ratio_at(layer), hits)


@given(ratio=st.floats(0.02, 0.98), check_layer=st.integers(0, 12), layers=st.integers(1, 48))
def test_gradual_costs_what_flat_costs(ratio: float, check_layer: int, layers: int) -> None:
    hits = 2000
    selector = selector_of(SelectorName.HKVD_GRADUAL, ratio, check_layer, layers)
    kept = [len(active) for active in run(selector, torch.arange(hits))][selector.check_layer :]
    assert sum(kept) / len(kept) == pytest.approx(ratio * hits, abs=1)
    if len(kept) > 1 and ratio < 0.9:
        assert kept[0] > kept[-1]


@pytest.mark.parametrize("name", list(SelectorName))
def test_ratio_extremes(name: SelectorName) -> None:
    candidates = torch.arange(50)
    for ratio, expected in ((0.0, 0), (1e-9, 1), (1.0, 50)):
        assert len(run(selector_of(name, ratio), candidates)[-1]) == expected
    assert len(run(selector_of(name, 0.5), candidates[:0])[-1]) == 0


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
    selector = selector_of(name, 0.25, 0, 1)
    kept = selector.keep(0, candidates_of(torch.arange(40), deviation=torch.zeros(40)))
    assert kept.tolist() == list(range(10))


def test_the_quota_counts_all_hit_tokens() -> None:
    """Not the candidates that are left."""
    candidates = candidates_of(torch.arange(60), 100, deviation=torch.rand(60))
    kept = selector_of(SelectorName.HKVD, 0.5).keep(1, candidates)
    assert len(kept) == 50


def test_a_flat_selector_measures_once() -> None:
    selector = selector_of(SelectorName.HKVD, 0.15, 2, 5)
    assert [selector.signal_at(layer) for layer in range(5)] == [None, None, Signal.DEVIATION, None, None]


def test_gradual_measures_from_the_check_layer_on() -> None:
    selector = selector_of(SelectorName.HKVD_GRADUAL, 0.15, 2, 5)
    both = Signal.DEVIATION
    assert [selector.signal_at(layer) for layer in range(5)] == [None, None, both, both, both]


def test_a_check_layer_beyond_the_model_is_its_last() -> None:
    assert selector_of(SelectorName.HKVD, 0.15, 99).check_layer == 3


@pytest.mark.parametrize("name", FROM_THE_START)
def test_what_needs_no_deviation_chooses_once_and_first(name: SelectorName) -> None:
    selector = selector_of(name, 0.3, 2)
    assert [selector.signal_at(layer) for layer in range(4)] == [Signal.NONE, None, None, None]


def test_random_depends_on_positions_alone() -> None:
    one, two = (selector_of(SelectorName.RANDOM, 0.3, check) for check in (1, 3))
    positions = candidates_of(torch.arange(100, 900))
    assert torch.equal(one.keep(0, positions), two.keep(0, positions))
    other = one.keep(0, candidates_of(torch.arange(5100, 5900)))
    assert not torch.equal(other, one.keep(0, positions))


@given(st.integers(0, 100_000), st.integers(200, 4000))
def test_random_spreads_over_the_prompt(start: int, count: int) -> None:
    selector = selector_of(SelectorName.RANDOM, 0.25)
    kept = selector.keep(0, candidates_of(torch.arange(start, start + count)))
    quarters = torch.histc(kept.float(), bins=4, min=0, max=count) / len(kept)
    noise = 6 * (0.25 * 0.75 / len(kept)) ** 0.5
    assert bool(((quarters - 0.25).abs() < noise).all())


def test_random_knows_no_pattern() -> None:
    """Every stride, every bit of the position and every distance to the next chosen token."""
    positions = torch.arange(1 << 14)
    chosen = torch.zeros(len(positions), dtype=torch.bool)
    chosen[selector_of(SelectorName.RANDOM, 0.25).keep(0, candidates_of(positions))] = True
    noise = 5 * (0.25 * 0.75) ** 0.5
    for stride in range(1, 70):
        for phase in range(stride):
            share = chosen[phase::stride].float().mean()
            assert abs(float(share) - 0.25) <= noise / (len(positions) / stride) ** 0.5
        both = (chosen[stride:] & chosen[:-stride]).float().mean()
        assert abs(float(both) - 0.0625) <= noise / len(positions) ** 0.5


def test_mixing_is_splitmix64() -> None:
    """The first outputs of the generator seeded with 0, whose state moves by one step a call."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [int(value) % (1 << 64) for value in splitmix64(torch.arange(1, 4))] == expected


def test_chunk_heads_are_as_many_of_each_chunk() -> None:
    positions = torch.cat((torch.arange(0, 50), torch.arange(50, 57), torch.arange(100, 143)))
    kept = positions[selector_of(SelectorName.CHUNK_HEAD, 0.3).keep(0, candidates_of(positions))]
    # 30 of 100 tokens: the short chunk gives its seven, the others share the rest, the earlier one first.
    assert kept.tolist() == [*range(12), *range(50, 57), *range(100, 111)]


def test_query_takes_what_is_attended_to() -> None:
    attention = torch.tensor([0.1, 0.0, 0.5, 0.2, 0.05, 0.15])
    selector = selector_of(SelectorName.QUERY, 0.5)
    assert selector.keep(0, candidates_of(torch.arange(6), attention=attention)).tolist() == [2, 3, 5]


def test_hybrid_weighs_attention_by_deviation_and_keeps_heads() -> None:
    hits, ratio = 400, 0.2
    positions = torch.arange(hits)
    generator = torch.Generator().manual_seed(1)
    attention, deviation = (torch.rand(hits, generator=generator) for _ in range(2))
    selector = selector_of(SelectorName.HYBRID, ratio, 2)
    both = Signal.DEVIATION
    assert [selector.signal_at(layer) for layer in range(4)] == [Signal.NONE, None, both, None]
    wide = selector.keep(0, candidates_of(positions, attention=attention))
    heads = {0, 50, 100, 150}  # of eight chunks: the quota has room for so many
    assert len(heads) == round(HYBRID_HEAD_SHARE * ratio * hits)
    assert len(wide) == round(HYBRID_WIDTH * ratio * hits)
    assert heads <= set(wide.tolist())
    others = [i for i in attention.argsort(descending=True).tolist() if i not in heads]
    assert set(wide.tolist()) - heads == set(others[: len(wide) - 4])
    known = candidates_of(wide, hits, attention=attention[wide], deviation=deviation[wide])
    kept = set(wide[selector.keep(2, known)].tolist())
    product = attention * deviation
    best = sorted(set(wide.tolist()) - heads, key=lambda i: -float(product[i]))
    assert kept == heads | set(best[: 80 - 4])


@pytest.mark.parametrize(
    ("layers", "wanted", "expected"),
    [
        (32, (), tuple(range(10, 26))),
        (30, (), tuple(range(9, 24))),
        (8, (), (2, 3, 4, 5)),
        (4, (), (1, 2)),
        (2, (), (1,)),
        (1, (), (0,)),
        (8, (2,), (2,)),
        (8, (0, 5, 7, 9, 12), (0, 5, 7)),
    ],
)
def test_query_layers_lie_in_the_model(
    layers: int, wanted: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    selection = Selection(0.2, SelectorName.QUERY, query_layers=wanted)
    assert make_selector(selection, layers).query_layers == expected


def test_which_selectors_depend_on_the_question() -> None:
    dependent = {name for name in SelectorName if depends_on_question(Selection(0.1, name))}
    assert dependent == {SelectorName.QUERY, SelectorName.HYBRID}


def test_every_name_has_a_selector() -> None:
    for name in SelectorName:
        assert isinstance(selector_of(name, 0.15), Selector)


def test_the_selector_of_the_how_to_page_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = code_of("selector.md", "from torch import Tensor")
    install(tmp_path, monkeypatch, SELECTORS, "stride", "stride_selector:StrideSelector", code)
    page: dict[str, Any] = {}
    exec(code_of("selector.md", "import torch\n"), page)
    page["test_every_sixteenth_token_is_kept"]()
    assert not depends_on_question(Selection(0.1, "stride"))
    assert len(run(make_selector(Selection(0.3, "stride"), 4), torch.arange(100))[-1]) == 30


def test_a_question_listens_at_layers_that_attend() -> None:
    attending = (3, 7, 11, 15)
    selection = Selection(0.2, SelectorName.QUERY)
    assert make_selector(selection, 16).query_layers == tuple(range(5, 13))
    assert make_selector(selection, 16, attending).query_layers == (7, 11)
    named = replace(selection, query_layers=(8, 9))
    assert make_selector(named, 16, attending).query_layers == (7,)
    assert make_selector(replace(selection, selector=SelectorName.HKVD), 16, attending).query_layers == ()
