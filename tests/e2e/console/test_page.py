"""The console in a real browser: what a user does, what goes wrong, and who uses no mouse or no eyes."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kintsugi.gateway.access import add_grant, new_token
from kintsugi.gateway.console.comparison import parts_of, view_of
from kintsugi.gateway.console.routes import FILES
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.precompute.chunking import Chunker
from kintsugi.store.protocol.access import TokenFile
from tests.fakes.console_service import LAYERS, ConsoleService, console_service
from tests.unit.cli.fakes import PROMPT, explained_accounting

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]

AXE = Path(__file__).parents[3] / ".tools" / "axe.min.js"
ASK = "button:has-text('Ask both ways')"
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
OpenPage = Callable[..., Any]


def ask(page: Any) -> None:
    page.click(ASK)
    page.wait_for_function("() => document.getElementById('progress').textContent.startsWith('Done')")


def problem_in(page: Any, view: str = "#compare") -> str:
    return str(page.locator(f"{view} .problem:not(.gentle)").first.inner_text())


def test_both_answers_stream_and_their_times_and_costs_are_shown(
    service: ConsoleService, open_page: OpenPage
) -> None:
    page = open_page(service.url)
    page.fill("#max-tokens", "5")
    ask(page)
    for way in ("full", "blend"):
        assert page.inner_text(f".way.{way} .answer") == "made up by a stub "
        assert "ms" in page.inner_text(f".way.{way} .figures")
    assert "100 %" in page.inner_text(".way.full .figures")
    assert "times sooner" in page.inner_text("#compare .verdict >> nth=0")
    likely = page.inner_text("#compare")
    assert "90 % under the full prefill itself, 74 % under the blend" in likely
    assert page.locator(".likely span").count() == 5


def test_the_slider_shows_what_each_layer_computed(service: ConsoleService, open_page: OpenPage) -> None:
    page = open_page(service.url)
    ask(page)
    computed = page.locator(".tokens .d4")
    everywhere = computed.count()
    slider = page.locator("#blend-layer")
    assert slider.get_attribute("max") == str(LAYERS)
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == "Layer 0"
    total = page.locator(".tokens span").count()
    assert computed.count() == total
    page.keyboard.press("ArrowRight")
    assert 0 < computed.count() == everywhere < total / 2
    assert "Layer 1: " in page.inner_text("#compare")


def test_documents_are_shuffled_edited_removed_and_asked_about_again(
    service: ConsoleService, open_page: OpenPage
) -> None:
    page = open_page(service.url)
    items = page.locator(".documents > li")
    number = items.count()
    page.click("text=Shuffle")
    assert items.count() == number
    page.locator(".documents summary").first.click()
    page.fill("#text-0", "A new text about the sea, which somebody wrote just now.")
    page.locator("button:has-text('Remove'):visible").first.click()
    assert items.count() == number - 1
    page.click("text=Add a document")
    page.fill(f"#text-{number - 1}", "One more text, about the Moon and how it pulls the sea.")
    ask(page)
    asked = [one for one in service.backend.seen.requests if one.scored_token is None][-1]
    assert len(asked.params.spans or ()) == number


def test_dropped_files_become_documents_and_text_is_never_markup(
    service: ConsoleService, open_page: OpenPage, tmp_path: Path
) -> None:
    page = open_page(service.url)
    page.click("text=Remove all")
    file = tmp_path / "<b>evil<b>.txt"
    file.write_text(EVIL)
    page.set_input_files("#files", str(file))
    assert "<b>evil<b>.txt" in page.inner_text(".documents")
    page.fill("#question", EVIL)
    ask(page)
    assert page.title() == "Kintsugi console"
    assert page.locator("main img").count() == page.locator("main script").count() == 0


def test_a_file_of_a_gigabyte_is_refused_before_it_is_read(
    service: ConsoleService, open_page: OpenPage, tmp_path: Path
) -> None:
    file = tmp_path / "corpus.txt"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 30)
    page = open_page(service.url)
    page.set_input_files("#files", str(file))
    assert "corpus.txt has 1024 MiB; a document here has at most 1 MiB" in problem_in(page)
    page.click("#tab-log")
    page.set_input_files("#log-file", str(file))
    assert "at most 64 MiB are read here" in problem_in(page, "#log")


def test_a_file_that_is_no_text_is_refused(
    service: ConsoleService, open_page: OpenPage, tmp_path: Path
) -> None:
    file = tmp_path / "photo.txt"
    file.write_bytes(b"\xff\xd8\xff\xe0")
    page = open_page(service.url)
    page.set_input_files("#files", str(file))
    assert "photo.txt is not UTF-8 text. Save it as plain text first." in problem_in(page)


def test_a_question_without_documents_says_what_to_do(service: ConsoleService, open_page: OpenPage) -> None:
    page = open_page(service.url)
    page.click("text=Remove all")
    before = len(service.backend.seen.requests)
    page.click(ASK)
    assert "Use the samples, or drop a text file" in problem_in(page)
    assert len(service.backend.seen.requests) == before


def test_what_the_gate_does_not_allow_is_marked(service: ConsoleService, open_page: OpenPage) -> None:
    page = open_page(service.url)
    assert not page.is_visible(".problem.gentle")
    page.select_option("#selector", "random")
    assert "does not allow random" in page.inner_text(".problem.gentle")
    page.select_option("#selector", "hkvd")
    assert "allows hkvd from 20 % on" in page.inner_text(".problem.gentle")
    page.locator("#ratio").evaluate("(e) => { e.value = 30; e.dispatchEvent(new Event('input')); }")
    assert not page.is_visible(".problem.gentle")


def test_a_log_says_what_would_have_been_saved_and_names_broken_lines(
    service: ConsoleService, open_page: OpenPage
) -> None:
    chunks = [f"chunk {number} " + "words and more words " * 20 for number in range(4)]
    lines = [json.dumps({"chunks": [*chunks[at:], *chunks[:at]], "question": "?"}) for at in range(4)]
    page = open_page(f"{service.url}#log")
    page.fill("#log-text", "\n".join([*lines, "{broken", "[1]"]))
    page.click("text=Work it out")
    page.wait_for_selector("text=would have saved")
    assert "2 lines of 6 could not be read" in problem_in(page, "#log")
    assert "line 5 is no JSON; line 6 is no JSON object" in problem_in(page, "#log")
    # Three of four requests have the chunks of the first at other places; 15 % of that is recomputed.
    assert "saved 64 % of the prefill work" in page.inner_text("#log h2")


def test_a_chosen_log_is_worked_out_again_with_another_share(
    service: ConsoleService, open_page: OpenPage, tmp_path: Path
) -> None:
    chunks = [f"chunk {number} " + "words and more words " * 20 for number in range(4)]
    lines = [json.dumps({"chunks": [*chunks[at:], *chunks[:at]], "question": "?"}) for at in range(4)]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(lines))
    page = open_page(f"{service.url}#log")
    page.set_input_files("#log-file", str(file))
    page.wait_for_selector("text=saved 64 % of the prefill work")
    page.fill("#log-ratio", "100")
    page.click("text=Work it out")
    page.wait_for_selector("text=saved 0 % of the prefill work")
    assert "requests.jsonl: 4 requests" in page.inner_text("#log")
    page.fill("#log-text", lines[0])
    page.click("text=Work it out")
    page.wait_for_selector("text=1 request, about")


def test_documents_are_counted_in_the_models_tokens(service: ConsoleService, open_page: OpenPage) -> None:
    text = "港口的灯塔在夜里亮着，守灯人每四个小时记录一次天气。" * 10
    page = open_page(service.url)
    assert "small test model" in page.inner_text("#test-model")
    page.click("text=Remove all")
    page.click("text=Add a document")
    page.fill("#title-0", "灯塔.md")
    page.fill("#text-0", text)
    tokens = len(Chunker.of_model(bundled_checkpoint()).token_ids(f"{text}\n"))
    page.wait_for_selector(f"summary:has-text('{tokens} tokens')")
    assert f"1 document, {tokens} tokens of the 8,192 that the model reads" in page.inner_text(
        "#documents-length"
    )
    page.fill("#text-0", text * 50)
    page.click(ASK)
    page.wait_for_selector(".problem:not(.gentle)")
    assert "document 1 ('灯塔.md')" in problem_in(page)


def test_a_token_that_expires_while_a_stream_runs(open_page: OpenPage, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token, grant = new_token("tester", ["*"], expires="2027-01-31T12:00:00Z")
    other, other_grant = new_token("other", ["*"])
    add_grant(path, grant)
    add_grant(path, other_grant)
    now_s = [datetime(2027, 1, 31, 11, 59, tzinfo=UTC).timestamp()]
    with console_service(access=TokenFile(path, clock=lambda: now_s[0])) as service:
        page = open_page(service.url)
        page.fill("#token", token)
        page.click("text=Use this token")
        page.wait_for_selector(ASK)
        page.evaluate("() => { document.title = 'before'; }")
        generate = service.backend.generate

        def expire(request: Any) -> Any:
            now_s[0] += 120
            return generate(request)

        service.backend.generate = expire  # type: ignore[method-assign]
        page.click(ASK)
        page.wait_for_selector("#token")
        assert "expired at 2027-01-31T12:00:00Z; ask for another" in problem_in(page)
        assert page.inner_text(".way.full .answer").startswith("made")
        page.fill("#token", other)
        page.click("text=Use this token")
        page.wait_for_selector("#token", state="detached")
        ask(page)


def test_two_tabs_take_turns(service: ConsoleService, open_page: OpenPage) -> None:
    first, second = open_page(service.url), open_page(service.url)
    for page in (first, second):
        page.fill("#max-tokens", "200")
    first.click(ASK)
    first.wait_for_function("() => document.querySelector('.way.full .answer')?.textContent.includes('made')")
    second.click(ASK)
    second.wait_for_selector("text=in another tab perhaps")
    for page in (first, second):
        page.wait_for_function("() => document.getElementById('progress').textContent.startsWith('Done')")


def test_stopping_ends_the_work_in_the_engine(service: ConsoleService, open_page: OpenPage) -> None:
    page = open_page(service.url)
    page.fill("#max-tokens", "250")
    page.click(ASK)
    page.wait_for_function("() => document.querySelector('.way.full .answer')?.textContent.includes('made')")
    page.click("text=Stop")
    page.wait_for_selector("text=The engine has ended this work")
    page.wait_for_function("() => !document.querySelector('form button.primary').disabled")
    page.wait_for_timeout(500)
    assert service.backend.seen.running == 0


def test_everything_is_reached_with_the_keyboard(service: ConsoleService, open_page: OpenPage) -> None:
    page = open_page(service.url)
    page.wait_for_selector(ASK)
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.id") == "tab-compare"
    page.keyboard.press("ArrowRight")
    assert page.evaluate("() => document.activeElement.id") == "tab-live"
    assert page.is_visible("#live")
    page.keyboard.press("End")
    assert page.is_visible("#log")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1200])
def test_axe_finds_nothing_and_nothing_overflows(
    service: ConsoleService, open_page: OpenPage, scheme: str, width: int
) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not fetched: make tools")
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}, "bypass_csp": True}
    page = open_page(service.url, **options)
    ask(page)
    for tab in ("compare", "live", "log"):
        page.click(f"#tab-{tab}")
        page.wait_for_timeout(300)
        page.evaluate(AXE.read_text(encoding="utf-8"))
        found = page.evaluate("() => axe.run()")["violations"]
        assert [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found] == []
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width


def drawing_of(view: dict[str, Any]) -> str:
    """A page that draws a view with the console's code, and nothing else."""
    style, code = ((FILES / name).read_text() for name in ("blend.css", "blend.js"))
    data = json.dumps(view).replace("<", "\\u003c")
    script = f"{code}\nrenderBlend(document.getElementById('blend'), {data});"
    head = f'<!doctype html><meta charset="utf-8"><style>{style}</style>'
    return f'{head}<div id="blend"></div><script type="module">{script}</script>'


def test_a_blend_is_drawn_layer_by_layer(open_page: OpenPage, tmp_path: Path) -> None:
    accounting = explained_accounting()
    titles = [chunk.title for chunk in PROMPT.chunks]
    parts = parts_of(PROMPT.token_ids, PROMPT.spans, titles, lambda token: f"</script><{token}>")
    path = tmp_path / "report.html"
    path.write_text(drawing_of(view_of(parts, accounting)), encoding="utf-8")
    page = open_page(path.as_uri())
    depths = [cell.get_attribute("class") or "" for cell in page.locator(".tokens span").all()]
    assert depths == ["d1", "d1", "d4", "d1", "d1", "d1", "d4", "d4"]
    assert "3 tokens, 1 computed in every layer" in page.inner_text("section.part >> nth=1")
    assert "4 layers in 27 ms. For 7 ms the pass" in page.inner_text("#blend")
    assert "layer 1 · 3 tokens" in page.locator("svg").text_content()
    assert "</script><10>" in page.inner_text("section.part >> nth=1")


def test_a_prompt_that_was_not_blended_says_so(open_page: OpenPage, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(drawing_of(view_of([], None)), encoding="utf-8")
    assert "No blend pass ran" in open_page(path.as_uri()).inner_text("#blend")
