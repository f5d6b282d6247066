"""Renders one blend as a self-contained page: how deep each token was recomputed, and a timeline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from typing import Any

from jinja2 import Environment, StrictUndefined

from kintsugi.cli.render import format_count
from kintsugi.core.prompt import RagPrompt

Decode = Callable[[int], str]
"""Maps a token id to its text."""

_CHART_WIDTH = 860
_CHART_LEFT = 130
_CHART_RIGHT = 20
_ROW_HEIGHT = 15
_AXIS_HEIGHT = 24
_TICKS_MAX = 8


@dataclass(frozen=True)
class Token:
    """One token of the prompt. `css` is empty for a token that was only loaded."""

    text: str
    css: str
    title: str


@dataclass(frozen=True)
class PromptSection:
    """A chunk, or the prompt's part before or after the chunks."""

    title: str
    note: str
    tokens: list[Token]


@dataclass(frozen=True)
class Bar:
    """When a layer was loaded or computed, in units of the drawing."""

    x: float
    width: float
    title: str


@dataclass(frozen=True)
class TimelineRow:
    """One layer of the timeline."""

    y: int
    label: str
    load: Bar
    compute: Bar


@dataclass(frozen=True)
class Timeline:
    """When each layer was loaded and computed, as a drawing."""

    width: int
    height: int
    rows: list[TimelineRow]
    ticks: list[tuple[float, str]]
    """Marks on the time axis: where, and what they say."""
    summary: str


@dataclass(frozen=True)
class Page:
    """The page's content as plain text; the template escapes it."""

    title: str
    subtitle: str
    question: str
    answer: str
    facts: list[tuple[str, str]]
    parts: list[PromptSection]
    timeline: Timeline | None
    comparison_headings: Sequence[str] = ()
    comparison: Sequence[Sequence[str]] = field(default=())


def render_page(page: Page) -> str:
    """The page as HTML. All text is escaped, and the page refers to no other file."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    source = (files(__package__) / "templates" / "report.html").read_text(encoding="utf-8")
    return environment.from_string(source).render(page=page, legend=LEGEND)


LEGEND = [
    ("d0", "loaded, not recomputed"),
    ("d1", "up to a quarter of the layers"),
    ("d2", "up to half"),
    ("d3", "up to three quarters"),
    ("d4", "deeper, or never stored"),
]


def depths_of(accounting: dict[str, Any] | None) -> tuple[Counter[int], int]:
    """By position, the number of layers in which it was computed; and the number of layers."""
    by_layer = (accounting or {}).get("recomputed_positions") or {}
    depths = Counter(position for positions in by_layer.values() for position in positions)
    return depths, len(by_layer)


def parts_of(prompt: RagPrompt, accounting: dict[str, Any] | None, decode: Decode) -> list[PromptSection]:
    """The prompt, cut where chunks begin and end."""
    depths, num_layers = depths_of(accounting)
    cached = int((accounting or {}).get("tokens_prefix_cached", 0))
    titles = [f"{number}. {chunk.title}" for number, chunk in enumerate(prompt.chunks, start=1)]
    borders = [0, *(span.start for span in prompt.spans), prompt.spans[-1].end, len(prompt.token_ids)]
    parts = []
    for title, (start, end) in zip(["Prefix", *titles, "Question"], pairwise(borders), strict=True):
        if start == end:
            continue
        tokens = [
            _token(decode(prompt.token_ids[position]), position, depths[position], num_layers, cached)
            for position in range(start, end)
        ]
        deepest = sum(1 for position in range(start, end) if num_layers and depths[position] == num_layers)
        note = f"{format_count(end - start, 'token')}, {deepest} computed in every layer"
        parts.append(PromptSection(title, note, tokens))
    return parts


def _token(text: str, position: int, depth: int, num_layers: int, cached: int) -> Token:
    if position < cached:
        return Token(text, "", "")
    return Token(text, depth_class(depth, num_layers), f"token {position}: {depth} of {num_layers} layers")


def depth_class(depth: int, num_layers: int) -> str:
    """d1 to d4 by quarters of the model's depth; empty for a token that was only loaded."""
    if depth == 0 or num_layers == 0:
        return ""
    return f"d{-(-4 * depth // num_layers)}"


def timeline_of(accounting: dict[str, Any] | None) -> Timeline | None:
    """The timeline; None if no blend ran or `explain` was off."""
    layers: list[dict[str, float]] = (accounting or {}).get("timeline") or []
    if not layers:
        return None
    end_ms = max(max(layer.values()) for layer in layers) or 1.0
    scale = (_CHART_WIDTH - _CHART_LEFT - _CHART_RIGHT) / end_ms
    computed = (accounting or {}).get("recomputed_positions") or {}
    counts = [len(positions) for _, positions in sorted(computed.items(), key=lambda item: int(item[0]))]
    rows = [_row(index, layer, scale, counts) for index, layer in enumerate(layers)]
    step_ms = tick_step(end_ms)
    marks_ms = [step_ms * index for index in range(int(end_ms / step_ms) + 1)]
    ticks = [(_x(mark_ms, scale), f"{mark_ms:g} ms") for mark_ms in marks_ms]
    exposed_ms = _sum_exposed_ms(layers)
    summary = (
        f"{format_count(len(layers), 'layer')} in {end_ms:.0f} ms. For {exposed_ms:.0f} ms the pass computed "
        "nothing and waited for loads or for the engine's other requests."
    )
    height = _ROW_HEIGHT * len(rows) + _AXIS_HEIGHT
    return Timeline(_CHART_WIDTH, height, rows, ticks, summary)


def tick_step(end_ms: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that gives at most `_TICKS_MAX` steps."""
    magnitude: float = 10.0 ** math.floor(math.log10(end_ms / _TICKS_MAX))
    return next(step * magnitude for step in (1, 2, 5, 10) if step * magnitude * _TICKS_MAX >= end_ms)


def _sum_exposed_ms(layers: list[dict[str, float]]) -> float:
    """Time in which nothing is computed: before the first layer, and between layers."""
    ends = [0.0, *(layer["compute_end_ms"] for layer in layers)]
    starts = [layer["compute_start_ms"] for layer in layers]
    return sum(max(0.0, start - end) for end, start in zip(ends, starts, strict=False))


def _row(index: int, layer: dict[str, float], scale: float, counts: list[int]) -> TimelineRow:
    tokens = f" · {format_count(counts[index], 'token')}" if index < len(counts) else ""
    return TimelineRow(
        y=_ROW_HEIGHT * index,
        label=f"layer {index}{tokens}",
        load=_bar(f"layer {index} loads", layer["load_start_ms"], layer["load_end_ms"], scale),
        compute=_bar(f"layer {index} computes", layer["compute_start_ms"], layer["compute_end_ms"], scale),
    )


def _bar(what: str, start_ms: float, end_ms: float, scale: float) -> Bar:
    """At least half a unit wide, so that a short interval stays visible."""
    width = round(max(0.5, scale * (end_ms - start_ms)), 1)
    return Bar(_x(start_ms, scale), width, f"{what} from {start_ms:.1f} to {end_ms:.1f} ms")


def _x(time_ms: float, scale: float) -> float:
    return round(_CHART_LEFT + scale * time_ms, 1)
