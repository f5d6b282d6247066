"""The structural figures: what each counts on a small tree, and that this repository keeps its limits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from scripts import house

REPOSITORY = Path(__file__).parents[3]


def modules(folder: Path, files: Mapping[str, str]) -> list[house.Module]:
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return [house.Module(folder / name) for name in files]


def test_a_nested_statement_counts_too(tmp_path: Path) -> None:
    (module,) = modules(tmp_path, {"a.py": '"""Said."""\n\n\ndef f():\n    if x:\n        return 1\n'})
    assert (module.lines, module.statements) == (6, 4)


def test_a_function_is_measured_whole_and_without_its_docstring(tmp_path: Path) -> None:
    source = 'def f(\n    x,\n):\n    """Said.\n\n    More.\n    """\n    y = x\n    return y\n'
    found = modules(tmp_path, {"a.py": source})
    assert [count for count, _ in house.function_lengths(found, whole=True)] == [9]
    assert [count for count, _ in house.function_lengths(found, whole=False)] == [2]


def test_a_public_class_name_in_two_modules_is_shared(tmp_path: Path) -> None:
    source = "class A: ...\nclass _B: ...\n"
    found = list(house.shared_class_names(modules(tmp_path, {"a.py": source, "b.py": source})))
    assert [place.split(":")[0] for _, place in found] == ["class A"]


def test_the_file_of_a_package_does_not_count_in_its_folder(tmp_path: Path) -> None:
    found = house.folder_sizes(modules(tmp_path, {"p/__init__.py": "", "p/a.py": "", "p/q/b.py": ""}))
    assert sorted(found) == [(1, str(tmp_path / "p")), (1, str(tmp_path / "p/q"))]


IMPORTS = {
    "absolute": "import ring.b\n",
    "from the package": "from ring import b\n",
    "relative": "from . import b\n",
    "in a function": "def f():\n    from ring.b import x\n",
    "for types": "if TYPE_CHECKING:\n    from ring.b import x\n",
}


@pytest.mark.parametrize("source", IMPORTS.values(), ids=IMPORTS.keys())
def test_a_cycle_is_found_however_it_is_imported(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules(tmp_path, {"ring/__init__.py": "", "ring/a.py": source, "ring/b.py": "from ring.c import x\n"})
    modules(tmp_path, {"ring/c.py": "x = 1\n"})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    assert list(house.import_cycles("ring")) == []
    modules(tmp_path, {"ring/c.py": "from ring.a import f\n"})
    ((_, cycle),) = house.import_cycles("ring")
    assert {"ring.a", "ring.b", "ring.c"} == set(cycle.split(" imports "))


def test_leaves_lie_within_objects_and_lists_of_objects() -> None:
    value = {"type": "string"}
    schema = {
        "properties": {
            "a": value,
            "list": {"items": {"properties": {"b": value, "c": {"items": value}}}},
            "map": {"additionalProperties": {"properties": {"d": value}}},
            "expert": {"properties": {"e": value}},
        }
    }
    leaves = list(house.leaves_of(schema, "S"))
    assert leaves == ["S.a", "S.list.b", "S.list.c", "S.map", "S.expert.e"]
    assert house.outside_expert(leaves) == leaves[:-1]


@pytest.mark.parametrize(
    ("value", "ratchet", "holds", "is_allowed"),
    [(10, None, True, True), (11, None, False, False), (12, 12, False, True), (13, 12, False, False)],
)
def test_a_figure_may_exceed_its_bar_up_to_its_ratchet(
    value: int, ratchet: int | None, holds: bool, is_allowed: bool
) -> None:
    figure = house.Figure("lines", value, 10, ratchet, [])
    assert (figure.holds, figure.is_allowed) == (holds, is_allowed)


def test_no_ratchet_is_below_its_bar() -> None:
    assert all(one.ratchet is None or one.ratchet > one.bar for one in house.LIMITS.values())


def test_this_repository_keeps_its_limits() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/house.py", "--json"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert {figure["name"]: figure["bar"] for figure in figures} == {
        name: limit.bar for name, limit in house.LIMITS.items()
    }
