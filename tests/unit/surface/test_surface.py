"""Nothing public goes away or changes unseen. How to record what is new: `snapshot.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripts import chart_schema, crds

from tests.unit.surface import snapshot


@pytest.mark.parametrize("part", snapshot.PARTS)
def test_the_surface_is_as_recorded(part: str) -> None:
    problem = snapshot.differences(part, snapshot.recorded(part), snapshot.collected(part))
    assert not problem, problem


def test_every_file_is_a_part() -> None:
    assert {path.stem for path in snapshot.FOLDER.iterdir()} == set(snapshot.PARTS)


@pytest.mark.parametrize("generated", [crds.render_crds, chart_schema.render_files])
def test_committed_files_are_what_the_types_say(generated: Callable[[], dict[Path, str]]) -> None:
    """The snapshot is made of the committed files."""
    assert [path.name for path, text in generated().items() if path.read_text() != text] == []


BEFORE: dict[str, Any] = {"one": {"kept": ["x", "y"], "frozen": "a"}}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"kept": ["x", "y"]}, '  - one > frozen: "a"'),
        ({"kept": ["y", "x"], "frozen": "b"}, '  ! one > frozen: "a" -> "b"'),
        ({"kept": ["x"], "frozen": "a"}, "  - one > kept > y: listed"),
        ({"kept": ["x", "y", "z"], "frozen": "a"}, "  + one > kept > z: listed"),
        ({"kept": ["x", "y"], "frozen": "a", "new": []}, "  + one > new: []"),
    ],
)
def test_a_difference_names_the_part_and_the_entry(change: dict[str, Any], line: str) -> None:
    text = snapshot.differences("metrics", BEFORE, {"one": change})
    assert "snapshots/metrics.json" in text
    assert text.splitlines()[-1] == line
    assert ("an alias that warns" in text) != line.startswith("  +")


def test_the_same_surface_has_no_differences() -> None:
    assert snapshot.differences("metrics", BEFORE, copy.deepcopy(BEFORE)) == ""
