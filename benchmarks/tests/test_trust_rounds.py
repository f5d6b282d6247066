"""Rounds whose outcomes are kept: what an interrupted run did is not done again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.support.trust import rounds
from benchmarks.support.trust.rounds import Outcome, Unfinished, run_rounds


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(rounds.FOLDER, str(tmp_path))
    monkeypatch.delenv(rounds.MINUTES, raising=False)
    return tmp_path


def test_an_interrupted_run_goes_on_where_it_stopped(state: Path) -> None:
    measured: list[str] = []

    def one(name: str) -> Outcome:
        if name == "third" and len(measured) < 3:
            measured.append("interrupted")
            raise KeyboardInterrupt
        measured.append(name)
        return {"wrong": len(measured)}

    names = ["first", "second", "third"]
    with pytest.raises(KeyboardInterrupt):
        run_rounds("toy", names, one, quick=True, seed=1)
    (file,) = state.iterdir()
    file.write_text(file.read_text() + '{"round": "third", "outc')  # the write that was cut
    outcomes = run_rounds("toy", names, one, quick=True, seed=1)
    assert measured == ["first", "second", "interrupted", "third"]
    assert list(outcomes) == names
    assert outcomes["first"] == {"wrong": 1}
    assert run_rounds("toy", names, one, quick=True, seed=1) == outcomes
    run_rounds("toy", ["first"], one, quick=True, seed=2)
    assert measured[-1] == "first", "another seed has outcomes of its own"


def test_a_run_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rounds.MINUTES, "0")
    with pytest.raises(Unfinished) as ended:
        run_rounds("toy", ["first"], lambda name: {}, quick=False, seed=1)
    assert ended.value.code == rounds.UNFINISHED_EXIT
