"""The structure figures: what each counts on a small tree, and that this repository keeps its bars."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "scripts" / "house.py"

LAYERS = {"type": "layers", "containers": ["kintsugi"], "layers": ["top", "(left) | right", "low : base"]}


@pytest.fixture(scope="module")
def house() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield importlib.import_module("house")


@pytest.fixture(autouse=True)
def _in_an_empty_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(files: Mapping[str, str]) -> None:
    for name, source in files.items():
        path = Path("services/kintsugi") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


def measure_tree(house: ModuleType, figure: str, files: Mapping[str, str]) -> tuple[float, list[str]]:
    """Write files below services/kintsugi; one figure's value and places in the tree as it is then."""
    write(files)
    configuration = {"tool": {"importlinter": {"contracts": [LAYERS]}}}
    measurement = house.measure(house.read_modules(), configuration)[figure]
    return measurement.value, [str(place) for place in measurement.places]


IMPORTS_OF_B = {
    "absolute": "import kintsugi.b\n",
    "from the package": "from kintsugi import b\n",
    "relative": "from . import b\n",
    "relative, a name": "from .b import x\n",
    "in a function": "def f():\n    from kintsugi.b import x\n",
    "for types": "if TYPE_CHECKING:\n    from kintsugi.b import x\n",
}


@pytest.mark.parametrize("source", IMPORTS_OF_B.values(), ids=IMPORTS_OF_B.keys())
def test_a_cycle_is_one_however_it_is_imported(house: ModuleType, source: str) -> None:
    files = {
        "__init__.py": "",
        "a.py": source,
        "b.py": "from kintsugi.c import y\n",
        "c.py": "import kintsugi.a\n",
    }
    value, places = measure_tree(house, "import_cycles", files)
    assert value == 1
    assert places == ["services/kintsugi/a.py:1: cycle of kintsugi.a, kintsugi.b, kintsugi.c"]


def test_a_line_of_imports_is_no_cycle_and_two_cycles_are_two(house: ModuleType) -> None:
    line = {"a.py": "from kintsugi import b\n", "b.py": "from kintsugi import c\n", "c.py": "import os\n"}
    assert measure_tree(house, "import_cycles", line) == (0, [])
    pairs = {"p.py": "import kintsugi.q\n", "q.py": "import kintsugi.p\n"}
    both = {**pairs, "r.py": "import kintsugi.s\n", "s.py": "import kintsugi.r\nimport kintsugi.p\n"}
    assert measure_tree(house, "import_cycles", both) == (
        2,
        [
            "services/kintsugi/p.py:1: cycle of kintsugi.p, kintsugi.q",
            "services/kintsugi/r.py:1: cycle of kintsugi.r, kintsugi.s",
        ],
    )


def test_a_package_that_imports_itself_is_no_cycle(house: ModuleType) -> None:
    assert measure_tree(house, "import_cycles", {"room/__init__.py": "from kintsugi.room import x\n"}) == (
        0,
        [],
    )


def test_a_package_is_not_in_a_cycle_with_the_modules_it_collects(house: ModuleType) -> None:
    files = {"room/__init__.py": "from .a import x\n", "room/a.py": "from kintsugi.room.b import y\n"}
    assert measure_tree(house, "import_cycles", {**files, "room/b.py": "y = 1\n"}) == (0, [])
    assert measure_tree(house, "import_cycles", {"room/b.py": "from kintsugi.room import x\n"})[0] == 1


@pytest.mark.parametrize(
    ("importer", "imported", "is_against"),
    [
        ("low/a.py", "top.a", True),
        ("right/a.py", "top.a", True),
        ("left/a.py", "right.a", True),
        ("low/a.py", "base.a", False),
        ("top/a.py", "low.a", False),
        ("low/b.py", "low.a", False),
        ("apart/a.py", "top.a", False),
    ],
)
def test_arrows_go_against_the_layers_contract(
    house: ModuleType, importer: str, imported: str, is_against: bool
) -> None:
    target = imported.replace(".", "/") + ".py"
    files = {target: "x = 1\n", importer: f"\ndef f():\n    from kintsugi.{imported} import x\n"}
    value, places = measure_tree(house, "arrows_upwards", files)
    name = importer.removesuffix(".py").replace("/", ".")
    against = [f"services/kintsugi/{importer}:3: kintsugi.{name} imports kintsugi.{imported}"]
    assert (value, places) == ((1, against) if is_against else (0, []))


def test_the_largest_folder_is_counted_without_its_init_and_what_lies_deeper(house: ModuleType) -> None:
    names = ["__init__", "a", "b", "deep/c", "deep/d", "deep/e"]
    value, places = measure_tree(house, "files_in_largest_folder", {f"{name}.py": "" for name in names})
    assert value == 3
    assert places == ["services/kintsugi/deep:1: 3 files", "services/kintsugi:1: 2 files"]


