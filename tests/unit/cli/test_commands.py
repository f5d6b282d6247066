"""The commands: exit codes, one line per error, JSON that is only JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kintsugi import __version__
from kintsugi.cli import session
from kintsugi.cli.commands import demo, doctor, generate
from kintsugi.cli.commands.doctor import Check, CheckResult
from kintsugi.cli.exits import ExitCode, exit_code_of
from kintsugi.cli.main import app
from kintsugi.cli.session import Asked, Session, build_prompt
from kintsugi.core import errors
from kintsugi.engine.config import SELF_TEST_CHECKS
from kintsugi.models.prompt_form import PromptForm
from tests.fakes.reports import open_report
from tests.unit.cli.fakes import FakeEngine, FakeTokenizer

RUNNER = CliRunner()


@pytest.fixture
def chunk(tmp_path: Path) -> Path:
    path = tmp_path / "chunk.txt"
    path.write_text("Tides are caused by the Moon.")
    return path


def use_engine(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> list[Mapping[str, object]]:
    """Let every command answer with `engine` and a tokenizer of words. Returns the configurations of its
    connector."""
    configs: list[Mapping[str, object]] = []

    @contextmanager
    def open_session(
        screen: Any,
        model: str,
        asked: Asked,
        namespace: str,
        length: int,
        extra_config: Mapping[str, object],
        context: str = "none",
    ) -> Iterator[Session]:
        configs.append(extra_config)
        form = PromptForm.of(FakeTokenizer(), asked.form)
        prompt = build_prompt(form, asked)
        reason = session._store_chunks(engine, prompt, namespace)  # type: ignore[arg-type]
        yield Session(engine, form, prompt, reason)  # type: ignore[arg-type]

    for module in (demo, generate, doctor):
        monkeypatch.setattr(module, "open_session", open_session)
    return configs


def generate_arguments(chunk: Path, *more: str) -> list[str]:
    return ["generate", "--model", "m", "--chunk", str(chunk), "--question", "Why tides?", *more]


def test_every_error_of_the_tree_has_a_code() -> None:
    error = errors.NotBlendable("lora", "x")
    assert exit_code_of(error) is ExitCode.NOT_BLENDABLE
    assert exit_code_of(errors.ForeignChunkKey("key", "x")) is ExitCode.BAD_INPUT
    assert exit_code_of(errors.NotFound("x")) is ExitCode.BAD_INPUT
    assert exit_code_of(errors.DeadlineExceeded("x")) is ExitCode.UNAVAILABLE
    assert exit_code_of(errors.Corrupted("x")) is ExitCode.CORRUPTED
    assert exit_code_of(errors.KintsugiError("x")) is ExitCode.FAILURE


def test_help_lists_the_commands_and_exit_codes() -> None:
    result = RUNNER.invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for word in ("demo", "generate", "doctor", "3 not blendable"):
        assert word in result.output
    assert RUNNER.invoke(app, ["--version"]).output.strip() == __version__


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--ratio", "1.5"], "ratio"),
        (["--selector", "hkdv"], "selector"),
        (["--chunk", "/does/not/exist"], "/does/not/exist"),
    ],
)
def test_bad_input_is_one_line_and_code_2(chunk: Path, arguments: list[str], word: str) -> None:
    result = RUNNER.invoke(app, generate_arguments(chunk, *arguments))
    assert result.exit_code == ExitCode.BAD_INPUT
    assert result.stderr.startswith("kintsugi: ")
    assert result.stderr.count("\n") == 1
    assert word in result.stderr
    assert result.stdout == ""


def test_a_missing_model_is_code_2(chunk: Path) -> None:
    result = RUNNER.invoke(app, ["demo", "--model", "/does/not/exist"])
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "/does/not/exist" in result.stderr


def test_errors_have_a_json_twin(chunk: Path) -> None:
    result = RUNNER.invoke(app, generate_arguments(chunk, "--ratio", "-1", "--json"))
    error = json.loads(result.stdout)["error"]
    assert (error["type"], error["field"], error["exit_code"]) == ("InvalidField", "ratio", 2)


def test_missing_options_are_code_2() -> None:
    assert RUNNER.invoke(app, ["generate"]).exit_code == ExitCode.BAD_INPUT
    assert RUNNER.invoke(app, ["demo", "--repeat"]).exit_code == ExitCode.BAD_INPUT


def test_generate_answers_and_accounts(monkeypatch: pytest.MonkeyPatch, chunk: Path) -> None:
    use_engine(monkeypatch, FakeEngine())
    text = RUNNER.invoke(app, generate_arguments(chunk))
    assert text.exit_code == ExitCode.OK
    assert text.stdout.startswith("1 2 9 9\n")
    assert "40.0% of a full prefill" in text.stdout
    document = json.loads(RUNNER.invoke(app, generate_arguments(chunk, "--json", "--compare")).stdout)
    assert document["answer"] == "1 2 9 9"
    assert document["accounting"]["outcome"] == "blended"
    assert len(document["methods"]) == 4


@pytest.mark.parametrize("command", ["demo", "generate"])
def test_an_answer_says_in_which_form_it_was_asked(
    monkeypatch: pytest.MonkeyPatch, chunk: Path, command: str
) -> None:
    use_engine(monkeypatch, FakeEngine())
    arguments = generate_arguments(chunk) if command == "generate" else ["demo", "--model", "m"]
    assert "prompt form: plain" in RUNNER.invoke(app, arguments).stdout
    assert json.loads(RUNNER.invoke(app, [*arguments, "--json"]).stdout)["form"] == "plain"
    if command == "demo":
        return
    refused = RUNNER.invoke(app, [*arguments, "--form", "chat"])
    assert refused.exit_code == ExitCode.BAD_INPUT
    assert "chat needs a chat template" in " ".join(refused.stderr.split())


def test_generate_trusts_a_report_or_nobody_unless_told(
    monkeypatch: pytest.MonkeyPatch, chunk: Path, tmp_path: Path
) -> None:
    configs = use_engine(monkeypatch, FakeEngine())
    path = tmp_path / "r.json"
    path.write_bytes(open_report().to_bytes())
    plain = RUNNER.invoke(app, generate_arguments(chunk))
    untested = RUNNER.invoke(app, generate_arguments(chunk, "--quality", "off"))
    RUNNER.invoke(app, generate_arguments(chunk, "--quality", "strict", "--report", str(path)))
    assert configs == [
        {"quality": "balanced"},
        {"quality": "off"},
        {"quality": "strict", "report": str(path)},
    ]
    assert "Blended without a test (--quality off)" in " ".join(untested.stderr.split())
    assert "without a test" not in " ".join(plain.stderr.split())


@pytest.mark.parametrize(
    ("kept", "code", "word"),
    [(0, ExitCode.BAD_INPUT, "is not a file"), (300, ExitCode.CORRUPTED, "the document is not JSON")],
)
def test_a_report_that_cannot_be_read_starts_no_engine(
    monkeypatch: pytest.MonkeyPatch, chunk: Path, tmp_path: Path, kept: int, code: ExitCode, word: str
) -> None:
    configs = use_engine(monkeypatch, FakeEngine())
    if kept:
        (tmp_path / "r.json").write_bytes(open_report().to_bytes()[:kept])
    result = RUNNER.invoke(app, generate_arguments(chunk, "--report", str(tmp_path / "r.json")))
    assert result.exit_code == code
    assert word in " ".join(result.stderr.split())
    assert not configs


def test_an_answer_that_was_not_blended_is_code_3(monkeypatch: pytest.MonkeyPatch, chunk: Path) -> None:
    use_engine(monkeypatch, FakeEngine("mla: latent KV"))
    result = RUNNER.invoke(app, generate_arguments(chunk, "--json"))
    assert result.exit_code == ExitCode.NOT_BLENDABLE
    assert json.loads(result.stdout)["answer"] == "1 2 3 4"
    assert "mla: latent KV" in result.stderr


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (CheckResult.OK, ExitCode.OK),
        (CheckResult.WARNING, ExitCode.OK),
        (CheckResult.FAILED, ExitCode.NOT_BLENDABLE),
    ],
)
def test_doctor_fails_where_a_check_does(
    monkeypatch: pytest.MonkeyPatch, verdict: CheckResult, code: ExitCode
) -> None:
    monkeypatch.setattr(doctor, "installation_checks", list)
    monkeypatch.setattr(doctor, "memory_check", lambda model: Check("memory", verdict, "[b]8[/b] GiB"))
    result = RUNNER.invoke(app, ["doctor"])
    assert result.exit_code == code
    assert "[b]8[/b] GiB" in result.stdout, "details are text, not markup"
    document = json.loads(RUNNER.invoke(app, ["doctor", "--json"]).stdout)
    assert document["ok"] is (code is ExitCode.OK)
    memory, self_test = document["checks"]
    assert memory == {"name": "memory", "verdict": verdict.value, "detail": "[b]8[/b] GiB"}
    assert (self_test["name"], self_test["verdict"]) == ("self-test", "skipped")


@pytest.mark.parametrize(
    ("reason", "verdict"), [(None, "ok"), ("self_test_failed: check 'full ratio'", "failed")]
)
def test_doctor_reports_the_self_test(
    monkeypatch: pytest.MonkeyPatch, reason: str | None, verdict: str
) -> None:
    monkeypatch.setattr(doctor, "installation_checks", list)
    monkeypatch.setattr(doctor, "memory_check", lambda model: Check("memory", CheckResult.OK, model or ""))
    use_engine(monkeypatch, FakeEngine(reason))
    result = RUNNER.invoke(app, ["doctor", "--model", "m", "--json"])
    memory, check = json.loads(result.stdout)["checks"]
    assert memory["detail"] == "m", "the memory that this model needs"
    assert (check["name"], check["verdict"]) == ("self-test", verdict)
    assert check["detail"] == reason if reason else all(name in check["detail"] for name in SELF_TEST_CHECKS)


def test_doctor_says_how_to_run_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installation_checks", list)
    _, line = RUNNER.invoke(app, ["doctor"]).stdout.strip().splitlines()
    assert "self-test" in line
    assert "--model" in line
