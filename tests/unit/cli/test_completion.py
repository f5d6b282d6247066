"""Shell completion: what a shell gets when it asks at a Tab, and that asking is cheap."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from kintsugi.cli.main import app
try:
    app(prog_name="kintsugi")
finally:
    print(*{"torch", "vllm", "ray", "transformers"} & set(sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("shell", "line", "found"),
    [
        ("bash", "kintsugi sta", ["status"]),
        ("bash", "kintsugi precompute pi", ["pin"]),
        ("bash", "kintsugi serve --qual", ["--quality"]),
        ("zsh", "kintsugi store sta", ["status"]),
        ("fish", "kintsugi calibrate --form ", ["auto", "chat", "plain"]),
    ],
)
def test_verbs_options_and_values_complete_without_torch(shell: str, line: str, found: list[str]) -> None:
    words = line.split(" ")
    asked = {
        "_KINTSUGI_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.stderr.strip() == ""
    for word in found:
        assert word in finished.stdout
    assert "--ratio" not in finished.stdout, "only what the line may go on with"
