"""Results on stdout, progress on stderr, the engine's output in a log that is kept only on failure."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

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
