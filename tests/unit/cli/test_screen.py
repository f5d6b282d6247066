"""Results on stdout, progress on stderr, the engine's output in a log that is kept only on failure."""

from __future__ import annotations

import json
import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from kintsugi.cli import screen
from kintsugi.cli.screen import Screen
from kintsugi.core.errors import Unavailable


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_json_is_all_of_stdout(capfd: pytest.CaptureFixture[str], logs: Path) -> None:
    shown = Screen(as_json=True)
    with shown.engine_log(), shown.step("Working") as say:
        say("half")
        os.write(1, b"a C library's chatter\n")
        os.write(2, b"a warning\n")
    shown.show({"answer": "é"}, lambda console: console.print("not this"))
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
Lines = tuple[threading.Event, threading.Event]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    """Lines come a thousand times as often. Set after two lines, and after one that names a part."""
    monkeypatch.setattr(screen, "LINE_EVERY_S", 0.01)
    twice, named, printed = threading.Event(), threading.Event(), [0]
    print_line = Screen._print_line

    def count(self: Screen, line: str) -> None:
        print_line(self, line)
        printed[0] += 1
        if printed[0] >= 2:
            twice.set()
        if ": half" in line:
            named.set()

    monkeypatch.setattr(Screen, "_print_line", count)
    return twice, named


@pytest.mark.parametrize("with_log", [False, True])
def test_a_step_prints_lines_that_name_its_part(
    capfd: pytest.CaptureFixture[str],
    logs: Path,
    lines: tuple[threading.Event, threading.Event],
    with_log: bool,
) -> None:
    silent, named = lines
    shown = Screen(as_json=True)
    with ExitStack() as stack:
        if with_log:
            stack.enter_context(shown.engine_log())
        with shown.step("Measuring [1]") as say:
            assert silent.wait(WAIT_S)
            say("half [of all]")
            assert named.wait(WAIT_S)
    captured = capfd.readouterr()
    assert captured.err.count("  Measuring [1] (") >= 2
    assert "  Measuring [1]: half [of all] (" in captured.err
    assert captured.out == ""
    assert "progress" not in {thread.name for thread in threading.enumerate()}
