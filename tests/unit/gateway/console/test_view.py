"""A view holds every token of the prompt once, and the positions that each layer computed."""

from __future__ import annotations

from kintsugi.core.spaces import Span
from kintsugi.gateway.console.comparison import parts_of, view_of
from tests.unit.cli.fakes import NUM_LAYERS, PROMPT, explained_accounting


def test_parts_tile_the_prompt() -> None:
    titles = [chunk.title for chunk in PROMPT.chunks]
    parts = parts_of(PROMPT.token_ids, PROMPT.spans, titles, str)
    assert [part.title for part in parts] == ["Prefix", "1. A & <b>", "2. Second", "Question"]
    assert [int(token) for part in parts for token in part.tokens] == PROMPT.token_ids


def test_text_between_chunks_is_a_part_of_its_own() -> None:
    parts = parts_of(range(10), [Span(0, 3), Span(5, 8)], ["a", "b"], str)
    assert [(part.title, part.tokens) for part in parts] == [
        ("1. a", ["0", "1", "2"]),
        ("Between chunks", ["3", "4"]),
        ("2. b", ["5", "6", "7"]),
        ("Question", ["8", "9"]),
    ]


def test_layers_come_in_order_whatever_the_accountings_keys_are() -> None:
    """JSON has made texts of them, and 10 would come before 2."""
    by_layer = {str(layer): [layer, 0] for layer in (10, 2, 0)}
    view = view_of([], {"recomputed_positions": by_layer, "tokens_prefix_cached": 3})
    assert view["layers"] == [[0, 0], [0, 2], [0, 10]]
    assert view["cached"] == 3


def test_a_prompt_that_was_not_blended_has_no_layers() -> None:
    for accounting in (None, {}, {"outcome": "declined"}):
        assert view_of([], accounting) == {"parts": [], "cached": 0, "layers": [], "timeline": []}
    view = view_of([], explained_accounting())
    assert len(view["layers"]) == len(view["timeline"]) == NUM_LAYERS
