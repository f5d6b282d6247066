"""Measures the gate: how soon it opens, and how often it is wrong, on recorded outcomes of real models.

Sections `replay` and `tenants` draw streams from recorded outcomes (`support/outcomes.py`), so the truth
about each configuration is known; `drift` simulates damage on them; `lines` counts the code. `live` serves a
model and measures how long a client waits for its first blend, with chunks put before; `delay`, how much
longer requests wait while the engine learns; `calibrate`, how long `kintsugi calibrate` takes for a file.

    python benchmarks/gate.py [--quick] [--save] [--only replay,tenants,drift,lines,live,delay,calibrate]
        [--model smollm2-135m] [--tokens 1200]

Nothing was tuned on the recorded prompts. The limits are those of `balanced`.
"""

from __future__ import annotations

import ast
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "2")

from benchmarks.support import gate_live
from benchmarks.support.engines import say
from benchmarks.support.figures import RESULTS, Figure
from benchmarks.support.gate_replay import (
    BINDING,
    CLEAN,
    DROP,
    PAIRS,
    VERSIONS,
    World,
    cheapest_passes,
    count_false_opens,
    count_false_trips,
    count_foreign_opens,
    less_agreement,
    pairs_until_trip,
    run_search,
    survives_upgrade,
)
from benchmarks.support.outcomes import RECORDED, read_records
from benchmarks.support.sections import measure, parser_of
from kintsugi.core.evidence import Deviation, Quality, Tally
from kintsugi.core.report import CLOSINGS_MAX, LADDER, Cell, Closing, describe_selection, source_of
from kintsugi.quality import metrics
from kintsugi.quality.reports import ReportKeeper

QUALITY = Quality.BALANCED
STREAMS, STREAMS_QUICK = 2000, 60
SEARCHES, SEARCHES_QUICK = 200, 20
TRIP_SEEDS, TRIP_SEEDS_QUICK = 20, 3
LINES_OF = (
    "services/kintsugi/quality/*.py",
    "services/kintsugi/serving/learning.py",
    "services/kintsugi/core/report.py",
    "services/kintsugi/core/evidence.py",
    "services/kintsugi/core/documents.py",
    "services/kintsugi/core/gate.py",
    "services/kintsugi/cli/commands/calibrate.py",
)


@dataclass
class Setup:
    """The inputs of the sections."""

    quick: bool
    live: gate_live.LiveSetup
    details: dict[str, Any] = field(default_factory=dict)

    def worlds(self) -> list[World]:
        """The recorded models."""
        found = [World.of(read_records(path)) for path in sorted(RESULTS.glob("outcomes-*.json.gz"))]
        for world in found:
            self.details[world.name] = {
                describe_selection(one): {
                    "prompts": len(world.losses[one]),
                    "cost": round(world.costs[one], 3),
                    "loss": round(world.mean(one), 4),
                    "lost": round(world.lost(one), 4),
                }
                for one in RECORDED
            }
        return found


def upper_share(count: int, total: int) -> float:
    """Return the 95 % upper bound of a share, one-sided (Clopper and Pearson)."""
    low, high = count / total, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(count, total, middle) > 0.05 else (low, middle)
    return high


def _at_most(count: int, total: int, share: float) -> float:
    """Return the probability of at most ``count`` successes."""
    term = total_of = (1 - share) ** total
    for index in range(1, count + 1):
        term *= (total - index + 1) / index * share / (1 - share)
        total_of += term
    return total_of


