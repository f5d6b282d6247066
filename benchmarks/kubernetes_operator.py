"""Measures the cost of 100 BlendServices for the operator and the API server, while they start and at rest.
Then tests whether deleted services drain although the operator is killed again and again.

The operator runs as in a pod, as a process of its own. Its API server is the tests' stand-in, in another
process over HTTP on loopback, or the cluster that KUBECONFIG names. There, KUBERAY_CRDS is a file or folder
with KubeRay's CRDs, KubeRay itself must not run, and everything happens in a namespace that is removed
afterwards. KubeRay is played in both cases. Each service has two shards with an SSD tier. Ends with a table
and one line of JSON:

- `settle_100_s` (with 100 services): from the first service's creation until each has all its objects, which
  its condition `Reconciled` says;
- `idle_requests_per_service_minute`, `idle_writes_per_service_minute`, `lists_per_look`: at rest, as the
  operator counts them (`kintsugi_operator_requests_total`). The Lease's requests are not among them;
- `drained_deletes` of `deletes`: services that drained in order, their engines before their shards, while the
  operator was killed at random moments (`operator_kills`). The moments follow from `seed`;
- `histories_repaired` of `histories`: random spec histories with failures (`tests/simulation/histories.py`)
  that end well in a model of a cluster; `refusals_told` of `refusals`: kinds of refusal that reach a
  condition, an Event and `Stalled` (`tests/unit/operator/refused.py`). Neither needs a cluster;
- `rss_mib`, `rss_peak_mib`, `cpu_share_at_rest`, `cpu_ms_per_look`: of the operator's process.

The stand-in does not show what a request costs a real API server. On a cluster without a kubelet no shard is
ever ready, so that looks at rest come every 10 s instead of every 60 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from benchmarks.support.figures import Figure, report
from kintsugi_operator.controller.cluster import BLEND_SERVICE, RAY_SERVICE, ApiServer
from kintsugi_operator.controller.metrics import WRITES
from kintsugi_operator.controller.reconcile import LATER_S
from tests.e2e.kubernetes.clusters import Kube, Operator, Team, kube, kubeconfig_for, team_of, until, why_not
from tests.e2e.kubernetes.drains import Drainer
from tests.fakes.api_server import FakeApiServer
from tests.fakes.cluster import FakeCluster, FakeKubeRay
from tests.simulation.histories import History
from tests.unit.operator.refused import CASES, why_untold

SERVICES = 100
DELETES = 50
HISTORIES = 1000
SETTLE_S_MAX = 900.0
POLL_S = 0.5
"""Delay between two lists of all services, which also cost the API server something."""
MIB = 1 << 20


class Keeper:
    """The process of the stand-in, which plays the API server and KubeRay."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self._api_server = FakeApiServer(self.cluster)
        self._kuberay = FakeKubeRay(self.cluster)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Handle any request."""
        if request.path == "/play":
            await self._play_kuberay()
            return web.json_response({})
        return await self._api_server.answer(request)

    async def _play_kuberay(self) -> None:
        """One object after the other, so that requests of the operator, such as for its Lease, are answered
        in between."""
        for name in self.cluster.named(RAY_SERVICE.kind):
            self._kuberay.serve(name)
            await asyncio.sleep(0)
        for name in self.cluster.named("Pod"):
            # An address that refuses connections at once, so that nothing waits for metrics that do
            # not exist.
            pod = self.cluster.find("Pod", name)
            if pod["status"]["podIP"] != "127.0.0.1":
                pod["status"]["podIP"] = "127.0.0.1"
                self.cluster.announce(pod)


def keep_objects(ready: Connection) -> None:
    """Serve until the process is ended."""
    asyncio.run(_serve(ready, Keeper()))


async def _serve(ready: Connection, keeper: Keeper) -> None:
    app = web.Application(client_max_size=16 * MIB)
    app.router.add_route("*", "/{path:.*}", keeper.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ready.send(runner.addresses[0][1])
    await asyncio.Event().wait()


class Stage:
    """The environment of a measurement: a namespace, and a substitute for KubeRay."""

    def __init__(self, team: Team, kubeconfig: Path | None = None, url: str = "") -> None:
        """`url`: of the stand-in; empty on a cluster."""
        self.team = team
        self.kubeconfig = kubeconfig
        self._url = url

    def play_kuberay(self) -> None:
        """All RayServices serve."""
        if self._url:
            with urllib.request.urlopen(f"{self._url}/play", timeout=300):
                return
        for one in self.team.kube.list(RAY_SERVICE, self.team.namespace):
            if not one.get("status"):
                self.team.is_ready(one["metadata"]["name"])

    def count_true(self, *conditions: str) -> int:
        """Number of services whose conditions of these types are all true."""
        services = self.team.kube.list(BLEND_SERVICE, self.team.namespace)
        held = [
            {
                one["type"]
                for one in service.get("status", {}).get("conditions", [])
                if one["status"] == "True"
            }
            for service in services
        ]
        return sum(held_here.issuperset(conditions) for held_here in held)


@contextlib.contextmanager
def stand_in() -> Iterator[Stage]:
    """The stand-in API server in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    keeper = context.Process(target=keep_objects, args=(there,), daemon=True)
    keeper.start()
    try:
        configuration = Configuration(host=f"http://127.0.0.1:{here.recv()}")
        with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
            client = ApiClient(configuration)
            cluster = Kube(runner, ApiServer(client), configuration)
            config = kubeconfig_for(configuration, "t", Path(folder) / "config")
            try:
                yield Stage(Team(cluster, "default"), config, configuration.host)
            finally:
                runner.run(client.close())
    finally:
        keeper.terminate()
        keeper.join()


