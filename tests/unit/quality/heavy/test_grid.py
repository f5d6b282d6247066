"""Which configurations are tried, and which of them where time is short."""

from __future__ import annotations

from dataclasses import replace

from kintsugi.core.plan import Selection
from kintsugi.core.prompt import PromptChunk, RagPrompt
from kintsugi.core.request import SelectorName
from kintsugi.quality import grid
from tests.unit.quality.fakes import case


def test_a_slow_model_is_tried_with_the_selectors_own_choices_first() -> None:
    everything = grid.candidates(grid.candidate_names(), grid.RATIOS, 16)
    assert grid.thin(everything, len(everything)) == everything
    some = grid.thin(everything, 20)
    assert len(some) == 20
    assert some == [one for one in everything if one in some], "their order stays"
    assert all(not one.query_layers and one.adaptive_mass is None for one in some)
    assert len({one.ratio for one in some}) > 3
    assert len(grid.thin(everything, 0.5)) == grid.KEPT_MIN


def test_variations_fill_what_room_is_left() -> None:
    plain = [Selection(ratio, SelectorName.QUERY) for ratio in (0.1, 0.2)]
    varied = [Selection(ratio, SelectorName.QUERY, 1, (2, 3)) for ratio in (n / 100 for n in range(1, 31))]
    kept = grid.thin([*varied, *plain], 10)
    assert len(kept) == 10
    assert kept[-2:] == plain
    assert kept[0] == varied[0]


def test_a_first_chunk_counts_as_exact_only_right_behind_the_prefix() -> None:
    direct = case(0)
    behind = replace(direct, prompt=RagPrompt((0,), (PromptChunk("", (1, 2, 3), (9,)),), (7,)))
    assert [grid.workload_of([one], 8).exact_tokens for one in (direct, behind)] == [3, 0]
