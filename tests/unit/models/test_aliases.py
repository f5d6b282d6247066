"""The names that a model answers to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kintsugi.models.hub import find_aliases


def checkpoint(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_answers_to_its_folder_and_its_hub_name(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint", _name_or_path="org/model")
    assert find_aliases("served", f"{folder}/", folder) == ("org/model", f"{folder}/", str(folder))


def test_no_name_comes_twice(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint", _name_or_path="org/model")
    assert find_aliases("org/model", str(folder), folder) == (str(folder),)


def test_a_relative_folder_has_its_absolute_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    assert find_aliases("checkpoint", "./checkpoint", "./checkpoint") == (
        "./checkpoint",
        str(folder.resolve()),
    )


def test_a_snapshot_of_the_hub_has_the_name_of_its_repository(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "models--org--model" / "snapshots" / "ab12", _name_or_path="other/base")
    assert find_aliases("model", "org/model", folder)[0] == "org/model"
    assert "other/base" not in find_aliases("model", "org/model", folder), "what it was trained from"


@pytest.mark.parametrize("named", ["/home/somebody/run-7", "../run-7", "run-7", 7, None, "o/" + "m" * 300])
def test_a_folder_of_another_machine_is_no_name(tmp_path: Path, named: object) -> None:
    folder = checkpoint(tmp_path / "checkpoint", _name_or_path=named)
    assert find_aliases("served", str(folder), folder) == (str(folder),)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_broken_config_names_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert find_aliases("served", str(tmp_path), tmp_path) == (str(tmp_path),)
