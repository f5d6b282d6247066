"""The SDK runs with the wheel's own dependencies alone."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


def distribution_of(requirement: str) -> str:
    return re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0].lower()


def test_the_sdk_imports_nothing_of_an_extra() -> None:
    own = {PROJECT["name"], *map(distribution_of, PROJECT["dependencies"])}
    extras = {
        distribution_of(one) for group in PROJECT["optional-dependencies"].values() for one in group
    } - own
    modules = sorted(
        module
        for module, distributions in packages_distributions().items()
        if {name.lower() for name in distributions} & extras and module.isidentifier()
    )
    assert "cryptography" in modules
    block = f"import sys; sys.modules.update(dict.fromkeys({modules!r}))"
    code = f"{block}; import kintsugi; kintsugi.Client('127.0.0.1:1', 'docs').close()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
