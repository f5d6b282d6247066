"""One blend as `static/blend.js` draws it: the prompt's tokens, and which of them each layer computed when.

Pure. The console sends a view as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kintsugi.core.spaces import Span

DecodeToken = Callable[[int], str]
"""Maps a token id to its text."""


@dataclass(frozen=True)
class ViewPart:
    """A chunk, or the text before, between or after the chunks."""

    title: str
    tokens: list[str]


def parts_of(
    token_ids: Sequence[int], spans: Sequence[Span], titles: Sequence[str], decode: DecodeToken
) -> list[ViewPart]:
    """Split the prompt at the chunks' boundaries. ``titles`` has one title for each span."""
    cuts: list[tuple[str, int, int]] = []
    end = 0
    for index, (span, title) in enumerate(zip(spans, titles, strict=True)):
        cuts.append(("Between chunks" if index else "Prefix", end, span.start))
        cuts.append((f"{index + 1}. {title}", span.start, span.end))
        end = span.end
    cuts.append(("Question", end, len(token_ids)))
    return [
        ViewPart(title, [decode(token) for token in token_ids[start:end]])
        for title, start, end in cuts
        if start < end
    ]


def view_of(parts: Sequence[ViewPart], accounting: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the view as JSON. `layers` has the positions that each layer computed. `layers` and `timeline`
    are empty without a blend, and for an answer that was not explained."""
    found = accounting or {}
    by_layer = found.get("recomputed_positions") or {}
    return {
        "parts": [{"title": part.title, "tokens": part.tokens} for part in parts],
        "cached": int(found.get("tokens_prefix_cached", 0)),
        "layers": [sorted(by_layer[layer]) for layer in sorted(by_layer, key=int)],
        "timeline": [dict(layer) for layer in found.get("timeline") or ()],
    }
