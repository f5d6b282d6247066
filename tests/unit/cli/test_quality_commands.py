"""`kintsugi calibrate` and `kintsugi eval` over an engine whose quality is known."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examples import offline_longbench
from typer.testing import CliRunner

from kintsugi.cli.commands import calibrate, evaluate
from kintsugi.cli.exits import ExitCode
from kintsugi.cli.main import app
from kintsugi.core.errors import InvalidField, NotFound, Unavailable
from kintsugi.core.evidence import Quality
from kintsugi.core.plan import FormName
from kintsugi.core.report import FILE, LADDER
from kintsugi.engine.local import Generation, Prompt
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.models.context import tokenize_context
from kintsugi.models.prompt_form import PromptForm, load_form_behind
from kintsugi.quality import reports
from kintsugi.quality.session import MeasuringEngineSpec
from tests.fakes.reports import BINDING, VERSIONS
from tests.unit.quality.fakes import FakeEngine, WordTokenizer

RUNNER = CliRunner()


class RunningEngine(FakeEngine):
    tokenizer = WordTokenizer()
    max_model_len = 64
    prefix_token_ids = (0,)
    num_layers = 8
    binding = BINDING
    versions = VERSIONS
    spec: MeasuringEngineSpec | None = None
    """As it was started."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: set[str] = set()

    def _answer(self, prompt: Prompt) -> Generation:
        if prompt.params is not None and prompt.params.trial is not None:
            self.tried.add(prompt.params.trial.selector)
        return super()._answer(prompt)

    def generate(self, prompts: Any) -> Any:
        """One word, unless the answer is forced."""
        short = [replace(one, max_tokens=1) if one.forced is None else one for one in prompts]
        return super().generate(short)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> RunningEngine:
    engine = RunningEngine()
    engine.right_from = lambda selection, index: selection.ratio >= 0.15

    @contextmanager
    def start_measuring_engine(spec: MeasuringEngineSpec) -> Iterator[RunningEngine]:
        engine.spec = spec
        yield engine

    for module in (calibrate, evaluate):
        monkeypatch.setattr(module, "start_measuring_engine", start_measuring_engine)
    form = PromptForm.of(WordTokenizer())
    monkeypatch.setattr(calibrate, "load_form_behind", lambda model, name, system, vllm_args: form)
    monkeypatch.setattr(evaluate, "load_form", lambda model, name: form)
    return engine


def write_questions(path: Path, chunks: list[str], count: int = 400) -> None:
    row = {"chunks": chunks, "question": "why?", "answers": ["w5"]}
    path.write_text("\n".join([json.dumps(row)] * count))


def test_questions_are_cut_into_segments(
    engine: RunningEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunningEngine, "max_model_len", 4096)
    path, out = tmp_path / "mine.jsonl", tmp_path / "report.json"
    arguments = ["calibrate", "--model", "o/m", "--questions", str(path), "--out", str(out)]
    generator = random.Random(0)
    long = " ".join("x" * generator.randrange(1, 16) for _ in range(700))
    write_questions(path, ["word " * 300, long])
    for options, in_segments in (([], False), (["--segments"], True)):
        result = RUNNER.invoke(app, [*arguments, *options])
        assert result.exit_code == ExitCode.OK, result.stderr
        (cell,) = reports.read(out).cells
        assert (cell.kind == "discovered") is in_segments
    write_questions(path, ["too few words"])
    result = RUNNER.invoke(app, [*arguments, "--segments"])
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "none of its chunks holds a segment, which takes 64 tokens" in " ".join(result.stderr.split())


def questions(folder: Path, count: int = 400, answer: str = "w5") -> Path:
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
    arguments = ["calibrate", "--model", "o/m", "--questions", str(path), "--out", out, *more]
    return RUNNER.invoke(app, arguments)


