"""Commands in installations without their extras: they stand in the list, and say what to install."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from kintsugi.cli import main
from kintsugi.cli.exits import ExitCode
from kintsugi.cli.extras import ENGINE, PRECOMPUTE, SERVING, SERVING_HERE, STORE, Extras, add_missing_command
from kintsugi.cli.main import app
from kintsugi.core.errors import Unavailable

REPOSITORY = Path(__file__).parents[3]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PROGRAM = """
import json, sys
from importlib.machinery import PathFinder

lacking = set(json.loads(sys.argv.pop(1)))

class Poorer:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.split(".")[0] in lacking else PathFinder.find_spec(name, path, target)

sys.meta_path = [Poorer if finder is PathFinder else finder for finder in sys.meta_path]
from kintsugi.cli.console_script import main
sys.argv[0] = "kintsugi"
main()
"""


def requirements_of(name: str, extra: str) -> list[Requirement]:
    """What a distribution needs with an extra, or without one (empty)."""
    if name == "kintsugi-kv":
        lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
        return [Requirement(line) for line in lines]
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:  # what this environment leaves out on purpose
        return []
    found = map(Requirement, lines)
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": extra})]


def modules_beside(extras: str) -> set[str]:
    """Top-level modules that `pip install kintsugi-kv[extras]` into an empty environment leaves out."""
    waiting = [("kintsugi-kv", extra) for extra in ("", *filter(None, extras.split(",")))]
    found: set[tuple[str, str]] = set()
    while waiting:
        name, extra = one = waiting.pop()
        if one not in found:
            found.add(one)
            needed = requirements_of(name, extra)
            waiting += [(canonicalize_name(of.name), each) for of in needed for each in ("", *of.extras)]
    names = {name for name, _ in found}
    owners = importlib.metadata.packages_distributions()
    return {module for module, of in owners.items() if not names & set(map(canonicalize_name, of))}


def run(extras: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line as it is with these extras."""
    modules = json.dumps(sorted(modules_beside(extras)))
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, modules, *arguments],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def listed(text: str) -> set[str]:
    """The commands that `--help` lists."""
    return set(re.findall(r"^│ ([a-z]+)  ", text, re.MULTILINE))


@pytest.mark.parametrize("extras", ["cli", "store", "serving,cpu", "precompute"])
def test_every_command_is_listed_whatever_is_installed(extras: str) -> None:
    done = run(extras, "--help")
    assert done.returncode == 0, done.stderr
    assert listed(done.stdout) == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_without_the_command_line_the_script_says_what_to_install() -> None:
    done = run("", "status")
    assert (done.returncode, done.stdout) == (ExitCode.UNAVAILABLE, "")
    assert done.stderr.startswith(
        "error: kintsugi needs modules that are not installed (cryptography, jinja2, "
    )
    assert done.stderr.endswith("pip install 'kintsugi-kv[cli]'\n")


def test_without_other_extras_a_service_elsewhere_can_be_asked() -> None:
    done = run("cli", "status", "--url", "http://127.0.0.1:1")
    assert (done.returncode, done.stderr) == (ExitCode.UNAVAILABLE, "")
    assert "Connection refused" in done.stdout


def test_a_command_without_its_extras_says_what_to_install() -> None:
    done = run("cli", "serve")
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "Traceback" not in done.stderr
    assert (
        "serve needs modules that are not installed (lmdb, prometheus_client, grpc_health, …)" in done.stderr
    )
    assert "install kintsugi-kv[serving,gpu], or without a GPU [serving,cpu]; see docs/howto" in done.stderr


def test_a_configuration_is_printed_without_an_engine() -> None:
    done = run("serving", "serve", "--print-config")
    assert done.returncode == 0, done.stderr
    assert "applications:" in done.stdout
    refused = run("serving", "serve")
    assert refused.returncode == ExitCode.UNAVAILABLE
    assert "serve needs modules that are not installed (torch, transformers, vllm)" in refused.stderr


@pytest.mark.parametrize("extras", [STORE, ENGINE, SERVING, SERVING_HERE, PRECOMPUTE])
def test_extras_are_those_of_the_distribution_and_bring_what_is_asked_for(extras: Extras) -> None:
    assert extras.missing == []
    assert not set(extras.modules) & modules_beside(extras.names)


LACKING = Extras("store", ("no_module_of_this_name",))


@pytest.mark.parametrize("words", [[], ["status", "--store", "grpc://h:1"], ["ls", "-n", "docs", "--json"]])
def test_in_place_of_a_group_any_arguments_are_taken(words: list[str]) -> None:
    own = typer.Typer()
    own.callback()(lambda: None)
    add_missing_command(own, "store", LACKING)
    done = CliRunner().invoke(own, ["store", *words])
    assert done.exit_code == ExitCode.UNAVAILABLE
    assert "store needs modules that are not installed (no_module_of_this_name): pip install" in done.stderr
    if "--json" in words:
        assert json.loads(done.stdout)["error"]["type"] == "Unavailable"
    assert "Not installed: needs kintsugi-kv with store." in CliRunner().invoke(own, ["--help"]).stdout


@pytest.mark.parametrize(
    "words",
    [
        ["demo"],
        ["generate", "--model", "m", "--chunk", "c", "--question", "q"],
        ["doctor", "--model", "m"],
        ["calibrate", "--model", "m"],
        ["eval", "--model", "m", "--questions", "q"],
        ["serve"],
    ],
)
def test_what_starts_an_engine_needs_one(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENGINE", "SERVING_HERE"):
        monkeypatch.setattr(main, name, LACKING)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == ExitCode.UNAVAILABLE, done.output
    assert "no_module_of_this_name" in done.stderr


def test_errors_of_missing_extras_are_of_the_one_tree() -> None:
    with pytest.raises(Unavailable, match=r"pip install 'kintsugi-kv\[store\]'"):
        LACKING.check("store")
    STORE.check("store")
