"""Every chunk token of a request is in one part, and only what was not to be had counts against a store."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.support import found_tokens
from benchmarks.support.found_tokens import CACHED, LOADED, MISSED, PREFILLED, RECOMPUTED, UNACCOUNTED
from kintsugi.core.spaces import Span

SPANS = (Span(1, 101), Span(101, 201), Span(201, 301))


@pytest.mark.parametrize(
    ("accounting", "parts", "share"),
    [
        ({"outcome": "blended", "tokens_hit": 300}, {LOADED: 300}, 1.0),
        ({"outcome": "blended", "tokens_hit": 200, "tokens_missed": 100}, {LOADED: 200, MISSED: 100}, 2 / 3),
        ({"outcome": "blended", "tokens_hit": 200}, {LOADED: 200, UNACCOUNTED: 100}, 2 / 3),
        (
            {"outcome": "blended", "tokens_hit": 100, "tokens_prefix_cached": 97, "chunks_recomputed": 1},
            {LOADED: 100, CACHED: 96, RECOMPUTED: 104},
            1.0,
        ),
        ({"outcome": "prefix_hit", "tokens_hit": 300, "tokens_prefix_cached": 301}, {CACHED: 300}, 1.0),
        (
            {"outcome": "declined", "reason": "loading_is_slower: 1 s", "tokens_missed": 100},
            {PREFILLED: 200, MISSED: 100},
            2 / 3,
        ),
        ({"outcome": "declined", "reason": "store_slow: 1 s"}, {"declined, store_slow": 300}, 0.0),
        ({"outcome": "failed", "reason": "lost"}, {"failed, lost": 300}, 0.0),
    ],
)
def test_every_chunk_token_has_a_part(
    accounting: dict[str, Any], parts: dict[str, int], share: float
) -> None:
    found = found_tokens.divide(SPANS, accounting)
    assert {name: count for name, count in found.items() if count} == parts
    assert found_tokens.share_found(found) == pytest.approx(share)


def test_parts_are_told_by_name() -> None:
    parts = found_tokens.divide(SPANS, {"outcome": "blended", "tokens_hit": 75, "tokens_missed": 225})
    assert found_tokens.describe(parts) == "0.7500 missed, 0.2500 loaded"
