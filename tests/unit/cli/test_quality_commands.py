"""`kintsugi calibrate` and `kintsugi eval` over an engine whose quality is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kintsugi.cli import calibrate, evaluate
from kintsugi.cli.exits import ExitCode
from kintsugi.cli.lists import floats, integers, selector_names
from kintsugi.cli.main import app
from kintsugi.core.errors import InvalidField
from kintsugi.core.request import SelectorName
from kintsugi.quality import reports
from kintsugi.quality.session import EngineSpec
from tests.unit.core.test_report import BINDING
from tests.unit.quality.fakes import FakeEngine, WordTokenizer

RUNNER = CliRunner()


class RunningEngine(FakeEngine):
    tokenizer = WordTokenizer()
    max_model_len = 64
    prefix_token_ids = (0,)
    num_layers = 8
    binding = BINDING
    spec: EngineSpec | None = None
    """As it was started."""

    def generate(self, prompts: Any, arrivals_s: list[float] | None = None) -> Any:
        return super().generate(prompts)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> RunningEngine:
    engine = RunningEngine()
    engine.right_from = lambda selection, index: selection.ratio >= 0.15

    @contextmanager
    def measuring_engine(spec: EngineSpec) -> Iterator[RunningEngine]:
        engine.spec = spec
        yield engine

    for module in (calibrate, evaluate):
        monkeypatch.setattr(module, "measuring_engine", measuring_engine)
    return engine


def questions(folder: Path, count: int = 40, answer: str = "w5") -> Path:
    path = folder / "questions.jsonl"
    rows = [
        {"chunks": ["a bb ccc", f"dd {'e' * (n % 9 + 1)}"], "question": "why?", "answers": [answer]}
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def calibrated(folder: Path, *more: str, **of_questions: Any) -> Any:
    path = questions(folder, **of_questions)
    out = str(folder / "report.json")
    arguments = ["calibrate", "--model", "m", "--questions", str(path), "--out", out, *more]
    return RUNNER.invoke(app, arguments)


def test_a_report_is_written_and_shown(engine: RunningEngine, tmp_path: Path) -> None:
    result = calibrated(tmp_path)
    assert result.exit_code == ExitCode.OK, result.stderr
    report = reports.read(tmp_path / "report.json")
    assert report.choice.selection is not None
    assert report.choice.selection.ratio == 0.15
    assert "default: " in result.stdout
    document = json.loads(calibrated(tmp_path, "--json").stdout)
    assert document["digest"]
    assert document["choice"]["selection"]["ratio"] == 0.15


def test_an_engine_is_measured_as_it_will_serve(engine: RunningEngine, tmp_path: Path) -> None:
    told = ("--engine", '{"tensor_parallel_size": 2}', "--connector", '{"portable": false}')
    assert calibrated(tmp_path, *told, "--dtype", "float16").exit_code == ExitCode.OK
    assert engine.spec is not None
    assert engine.spec.vllm_args == {"tensor_parallel_size": 2, "dtype": "float16"}
    assert engine.spec.extra_config == {"portable": False}


def test_a_model_that_does_not_pass_is_code_3_and_the_report_says_so(
    engine: RunningEngine, tmp_path: Path
) -> None:
    engine.right_from = lambda selection, index: False
    result = calibrated(tmp_path)
    assert result.exit_code == ExitCode.NOT_BLENDABLE
    assert "not blendable" in result.stdout
    assert reports.read(tmp_path / "report.json").choice.selection is None


@pytest.mark.parametrize(
    ("of_questions", "more", "word"),
    [
        ({"count": 5}, (), "5 can be asked"),
        ({"answer": "never"}, (), "answers none of 40 right"),
        ({}, ("--store", "ram://here"), "ends with this process"),
        ({}, ("--engine", "{"), "engine: is no JSON"),
        ({}, ("--connector", "[]"), "connector: must be a JSON object"),
    ],
)
def test_bad_input_is_code_2_and_says_what_to_change(
    engine: RunningEngine, tmp_path: Path, of_questions: dict[str, Any], more: tuple[str, ...], word: str
) -> None:
    result = calibrated(tmp_path, *more, **of_questions)
    assert result.exit_code == ExitCode.BAD_INPUT
    assert word in " ".join(result.stderr.split())
    assert not (tmp_path / "report.json").exists()


def test_a_report_needs_somewhere_to_go(tmp_path: Path) -> None:
    nowhere = RUNNER.invoke(app, ["calibrate", "--model", "m"])
    assert nowhere.exit_code == ExitCode.BAD_INPUT
    assert "--store URL" in nowhere.stderr
    missing = RUNNER.invoke(app, ["calibrate", "--model", "m", "--out", str(tmp_path / "no/report")])
    assert "is not a folder" in missing.stderr
    absent = RUNNER.invoke(
        app, ["calibrate", "--model", "m", "--questions", str(tmp_path / "q"), "--out", str(tmp_path / "r")]
    )
    assert "is not a file" in absent.stderr


def test_chunks_longer_than_the_context_are_warned_about(engine: RunningEngine, tmp_path: Path) -> None:
    path = questions(tmp_path)
    long = {"chunks": ["word " * 100], "question": "why?", "answers": ["w5"]}
    path.write_text(path.read_text() + "\n" + json.dumps(long))
    arguments = ["calibrate", "--model", "m", "--questions", str(path), "--out", str(tmp_path / "r.json")]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == ExitCode.OK
    assert "question 41 is left out" in " ".join(result.stderr.split())


def test_an_evaluation_is_a_table_json_and_pictures(engine: RunningEngine, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["eval", "--model", "m", "--questions", str(questions(tmp_path)), "--limit", "8"]
    arguments += ["--ratios", "0.1,0.3", "--selectors", "hkvd", "--check-layers", "1", "--rates", "2"]
    result = RUNNER.invoke(app, [*arguments, "--plots", str(tmp_path / "plots")], env={"COLUMNS": "160"})
    assert result.exit_code == ExitCode.OK, result.stderr
    assert "hkvd r=0.3 @1" in result.stdout
    assert "TTFT by request rate" in result.stdout
    assert (tmp_path / "plots/quality-cost.svg").is_file()
    document = json.loads(RUNNER.invoke(app, [*arguments, "--json"]).stdout)
    assert [row["method"] for row in document["rows"]] == [
        "full prefill",
        "full KV reuse",
        "hkvd r=0.1 @1",
        "hkvd r=0.3 @1",
    ]
    assert len(document["rates"]) == 3


def test_lists() -> None:
    assert integers("x", "1, 2,") == [1, 2]
    assert floats("x", "") == []
    assert selector_names("hkvd,query") == [SelectorName.HKVD, SelectorName.QUERY]
    for parse, text in ((integers, "1,a"), (floats, "x")):
        with pytest.raises(InvalidField, match="comma-separated"):
            parse("x", text)
    with pytest.raises(InvalidField, match="is not one of"):
        selector_names("best")
