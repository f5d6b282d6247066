"""Measure the structure of `services/` and `operators/`: `python scripts/house.py [--json | --list FIGURE]`.

Fails if a figure exceeds its bar. Bars only ever go down. Generated code is not counted. `--list` prints the
places behind a figure. `tests_import_benchmarks` alone is about `tests/`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ratchet import sources

BARS: dict[str, float | None] = {
    "import_cycles": 0,
    "arrows_upwards": 0,
    "files_in_largest_folder": 18,
    "class_names_used_twice": 3,
    "attribute_docstrings_of": 0,
    "docstrings_of": 0,
    "participle_function_names_percent": 2,
    "tests_import_benchmarks": 0,
    "lines": None,
}
"""The highest allowed value of each figure; None for a figure without a limit."""

ROOTS = (Path("services"), Path("operators"))
TESTS = Path("tests")
CONFIGURATION = Path("pyproject.toml")

VERBS_AND_NOUNS = """
    embed exceed feed need proceed seed shed speed succeed bring ping ring string
    accounting binding encoding mapping padding routing sampling setting settings timing
"""
"""Words that end like participles but are verbs or common nouns."""

IRREGULAR_PARTICIPLES = """
    begun broken brought built chosen done drawn driven found forgotten frozen given gone grown heard held
    hidden kept known left lost made met overridden paid rebuilt said seen sent shown sought spent stolen
    stuck taken thought thrown told torn understood unread unwritten withdrawn won written
"""
"""Excludes words that are also verbs or nouns (read, put, set, split, bound)."""

_OF = re.compile(r"\s*Of\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    """A location in a source file that counts towards a figure."""

    path: Path
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


@dataclass(frozen=True)
class Import:
    """An import of one of our modules by another."""

    path: Path
    line: int
    importer: str
    imported: str


@dataclass(frozen=True)
class Module:
    """A source file. `name` is dotted; a package's `__init__.py` has the package's name."""

    name: str
    path: Path
    source: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, str(self.path))

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    def place(self, node: Any, what: str) -> Place:
        return Place(self.path, node.lineno, what)


@dataclass(frozen=True)
class Layer:
    """A layer of a contract. A higher layer may import a lower one."""

    name: str
    height: int
    are_siblings_apart: bool
    """Whether layers of this height must not import each other: the contract separates them by a bar, not a
    colon."""

    def may_import(self, other: Layer) -> bool:
        if self.height == other.height:
            return self.name == other.name or not self.are_siblings_apart
        return self.height > other.height


@dataclass(frozen=True)
class Measurement:
    """A figure's value and the places behind it."""

    value: float
    places: Sequence[Place] = ()


@dataclass(frozen=True)
class Figure:
    """A measured figure beside its bar."""

    name: str
    value: float
    bar: float | None

    @property
    def holds(self) -> bool | None:
        return None if self.bar is None else self.value <= self.bar


def read_modules(roots: Iterable[Path] = ROOTS) -> list[Module]:
    modules = []
    for root in roots:
        for path in sources([root]):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules.append(Module(name, path, path.read_text()))
    return modules


def measure(modules: Sequence[Module], configuration: Mapping[str, Any]) -> dict[str, Measurement]:
    """Measure every figure, in the order of `BARS`. `configuration` is the content of pyproject.toml."""
    imports = list(find_imports(modules))
    contracts = configuration.get("tool", {}).get("importlinter", {}).get("contracts", [])
    return {
        "import_cycles": measure_cycles(imports),
        "arrows_upwards": measure_arrows(imports, contracts),
        "files_in_largest_folder": measure_folders(modules),
        "class_names_used_twice": measure_class_names(modules),
        "attribute_docstrings_of": count(find_attribute_docstrings(modules)),
        "docstrings_of": count(find_docstrings(modules)),
        "participle_function_names_percent": measure_function_names(modules),
        "tests_import_benchmarks": count(find_imports_of("benchmarks", TESTS)),
        "lines": Measurement(sum(module.source.count("\n") for module in modules)),
    }


def find_imports(modules: Sequence[Module]) -> Iterator[Import]:
    """Find all imports: at the top, inside functions and under TYPE_CHECKING.

    As import-linter does, this leaves out that importing `a.b` also runs `a/__init__.py`.
    """
    names = {module.name for module in modules}
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for imported in imported_names(module, node, names):
                    if imported != module.name:
                        yield Import(module.path, node.lineno, module.name, imported)


def imported_names(module: Module, node: ast.Import | ast.ImportFrom, names: set[str]) -> Iterator[str]:
    """Names of our modules that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in names)
        return
    origin = node.module or ""
    if node.level:
        parents = module.package.split(".")
        origin = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [origin])])
    submodules = {f"{origin}.{alias.name}" for alias in node.names}
    yield from sorted(submodules & names)
    if origin in names and not submodules <= names:
        yield origin


def measure_cycles(imports: Iterable[Import]) -> Measurement:
    """Groups of modules that reach each other through imports (strongly connected components)."""
    targets: dict[str, set[str]] = defaultdict(set)
    paths = {}
    for one in imports:
        targets[one.importer].add(one.imported)
        paths[one.importer] = one.path
    reached = {name: reachable(name, targets) for name in targets}
    groups = {
        frozenset(other for other in reached[name] if name in reached.get(other, ()))
        for name in targets
        if name in reached[name]
    }
    members = sorted(sorted(group) for group in groups)
    return count(Place(paths[group[0]], 1, "cycle of " + ", ".join(group)) for group in members)


def reachable(start: str, targets: Mapping[str, set[str]]) -> set[str]:
    """Everything that can be reached from `start` in one or more steps."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = targets.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def measure_arrows(imports: Sequence[Import], contracts: Iterable[Mapping[str, Any]]) -> Measurement:
    """Imports that a layers contract of import-linter forbids: upwards, or between separated layers.

    Only direct imports count, and those that a contract excepts (`ignore_imports`) count, too.
    """
    places = []
    for contract in contracts:
        if contract["type"] != "layers":
            continue
        for container in contract.get("containers", [""]):
            layers = read_layers(contract["layers"], container)
            for one in imports:
                importer, imported = layer_of(one.importer, layers), layer_of(one.imported, layers)
                if importer is not None and imported is not None and not importer.may_import(imported):
                    places.append(Place(one.path, one.line, f"{one.importer} imports {one.imported}"))
    return count(places)


