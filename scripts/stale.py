"""Mark committed benchmark results that are older than the code they depend on: `make bench-stale`.

    python scripts/stale.py [--json] [--results FOLDER]

A result says which benchmark made it and on which commit. It is *stale* if a file of the packages in
`DEPENDS_ON` has changed since. A commit that ends in `+` had further changes that nobody can see any more;
the result is judged by the commit, and says so. A result whose commit or benchmark is not known is `unknown`.
Exits with 0 whatever it finds: figures may be old, as long as that can be seen.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
RESULTS = Path("benchmarks/results")

_BLEND = ("core", "fusor", "engine", "models")
_STORE = ("store",)
_SERVICE = ("core", "engine", "fusor", "store", "models", "gateway", "serving", "sdk", "bench")

DEPENDS_ON: Mapping[str, Sequence[str]] = {
    "ttft": _BLEND,
    "queueing": _BLEND,
    "loading": (*_BLEND, *_STORE),
    "architectures": (*_BLEND, *_STORE),
    "serving": _SERVICE,
    "gateway": ("core", "gateway", "sdk", "models"),
    "routing": ("core", "serving"),
    "clients": _SERVICE,
    "console": (*_SERVICE, "cli"),
    "latent": (*_BLEND, "checkpoints"),
    "store": ("core", *_STORE),
    "precompute": (*_BLEND, *_STORE, "precompute"),
    "quality": (*_BLEND, "quality", "checkpoints"),
    "paper": (*_BLEND, "quality"),
    "trust": (*_SERVICE, "precompute"),
    "discovery": (*_SERVICE, "discovery"),
    "docs": (*_SERVICE, "precompute", "cli", "kintsugi_operator"),
    "kubernetes_operator": ("kintsugi_operator",),
    "scattered_attention": ("fusor",),
}
"""The packages that a benchmark's figures depend on, by its name in results. Its own script counts, too."""


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


def paths_of(benchmark: str) -> dict[str, str]:
    """The folders and files that count, by the name of their package."""
    paths = {
        name: f"operators/{name}" if name == "kintsugi_operator" else f"services/kintsugi/{name}"
        for name in DEPENDS_ON[benchmark]
    }
    folder = "benchmarks/gpu" if benchmark == "scattered_attention" else "benchmarks"
    return {**paths, "its script": f"{folder}/{benchmark}.py"}


def judge(name: str, result: Mapping[str, object], repository: Path) -> Verdict:
    """Judge one result by the history of `repository`."""
    benchmark, recorded = str(result.get("benchmark")), str(result.get("commit") or "")
    commit = recorded.removesuffix("+")
    if benchmark not in DEPENDS_ON:
        return Verdict(name, benchmark, recorded, "unknown", note="no such benchmark in DEPENDS_ON")
    if not commit or _git(repository, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        return Verdict(name, benchmark, recorded, "unknown", note="its commit is not in this history")
    paths = paths_of(benchmark)
    log = _git(repository, "rev-list", f"{commit}..HEAD", "--", *paths.values()) or ""
    diff = _git(repository, "diff", "--name-only", commit, "HEAD", "--", *paths.values()) or ""
    files = diff.split()
    changed = tuple(
        package
        for package, path in paths.items()
        if any(file == path or file.startswith(f"{path}/") for file in files)
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
