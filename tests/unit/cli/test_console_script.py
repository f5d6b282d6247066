"""What the console script does with output that cannot be written, and before a command runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("typer", reason="install the extra `cli`")

from kintsugi import __version__
from kintsugi.cli.exits import ExitCode

SCRIPT = "import sys; sys.argv[0] = 'kintsugi'; from kintsugi.cli.console_script import main; main()"
INTERRUPTED = f"""
import sys, types
def app(): raise KeyboardInterrupt
sys.modules["kintsugi.cli.main"] = types.SimpleNamespace(app=app)
{SCRIPT}"""


def run(redirections: str, *arguments: str, script: str = SCRIPT, **env: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `kintsugi ARGUMENTS REDIRECTIONS`, with buffered output."""
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirections}', "bash", sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": "", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


SIZE = ("size", "--model", "bundled", "--corpus-tokens", "1M", "--bandwidth", "25Gbit/s")


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), SIZE, (*SIZE, "--json")])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_output_is_said_in_a_line(arguments: tuple[str, ...], unbuffered: str) -> None:
    code, _, error = run("> /dev/full", *arguments, PYTHONUNBUFFERED=unbuffered)
    assert code == ExitCode.FAILURE
    assert error == "kintsugi: the output or a file cannot be read or written (No space left on device)\n"


@pytest.mark.parametrize("redirections", ["<&- >&-", "<&- >&- 2>&-", ">&-"])
def test_closed_streams_are_as_good_as_null(redirections: str) -> None:
    assert run(redirections, *SIZE, "--json") == (ExitCode.OK, "", "")


def test_a_reader_that_has_gone_is_no_error_to_print() -> None:
    _, _, error = run("| true", "--help")
    assert error == ""


def test_an_encoding_without_our_characters_is_written_in_escapes() -> None:
    code, output, error = run("", "--help", PYTHONIOENCODING="ascii")
    assert (code, error) == (ExitCode.OK, "")
    assert r"\xb7 130 interrupted" in " ".join(output.replace("\n", " ").split())


def test_a_signal_outside_a_command_prints_no_traceback() -> None:
    assert run("", script=INTERRUPTED) == (ExitCode.INTERRUPTED, "", "kintsugi: interrupted\n")


def test_the_version_is_printed() -> None:
    assert run("", "--version") == (ExitCode.OK, f"{__version__}\n", "")