def test_class_names_used_twice_are_public_and_at_the_top(house: ModuleType) -> None:
    inner = "class Inner: ...\n"
    first = f"class Row: ...\nclass _Own: ...\nclass Single: ...\nclass A:\n    {inner}"
    second = f"\nclass Row: ...\nclass _Own: ...\nclass B:\n    {inner}"
    value, places = measure_tree(house, "class_names_used_twice", {"a.py": first, "b.py": second})
    assert value == 1
    assert places == ["services/kintsugi/a.py:1: class Row", "services/kintsugi/b.py:2: class Row"]


OF = '''"""Of a module."""

LIMIT = 1
"""Of one put."""

OFTEN = 2
"""Often, and of course."""

class Row:
    """Of a table."""

    width: int
    """Of all cells,
    in characters."""

    def f(self):
        """Of a row."""
        self.x = 1
        """Of f."""

    async def g(self):
        """Official."""
'''


def test_strings_that_begin_with_of(house: ModuleType) -> None:
    value, places = measure_tree(house, "attribute_docstrings_of", {"a.py": OF})
    assert value == 3
    assert sorted(places) == [
        f"services/kintsugi/a.py:{where}" for where in ("13: Of all cells,", "19: Of f.", "4: Of one put.")
    ]
    value, places = measure_tree(house, "docstrings_of", {})
    assert value == 3
    assert sorted(places) == [
        f"services/kintsugi/a.py:{where}" for where in ("10: Of a table.", "17: Of a row.", "1: Of a module.")
    ]


def test_participles_are_counted_among_functions_methods_and_nested_ones(house: ModuleType) -> None:
    source = """
def checked_range(): ...
async def _measuring():
    def __built(): ...
class A:
    def __added__(self): ...
    @property
    def used(self): ...
    @functools.cached_property
    def loaded(self): ...
    @used.setter
    def used(self, value): ...
    def check_used(self): ...
"""
    value, places = measure_tree(house, "participle_function_names_percent", {"a.py": source})
    assert value == 75.0
    assert {place.rpartition(" ")[2] for place in places} == {"checked_range", "_measuring", "__built"}


@pytest.mark.parametrize(
    ("name", "is_participle"),
    [
        ("parsed_keys", True),
        ("_sent", True),
        ("known_s", True),
        ("leading_equal", True),
        ("embed", False),
        ("_seed_of", False),
        ("bring_up", False),
        ("sampling_to_wire", False),
        ("is_checked", False),
        ("read_bytes", False),
        ("put_sent", False),
        ("editions", False),
    ],
)
def test_what_a_participle_is(house: ModuleType, name: str, is_participle: bool) -> None:
    assert house.begins_with_participle(name) is is_participle


def test_generated_code_counts_for_nothing(house: ModuleType) -> None:
    write({"a.py": "x = 1\ny = 2\n", "rpc/v1/big_pb2.py": '"""Of stubs."""\ndef made(): ...\n'})
    measurements = house.measure(house.read_modules(), {})
    assert {name: measurement.value for name, measurement in measurements.items()} == {
        **dict.fromkeys(house.BARS, 0),
        "files_in_largest_folder": 1,
        "lines": 2,
    }


@pytest.mark.parametrize(
    ("source", "is_counted"),
    [
        ("import benchmarks.routing\n", True),
        ("from benchmarks import routing\n", True),
        ("def f():\n    from benchmarks.support.figures import Figure\n", True),
        ("from benchmarks_of_others import x\n", False),
        ("from .benchmarks import x\n", False),
        ('"""As benchmarks/routing.py does."""\n', False),
    ],
)
def test_tests_import_no_benchmark(house: ModuleType, source: str, is_counted: bool) -> None:
    path = Path("tests/unit/test_a.py")
    path.parent.mkdir(parents=True)
    path.write_text(source)
    value, places = measure_tree(house, "tests_import_benchmarks", {})
    assert value == is_counted
    assert [place.startswith("tests/unit/test_a.py:") for place in places] == [True] * is_counted


def run(*options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(script, cwd=cwd, capture_output=True, text=True, check=False)


def test_a_figure_above_its_bar_fails_and_is_listed(house: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    write({"a.py": "def made(): ...\n"})
    done = run("--json", cwd=tmp_path)
    assert done.returncode == 1
    figures: dict[str, Any] = {figure["name"]: figure for figure in json.loads(done.stdout)["figures"]}
    percent = "participle_function_names_percent"
    assert figures.pop(percent) == {
        "name": percent,
        "value": 100.0,
        "bar": house.BARS[percent],
        "holds": False,
    }
    assert figures.pop("lines") == {"name": "lines", "value": 1, "bar": None, "holds": None}
    assert all(figure["holds"] for figure in figures.values())
    table = run(cwd=tmp_path)
    assert table.returncode == 1
    assert [line.split()[0] for line in table.stdout.splitlines() if line.endswith(" no")] == [percent]
    listed = run("--list", percent, cwd=tmp_path)
    assert (listed.returncode, listed.stdout) == (0, "services/kintsugi/a.py:1: made\n")


def test_this_repository_keeps_within_the_bars() -> None:
    done = run(cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
