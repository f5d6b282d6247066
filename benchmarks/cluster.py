"""What a service on several hosts survives: hosts that die, are cut off and return, links that lose or slow
packets, scaling, and a corpus job meanwhile.

    python benchmarks/cluster.py [--quick] [--save] [--only NAME,NAME] [--records FOLDER]

The hosts are namespaces of this machine with a Ray of their own (`support/cluster`): a head with Redis, two
shards, two engines with the bundled model in float32, two gateways. Needs root, iproute2 and util-linux, and
for the loss of the head `redis-server`. Questions are asked throughout, and chunks are put. Ends with a table
and one line of JSON:

- `cluster_bed_scenarios`: scenarios that passed: questions are answered again in time, no answer is wrong, no
  acknowledged chunk is lost, and everything runs again;
- `cluster_bed_wrong_answers`: answers whose tokens differ from a full prefill's;
- `cluster_bed_lost_chunks`: chunks that were acknowledged, and that a gateway does not find afterwards;
- `failover_s`: the longest time from the loss of a host until no question fails or takes longer than 5 s at
  the gateways that are left; `failover_KIND_s` of a shard, an engine, a gateway and the head.

With `--records`, scenarios that passed are not run again while their record is there. Nothing outside the
namespaces is changed, and all processes end with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.support.cluster import hosts
from benchmarks.support.cluster.bed import GATEWAY, HOSTS, Bed
from benchmarks.support.cluster.scenarios import NEEDS_REDIS, SCENARIOS, Outcome, play
from benchmarks.support.cluster.traffic import connect
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure, report
from benchmarks.support.sections import parser_of

NAME = "cluster"
SCENARIOS_MIN = 12
FAILOVER_S_MAX = 30.0
CHUNKS = 12
QUICK = ("kill_gateway",)
KINDS = ("shard", "engine", "gateway", "head")


def main() -> None:
    arguments = _parse_arguments()
    names = arguments.only.split(",") if arguments.only else QUICK if arguments.quick else list(SCENARIOS)
    if unknown := [name for name in names if name not in SCENARIOS]:
        sys.exit(f"--only {','.join(unknown)}: the scenarios are {', '.join(SCENARIOS)}")
    if reason := hosts.why_not():
        report(NAME, {}, [Figure("cluster_bed_scenarios", None, "", detail=reason)], None)
        return
    hosts.enter_namespaces()
    outcomes = run(names, arguments.records)
    config = {
        "weights": "trained",
        "quick": arguments.quick,
        "hosts": len(HOSTS),
        "left_out": sorted(SCENARIOS.keys() - {one.name for one in outcomes}),
        "rows": [one.to_mapping() for one in outcomes],
    }
    figures = figures_of(outcomes)
    report(NAME, config, figures, NAME if arguments.save else None, _oldest(outcomes))
    if any(one.problem for one in outcomes):
        sys.exit(1)


def _parse_arguments() -> argparse.Namespace:
    parser = parser_of((__doc__ or "").splitlines()[0], dict.fromkeys(SCENARIOS, figures_of), "one scenario")
    parser.add_argument("--records", type=Path, help="folder in which outcomes are kept, to go on from")
    return parser.parse_args()


def run(names: Sequence[str], records: Path | None) -> list[Outcome]:
    """Play the scenarios that are not recorded yet: on one bed, or on another if one breaks it."""
    known = _read(records)
    has_redis = shutil.which("redis-server") is not None
    outcomes = [known[name] for name in names if name in known]
    left = [name for name in names if name not in known and (has_redis or name not in NEEDS_REDIS)]
    if not has_redis:
        say(f"without redis-server, {', '.join(NEEDS_REDIS)} are left out")
    while left:
        with tempfile.TemporaryDirectory(prefix="kb-", dir="/tmp", ignore_cleanup_errors=True) as folder:
            bed = Bed(Path(folder))
            try:
                bed.start(has_redis)
                with connect(bed.running(GATEWAY)[0]) as client:
                    bed.book.put(client, CHUNKS)
                bed.count_wrong()
                while left:
                    outcome = play(bed, left.pop(0))
                    outcomes.append(outcome)
                    if outcome.is_broken:
                        break
                    if outcome.has_passed:
                        _keep(records, outcome)
            finally:
                _keep_logs(bed)
                bed.close()
    return outcomes


def _keep_logs(bed: Bed) -> None:
    """Copy what the hosts wrote to the folder that KINTSUGI_BED_LOGS names."""
    if logs := os.environ.get("KINTSUGI_BED_LOGS"):
        leave_out = shutil.ignore_patterns("sockets", "ssd", "data", "ray_*")
        shutil.copytree(
            bed.folder, Path(logs) / bed.folder.name, dirs_exist_ok=True, ignore=leave_out, symlinks=True
        )


def _read(records: Path | None) -> dict[str, Outcome]:
    """Return the recorded outcomes."""
    files = records.glob("*.json") if records else ()
    rows = [Outcome(**json.loads(file.read_text())) for file in files]
    return {row.name: row for row in rows}


def _keep(records: Path | None, outcome: Outcome) -> None:
    if records:
        records.mkdir(parents=True, exist_ok=True)
        (records / f"{outcome.name}.json").write_text(json.dumps(outcome.to_mapping()))


def _oldest(outcomes: Sequence[Outcome]) -> str:
    """Return the commit of the scenario that was run longest ago."""
    commits = {one.commit for one in outcomes}
    ages = {one: _count_commits_since(one) for one in commits}
    return max(ages, key=lambda one: ages[one])


def _count_commits_since(made_on: str) -> int:
    command = ["git", "rev-list", "--count", f"{made_on.removesuffix('+')}..HEAD"]
    return int(subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, check=True).stdout)


def figures_of(outcomes: Sequence[Outcome]) -> list[Figure]:
    passed = [one.name for one in outcomes if one.has_passed]
    failed = [f"{one.name}: {one.problem}" for one in outcomes if not one.has_passed]
    detail = "; ".join(failed) or ", ".join(passed)
    figures = [
        Figure.at_least("cluster_bed_scenarios", len(passed), SCENARIOS_MIN, "", detail),
        Figure.at_most(
            "cluster_bed_wrong_answers", sum(one.wrong for one in outcomes), 0, "", _asked(outcomes)
        ),
        Figure.at_most("cluster_bed_lost_chunks", sum(one.lost for one in outcomes), 0, ""),
    ]
    measured = {one.name: one.failover_s for one in outcomes if one.failover_s is not None}
    if measured:
        worst = max(measured, key=lambda name: measured[name])
        figures.append(Figure.at_most("failover_s", measured[worst], FAILOVER_S_MAX, "s", worst))
    for kind in KINDS:
        of_kind = {name: took_s for name, took_s in measured.items() if name.endswith(f"_{kind}")}
        if of_kind:
            parts = ", ".join(f"{name} {took_s:.1f} s" for name, took_s in of_kind.items())
            figures.append(Figure(f"failover_{kind}_s", max(of_kind.values()), "s", detail=parts))
    return figures


def _asked(outcomes: Sequence[Outcome]) -> str:
    asked, errors = sum(one.asked for one in outcomes), sum(one.errors for one in outcomes)
    return f"{asked} questions, of which {errors} failed and said so"


if __name__ == "__main__":
    main()
