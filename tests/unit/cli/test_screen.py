"""Results on stdout, progress on stderr, the engine's output in a log that is kept only on failure."""

from __future__ import annotations

import json
import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kintsugi.cli import progress
from kintsugi.cli.progress import ProgressLines
from kintsugi.cli.runner import command
from kintsugi.cli.screen import Screen
from kintsugi.core.errors import Unavailable


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_json_is_all_of_stdout(capfd: pytest.CaptureFixture[str], logs: Path) -> None:
    screen = Screen(as_json=True)
    with screen.engine_log(), screen.step("Working") as say:
        say("half")
        os.write(1, b"a C library's chatter\n")
        os.write(2, b"a warning\n")
    screen.show({"answer": "é"}, lambda console: console.print("not this"))
    captured = capfd.readouterr()
    assert json.loads(captured.out) == {"answer": "é"}
    assert "Working" in captured.err
    assert "chatter" not in captured.err
    assert "warning" not in captured.err
    assert list(logs.iterdir()) == []


def test_a_failure_says_where_the_log_is(capfd: pytest.CaptureFixture[str], logs: Path) -> None:
    def start() -> None:
        with Screen(as_json=False).engine_log():
            os.write(1, b"what went wrong\n")
            raise Unavailable("vLLM did not start")

    with pytest.raises(Unavailable, match="log is") as caught:
        start()
    (log,) = logs.iterdir()
    assert str(log) in str(caught.value)
    assert log.read_text() == "what went wrong\n"
    os.write(1, b"restored\n")
    assert "restored" in capfd.readouterr().out


WAIT_S = 30.0


class Beats:
    """Ten seconds pass whenever the test says so; lines are waited for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.lines: list[str] = []
        self._pass = threading.Semaphore(0)
        self._written = threading.Semaphore(0)

    def wait(self, ended: threading.Event) -> bool:
        while not self._pass.acquire(timeout=0.001):
            if ended.is_set():
                return True
        return False

    def write(self, line: str) -> None:
        self.lines.append(line)
        self._written.release()

    def beat(self) -> None:
        self.now_s += 10.0
        self._pass.release()
        assert self._written.acquire(timeout=WAIT_S)


def test_a_line_every_ten_seconds_names_what_is_done_though_nothing_is_said() -> None:
    beats = Beats()
    lines = ProgressLines(beats.write, lambda: beats.now_s, beats.wait)
    with lines.track("working"):
        beats.beat()
        with lines.track("Measuring") as activity:
            beats.beat()
            activity.name_part("ratio 0.15 [of many]")
            beats.beat()
        beats.beat()
    assert beats.lines == [
        "working (10 s)",
        "Measuring (10 s)",
        "Measuring: ratio 0.15 [of many] (20 s)",
        "working (40 s)",
    ]
    assert "progress" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Lines come a thousand times as often; the event is set once two were printed."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.01)
    twice, printed = threading.Event(), [0]
    print_line = Screen._print_line

    def count(self: Screen, line: str) -> None:
        print_line(self, line)
        printed[0] += 1
        if printed[0] >= 2:
            twice.set()

    monkeypatch.setattr(Screen, "_print_line", count)
    return twice


@pytest.mark.parametrize("with_log", [False, True])
def test_a_step_that_says_nothing_prints_lines(
    capfd: pytest.CaptureFixture[str], logs: Path, often: threading.Event, with_log: bool
) -> None:
    screen = Screen(as_json=True)
    with ExitStack() as stack:
        if with_log:
            stack.enter_context(screen.engine_log())
        with screen.step("Measuring [1]"):
            assert often.wait(WAIT_S)
    captured = capfd.readouterr()
    assert captured.err.count("  Measuring [1] (") >= 2
    assert captured.out == ""


@pytest.mark.parametrize("serves", [False, True])
def test_a_command_prints_lines_between_its_steps_unless_it_serves(
    often: threading.Event, serves: bool
) -> None:
    app = typer.Typer()

    @command(app, serves=serves)
    def linger(screen: Screen) -> None:
        assert often.wait(0.3 if serves else WAIT_S) is not serves

    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0, result.output
    assert ("working (" in result.stderr) is not serves