def read_layers(rows: Sequence[str], container: str) -> dict[str, Layer]:
    """Layers by dotted name. A name in brackets is optional."""
    layers = {}
    for height, row in enumerate(reversed(rows)):
        for part in re.split(r"[|:]", row):
            name = ".".join(filter(None, [container, part.strip(" ()")]))
            layers[name] = Layer(name, height, are_siblings_apart="|" in row)
    return layers


def layer_of(module: str, layers: Mapping[str, Layer]) -> Layer | None:
    while module and module not in layers:
        module = module.rpartition(".")[0]
    return layers.get(module)


def measure_folders(modules: Iterable[Module]) -> Measurement:
    """The largest number of files directly in one folder, without `__init__.py`."""
    files = Counter(module.path.parent for module in modules if module.path.name != "__init__.py")
    largest = max(files.values(), default=0)
    return Measurement(largest, [Place(path, 1, f"{size} files") for path, size in files.most_common()])


def measure_class_names(modules: Iterable[Module]) -> Measurement:
    """Public names of classes that more than one module defines at its top level."""
    places: dict[str, list[Place]] = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.place(node, f"class {node.name}"))
    shared = {name: found for name, found in places.items() if len({one.path for one in found}) > 1}
    return Measurement(len(shared), [place for name in sorted(shared) for place in shared[name]])


def find_attribute_docstrings(modules: Iterable[Module]) -> Iterator[Place]:
    """Attribute docstrings, in modules, classes and functions, that begin with "Of"."""
    for module in modules:
        for owner in module.nodes:
            if not isinstance(owner, Function | ast.ClassDef | ast.Module):
                continue
            for assignment, statement in zip(owner.body, owner.body[1:], strict=False):
                match assignment, statement:
                    case (ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text)))):
                        if _OF.match(text):
                            yield module.place(statement, first_line(text))


def find_docstrings(modules: Iterable[Module]) -> Iterator[Place]:
    """Docstrings of functions, classes and modules that begin with "Of"."""
    for module in modules:
        for owner in module.nodes:
            if isinstance(owner, Function | ast.ClassDef | ast.Module):
                text = ast.get_docstring(owner) or ""
                if _OF.match(text):
                    yield module.place(owner.body[0], first_line(text))


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def measure_function_names(modules: Iterable[Module]) -> Measurement:
    """Percent of functions, methods and nested functions whose name begins with a participle.

    Properties, which are values, and names with two underscores on both sides are left out of both counts.
    An earlier review measured 9.6 %, where this measures 13.3 %: it counted words in -ed alone, not those in
    -ing and irregular participles, as a share of all functions (properties and double underscores too).
    """
    functions = [
        module.place(node, node.name)
        for module in modules
        for node in module.nodes
        if isinstance(node, Function) and not is_property(node) and not is_dunder(node.name)
    ]
    participles = [place for place in functions if begins_with_participle(place.what)]
    percent = round(100 * len(participles) / len(functions), 1) if functions else 0.0
    return Measurement(percent, participles)


def begins_with_participle(name: str) -> bool:
    word = name.lstrip("_").partition("_")[0]
    if word in VERBS_AND_NOUNS.split():
        return False
    return word.endswith(("ed", "ing")) or word in IRREGULAR_PARTICIPLES.split()


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def is_property(function: Function) -> bool:
    """Whether the function is a `@property`, a `@cached_property`, or a property's setter or deleter."""
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in function.decorator_list}
    return bool(names & {"property", "cached_property", "setter", "deleter"})


def find_imports_of(package: str, folder: Path) -> Iterator[Place]:
    """Absolute imports of a package or of anything in it, in all Python files below a folder."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            match node:
                case ast.Import():
                    imported = [alias.name for alias in node.names]
                case ast.ImportFrom(module=str(origin), level=0):
                    imported = [origin]
                case _:
                    continue
            for name in imported:
                if name == package or name.startswith(f"{package}."):
                    yield Place(path, node.lineno, f"imports {name}")


def count(places: Iterable[Place]) -> Measurement:
    found = list(places)
    return Measurement(len(found), found)


def print_table(figures: Iterable[Figure]) -> None:
    print(f"{'figure':<36}{'value':>8}{'bar':>8}  holds")
    for figure in figures:
        bar = "–" if figure.bar is None else f"{figure.bar:g}"
        holds = {None: "–", True: "yes", False: "no"}[figure.holds]
        print(f"{figure.name:<36}{figure.value:>8g}{bar:>8}  {holds}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the structure of services/ and operators/.")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--list", choices=BARS, metavar="FIGURE", help="print the places behind a figure")
    options = parser.parse_args()
    measurements = measure(read_modules(), tomllib.loads(CONFIGURATION.read_text()))
    if options.list is not None:
        for place in measurements[options.list].places:
            print(place)
        return 0
    figures = [Figure(name, measurements[name].value, bar) for name, bar in BARS.items()]
    if options.json:
        print(json.dumps({"figures": [{**asdict(figure), "holds": figure.holds} for figure in figures]}))
    else:
        print_table(figures)
    return 1 if any(figure.holds is False for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
