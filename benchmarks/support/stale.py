"""Mark committed benchmark results that are older than the code they depend on: `make bench-stale`.

    python -m benchmarks.support.stale [--json] [--results FOLDER]

A result says which benchmark made it and on which commit. It is *stale* if something that it depends on has
changed since: a file of the packages in `DEPENDS_ON`, its script, or what the script imports of benchmarks
and tests, which hold most of the measuring code. A commit that ends in `+` had further changes that were not
committed; the result is judged by the commit, and the verdict says so. A result whose commit or benchmark is
not known is `unknown`. Exits with 0 whatever it finds: figures may be old, as long as that can be seen.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RESULTS = Path("benchmarks/results")

_BLEND = ("core", "fusor", "engine", "models", "discovery")
_STORE = ("store",)
_RAM_STORE = ("store/client", "store/protocol")
"""For engines that keep chunks in their own process."""
_SERVICE = (*_BLEND, *_STORE, "gateway", "serving", "sdk", "precompute", "quality")

DEPENDS_ON: Mapping[str, Sequence[str]] = {
    "ttft": (*_BLEND, *_RAM_STORE),
    "queueing": (*_BLEND, *_RAM_STORE),
    "posed": (*_BLEND, *_RAM_STORE),
    "gpu": (*_BLEND, *_RAM_STORE),
    "loading": (*_BLEND, *_STORE, "quality"),
    "architectures": (*_BLEND, *_STORE),
    "serving": _SERVICE,
    "path": _SERVICE,
    "gateway": ("core", "gateway", "sdk", "models", "precompute", *_STORE),
    "routing": ("core", "serving"),
    "scale": _SERVICE,
    "cluster": _SERVICE,
    "clients": _SERVICE,
    "console": (*_SERVICE, "cli"),
    "codecs": (*_BLEND, *_RAM_STORE, "quality"),
    "protocol": (*_BLEND, *_RAM_STORE, "quality", "precompute"),
    "latent": (*_BLEND, *_RAM_STORE, "checkpoints"),
    "hybrid": (*_BLEND, *_RAM_STORE, "checkpoints"),
    "store": ("core", *_STORE),
    "precompute": (*_BLEND, *_STORE, "precompute"),
    "quality": (*_BLEND, *_RAM_STORE, "quality", "checkpoints"),
    "gate": (*_SERVICE, "cli"),
    "paper": (*_BLEND, *_RAM_STORE, "quality"),
    "trust": _SERVICE,
    "discovery": _SERVICE,
    "kubernetes_operator": ("kintsugi_operator",),
    "scattered_attention": ("core", "fusor"),
}
"""The packages that a benchmark's figures depend on, by its name in results."""
FOLDERS = {"kintsugi_operator": "operators/kintsugi_operator", "checkpoints": "checkpoints"}
"""Paths of packages outside `services/kintsugi`."""
SCRIPTS = {
    # A folder: parts of it run as processes of their own, which no import shows.
    "gpu": "benchmarks/gpu",
    "scattered_attention": "benchmarks/gpu/scattered_attention.py",
}
"""What makes a result; by default the script of that name in `benchmarks`."""
MEASURING = ("benchmarks", "tests")
"""Packages outside the product; what a script imports from them counts."""
REPORTING = frozenset({"benchmarks/support/figures.py", "benchmarks/support/sections.py"})
"""Every script imports them, and they measure nothing: a new column would make every result stale."""


@dataclass(frozen=True)
class Verdict:
    """One committed result."""

    result: str
    benchmark: str
    commit: str
    state: str
    """`fresh`, `stale` or `unknown`."""
    commits_since: int = 0
    """Commits that changed something the result depends on."""
    changed: tuple[str, ...] = ()
    """The packages they changed."""
    note: str = ""


def paths_of(benchmark: str, repository: Path) -> dict[str, list[str]]:
    """The folders and files that count, by the name that a verdict gives them."""
    paths = {name: [FOLDERS.get(name, f"services/kintsugi/{name}")] for name in DEPENDS_ON[benchmark]}
    script = SCRIPTS.get(benchmark, f"benchmarks/{benchmark}.py")
    imported = [path for path in imports_of(script, repository) if not _is_within(path, script)]
    return {**paths, "its script": [script], "what its script imports": imported}


def imports_of(script: str, repository: Path) -> list[str]:
    """The files of `MEASURING` that a script, or the scripts of a folder, import, and what these import in
    turn, wherever in them the import stands."""
    place = repository / script
    waiting = sorted(place.rglob("*.py")) if place.is_dir() else [place] * place.is_file()
    found = set(waiting)
    while waiting:
        for module in _modules_in(waiting.pop()):
            inside = repository.joinpath(*module.split("."))
            for file in (inside.with_suffix(".py"), inside / "__init__.py"):
                if file.is_file() and file not in found:
                    found.add(file)
                    waiting.append(file)
    return sorted({str(file.relative_to(repository)) for file in found} - REPORTING)


def _modules_in(file: Path) -> set[str]:
    """What a file imports of `MEASURING`. What follows `from … import` may be a module, too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.split(".")[0] in MEASURING}


def _is_within(file: str, path: str) -> bool:
    """Whether `path` is the file, or a folder that holds it."""
    return file == path or file.startswith(f"{path}/")


def judge(name: str, result: Mapping[str, object], repository: Path) -> Verdict:
    """Judge one result by the history of `repository`."""
    benchmark, recorded = str(result.get("benchmark")), str(result.get("commit") or "")
    commit = recorded.removesuffix("+")
    if benchmark not in DEPENDS_ON:
        return Verdict(name, benchmark, recorded, "unknown", note="no such benchmark in DEPENDS_ON")
    if not commit or _git(repository, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        return Verdict(name, benchmark, recorded, "unknown", note="its commit is not in this history")
    paths = paths_of(benchmark, repository)
    every = list(chain.from_iterable(paths.values()))
    log = _git(repository, "rev-list", f"{commit}..HEAD", "--", *every) or ""
    diff = _git(repository, "diff", "--name-only", commit, "HEAD", "--", *every) or ""
    files = diff.split()
    changed = tuple(
        name for name, some in paths.items() if any(_is_within(file, path) for file in files for path in some)
    )
    note = "made with changes that were not committed" if recorded.endswith("+") else ""
    state = "stale" if changed else "fresh"
    return Verdict(name, benchmark, recorded, state, len(log.split()), changed, note)


def judge_all(repository: Path, results: Path) -> list[Verdict]:
    """Judge every committed result that is JSON."""
    listed = _git(repository, "ls-files", "--", str(results)) or ""
    names = [Path(name) for name in listed.splitlines() if name.endswith(".json")]
    return [judge(name.name, json.loads((repository / name).read_text()), repository) for name in names]


def _git(repository: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails."""
    ran = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True)
    return ran.stdout if ran.returncode == 0 else None


def table_of(verdicts: Sequence[Verdict]) -> str:
    rows = [("result", "commit", "state", "changes", "of what")]
    for one in verdicts:
        about = ", ".join((*one.changed, *([one.note] if one.note else [])))
        changes = str(one.commits_since) if one.changed else ""
        rows.append((one.result, one.commit, one.state, changes, about))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print a JSON array instead of a table")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results in the repository")
    given = parser.parse_args(arguments)
    verdicts = judge_all(REPOSITORY, given.results)
    print(json.dumps([asdict(one) for one in verdicts]) if given.json else table_of(verdicts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
