"""The report holds a blend as data and the code that draws it, escapes texts, and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

from kintsugi.cli.html import Page, render_page
from kintsugi.core.prompt import PromptChunk, RagPrompt
from kintsugi.gateway.console.assets import read_text
from kintsugi.gateway.console.view import parts_of, view_of
from tests.unit.cli.fakes import PROMPT, explained_accounting


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


def decode(token: int) -> str:
    return f"</script><{token}>"


def page_of(prompt: RagPrompt = PROMPT, accounting: dict[str, object] | None = None) -> str:
    accounting = explained_accounting() if accounting is None else accounting
    titles = [chunk.title for chunk in prompt.chunks]
    return render_page(
        Page(
            title="Title",
            subtitle="subtitle",
            question="<script>alert('q')</script>",
            answer="a & b </div>",
            facts=[("cost", "40 %")],
            view=view_of(
                parts_of(prompt.token_ids, prompt.spans, titles, decode),
                accounting,
            ),
            comparison_headings=("", "TTFT"),
            comparison=[["blend", "1 ms"]],
        )
    )


def find_script(page: str, kind: str) -> str:
    found = re.findall(rf'<script type="{kind}"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def test_text_is_escaped_and_nothing_is_fetched() -> None:
    page = page_of()
    reader = Reader(page)
    assert [tag for tag, _ in reader.seen].count("script") == 2
    assert not {tag for tag, _ in reader.seen} & {"link", "img", "iframe"}
    assert all(not {"src", "href"} & set(attributes) for _, attributes in reader.seen)
    assert page.count("<script>alert('q')</script>") == 0
    view = json.loads(find_script(page, "application/json"))
    assert [part["title"] for part in view["parts"]] == ["Prefix", "1. A & <b>", "2. Second", "Question"]
    tokens = [token for part in view["parts"] for token in part["tokens"]]
    assert tokens == [decode(token) for token in PROMPT.token_ids]


def test_the_browser_runs_only_what_the_page_holds() -> None:
    """The policy names the very bytes of the style and the script; one changed byte, and nothing is drawn."""
    page = page_of()
    policy = next(
        attributes["content"] or ""
        for tag, attributes in Reader(page).seen
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    style = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)[0]
    for text, directive in ((style, "style-src"), (find_script(page, "module"), "script-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_the_drawing_is_the_consoles() -> None:
    page = page_of()
    assert read_text("blend.js") in find_script(page, "module")
    assert read_text("blend.css") in page


def test_four_thousand_tokens_stay_a_page_that_a_browser_opens() -> None:
    prompt = RagPrompt((0,), (PromptChunk("long", tuple(range(4000))),), (1,))
    layers = {layer: list(range(4002)) for layer in range(32)}
    assert len(page_of(prompt, explained_accounting() | {"recomputed_positions": layers})) < 1_000_000
