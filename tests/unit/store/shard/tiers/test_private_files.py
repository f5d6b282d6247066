"""The files of a shard: only their owner may read them, and no link leads out of their folder."""

from __future__ import annotations

import stat
from contextlib import closing
from pathlib import Path

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.spaces import ModelFingerprint
from kintsugi.store.shard.erasure import Scope
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.shard import Shard


def opened(folder: Path) -> Shard:
    ssd = SsdSpec(folder / "ssd", 1 << 20)
    return open_shard(ShardSpec(1 << 20, folder / "data", (ssd,)))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a shard that has stored something in each of its files."""
    with closing(opened(tmp_path)) as shard:
        shard.erase(Scope("acme"), 1.0)
        shard.reports.put(ModelFingerprint.of({"w": "x"}), "calibration", b"{}")
    return tmp_path


def test_only_the_owner_may_read_a_shards_files(folder: Path) -> None:
    names = {path.name for path in files_of(folder)}
    assert {"slab", "data.mdb", "lock.mdb", "kintsugi.json", "lock"} == names
    for file in files_of(folder):
        file.chmod(0o644)
    opened(folder).close()
    assert {stat.S_IMODE(file.stat().st_mode) for file in files_of(folder)} == {0o600}


def test_links_are_refused(folder: Path) -> None:
    for number, file in enumerate(files_of(folder)):
        moved = folder / f"moved-{number}"
        file.rename(moved)
        file.symlink_to(moved)
        before = moved.read_bytes()
        with pytest.raises(InvalidField, match="symbolic link"):
            opened(folder)
        assert moved.read_bytes() == before
        file.unlink()
        moved.rename(file)
    opened(folder).close()
