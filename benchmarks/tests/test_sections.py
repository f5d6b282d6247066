"""The command line that benchmarks of sections share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.support.figures import Figure
from benchmarks.support.musique import measurable
from benchmarks.support.sections import measure, parser_of, run


def figure_of(name: str, quick: bool) -> list[Figure]:
    return [Figure.at_most(name, 1.0 if quick else 3.0, 2.0)]


SECTIONS = {name: lambda quick, name=name: figure_of(name, quick) for name in ("speed", "size")}


def test_sections_are_measured_as_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for given, chosen, value in (
        (["--quick", "--only", "size"], ["size"], 1.0),
        ([], ["speed", "size"], 3.0),
    ):
        monkeypatch.setattr("sys.argv", ["bench", *given])
        run("toy", "A toy.", SECTIONS)
        said = json.loads(capsys.readouterr().out)
        assert (said["benchmark"], said["config"]["sections"]) == ("toy", chosen)
        assert (said["config"]["quick"], said["config"]["weights"]) == (value == 1.0, "random")
        assert [(one["name"], one["value"]) for one in said["figures"]] == [(name, value) for name in chosen]


def test_what_a_section_notes_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    details: dict[str, int] = {}

    def noted(setup: str) -> list[Figure]:
        details[setup] = 5
        return []

    arguments = parser_of("A toy.", {"noted": noted}, "fewer").parse_args([])
    measure("toy", arguments, {"noted": noted}, {"details": details}, setup="mine")
    assert json.loads(capsys.readouterr().out)["config"]["details"] == {"mine": 5}


def test_what_was_measured_before_a_failure_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(quick: bool) -> list[Figure]:
        raise OSError("no such device")

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("sys.argv", ["bench"])
    with pytest.raises(OSError, match="no such device"):
        run("toy", "A toy.", {"speed": SECTIONS["speed"], "broken": broken, "size": SECTIONS["size"]})
    said = json.loads(capsys.readouterr().out)
    assert said["config"]["sections"] == ["speed"]
    assert [one["name"] for one in said["figures"]] == ["speed"]


def test_an_unknown_section_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--only", "speed,sizes"])
    with pytest.raises(SystemExit, match="--only sizes: the sections are speed, size"):
        run("toy", "A toy.", SECTIONS)


def test_what_lacks_its_passages_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["rates", "crashes"]
    assert measurable(names, ("crashes",), tmp_path) == names
    assert measurable(names, ("crashes",), tmp_path / "none.json") == ["crashes"]
    assert "none.json is not here: rates left out" in capsys.readouterr().err