@contextlib.contextmanager
def real_cluster() -> Iterator[Stage]:
    """A namespace of the cluster that KUBECONFIG names."""
    with kube() as cluster:
        cluster.install_crds()
        with team_of(cluster, {}) as team:
            yield Stage(team)


class Figures:
    """The counts of the operator's process so far."""

    def __init__(self, operator: Operator) -> None:
        self.at_s = time.monotonic()
        self.requests = Counter(operator.requests())
        self.looks = operator.looks()
        stat = Path(f"/proc/{operator.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        self.cpu_s = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def writes(self) -> int:
        return sum(self.requests[verb] for verb in WRITES)


def measure(stage: Stage, services: int, seconds: float) -> dict[str, Any]:
    """Bring services up, and leave them alone."""
    operator = Operator(stage.team, "measured", stage.kubeconfig)
    try:
        operator.wait_until_it_leads()
        begun_s = time.monotonic()
        for index in range(services):
            stage.team.make(f"service-{index}", store={"shards": 2, "tiers": [{"name": "nvme", "gib": 100}]})
        _wait_for(stage, operator, services, "Reconciled")
        settle_s = time.monotonic() - begun_s
        stage.play_kuberay()
        _wait_for(stage, operator, services, "Ready")
        stage.play_kuberay()
        _wait_until_idle(operator)
        before = Figures(operator)
        time.sleep(seconds)
        after = Figures(operator)
        memory = {name: _memory_mib(operator, field) for name, field in MEMORY.items()}
    finally:
        operator.stop()
    looks, minutes = after.looks - before.looks, (after.at_s - before.at_s) / 60
    requests, cpu_s = after.requests - before.requests, after.cpu_s - before.cpu_s
    return {
        "services": services,
        f"settle_{services}_s": round(settle_s, 1),
        "writes_to_get_there": before.writes,
        "seconds_at_rest": round(60 * minutes, 1),
        "looks_at_rest": looks,
        "requests_at_rest": dict(requests),
        "idle_requests_per_service_minute": round(requests.total() / services / minutes, 3),
        "idle_writes_per_service_minute": round((after.writes - before.writes) / services / minutes, 3),
        "lists_per_look": round(requests["list"] / max(1, looks), 3),
        "cpu_share_at_rest": round(cpu_s / (60 * minutes), 4),
        "cpu_ms_per_look": round(1000 * cpu_s / max(1, looks), 2),
        **memory,
    }


def measure_drains(stage: Stage, deletes: int, seed: int) -> dict[str, Any]:
    """Delete services while the operator is killed."""
    drains = Drainer(stage.team, seed, stage.kubeconfig).run(deletes)
    return {
        "seed": seed,
        "deletes": deletes,
        "drained_deletes": drains.drained,
        "operator_kills": drains.kills,
        "undrained": drains.faults,
    }


def measure_repairs(histories: int) -> dict[str, Any]:
    """Play random histories, and every kind of refusal."""
    broken = [seed for seed in range(histories) if History(seed).play()]
    untold = [case.name for case in CASES if why_untold(case)]
    return {
        "histories": histories,
        "histories_repaired": histories - len(broken),
        "broken_seeds": broken,
        "refusals": len(CASES),
        "refusals_told": len(CASES) - len(untold),
        "untold": untold,
    }


MEMORY = {"rss_mib": "VmRSS", "rss_peak_mib": "VmHWM"}


def _wait_for(stage: Stage, operator: Operator, services: int, condition: str) -> None:
    def is_true_of_all() -> bool:
        time.sleep(POLL_S)
        return stage.count_true(condition) == services

    until(is_true_of_all, f"{services} services are {condition}", operator.said, SETTLE_S_MAX)


def _wait_until_idle(operator: Operator) -> None:
    """Wait until every service was reconciled without a write."""

    def is_idle() -> bool:
        writes = Figures(operator).writes
        time.sleep(LATER_S + 2)  # at rest, looks come so far apart
        return Figures(operator).writes == writes

    until(is_idle, "nothing is written", operator.said, SETTLE_S_MAX)


def _memory_mib(operator: Operator, field: str) -> float:
    lines = Path(f"/proc/{operator.process.pid}/status").read_text().splitlines()
    (line,) = [one for one in lines if one.startswith(f"{field}:")]
    return round(int(line.split()[1]) / 1024, 1)


BARS = {
    "settle_100_s": (60.0, "s"),
    "idle_requests_per_service_minute": (2.0, ""),
    "idle_writes_per_service_minute": (0.0, ""),
    "lists_per_look": (0.0, ""),
    "rss_peak_mib": (110.0, "MiB"),
}
"""Highest values, and units."""


REFUSALS_MIN = 25.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--services", type=int, default=SERVICES, help="0: none")
    parser.add_argument("--seconds", type=float, default=2 * LATER_S + 5, help="at rest")
    parser.add_argument("--deletes", type=int, default=DELETES, help="services to delete; 0: none")
    parser.add_argument("--histories", type=int, default=HISTORIES, help="random histories; 0: none")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of the kills")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    parser.add_argument(
        "--quick", action="store_true", help="5 services, 15 s at rest, 5 deletes, 20 histories"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.services, arguments.seconds, arguments.deletes = 5, 15.0, 5
        arguments.histories = 20
    print(f"seed {arguments.seed}", file=sys.stderr)
    is_real = bool(os.environ.get("KUBECONFIG"))
    if is_real and (problem := why_not()):
        parser.error(problem)
    figures: dict[str, Any] = {}
    if arguments.services:
        with real_cluster() if is_real else stand_in() as stage:
            figures = measure(stage, arguments.services, arguments.seconds)
    if arguments.deletes:
        with real_cluster() if is_real else stand_in() as stage:
            figures |= measure_drains(stage, arguments.deletes, arguments.seed)
    if arguments.histories:
        figures |= measure_repairs(arguments.histories)
    config = {"api_server": "cluster" if is_real else "stand-in", "quick": arguments.quick, **figures}
    # A run of the histories alone must not replace the figures of the operator's process.
    name = "kubernetes-operator" if arguments.services else "kubernetes-operator-histories"
    report("kubernetes_operator", config, judge(figures), name if arguments.save else None)


def judge(measured: Mapping[str, Any]) -> list[Figure]:
    """The figures with a bar, of those that were measured."""
    found = [
        Figure.at_most(name, measured[name], bar, unit)
        for name, (bar, unit) in BARS.items()
        if name in measured
    ]
    if "deletes" in measured:
        detail = f"{measured['operator_kills']} kills, seed {measured['seed']}"
        count = float(measured["deletes"])
        found.append(Figure.at_least("drained_deletes", measured["drained_deletes"], count, "", detail))
    if "histories" in measured:
        bars = {"histories_repaired": float(measured["histories"]), "refusals_told": REFUSALS_MIN}
        found += [Figure.at_least(name, measured[name], bar, "", "") for name, bar in bars.items()]
    return found


if __name__ == "__main__":
    main()
