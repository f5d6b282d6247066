"""Measure the size and structure of the code: `python scripts/house.py [--json | --list FIGURE]`.

Each figure has a bar, which is the goal. A figure that has not reached its bar also has a ratchet: the
highest value allowed until then. The check fails if a figure exceeds its ratchet, or its bar if it has no
ratchet. Both may only decrease. `--list` prints what contributes most to a figure. Generated code is not
counted. What ruff and import-linter check (complexity, layers) is configured in pyproject.toml.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import grimp
import yaml

PRODUCT = ("services", "operators")
ALL = (*PRODUCT, "checkpoints", "tests", "benchmarks", "scripts")
PACKAGES = ("kintsugi", "kintsugi_operator")
GENERATED = Path("services/kintsugi/rpc")
SURFACE = Path("tests/unit/surface/snapshots")
CRDS = Path("charts/kintsugi/crds")
EXPERT = "expert"
"""The key of the settings that few users need."""
LISTED_MAX = 40

Place = tuple[int, str]
"""A count, and the path or name that it belongs to."""


@dataclass(frozen=True)
class Limit:
    """The highest allowed value of a figure."""

    bar: int
    ratchet: int | None = None
    """Allowed until the bar is reached."""


LIMITS = {
    "lines": Limit(66_000),
    "statements": Limit(42_000),
    "scripts_lines": Limit(2_000),
    "cli_option_slots": Limit(160),
    "serve_settings": Limit(80),
    "serve_settings_outside_expert": Limit(45),
    "crd_leaves": Limit(150),
    "crd_leaves_outside_expert": Limit(80),
    "import_cycles": Limit(0),
    "files_in_largest_folder": Limit(18),
    "class_names_used_twice": Limit(2),
    "longest_function": Limit(80),
    "longest_function_body": Limit(60),
    "longest_file": Limit(600),
}


@dataclass(frozen=True)
class Figure:
    """A measured figure beside its limit."""

    name: str
    value: int
    bar: int
    ratchet: int | None
    places: list[Place]
    """What it counts, largest first."""

    @property
    def holds(self) -> bool:
        return self.value <= self.bar

    @property
    def is_allowed(self) -> bool:
        return self.value <= max(self.bar, self.ratchet or 0)


@dataclass(frozen=True)
class Module:
    """A source file."""

    path: Path

    @cached_property
    def source(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, str(self.path))

    @property
    def lines(self) -> int:
        return self.source.count("\n")

    @property
    def statements(self) -> int:
        return sum(isinstance(node, ast.stmt) for node in ast.walk(self.tree))

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def list_files(*folders: str) -> list[Path]:
    """Return the files in folders that git tracks, without generated code."""
    listed = subprocess.run(["git", "ls-files", *folders], capture_output=True, text=True, check=True)
    paths = map(Path, listed.stdout.splitlines())
    return [path for path in paths if path.is_file() and not path.is_relative_to(GENERATED)]


def read_modules(*folders: str) -> list[Module]:
    return [Module(path) for path in list_files(*folders) if path.suffix == ".py"]


def measure() -> list[Figure]:
    """Measure every figure, in the order of `LIMITS`."""
    product, every = read_modules(*PRODUCT), read_modules(*ALL)
    settings, leaves = list(serve_settings()), list(crd_leaves())
    sums = {
        "lines": [(module.lines, str(module.path)) for module in product],
        "statements": [(module.statements, str(module.path)) for module in product],
        "scripts_lines": [(path.read_text().count("\n"), str(path)) for path in list_files("scripts")],
        "cli_option_slots": list(cli_options()),
        "serve_settings": [(1, name) for name in settings],
        "serve_settings_outside_expert": [(1, name) for name in outside_expert(settings)],
        "crd_leaves": [(1, name) for name in leaves],
        "crd_leaves_outside_expert": [(1, name) for name in outside_expert(leaves)],
        "import_cycles": list(import_cycles(*PACKAGES)),
        "class_names_used_twice": list(shared_class_names(product)),
    }
    maxima = {
        "files_in_largest_folder": folder_sizes(product),
        "longest_function": list(function_lengths(product, whole=True)),
        "longest_function_body": list(function_lengths(every, whole=False)),
        "longest_file": [(module.lines, str(module.path)) for module in every],
    }
    values = {name: sum(count for count, _ in places) for name, places in sums.items()}
    values |= {name: max(count for count, _ in places) for name, places in maxima.items()}
    places = sums | maxima
    return [
        Figure(name, values[name], limit.bar, limit.ratchet, sorted(places[name], reverse=True))
        for name, limit in LIMITS.items()
    ]


def cli_options() -> Iterator[Place]:
    """Yield the number of options of each command, without `--help`, from the recorded surface."""
    for command, parameters in read_surface("command_line")["kintsugi"].items():
        yield sum(name.startswith("-") and name != "--help" for name in parameters), command


def serve_settings() -> Iterator[str]:
    """Yield the keys of the file of `kintsugi serve --config`, from the recorded surface."""
    yield from read_surface("configuration")["kintsugi serve --config"]


def read_surface(part: str) -> Mapping[str, Any]:
    recorded: Mapping[str, Any] = json.loads((SURFACE / f"{part}.json").read_text())
    return recorded


def crd_leaves() -> Iterator[str]:
    """Fields of the CRDs' specs that hold a value, a map or a list of values."""
    for path in sorted(CRDS.glob("*.yaml")):
        crd = yaml.safe_load(path.read_text())
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        yield from leaves_of(schema["properties"]["spec"], crd["spec"]["names"]["kind"])


