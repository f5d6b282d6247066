"""What happens to the bed, one scenario a function. Each leaves the bed as it found it, or raises."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from benchmarks.support.cluster.bed import ENGINE, GATEWAY, HEAD, SHARD, VLLM, Bed
from benchmarks.support.cluster.traffic import (
    NAMESPACE,
    Traffic,
    connect,
    failover_s,
    first_good_s,
    make_text,
)
from benchmarks.support.engines import say
from benchmarks.support.figures import commit
from kintsugi.core.deploy import SHARD_PORT
from kintsugi.core.errors import KintsugiError

LIMIT_S = 120.0
"""Maximum time until questions are answered again."""
NOTICED_S = 25.0
"""Within this time Ray has noticed that a node is cut off (`core.deploy.RAY_CLUSTER_ENVIRONMENT`)."""
HEAL_S = 240.0
"""Maximum time in which engines start and everything runs again."""
BLINK_S = 6.0
HEAD_CUT_S = 12.0
"""Cuts that Ray does not notice."""
HEALTHY_S = 5.0
PARTITION_S = 15.0
PUTS = 4
DOCUMENTS = 300
"""More than one batch of a job; each is a chunk."""


@dataclass
class Outcome:
    """What a scenario found."""

    name: str
    wrong: int = 0
    lost: int = 0
    errors: int = 0
    """Questions that failed, and said so."""
    asked: int = 0
    failover_s: float | None = None
    first_good_s: float | None = None
    commit: str = ""
    seconds: float = 0.0
    """Length, without the return of a lost host."""
    problem: str = ""
    """Why it did not pass; empty if it did."""
    is_broken: bool = False
    """Whether the bed was not made whole again."""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def has_passed(self) -> bool:
        return not self.problem

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)


class Stage:
    """The bed during one scenario."""

    def __init__(self, bed: Bed, outcome: Outcome) -> None:
        self.bed = bed
        self.outcome = outcome

    @contextmanager
    def asking(self, without: str = "", may_fail: bool = False) -> Iterator[Traffic]:
        """Ask questions, apart from the gateway on the host ``without``; at first for `HEALTHY_S`.
        ``may_fail``: some may be refused."""
        with self.bed.traffic(without) as traffic:
            try:
                if not traffic.wait_calm(time.monotonic(), HEALTHY_S, LIMIT_S):
                    raise RuntimeError(f"not healthy before anything happened: {traffic.asked[-3:]}")
                yield traffic
            finally:
                traffic.stop()
                self._count(traffic)
        if not may_fail and self.outcome.errors:
            raise RuntimeError(f"{self.outcome.errors} questions failed")

    def _count(self, traffic: Traffic) -> None:
        asked = traffic.asked
        self.outcome.asked += len(asked)
        self.outcome.wrong += sum(one.is_wrong for one in asked)
        failed = [one.error for one in asked if one.error]
        self.outcome.errors += len(failed)
        for error in failed:
            errors = self.outcome.notes.setdefault("errors", {})
            errors[error[:160]] = errors.get(error[:160], 0) + 1
        outcomes = self.outcome.notes.setdefault("outcomes", {})
        for name, count in traffic.outcomes.items():
            outcomes[name] = outcomes.get(name, 0) + count

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Require that no replica restarts in the body."""
        before = {one.name for one in self.bed.replicas()}
        yield
        self.bed.wait_ready(HEAL_S)
        after = self.bed.replicas()
        if new := [f"{one.deployment} on {one.host}" for one in after if one.name not in before]:
            raise RuntimeError(f"restarted: {', '.join(new)}")

    def scale(self, **counts: int) -> None:
        """As `Bed.scale`, and wait until the replicas are there."""
        self.bed.scale(**counts)
        self.bed.wait_ready(HEAL_S)

    def put(self, without: str = "") -> None:
        with connect(self.bed.gateway(without)) as client:
            self.bed.book.put(client, PUTS)

    def lose(self, name: str, how: Callable[[], None], back: Callable[[], None]) -> None:
        """Ask and put while a host is lost by ``how``, measure until questions are answered again, and go on
        while it comes ``back``."""
        outcome, survivor = self.outcome, self.bed.gateway(name)
        outcome.notes["host"] = name
        with self.asking(without=name, may_fail=True) as traffic:
            lost_s = time.monotonic()
            how()
            try:
                with connect(survivor) as client:
                    self.bed.book.put(client, PUTS)
                is_calm = traffic.wait_calm(lost_s, NOTICED_S, LIMIT_S)
                asked = traffic.asked
            finally:
                back()
            outcome.seconds = time.monotonic() - lost_s
            outcome.failover_s = failover_s(asked, lost_s)
            outcome.first_good_s = first_good_s(asked, lost_s)
            declined = [one.ended_s - lost_s for one in asked if one.is_declined and one.ended_s > lost_s]
            outcome.notes["declined_until_s"] = round(max(declined, default=0.0), 1)
            if not is_calm or outcome.failover_s is None:
                raise RuntimeError(f"questions are not answered again after the loss of {name}")
            self.bed.wait_ready(HEAL_S)
            later = [one for one in traffic.asked[len(asked) :] if one.is_disturbed]
            if later:
                raise RuntimeError(
                    f"{name} returned, and then {len(later)} questions were disturbed: {later[:2]}"
                )


