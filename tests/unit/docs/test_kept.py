"""Every collection that callers may make grow is in the table of docs/operate/size.md, with its limit."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.kept import KINDS, NAMES, TRIP_TESTS, measure_heap

ITEMS, UNCOUNTED_MAX = 1000, 1.2
ROOT = Path(__file__).parents[3]
ROOMS = ("discovery", "engine", "gateway", "quality", "serving", "store")
MAKERS = {
    "dict",
    "list",
    "set",
    "deque",
    "OrderedDict",
    "Counter",
    "defaultdict",
    "Held",
    "ContentIndex",
    "NamespaceSums",
}

NOBODY = {
    # Configured, or made once.
    "AccessDocument.limits", "AccessDocument.privacy", "AsyncSpec.extra_config", "AsyncSpec.vllm_args",
    "EngineConfig.context_token_ids", "MeasuringEngineSpec.extra_config", "MeasuringEngineSpec.vllm_args",
    "RotationFinder._tables", "Projected.sources", "LoadedWeights._looks", "Shard._writers",
    "LockStep._operations", "LockStep._results",  # by layer
    "CatchingUp._to_ask",  # the shards of a map
    "RecurrentStates._final", "RecurrentStates._metadata", "VllmStack._states", "VllmStack._tables",
    # By shard, tier, part of the service or kind of fault.
    "LostParts._losses", "LostParts._seen", "Learning._measured_s",
    "Erasures._acknowledged", "Erasures._peers", "Erasures._tiers", "Membership._left", "Membership._members",
    "ObjectTier.faults", "Promoter.faults", "Replicator._peers", "ReportKeeper._seen", "Sent._report",
    "ShardedStore._shards", "_Placed.holders", "_Placed.hot",
    # A value that one call makes and hands on.
    "BlendStats.data", "Generation.itl_s", "Generation.logprobs", "Generation.top_logprobs",
    "GenerateCall.sampling", "GenerateCall.trace", "StepMetadata.blends", "StepMetadata.cancelled",
    "StepMetadata.discovered", "StepMetadata.probes", "StepMetadata.saves", "Wanted.chunks",
    "WorkerReport.discovered", "WorkerReport.finished", "WorkerReport.loads", "WorkerReport.passes",
    "_Chunks.texts", "_Way.texts", "_Way.token_ids",
    # Of commands that an operator runs.
    "Bench._full", "Bench._stored", "EvaluationRow.by_task",
}  # fmt: skip
"""What no caller makes grow."""


def _is_empty_collection(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.List | ast.Set):
        return not value.elts
    if not isinstance(value, ast.Call):
        return False
    name = value.func.id if isinstance(value.func, ast.Name) else getattr(value.func, "attr", "")
    if name == "field":
        made = (one.value for one in value.keywords if one.arg == "default_factory")
        return any(isinstance(one, ast.Name) and one.id in MAKERS for one in made)
    return name in MAKERS and not (name in ("dict", "list", "set") and value.args)


def collections_of(source: str) -> Iterator[str]:
    """`Class.attribute` of each collection that a class begins empty."""
    for made in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(made):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not _is_empty_collection(node.value):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    yield f"{made.name}.{target.attr}"
                elif isinstance(target, ast.Name) and node in made.body:
                    yield f"{made.name}.{target.id}"


def test_collections_are_found_however_they_are_written() -> None:
    source = """
class A:
    e: dict[str, int] = field(default_factory=dict)
    def f(self):
        self.a, local = {}, {}
        self.b: list[int] = []
        self.c = self.d = deque(maxlen=3)
        self.g = [1]
"""
    assert set(collections_of(source)) == {"A.b", "A.c", "A.d", "A.e"}


def test_whatever_callers_may_make_grow_is_listed_with_its_limit() -> None:
    files = [path for room in ROOMS for path in (ROOT / "services/kintsugi" / room).rglob("*.py")]
    found = {name for path in files for name in collections_of(path.read_text())}
    found |= set(collections_of((ROOT / "services/kintsugi/core/held.py").read_text()))
    page = (ROOT / "docs/operate/size.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| [^|]+ \| (.*) \|$", page, re.MULTILINE)
    listed = set(re.findall(r"`(\w+\.\w+)`", "".join(rows)))
    own = {"Held._items", "Held.bytes_by_namespace"}
    assert found - listed - NOBODY - own == set(), "name it in the table with its limit"
    assert (listed | NOBODY | own) - found == set(), "the code has it no more"
    assert not listed & NOBODY


@pytest.mark.parametrize("kind", sorted({*KINDS} - {TRIP_TESTS}))
@pytest.mark.parametrize("shape", NAMES)
def test_what_is_kept_takes_little_more_than_it_is_charged(kind: str, shape: str) -> None:
    taken, charged = measure_heap(kind, shape, ITEMS)
    assert taken <= UNCOUNTED_MAX * charged, (
        f"{taken / ITEMS:.0f} bytes an item, {charged / ITEMS:.0f} charged"
    )
