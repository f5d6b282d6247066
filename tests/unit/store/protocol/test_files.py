"""Who may read files with tokens and texts."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.store.protocol.files import check_private, make_private


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "file"
    make_private(path)
    assert mode_of(path) == 0o600
    path.write_text("kept")
    path.chmod(0o664)
    make_private(path)
    assert (mode_of(path), path.read_text()) == (0o600, "kept")


def file_of_mode(folder: Path, mode: int) -> Path:
    path = folder / "file"
    path.touch()
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_private_file_is_accepted(tmp_path: Path, mode: int) -> None:
    check_private("tokens_file", file_of_mode(tmp_path, mode))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = file_of_mode(tmp_path, mode)
    with pytest.raises(InvalidField, match=rf"tokens_file: .* \(mode {mode:o}\); chmod 600 it"):
        check_private("tokens_file", path)


def test_what_would_block_its_reader_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    with pytest.raises(InvalidField, match=r"tokens_file: .*pipe is not a regular file; name one"):
        check_private("tokens_file", path)


def test_a_file_of_another_user_is_read_by_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of_mode(tmp_path, 0o640)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    check_private("tokens_file", path)
    for mode in (0o660, 0o644):
        path.chmod(mode)
        with pytest.raises(InvalidField, match="chmod 600"):
            check_private("tokens_file", path)


def test_a_secret_that_is_mounted_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of_mode(tmp_path, 0o644)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    check_private("tokens_file", path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="absent cannot be read"):
        check_private("tokens_file", tmp_path / "absent")