Scenario = Callable[[Stage], None]


def _kill(*roles: str) -> Scenario:
    def scenario(stage: Stage) -> None:
        bed = stage.bed
        name = bed.host_of(*roles)
        stage.lose(name, lambda: bed.kill(name), lambda: bed.boot(name))

    return scenario


def kill_head(stage: Stage) -> None:
    """Nothing restarts, neither without a head nor when it has returned at its address."""
    bed = stage.bed
    with stage.unchanged():
        stage.lose(HEAD, lambda: bed.kill(HEAD), lambda: bed.boot(HEAD))


def _cut_off(*roles: str) -> Scenario:
    """Cut a host off until Ray counts it as lost, and let it return."""

    def scenario(stage: Stage) -> None:
        name = stage.bed.host_of(*roles)
        host = stage.bed.hosts[name]
        stage.lose(name, host.cut_off, host.reconnect)

    return scenario


def cut_head(stage: Stage) -> None:
    """The head is cut off for less time than it takes to count all nodes as lost: nothing restarts."""
    bed = stage.bed
    with stage.unchanged():
        with stage.asking(may_fail=True) as traffic:
            cut_s = time.monotonic()
            bed.head.cut_off()
            try:
                traffic.wait_calm(cut_s, HEAD_CUT_S, HEAD_CUT_S)
            finally:
                bed.head.reconnect()
            if not traffic.wait_calm(time.monotonic(), HEALTHY_S, LIMIT_S):
                raise RuntimeError("questions are not answered after the head was cut off")
            bed.wait_ready(HEAL_S)
        stage.outcome.failover_s = failover_s(traffic.asked, cut_s)
        stage.outcome.first_good_s = first_good_s(traffic.asked, cut_s)


def blink(stage: Stage) -> None:
    """Cut off a shard and an engine for some seconds: nothing restarts."""
    bed = stage.bed
    with stage.unchanged(), stage.asking(may_fail=True) as traffic:
        for name in (bed.host_of(SHARD), bed.host_of(ENGINE)):
            bed.hosts[name].cut_off()
            time.sleep(BLINK_S)
            bed.hosts[name].reconnect()
        if not traffic.wait_calm(time.monotonic(), HEALTHY_S, LIMIT_S):
            raise RuntimeError("questions are not answered after short cuts")


def partition(stage: Stage) -> None:
    """A gateway and the engine on its host reach no shard."""
    bed = stage.bed
    name = bed.host_of(ENGINE, GATEWAY)
    shards = [other for other in bed.hosts.values() if other.address in bed.running(SHARD)]
    with stage.asking() as traffic:
        since_s = time.monotonic()
        for shard in shards:
            shard.drop(bed.hosts[name], SHARD_PORT)
        try:
            stage.put(without=name)
            is_calm = traffic.wait_calm(since_s, PARTITION_S, LIMIT_S)
        finally:
            for shard in shards:
                shard.deliver(bed.hosts[name], SHARD_PORT)
        if not is_calm:
            raise RuntimeError("questions are not answered while a gateway is cut off from the shards")


def slow_link(stage: Stage) -> None:
    """A shard sends 1 Mbit/s."""
    bed = stage.bed
    host = bed.hosts[bed.host_of(SHARD)]
    with stage.asking() as traffic:
        since_s = time.monotonic()
        host.slow_down("1mbit")
        try:
            stage.put()
            is_calm = traffic.wait_calm(since_s, 20.0, LIMIT_S)
        finally:
            host.speed_up()
        if not is_calm:
            raise RuntimeError("questions are not answered with a slow link")


def scale_out_shards(stage: Stage) -> None:
    bed = stage.bed
    with stage.asking():
        bed.boot("five")
        stage.scale(shards=3)
        stage.put()


def scale_in_shards(stage: Stage) -> None:
    bed = stage.bed
    with stage.asking():
        stage.scale()
        stage.put()
    shards = bed.running(SHARD)
    idle = next(name for name in ("five", "three", "one") if bed.hosts[name].address not in shards)
    stage.outcome.notes["left"] = idle
    if idle == "five":
        bed.kill(idle)


def scale_in_fronts(stage: Stage) -> None:
    """An engine goes while both gateways are asked, then a gateway; the other one is asked afterwards."""
    with stage.asking():
        stage.scale(engines=1)
    stage.scale(engines=1, gateways=1)
    with stage.asking():
        stage.put()


def scale_out_fronts(stage: Stage) -> None:
    with stage.asking():
        stage.scale()
    with stage.asking():
        stage.put()


