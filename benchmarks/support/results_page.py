"""The benchmarks' page, from the committed results and the history of what they depend on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.reference.page import code, table

from benchmarks.support.stale import RESULTS, Verdict, judge_all

REPOSITORY = Path(__file__).parents[2]
PATH = "benchmarks.md"
DETAIL_CHARS_MAX = 240
STATES = {"fresh": "current", "stale": "stale", "unknown": "unknown"}

ABOUT = """\
# Benchmarks

Every figure here is read from a file in `benchmarks/results`, which the named script wrote. A bar was
**held** or **missed**. A result is *stale* if the code that it depends on has changed since its commit; the
figures may still be right, but nobody has measured them again.

| to | run |
| --- | --- |
| repeat one benchmark | `make bench BENCHMARKS=benchmarks/store.py` |
| keep the result | the script itself, with `--save` |
| list stale results | `make bench-stale` |

Times depend on the machine: compare ratios within one result, not times between results.
[The log](../benchmarks/LOG.md) lists what was tried, and what failed."""


def markdown() -> str:
    results = [(verdict, _read(verdict)) for verdict in judge_all(REPOSITORY, RESULTS)]
    parts = [ABOUT, "## Overview", _overview(results)]
    for verdict, result in results:
        parts += _section(verdict, result)
    return "\n\n".join(parts) + "\n"


def _read(verdict: Verdict) -> Mapping[str, Any]:
    result: Mapping[str, Any] = json.loads((REPOSITORY / RESULTS / verdict.result).read_text())
    return result


def _overview(results: Sequence[tuple[Verdict, Mapping[str, Any]]]) -> str:
    rows = [["result", "held", "missed", "without a bar", "commit", "state"]]
    for verdict, result in results:
        verdicts = [figure.get("holds") for figure in result["figures"]]
        name = verdict.result.removesuffix(".json")
        rows.append(
            [
                f"[{name}](#{name})",
                *(str(verdicts.count(one)) for one in (True, False, None)),
                code(_commit(verdict, result)),
                STATES[verdict.state],
            ]
        )
    return table(rows)


def _commit(verdict: Verdict, result: Mapping[str, Any]) -> str:
    return verdict.commit or " → ".join(map(str, result.get("commits", {}).values())) or "unknown"


def _section(verdict: Verdict, result: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {verdict.result.removesuffix('.json')}"
    yield table([["about it", ""], *_about(verdict, result)])
    yield _figures(result["figures"])


def _about(verdict: Verdict, result: Mapping[str, Any]) -> Iterator[list[str]]:
    config = result["config"]
    yield ["file", f"[{verdict.result}](../{RESULTS}/{verdict.result})"]
    yield ["commit, date", f"{code(_commit(verdict, result))}, {config.get('date', 'unknown')}"]
    yield ["machine", _cell(str(config.get("machine", "unknown")))]
    model = config.get("model") or config.get("weights") or config.get("real_model")
    if model:
        yield ["model", _cell(str(model))]
    parts = config.get("sections") or config.get("parts")
    if parts:
        yield ["parts", ", ".join(map(code, parts))]
    script = Path(f"benchmarks/{verdict.benchmark}.py")
    if (REPOSITORY / script).is_file():
        yield ["to repeat", code(f"make bench BENCHMARKS={script}")]
    if config.get("quick"):
        yield ["note", "A quick run: its times say little."]
    changed = f": {', '.join(verdict.changed)} changed since" if verdict.changed else ""
    note = f" ({verdict.note})" if verdict.note else ""
    yield ["state", f"{STATES[verdict.state]}{changed}{note}"]


def _figures(figures: Sequence[Mapping[str, Any]]) -> str:
    rows = [["figure", "value", "bar", "verdict", "detail"]]
    for figure in figures:
        verdict = figure.get("holds")
        holds = "" if verdict is None else "held" if verdict else "**missed**"
        detail = str(figure.get("detail") or "")
        short = detail if len(detail) <= DETAIL_CHARS_MAX else f"{detail[:DETAIL_CHARS_MAX]}…"
        rows.append(
            [code(figure["name"]), _value(figure), _cell(str(figure.get("bar") or "")), holds, _cell(short)]
        )
    told = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    return table([[row[column] for column in told] for row in rows])


def _value(figure: Mapping[str, Any]) -> str:
    unit = _cell(str(figure.get("unit") or ""))
    if "new_median" in figure:
        return f"{figure['old_median']:.4g} → {figure['new_median']:.4g} {unit}"
    if figure.get("value") is None:
        return "not measured"
    return f"{figure['value']:.4g} {unit}".strip()


def _cell(text: str) -> str:
    """Text of a result, which may hold what Markdown takes for marks."""
    for mark in "\\`*_[]<>":
        text = text.replace(mark, f"\\{mark}" if mark not in "<>" else {"<": "&lt;", ">": "&gt;"}[mark])
    return " ".join(text.split())
