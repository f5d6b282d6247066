"""A wheel of another vLLM is probed from its files."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from scripts.probe_vllm import probe


def wheel_of(folder: Path, **files: str) -> Path:
    path = folder / "vllm-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"vllm/{name}.py", text)
    return path


def test_a_wheel_says_what_it_lacks(tmp_path: Path) -> None:
    wheel = wheel_of(
        tmp_path,
        __init__="__version__ = '0.1.0'",
        forward_context="def set_forward_context(attn_metadata): ...\ndef get_forward_context(): ...",
    )
    found = probe(wheel)
    assert found["vllm"] == "0.1.0"
    assert len(found["missing"]) == found["hooks"] - 2, (
        "a function and the version are there as they should be"
    )
    assert any("forward_context.set_forward_context" in name for name in found["missing"]), (
        "its signature is not"
    )
    assert not any("get_forward_context" in name for name in found["missing"])


def test_a_wheel_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"vllm-0\.1\.0-py3-none-any\.whl cannot be probed"):
        probe(wheel_of(tmp_path, __init__="raise RuntimeError('broken')"))