def corpus(stage: Stage) -> None:
    """A corpus job whose first worker dies with its host."""
    bed = stage.bed
    source = bed.folder / "corpus.jsonl"
    lines = [json.dumps({"id": f"d{n}", "text": make_text(10_000 + n)}) for n in range(DOCUMENTS)]
    source.write_text("\n".join(lines))
    result = bed.folder / "logs/corpus"

    def start(*more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "from kintsugi.cli.console_script import main; main()"]
        command += ["precompute", "run", str(source), "--model", "bundled", "--json"]
        command += ["--namespace", NAMESPACE, "--store", f"shards://{bed.head.address}:7410"]
        command += ["--state", str(bed.place / "state"), "--workers", "2", "--engine", json.dumps(VLLM)]
        environment = {**bed.environment(), "RAY_ADDRESS": f"{bed.head.address}:6379"}
        result.write_text("")
        return bed.head.start([*command, *more], environment, result)

    def finish(job: subprocess.Popen[bytes]) -> dict[str, Any]:
        bed.wait(lambda: job.poll() is not None, HEAL_S, "the job ends")
        said = result.read_text()
        if job.returncode:
            raise RuntimeError(f"the job ended with {job.returncode}: {said[-400:]}")
        report: dict[str, Any] = json.loads(said[said.index("{") : said.rindex("}") + 1])
        return report

    with stage.asking(may_fail=True):
        began_s = time.monotonic()
        job = start()
        bed.wait(lambda: bool(_workers(bed)) or job.poll() is not None, HEAL_S, "a worker runs")
        if job.poll() is not None:
            finish(job)
            raise RuntimeError("the job ended before its worker could be killed")
        name = _workers(bed)[0]
        bed.kill(name)
        done = finish(job)
        stage.outcome.seconds = time.monotonic() - began_s
        bed.boot(name)
        bed.wait_ready(HEAL_S)
    found = finish(start("--dry-run"))
    kept = {key: done[key] for key in ("chunks", "chunks_filled", "chunks_failed", "worker_deaths")}
    stage.outcome.notes |= {"host": name, **kept, "missing": found["chunks_missing"]}
    if found["chunks_missing"] or done["chunks"] != DOCUMENTS or not done["worker_deaths"]:
        raise RuntimeError(f"of {DOCUMENTS} documents: {stage.outcome.notes}")


def _workers(bed: Bed) -> list[str]:
    """Return the hosts of the job's workers."""
    titles = {name: list(host.titles()) for name, host in bed.hosts.items() if host.is_up}
    return [name for name in titles if any(one.startswith("ray::Worker") for one in titles[name])]


SCENARIOS: Mapping[str, Scenario] = {
    "kill_shard": _kill(SHARD),
    "kill_engine": _kill(ENGINE),
    "kill_gateway": _kill(SHARD, GATEWAY),
    "kill_head": kill_head,
    "cut_shard": _cut_off(SHARD),
    "cut_engine": _cut_off(ENGINE),
    "cut_gateway": _cut_off(SHARD, GATEWAY),
    "cut_head": cut_head,
    "blink": blink,
    "partition": partition,
    "slow_link": slow_link,
    "scale_out_shards": scale_out_shards,
    "scale_in_shards": scale_in_shards,
    "scale_in_fronts": scale_in_fronts,
    "scale_out_fronts": scale_out_fronts,
    "corpus": corpus,
}
FAILURES = (RuntimeError, OSError, StopIteration, ValueError, KeyError, KintsugiError, httpx.HTTPError)
NEEDS_REDIS = ("kill_head", "cut_head")


def play(bed: Bed, name: str) -> Outcome:
    """Run one scenario, make the bed whole, and look for lost chunks and wrong answers."""
    say(f"scenario {name}")
    outcome = Outcome(name, commit=commit())
    began_s = time.monotonic()
    try:
        SCENARIOS[name](Stage(bed, outcome))
        outcome.seconds = outcome.seconds or time.monotonic() - began_s
    except FAILURES as failure:
        outcome.problem = _describe(failure)
    try:
        began_s = time.monotonic()
        bed.wait_ready(HEAL_S)
        outcome.notes |= {"heal_s": round(time.monotonic() - began_s, 1), "chunks": len(bed.book.texts)}
        if refused := [reason[:160] for reason in bed.book.refused]:
            outcome.notes["refused"] = refused
            bed.book.refused.clear()
        outcome.lost = len(bed.find_lost())
        outcome.wrong += bed.count_wrong()
    except FAILURES as failure:
        outcome.is_broken = True
        outcome.problem = "; then ".join(filter(None, (outcome.problem, _describe(failure))))
    if not outcome.problem and (outcome.lost or outcome.wrong):
        outcome.problem = f"{outcome.lost} acknowledged chunks lost, {outcome.wrong} wrong answers"
    say(f"{name}: {outcome.problem or 'passed'} {outcome.to_mapping()}")
    return outcome


def _describe(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"[:500]
