"""Records the public surface in JSON files and compares it with them.

    python -m tests.unit.surface.snapshot            write every file under snapshots/
    python -m tests.unit.surface.snapshot --check    write nothing; print differences, exit 1 if there are any

One file per part. Texts that may be improved (help, descriptions, messages) and module paths are not
recorded, so rewording and moving code leave the files as they are. A new public name is recorded by writing
the files again. A recorded name that goes away needs an alias that warns, and then stays recorded.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.unit.surface import command_line, databases, deployment, metrics, protocol, python_api

FOLDER = Path(__file__).parent / "snapshots"
WRITE = "python -m tests.unit.surface.snapshot"

PARTS: dict[str, Callable[[], Any]] = {
    "wire_protocol": protocol.messages_and_services,
    "http_routes": protocol.http_routes,
    "requests": protocol.requests,
    "crds": deployment.crds,
    "chart_values": deployment.chart_values,
    "configuration": deployment.configuration,
    "packaging": deployment.packaging,
    "environment": deployment.environment_variables,
    "python": python_api.surface,
    "command_line": command_line.surface,
    "metrics": metrics.surface,
    "databases": databases.surface,
}
"""Each collects one part from the code, as JSON values."""


def collected(part: str) -> Any:
    """A part as the code has it now. An alias that warns counts as present."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return json.loads(json.dumps(PARTS[part]()))


def recorded(part: str) -> Any:
    return json.loads((FOLDER / f"{part}.json").read_text())


def differences(part: str, before: Any, now: Any) -> str:
    """Every difference on a line of its own, under a heading that says what to do; empty if there is none."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    gone = [f"  - {path}: {old[path]}" for path in old if path not in new]
    changed = [
        f"  ! {path}: {old[path]} -> {new[path]}" for path in old if old[path] != new.get(path, old[path])
    ]
    added = [f"  + {path}: {new[path]}" for path in new if path not in old]
    if not (gone or changed or added):
        return ""
    heads = [f"the public surface differs from tests/unit/surface/snapshots/{part}.json:"]
    if gone or changed:
        heads.append("  What is recorded is frozen: keep it, as an alias that warns if it has a new name.")
    if added:
        heads.append(f"  If what is new is meant to be public, record it: {WRITE}")
    return "\n".join([*heads, *gone, *changed, *added])


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and JSON text of every value that is not an object with entries. Each text of a list is one, so
    that adding to a list is no change of it."""
    under = f"{path} > " if path else ""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{under}{key}")
    elif isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        yield from ((f"{under}{one}", "listed") for one in value)
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def main() -> int:
    found = {part: collected(part) for part in PARTS}
    if "--check" in sys.argv[1:]:
        problems = [text for part in PARTS if (text := differences(part, recorded(part), found[part]))]
        print("\n\n".join(problems), end="\n" if problems else "")
        return 1 if problems else 0
    FOLDER.mkdir(exist_ok=True)
    for part, value in found.items():
        (FOLDER / f"{part}.json").write_text(json.dumps(value, indent=0, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