def test_a_report_is_written_and_shown(
    engine: RunningEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = calibrated(tmp_path)
    assert result.exit_code == ExitCode.OK, result.stderr
    report = reports.read(tmp_path / "report.json")
    (cell,) = report.cells
    assert report.standing(cell, FILE, Quality.BALANCED).passed == LADDER[:3]
    for shown in (
        "prompts of 1 to 512 tokens with declared chunks, codec raw",
        "✓ query r=0.75 @1",
        "passes: query r=0.2 @1",
        "does not pass: query r=0.1 @1",
        "a mean below 0.250 passes (balanced)",
    ):
        assert shown in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80
    document = json.loads(calibrated(tmp_path, "--json").stdout)
    assert document["binding"]["codec"] == "raw"
    (found,) = document["cells"]
    assert found["passed"] == ["query r=0.75 @1", "query r=0.4 @1", "query r=0.2 @1"]
    assert [row["passed"] for row in found["configurations"]] == [True, True, True, False]
    assert [row["answers_lost"] for row in found["configurations"]] == [0.0, 0.0, 0.0, 1.0]
    assert (found["is_over"], found["pairs_missing"]) == (True, None)


def test_what_stays_undecided_is_shown_with_what_it_takes(engine: RunningEngine, tmp_path: Path) -> None:
    result = calibrated(tmp_path, count=48)
    assert result.exit_code == ExitCode.NOT_BLENDABLE
    text = " ".join(result.stdout.split())
    assert "undecided: query r=0.75 @1: 48 of about " in text
    assert reports.read(tmp_path / "report.json").cells, "the evidence is kept"


def test_strict_is_not_passed_by_what_passes_balanced(engine: RunningEngine, tmp_path: Path) -> None:
    assert calibrated(tmp_path, count=200).exit_code == ExitCode.OK
    strict = calibrated(tmp_path, "--quality", "strict", count=200)
    assert strict.exit_code == ExitCode.NOT_BLENDABLE
    assert "a mean below 0.083 passes (strict)" in " ".join(strict.stdout.split())


def test_an_engine_is_measured_as_it_will_serve(engine: RunningEngine, tmp_path: Path) -> None:
    told = ("--engine", '{"tensor_parallel_size": 2, "dtype": "float16"}', "--no-portable")
    assert calibrated(tmp_path, *told).exit_code == ExitCode.OK
    assert engine.spec is not None
    assert engine.spec.vllm_args == {"tensor_parallel_size": 2, "dtype": "float16"}
    assert engine.spec.extra_config == {"portable": False}
    assert engine.spec.form is not None
    assert engine.spec.form.head == (0,)


def test_a_model_that_does_not_pass_is_code_3_and_the_report_says_so(
    engine: RunningEngine, tmp_path: Path
) -> None:
    engine.right_from = lambda selection, index: False
    result = calibrated(tmp_path)
    assert result.exit_code == ExitCode.NOT_BLENDABLE
    assert "does not pass: query r=0.75 @1: " in " ".join(result.stdout.split())
    assert "too much to pass" in " ".join(result.stdout.split())
    report = reports.read(tmp_path / "report.json")
    assert not report.standing(report.cells[0], FILE, Quality.BALANCED).passed


@pytest.mark.parametrize(
    ("of_questions", "more", "word"),
    [
        ({"count": 5}, (), "5 fit the model"),
        ({"answer": "never"}, (), "rarely right"),
        ({}, ("--store", "ram://here"), "exists only in this process"),
        ({}, ("--engine", "{"), "engine: is not JSON"),
        ({}, ("--quality", "off"), "off tests nothing; choose balanced or strict"),
        ({}, ("--minutes", "0"), "minutes: 0 must be above 0"),
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
    nowhere = RUNNER.invoke(app, ["calibrate", "--model", "o/m"])
    assert nowhere.exit_code == ExitCode.BAD_INPUT
    assert "--store URL" in nowhere.stderr
    missing = RUNNER.invoke(app, ["calibrate", "--model", "o/m", "--out", str(tmp_path / "no/report")])
    assert "is not a folder" in missing.stderr
    folder = RUNNER.invoke(app, ["calibrate", "--model", "o/m", "--out", str(tmp_path)])
    assert "is a folder" in " ".join(folder.stderr.split())
    absent = RUNNER.invoke(
        app, ["calibrate", "--model", "o/m", "--questions", str(tmp_path / "q"), "--out", str(tmp_path / "r")]
    )
    assert "is not a file" in absent.stderr


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(spec: MeasuringEngineSpec) -> None:
        raise AssertionError("what cannot end well is found before an engine is started")

    for module in (calibrate, evaluate):
        monkeypatch.setattr(module, "start_measuring_engine", started)


@pytest.mark.parametrize("command", ["calibrate", "eval"])
def test_a_context_reaches_the_engine_that_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    seen: list[MeasuringEngineSpec] = []

    def started(spec: MeasuringEngineSpec) -> None:
        seen.append(spec)
        raise Unavailable("by the test")

    for module in (calibrate, evaluate):
        monkeypatch.setattr(module, "start_measuring_engine", started)
    model = str(bundled_checkpoint())
    arguments = [command, "--model", model, "--questions", str(questions(tmp_path)), "--context", "bundled"]
    out = ["--out", str(tmp_path / "report.json")] if command == "calibrate" else []
    RUNNER.invoke(app, [*arguments, *out])
    assert [spec.context_token_ids for spec in seen] == [tokenize_context("bundled", model)]


@pytest.mark.usefixtures("no_engine")
def test_a_store_that_does_not_answer_is_found_before_minutes_are_spent(tmp_path: Path) -> None:
    result = calibrated(tmp_path, "--store", "grpc://127.0.0.1:1")
    assert result.exit_code == ExitCode.UNAVAILABLE, result.stderr
    assert not (tmp_path / "report.json").exists()


def evaluation(folder: Path, **grid: Any) -> list[str]:
    """The arguments of an evaluation over a grid."""
    file = folder / "grid.yaml"
    file.write_text(json.dumps(grid))
    asked = ["--questions", str(questions(folder)), "--grid", str(file)]
    return ["eval", "--model", "o/m", *asked]


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"codecs": ["raw", "int9"]}, "'int9' is not one of"),
        ({"batches": [0]}, "at least 1"),
        ({"limit": 0}, "at least 1"),
        ({"selectors": ["best"]}, "is not one of"),
        ({"ratios": ["x"]}, "grid.ratios.0"),
        ({"ratio": [0.1]}, "did you mean 'ratios'"),
    ],
)
def test_an_evaluation_that_cannot_end_well_is_not_begun(
    tmp_path: Path, more: dict[str, Any], word: str
) -> None:
    result = RUNNER.invoke(app, evaluation(tmp_path, **more))
    assert result.exit_code == ExitCode.BAD_INPUT, result.stderr
    assert word in " ".join(result.stderr.split())


