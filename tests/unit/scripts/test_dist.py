"""The wheel: what it holds, and that a wheel which lacks something is found out."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from scripts.dist import DistError, build, expect, missing_from, run

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    assert wheel.name.startswith("kintsugi_kv-")
    assert missing_from(wheel) == []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert "kintsugi/py.typed" in names
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)
    assert "Name: kintsugi-kv\n" in metadata
    for extra in ("langchain", "llama-index", "serving"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_a_file_that_the_wheel_lacks_is_named(wheel: Path, tmp_path: Path) -> None:
    poorer = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(poorer, "w") as copy:
        for name in archive.namelist():
            if name != "kintsugi/py.typed":
                copy.writestr(name, archive.read(name))
    assert missing_from(poorer) == ["kintsugi/py.typed"]


def test_a_command_that_fails_is_told_with_what_it_said() -> None:
    with pytest.raises(DistError, match="no such thing"):
        run(["sh", "-c", "echo no such thing >&2; exit 3"])


def test_a_command_that_must_fail_is_told_by_its_code_and_its_words(tmp_path: Path) -> None:
    refuse = ["sh", "-c", "echo install the extra >&2; exit 4"]
    expect("the extra", refuse, tmp_path)
    with pytest.raises(DistError, match="does not say 'another'"):
        expect("another", refuse, tmp_path)
    with pytest.raises(DistError, match="failed"):
        expect("", ["true"], tmp_path)
