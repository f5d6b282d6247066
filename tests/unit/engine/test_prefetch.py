"""Files that starting an engine reads are asked for at once, and nothing else."""

from __future__ import annotations

import _ctypes
import importlib.util
import os
import threading
from pathlib import Path

import pytest

from kintsugi.engine import prefetch
from kintsugi.engine.prefetch import FileKeeper, files_in_use, prefetch_engine, read_through


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that the kernel was asked for, by file name."""
    asked: dict[str, int] = {}

    def fadvise(file: int, start: int, size: int, advice: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{file}")).name
        assert (start, advice) == (asked.get(name, 0), os.POSIX_FADV_WILLNEED)
        assert 0 < size <= 128 << 10, "the kernel reads no more at one request"
        asked[name] = asked.get(name, 0) + size

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    return asked


def test_libraries_bytecode_and_weights_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, int]
) -> None:
    package, model = tmp_path / "package", tmp_path / "model"
    (package / "lib").mkdir(parents=True)
    model.mkdir()
    (package / "__init__.py").write_text("")
    (package / "lib" / "libone.so.2").write_bytes(bytes(10))
    (package / "code.pyc").write_bytes(bytes(20))
    (model / "model.safetensors").write_bytes(bytes(30))
    (model / "README.md").write_bytes(bytes(40))
    (model / "gone.safetensors").symlink_to(model / "nowhere")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(prefetch, "PACKAGES", ("package", "no_such_package"))
    assert prefetch_engine(model) == 60
    assert asked == {"libone.so.2": 10, "code.pyc": 20, "model.safetensors": 30}


def test_a_large_checkpoint_is_asked_for_in_pieces_and_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, int]
) -> None:
    monkeypatch.setattr(prefetch, "PACKAGES", ())
    monkeypatch.setattr(prefetch, "BYTES_MAX", 500_000)
    for name in ("one.safetensors", "two.safetensors"):
        (tmp_path / name).write_bytes(bytes(300_001))
    assert prefetch_engine(tmp_path) == 500_000
    assert sorted(asked.values()) == [199_999, 300_001]


def test_a_model_that_is_no_folder_is_left_alone(
    asked: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "PACKAGES", ())
    assert prefetch_engine("some/model-name") == 0
    assert not asked


def test_the_next_start_reads_what_this_one_has_mapped_and_imported_and_the_weights(
    tmp_path: Path,
) -> None:
    weights = tmp_path / "model.safetensors"
    weights.touch()
    (tmp_path / "README.md").touch()
    found = files_in_use(tmp_path)
    assert {_ctypes.__file__, importlib.util.cache_from_source(prefetch.__file__), str(weights)} <= set(found)
    assert all(".so" in name or name.endswith((".pyc", ".safetensors")) for name in found)
    assert found[-1] == str(weights), "libraries count before a checkpoint that is too large"


def test_files_are_read_to_their_end_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").write_bytes(bytes(5_000_000))
    (tmp_path / "two").write_bytes(bytes(10))
    paths = [str(tmp_path / name) for name in ("one", "gone", "two")]
    assert read_through(paths) == 5_000_010
    monkeypatch.setattr(prefetch, "BYTES_MAX", 5_000_004)
    assert read_through(paths) == 5_000_004


class Clock:
    """Waits and readings take no time but are counted. The keeper is closed during its fourth wait."""

    def __init__(self, reading_s: float) -> None:
        self.reading_s = reading_s
        self.now_s = 0.0
        self.waits_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def read(self, paths: list[str]) -> None:
        assert paths == ["one"]
        self.now_s += self.reading_s

    def wait(self, seconds: float) -> bool:
        self.waits_s.append(seconds)
        return len(self.waits_s) == 4


@pytest.mark.parametrize(("reading_s", "expected_s"), [(0.06, 60.0), (4.0, 400.0)])
def test_a_keeper_reads_again_and_again_but_seldom_where_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, reading_s: float, expected_s: float
) -> None:
    clock = Clock(reading_s)
    monkeypatch.setattr(prefetch, "read_through", clock.read)
    monkeypatch.setattr(prefetch, "time", clock)
    keeper = FileKeeper(["one"])
    keeper.close()
    monkeypatch.setattr(keeper, "_closed", clock)
    keeper._keep()
    assert clock.waits_s == [60.0, *[expected_s] * 3]


def test_a_keeper_ends_when_it_is_closed() -> None:
    before = set(threading.enumerate())
    keeper = FileKeeper(["one"])
    (thread,) = set(threading.enumerate()) - before
    keeper.close()
    keeper.close()
    thread.join(10)
    assert not thread.is_alive()
