"""Files of a Ray that is started here."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="install the extra `precompute`")
pytest.importorskip("semantic_text_splitter", reason="install the extra `precompute`")

from kintsugi.core.deploy import RAY_ENVIRONMENT
from kintsugi.precompute.local_ray import (
    UNREAD,
    make_private_folder,
    make_token_file,
    require_token,
    start_local_ray,
)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_token_is_made_once_and_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / ".ray" / "auth_token"
    make_token_file(path)
    token = path.read_text()
    assert len(token) == 64
    assert (mode_of(path), mode_of(path.parent)) == (0o600, 0o700)
    path.chmod(0o644)  # as Ray makes it
    make_token_file(path)
    assert (path.read_text(), mode_of(path)) == (token, 0o600)


def test_without_a_home_the_token_is_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
    require_token()
    token = os.environ["RAY_AUTH_TOKEN"]
    assert len(token) == 64
    require_token()
    assert os.environ["RAY_AUTH_TOKEN"] == token, "a token that was given is kept"


def test_no_token_is_made_where_there_is_to_be_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    require_token()
    assert list(tmp_path.iterdir()) == []
    assert os.environ["RAY_AUTH_TOKEN"] == ""


def test_a_private_folder_is_the_same_at_each_start(tmp_path: Path) -> None:
    folder = make_private_folder(tmp_path)
    folder.chmod(0o777)
    assert make_private_folder(tmp_path) == folder
    assert mode_of(folder) == 0o700


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o755)
    (tmp_path / f"kintsugi-{os.getuid()}").symlink_to(theirs)
    folder = make_private_folder(tmp_path)
    assert folder.name.startswith(f"kintsugi-{os.getuid()}-")
    assert (mode_of(folder), mode_of(theirs)) == (0o700, 0o755)


def test_what_nobody_reads_is_not_counted_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private.node import Node

    start_log_monitor, during = Node.start_log_monitor, []
    folders: list[Path] = []

    def init(**options: Any) -> None:
        during.append(Node.start_log_monitor)
        folders.append(Path(options["_temp_dir"]))

    monkeypatch.setattr("ray.init", init)
    settings = {**RAY_ENVIRONMENT, **UNREAD}
    for name in settings:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "new"))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_event_stats", "true")
    start_local_ray()
    found = {name: os.environ.pop(name) for name in settings}
    assert found == {**settings, "RAY_event_stats": "true"}
    assert found["RAY_memory_monitor_refresh_ms"] == found["RAY_worker_oom_score_adjustment"] == "0"
    assert during != [start_log_monitor]
    assert folders == [tmp_path / f"new/kintsugi-{os.getuid()}/ray"]
    assert mode_of(folders[0].parent) == 0o700
    assert Node.start_log_monitor is start_log_monitor, "other users of Ray in this process keep theirs"