def leaves_of(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    inner = schema.get("properties") or schema.get("items", {}).get("properties")
    if not inner:
        yield path
        return
    for name, one in inner.items():
        yield from leaves_of(one, f"{path}.{name}")


def outside_expert(names: Iterable[str]) -> list[str]:
    return [name for name in names if EXPERT not in name.split(".")]


def import_cycles(*packages: str) -> Iterator[Place]:
    """Yield the first cycle of modules that import each other. Imports inside functions count, too."""
    graph = grimp.build_graph(*packages, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        yield 1, " imports ".join(reversed(error.args[1]))


def folder_sizes(modules: Iterable[Module]) -> list[Place]:
    """The number of files directly in each folder, without `__init__.py`."""
    folders = Counter(str(one.path.parent) for one in modules if one.path.name != "__init__.py")
    return [(count, folder) for folder, count in folders.items()]


def shared_class_names(modules: Iterable[Module]) -> Iterator[Place]:
    """Public names of classes that more than one module defines at its top level."""
    paths: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                paths[node.name].add(str(module.path))
    for name, found in paths.items():
        if len(found) > 1:
            yield 1, f"class {name}: {', '.join(sorted(found))}"


def function_lengths(modules: Iterable[Module], whole: bool) -> Iterator[Place]:
    """Yield the number of lines of each function: all if `whole`, else its body without the docstring."""
    for module in modules:
        for function in module.functions():
            body = function.body[1:] if ast.get_docstring(function) is not None else function.body
            if body or whole:
                start = function.lineno if whole else body[0].lineno
                end = function.end_lineno if whole else body[-1].end_lineno
                assert end is not None, "the parser sets it"
                yield end - start + 1, f"{module.path}:{function.lineno}: {function.name}"


def print_table(figures: Iterable[Figure]) -> None:
    print(f"{'figure':<32}{'value':>8}{'bar':>8}{'ratchet':>9}  holds")
    for one in figures:
        ratchet = "" if one.ratchet is None else one.ratchet
        holds = "yes" if one.holds else "not yet" if one.is_allowed else "no"
        print(f"{one.name:<32}{one.value:>8}{one.bar:>8}{ratchet:>9}  {holds}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the size and structure of the code.")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--list", choices=LIMITS, metavar="FIGURE", help="print what a figure counts")
    options = parser.parse_args()
    figures = measure()
    if options.list is not None:
        (chosen,) = (one for one in figures if one.name == options.list)
        for count, place in chosen.places[:LISTED_MAX]:
            print(f"{count:>7}  {place}")
        return 0
    if options.json:
        shown = [
            {**{key: value for key, value in asdict(one).items() if key != "places"}, "holds": one.holds}
            for one in figures
        ]
        print(json.dumps({"figures": shown}))
    else:
        print_table(figures)
    return 0 if all(one.is_allowed for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