def test_a_system_prompt_that_is_no_text_or_of_no_model_is_explained(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "text").write_text("Be brief.")
    with pytest.raises(InvalidField, match="not UTF-8"):
        load_form_behind("m", FormName.AUTO, tmp_path / "binary")
    with (tmp_path / "weights").open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(InvalidField, match=r"system: .* has more than 1048576 bytes"):
        load_form_behind("m", FormName.AUTO, tmp_path / "weights")
    with pytest.raises(NotFound, match="check the name"):
        load_form_behind(str(tmp_path / "no model"), FormName.AUTO, tmp_path / "text")
    with pytest.raises(NotFound, match="is not a file"):
        load_form_behind("m", FormName.AUTO, tmp_path)


def test_calibrating_in_a_codec_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidField, match="codec"):
        MeasuringEngineSpec("m", codec="int9")
    with pytest.raises(InvalidField, match="plain_copies"):
        MeasuringEngineSpec("m", extra_config={"plain_copies": False})


def test_chunks_longer_than_the_context_are_warned_about(engine: RunningEngine, tmp_path: Path) -> None:
    path = questions(tmp_path)
    long = {"chunks": ["word " * 100], "question": "why?", "answers": ["w5"]}
    path.write_text(path.read_text() + "\n" + json.dumps(long))
    arguments = ["calibrate", "--model", "o/m", "--questions", str(path), "--out", str(tmp_path / "r.json")]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == ExitCode.OK
    assert "question 401 is left out" in " ".join(result.stderr.split())


def test_an_evaluation_is_a_table_and_json(engine: RunningEngine, tmp_path: Path) -> None:
    grid = {"ratios": [0.1, 0.3], "selectors": ["hkvd"], "check_layers": [1], "limit": 8}
    arguments = evaluation(tmp_path, **grid)
    result = RUNNER.invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == ExitCode.OK, result.stderr
    assert engine.spec is not None
    assert "hkvd r=0.3 @1" in result.stdout
    document = json.loads(RUNNER.invoke(app, [*arguments, "--json"]).stdout)
    assert [row["method"] for row in document["rows"]] == [
        "full prefill",
        "full KV reuse",
        "hkvd r=0.1 @1",
        "hkvd r=0.3 @1",
    ]


def test_an_engine_that_fails_costs_only_its_own_rows(
    engine: RunningEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def one_that_starts(spec: MeasuringEngineSpec) -> Iterator[RunningEngine]:
        if spec.codec == "int8":
            raise Unavailable("vLLM did not start")
        yield engine

    monkeypatch.setattr(evaluate, "start_measuring_engine", one_that_starts)
    grid = {"ratios": [0.3], "selectors": ["hkvd"], "check_layers": [1], "codecs": ["raw", "int8"]}
    arguments = evaluation(tmp_path, limit=8, **grid)
    result = RUNNER.invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == ExitCode.UNAVAILABLE
    assert "hkvd r=0.3 @1" in result.stdout
    assert "vLLM did not start" in result.stderr
    document = json.loads(RUNNER.invoke(app, [*arguments, "--json"]).stdout)
    assert len(document["rows"]) == 3
    assert document["error"]["exit_code"] == ExitCode.UNAVAILABLE


@pytest.fixture
def longbench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """The example as it is run, over one small data set; its exit code."""
    questions(tmp_path, 4).rename(tmp_path / "musique.jsonl")
    fixed = [
        "--model",
        "o/m",
        "--data",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
        "--datasets",
        "musique",
    ]

    def run(*more: str, **grid: Any) -> int:
        file = tmp_path / "given.json"
        file.write_text(json.dumps(grid))
        monkeypatch.setattr("sys.argv", ["offline_longbench.py", *fixed, "--grid", str(file), *more])
        return offline_longbench.main()

    return run


def test_the_papers_measurements_are_one_command(
    engine: RunningEngine, longbench: Callable[..., int], tmp_path: Path
) -> None:
    assert longbench(ratios=[0.3], selectors=["hkvd"]) == 0
    document = json.loads((tmp_path / "out/musique.json").read_text())
    assert [row["method"] for row in document["rows"]][2:] == ["hkvd r=0.3 @1"]


@pytest.mark.usefixtures("no_engine")
def test_the_example_explains_bad_input(
    longbench: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for said, word in (
        (lambda: longbench(ratios=["x"]), "grid.ratios.0"),
        (lambda: longbench(selectors=["best"]), "is not one of"),
        (lambda: longbench("--datasets", "none"), "is not a file"),
    ):
        assert said() == 1
        assert word in " ".join(capsys.readouterr().out.split())
