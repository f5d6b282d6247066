"""The length ratchet: what it counts, and that this repository keeps within it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ratchet() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ratchet", REPOSITORY / "scripts" / "ratchet.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ratchet"] = module
    spec.loader.exec_module(module)
    return module


def function_of(statements: int, docstring: str = "") -> str:
    header = f'def f():\n    """{docstring}"""\n' if docstring else "def f():\n"
    return header + "    x = 1\n" * statements


def test_a_function_at_its_limit_passes(ratchet: ModuleType) -> None:
    limit = ratchet.FUNCTION_LINES_MAX
    assert list(ratchet.excesses_of(Path("f.py"), function_of(limit))) == []
    assert list(ratchet.excesses_of(Path("f.py"), function_of(limit, "Long.\n" * 90))) == []


@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_longer_function_is_named(ratchet: ModuleType, prefix: str) -> None:
    source = "import os\n\n\n" + prefix + function_of(ratchet.FUNCTION_LINES_MAX + 1)
    (excess,) = ratchet.excesses_of(Path("f.py"), source)
    assert str(excess) == "f.py:4: function f has 61 lines, at most 60 allowed"


def test_a_long_file_is_named(ratchet: ModuleType) -> None:
    source = "x = 1\n" * (ratchet.FILE_LINES_MAX + 1)
    (excess,) = ratchet.excesses_of(Path("f.py"), source)
    assert excess.what == "file"


def test_a_function_of_only_a_docstring_is_empty(ratchet: ModuleType) -> None:
    assert list(ratchet.excesses_of(Path("f.py"), 'def f():\n    """Nothing."""\n')) == []


def test_this_repository_keeps_within_the_limits() -> None:
    script = [sys.executable, "scripts/ratchet.py"]
    done = subprocess.run(script, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
