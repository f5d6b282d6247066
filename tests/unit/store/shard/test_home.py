"""What is said about a data folder that cannot be used."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.store.shard.tiers import home as module
from kintsugi.store.shard.tiers.home import Home


def test_a_full_disk_is_the_folder_s_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(module, "write_durably", write)
        with pytest.raises(InvalidField, match=r"data-dir: .*cannot be used \(No space left on device\)"):
            Home(tmp_path)
    Home(tmp_path).close()


def test_a_folder_in_place_of_the_identity_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kintsugi.json").mkdir()
    with pytest.raises(InvalidField, match=r"data-dir: .*cannot be used \(Is a directory\)"):
        Home(tmp_path)
