"""Files that starting an engine reads are asked for at once, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kintsugi.engine import prefetch
from kintsugi.engine.prefetch import prefetch_engine


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
