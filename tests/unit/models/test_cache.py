"""Folders that are made once: whole or not at all, whoever else is at it."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kintsugi.core.errors import InvalidField, KintsugiError, ResourceExhausted
from kintsugi.models.cache import make_folder_once


def fill(draft: Path) -> None:
    (draft / "file").write_text("whole")


def visible(folder: Path) -> list[str]:
    """Everything but the locks, which stay."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_folder_is_made_once_and_whole(tmp_path: Path) -> None:
    final = tmp_path / "cache" / "folder"
    assert make_folder_once(final, fill) == final
    assert (final / "file").read_text() == "whole"
    assert final.stat().st_mode & 0o777 == 0o755
    assert make_folder_once(final, lambda draft: pytest.fail("made again")) == final
    assert visible(final.parent) == ["folder"]


def test_whoever_comes_second_waits_for_the_first(tmp_path: Path) -> None:
    called, entered_twice, made = threading.Event(), threading.Event(), []

    def make(draft: Path) -> None:
        made.append(draft)
        if len(made) > 1:
            entered_twice.set()
        called.wait()
        entered_twice.wait(0.2)
        fill(draft)

    def second() -> Path:
        called.set()
        return make_folder_once(tmp_path / "folder", make)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(make_folder_once, tmp_path / "folder", make)
        assert pool.submit(second).result() == first.result()
    assert len(made) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError()], ids=repr)
def test_an_interrupted_make_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    def interrupted(draft: Path) -> None:
        fill(draft)
        raise error

    with pytest.raises(type(error)):
        make_folder_once(tmp_path / "folder", interrupted)
    assert visible(tmp_path) == []


def test_the_draft_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    abandoned = tmp_path / ".folder.draft-abc"
    another = tmp_path / ".folder-2.draft-abc"
    for folder in (abandoned, another):
        folder.mkdir()
        (folder / "file").write_text("ha")
    make_folder_once(tmp_path / "folder", fill)
    assert visible(tmp_path) == [another.name, "folder"]


@pytest.mark.parametrize(
    ("number", "kind", "advice"),
    [
        (errno.ENOSPC, ResourceExhausted, "free some space"),
        (errno.EDQUOT, ResourceExhausted, "larger disk"),
        (errno.EROFS, InvalidField, "writable folder"),
    ],
)
def test_a_disk_error_says_what_to_do(
    number: int, kind: type[KintsugiError], advice: str, tmp_path: Path
) -> None:
    def fails(draft: Path) -> None:
        raise OSError(number, "said by the system")

    with pytest.raises(kind, match=advice) as caught:
        make_folder_once(tmp_path / "folder", fails)
    assert str(tmp_path) in str(caught.value)
    assert "KINTSUGI_CACHE" in str(caught.value)
    assert visible(tmp_path) == []


def test_a_cache_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidField, match="KINTSUGI_CACHE"):
        make_folder_once(tmp_path / "file" / "folder", fill)