def measure_replay(setup: Setup) -> list[Figure]:
    """False openings at the limit, and the power to find what passes."""
    streams = STREAMS_QUICK if setup.quick else STREAMS
    searches = SEARCHES_QUICK if setup.quick else SEARCHES
    figures = []
    for world in setup.worlds():
        opened = total = 0
        for number, selection in enumerate(LADDER):
            for tenants in (1, 5):
                for losses in world.at_limit(selection, QUALITY):
                    each = -(-streams // (4 * len(LADDER)))
                    opened += count_false_opens(losses, QUALITY, each, tenants, seed=10 * number + tenants)
                    total += each
        say(f"{world.name}: {opened} of {total} streams opened at the limit")
        figures.append(
            Figure.at_most(
                f"false_open [{world.name}]",
                upper_share(opened, total),
                0.05,
                "",
                f"95 % upper bound; {opened} of {total} lives of 10,000 requests, every configuration at the "
                "limit, one tenant and five",
            )
        )
        true = cheapest_passes(world, QUALITY)
        found = [run_search(world, QUALITY, seed) for seed in range(searches)]
        first = sorted(one.first_open for one in found if one.first_open is not None)
        if true:
            hits = sum(bool(set(one.passed) & set(true)) for one in found)
            detail = (
                f"{hits} of {searches} streams within {PAIRS} prompts; true: "
                f"{', '.join(map(describe_selection, true))}"
            )
            figures.append(Figure.at_least(f"power [{world.name}]", hits / searches, 0.9, "", detail))
        else:
            passes = [describe_selection(one) for one in LADDER if world.passes(one, QUALITY)]
            detail = f"none has half of the limit's margin; within the limit: {', '.join(passes) or 'none'}"
            figures.append(Figure(f"power [{world.name}]", None, "", detail=detail))
        if first:
            figures.append(
                Figure(
                    f"pairs_to_first_open [{world.name}]",
                    metrics.percentile(first, 0.5),
                    "pairs",
                    detail=f"{len(first)} of {searches} streams; 9 of 10 within "
                    f"{metrics.percentile(first, 0.9):.0f}",
                )
            )
    holds = survives_upgrade(QUALITY)
    figures.append(Figure("gate_survives_upgrade", float(holds), "", "on probation", holds))
    return figures


def measure_tenants(setup: Setup) -> list[Figure]:
    """Measure the influence of one of five tenants, whose prompts are easy or who causes trips at will."""
    streams = STREAMS_QUICK if setup.quick else STREAMS
    opened = total = 0
    for number, world in enumerate(setup.worlds()):
        for selection in LADDER:
            good = [0.0] * 100
            for bad in world.at_limit(selection, QUALITY):
                each = -(-streams // (2 * len(LADDER)))
                opened += count_foreign_opens(good, bad, QUALITY, each, seed=number)
                total += each
    return [
        Figure.at_most(
            "foreign_open",
            upper_share(opened, total),
            0.05,
            "",
            f"95 % upper bound; {opened} of {total} streams in which one of five tenants loses nothing",
        ),
        Figure.at_most("foreign_trip", float(_shuts_all()), 0.05, "", "one tenant trips at will"),
    ]


def _shuts_all() -> bool:
    """Measure whether closings of one tenant, up to their maximum number, close blending for another."""
    keeper = ReportKeeper(None, BINDING, VERSIONS, QUALITY)
    cell, mine, theirs = Cell.of(False, 1000), source_of("mine"), source_of("theirs")
    good = Tally.of(Deviation(0.0005, 0.0), 0.5, [200] * 6)
    for _ in range(120):
        keeper.record(cell, mine, LADDER[0], good)
    for _ in range(CLOSINGS_MAX):
        keeper.close(Closing("trip", keeper.now, theirs))
    return keeper.report.allowance(cell, mine, QUALITY, VERSIONS) is None


def measure_drift(setup: Setup) -> list[Figure]:
    """False trips of clean streams, and pairs until a drop of agreement trips."""
    seeds = TRIP_SEEDS_QUICK if setup.quick else TRIP_SEEDS
    figures = []
    for world in setup.worlds():
        served = [one for one in LADDER if world.passes(one, QUALITY, 0.5)]
        if not served:
            continue
        clean, reuse = world.deviations[served[-1]], world.deviations[RECORDED[-1]]
        false = [count_false_trips(clean, QUALITY, seed) for seed in range(max(2, seeds // 4))]
        after = [
            pairs_until_trip(clean, less_agreement(reuse, DROP, seed), QUALITY, seed) for seed in range(seeds)
        ]
        name = describe_selection(served[-1])
        figures += [
            Figure.at_most(
                f"false_trips [{world.name}]",
                metrics.mean(false),
                1,
                f"in {CLEAN}",
                f"{name}; mean of {len(false)} streams, most {max(false)}",
            ),
            Figure.at_most(
                f"trip_after [{world.name}]",
                metrics.percentile(after, 0.5),
                200,
                "pairs",
                f"{name}, {100 * DROP:g} points less agreement after {PAIRS} clean pairs; median of {seeds}, "
                f"9 of 10 within {metrics.percentile(after, 0.9):.0f}",
            ),
        ]
    return figures


def measure_lines(setup: Setup) -> list[Figure]:
    root = Path(__file__).parent.parent
    files = [path for pattern in LINES_OF for path in root.glob(pattern)]
    lines = sum(path.read_text().count("\n") for path in files)
    statements = sum(
        isinstance(node, ast.stmt) for path in files for node in ast.walk(ast.parse(path.read_text()))
    )
    return [
        Figure.at_most("gate_lines", lines, 3800, "lines", f"{len(files)} files, {statements} statements")
    ]


SECTIONS = {
    "replay": measure_replay,
    "tenants": measure_tenants,
    "drift": measure_drift,
    "lines": measure_lines,
    "live": lambda setup: gate_live.measure(setup.live),
    "delay": lambda setup: gate_live.measure_delay(setup.live),
    "calibrate": lambda setup: gate_live.measure_calibration(setup.live),
}


def main() -> None:
    parser = parser_of(__doc__.splitlines()[0], SECTIONS, "few streams: 2 minutes, and wide intervals")
    live = parser.add_argument_group("the section live")
    live.add_argument("--model", default="bundled", help="default: %(default)s")
    live.add_argument("--tokens", type=int, default=1200, help="of a prompt, about; default: %(default)s")
    live.add_argument("--dtype", default="", help="vLLM's; default: the service's own")
    live.add_argument("--minutes", type=float, default=10.0, help="longest wait; default: %(default)s")
    arguments = parser.parse_args()
    setup = Setup(
        arguments.quick,
        gate_live.LiveSetup(
            arguments.model,
            arguments.tokens,
            1.0 if arguments.quick else arguments.minutes,
            arguments.dtype,
        ),
    )
    measure("gate", arguments, SECTIONS, {"quality": QUALITY.value, "details": setup.details}, setup=setup)


if __name__ == "__main__":
    main()
