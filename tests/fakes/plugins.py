"""Installs a small distribution with one entry point, as pip would."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from kintsugi.core import plugins

HOWTO = Path(__file__).resolve().parents[2] / "docs/howto"


def code_of(page: str, beginning: str) -> str:
    """The block of code of a how-to page that begins so."""
    blocks = re.findall(r"```python\n(.*?)```", (HOWTO / page).read_text(), re.DOTALL)
    (found,) = (block for block in blocks if block.startswith(beginning))
    return str(found)


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, group: str, name: str, target: str, code: str
) -> None:
    """Put a module with ``code`` on the path, and metadata that name ``target``, `module:class`."""
    module = target.partition(":")[0]
    (folder / f"{module}.py").write_text(code)
    metadata = folder / f"{module}-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(str(folder))
    # The test's own caches, so that no other test sees its names.
    monkeypatch.setattr(plugins, "_entries", cache(plugins._entries.__wrapped__))
