"""The page shows every token once, escaped, in its depth's colour, and refers to nothing outside."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from kintsugi.cli.html import Page, depth_class, parts_of, render_page, tick_step, timeline_of
from kintsugi.core.prompt import PromptChunk, RagPrompt
from tests.unit.cli.fakes import NUM_LAYERS, PROMPT, explained_accounting


class Reader(HTMLParser):
    """Tags and attributes of a page; fails on tags that are not closed."""

    VOID = frozenset({"meta", "br", "line"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(prompt: RagPrompt = PROMPT, accounting: dict[str, object] | None = None) -> str:
    accounting = explained_accounting() if accounting is None else accounting
    return render_page(
        Page(
            title="Title",
            subtitle="subtitle",
            question="<script>alert('q')</script>",
            answer="a & b </div>",
            facts=[("cost", "40 %")],
            parts=parts_of(prompt, accounting, lambda token: f"<{token}>"),
            timeline=timeline_of(accounting),
            comparison_headings=("", "TTFT"),
            comparison=[["blend", "1 ms"]],
        )
    )


def test_text_is_escaped_and_nothing_is_fetched() -> None:
    reader = Reader(page_of())
    tags = {tag for tag, _ in reader.seen}
    assert not tags & {"script", "link", "img", "iframe"}
    assert all(not {"src", "href"} & set(attributes) for _, attributes in reader.seen)
    assert "<script>alert('q')</script>" in reader.text
    assert "A & <b>" in reader.text
    for token in PROMPT.token_ids:
        assert reader.text.count(f"<{token}>") == 1


def test_tokens_are_coloured_by_depth() -> None:
    prefix, first, second, question = parts_of(PROMPT, explained_accounting(), str)
    assert [token.css for token in prefix.tokens] == ["d1"]
    assert [token.css for token in first.tokens] == ["d1", "d4", "d1"]
    assert [token.css for token in second.tokens] == ["d1", "d1"]
    assert [token.css for token in question.tokens] == ["d4", "d4"]
    assert first.title == "1. A & <b>"
    assert first.note == "3 tokens, 1 computed in every layer"


def test_cached_tokens_and_absent_explanations_have_no_colour() -> None:
    cached = explained_accounting() | {"tokens_prefix_cached": 4}
    assert [token.css for token in parts_of(PROMPT, cached, str)[1].tokens] == [""] * 3
    for accounting in (None, {"outcome": "declined"}):
        assert all(not token.css for part in parts_of(PROMPT, accounting, str) for token in part.tokens)
        assert timeline_of(accounting) is None
    assert "No blend pass ran" in page_of(accounting={"outcome": "declined"})


@pytest.mark.parametrize(
    ("depth", "layers", "css"),
    [(0, 16, ""), (1, 16, "d1"), (4, 16, "d1"), (5, 16, "d2"), (12, 16, "d3"), (13, 16, "d4"), (3, 0, "")],
)
def test_depth_classes_are_quarters(depth: int, layers: int, css: str) -> None:
    assert depth_class(depth, layers) == css


def test_the_timeline_stays_inside_its_frame() -> None:
    timeline = timeline_of(explained_accounting())
    assert timeline is not None
    assert len(timeline.rows) == NUM_LAYERS
    for row in timeline.rows:
        assert 0 <= row.load.x <= row.load.x + row.load.width <= timeline.width
        assert 0 <= row.compute.x <= row.compute.x + row.compute.width <= timeline.width
        assert row.y + 12 <= timeline.height
    assert [row.label for row in timeline.rows][:2] == ["layer 0 · 8 tokens", "layer 1 · 3 tokens"]
    assert "4 layers in 27 ms" in timeline.summary
    assert "For 7 ms the pass" in timeline.summary


@pytest.mark.parametrize(("end_ms", "step_ms"), [(27, 5), (667, 100), (8, 1), (1500, 200), (0.8, 0.1)])
def test_ticks_are_round(end_ms: float, step_ms: float) -> None:
    assert tick_step(end_ms) == pytest.approx(step_ms)


def test_four_thousand_tokens_stay_a_page_that_a_browser_opens() -> None:
    prompt = RagPrompt((0,), (PromptChunk("long", tuple(range(4000))),), (1,))
    layers = {layer: list(range(4002)) for layer in range(32)}
    page = page_of(prompt, explained_accounting() | {"recomputed_positions": layers})
    assert len(page) < 1_000_000
    assert page.count('<span class="d4"') == 4002
