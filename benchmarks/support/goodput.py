"""Measures the goodput of the two servers: answers per second whose first token came in time.

Conditions for a rate to count:

- **In time is stated in seconds**, the same for both servers, and not derived from either.
- **A rate has at least `GoodputPlan.requests` requests**, at Poisson arrivals, and each server is measured at
  several shares of its own capacity: of what it answers per second when requests come at once.
- **It is steady at the end**: the median first token of the last third of the requests is in time, and when
  the last request comes, few are unanswered. Otherwise a queue is growing, and the server cannot keep up.
- **Each server has its best setting**: the value in `GoodputPlan.settings` with which its capacity is
  greatest. Ours has `GoodputPlan.selector` as well: `query` is what the real model is measured with
  (`quality.py`, `discovery.py`), and it computes no layer at full width.

CPU seconds of a server's whole tree of processes are counted over the same load, and those of the other
server, which is idle on the same core meanwhile.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.load.profile import RagWorkload, poisson_arrivals, prompt_of, requests
from benchmarks.support.load.report import Sample, Summary, summarize_samples
from benchmarks.support.load.run import run
from benchmarks.support.servers import Server
from benchmarks.support.serving_phases import ask_alone
from kintsugi.core.request import SelectorName


@dataclass(frozen=True)
class GoodputPlan:
    """What is measured."""

    workload: RagWorkload
    slo_s: float
    """Longest time to the first token that counts as in time."""
    burst: int
    """Requests that come at once; they give a server's capacity."""
    loads_of_capacity: tuple[float, ...]
    """Rates, as shares of it."""
    requests: int
    """Requests at each rate."""
    settings: tuple[int, ...]
    """Values of vLLM's `max_num_batched_tokens` to choose from."""
    selector: SelectorName = SelectorName.QUERY
    """The selector of our server."""


FULL = GoodputPlan(
    RagWorkload(documents=50, zipf=0.9, chunks=6, chunk_tokens=256, answer_tokens=16),
    slo_s=15.0,
    burst=8,
    loads_of_capacity=(0.7, 0.8, 0.9),
    requests=60,
    settings=(2048, 8192),
)
QUICK = GoodputPlan(
    RagWorkload(documents=16, zipf=0.9, chunks=4, chunk_tokens=128, answer_tokens=8),
    slo_s=4.0,
    burst=2,
    loads_of_capacity=(0.5, 0.7),
    requests=12,
    settings=(2048,),
)
UNANSWERED_MAX = 0.1
"""Share of the requests that may be unanswered when the last one comes."""


@dataclass(frozen=True)
class Load:
    """One rate of one server with one setting."""

    server: str
    batched_tokens: int
    summary: Summary
    cpu_s: float
    beside_cpu_s: float
    """CPU seconds of the other server meanwhile."""
    is_steady: bool

    @property
    def goodput_per_s(self) -> float:
        return self.summary.goodput_per_s or 0.0

    @property
    def cpu_per_answer_s(self) -> float:
        return self.cpu_s / max(1, self.summary.requests - self.summary.errors)

    def __str__(self) -> str:
        summary = self.summary
        return (
            f"at {summary.rate_per_s:.2f}/s, {summary.requests} requests, {summary.errors} errors, "
            f"{self.batched_tokens} batched tokens, {'steady' if self.is_steady else 'not steady'}, "
            f"{self.beside_cpu_s:.1f} CPU s of the other server"
        )


def measure_capacities(
    servers: Sequence[Server], texts: Sequence[str], plan: GoodputPlan
) -> dict[str, float]:
    """Answers per second of each server, by name, when `plan.burst` requests come at once."""
    workload = replace(plan.workload, seed=plan.workload.seed + len(plan.loads_of_capacity) + 1)
    coming = requests(workload, [0.0] * (plan.burst + 1))
    prompts = [prompt_of(request, texts) for request in coming]
    capacities = {}
    for server in servers:
        ask_alone(server, prompts[0], workload.answer_tokens)  # prepares kernels
        samples = asyncio.run(run(server.endpoint, coming[1:], prompts[1:], workload.answer_tokens))
        capacities[server.name] = summarize_samples(samples).requests_per_s
    return capacities


def measure(
    servers: Sequence[Server],
    names: Collection[str],
    texts: Sequence[str],
    plan: GoodputPlan,
    batched_tokens: int,
    capacities: Mapping[str, float],
) -> list[Load]:
    """Measure every rate of the servers in `names`, in turns."""
    loads = []
    for step, share in enumerate(plan.loads_of_capacity):
        for server in servers:
            if server.name not in names:
                continue
            arrivals = poisson_arrivals(share * capacities[server.name], plan.requests, seed=step)
            coming = requests(replace(plan.workload, seed=plan.workload.seed + step + 1), arrivals)
            prompts = [prompt_of(request, texts) for request in coming]
            before_s = {one.name: one.cpu_s() for one in servers}
            samples = asyncio.run(run(server.endpoint, coming, prompts, plan.workload.answer_tokens))
            used_s = {one.name: one.cpu_s() - before_s[one.name] for one in servers}
            cpu_s = used_s.pop(server.name)
            summary = summarize_samples(samples, plan.slo_s)
            steady = is_steady(samples, plan.slo_s)
            load = Load(server.name, batched_tokens, summary, cpu_s, sum(used_s.values()), steady)
            loads.append(load)
            first = summary.ttft_s.get("p50", 0)
            say(f"{server.name}: goodput {load.goodput_per_s:.3f}/s, TTFT p50 {first:.2f} s, {load}")
    return loads


def is_steady(samples: Sequence[Sample], slo_s: float) -> bool:
    """Whether the median first token of the last third is in time, and few requests (`UNANSWERED_MAX`) are
    unanswered when the last one comes. A first token that never came is late."""
    ordered = sorted(samples, key=lambda sample: sample.at_s)
    last = ordered[-max(1, len(ordered) // 3) :]
    firsts = [one.ttft_s if one.is_ok and one.ttft_s is not None else float("inf") for one in last]
    end_s = ordered[-1].at_s
    unanswered = sum(1 for one in ordered if one.at_s < end_s < one.at_s + one.done_s)
    return statistics.median(firsts) <= slo_s and unanswered <= UNANSWERED_MAX * len(ordered)


def figures_of(loads: Sequence[Load], slo_s: float, bar: float | None, cpu_bar: float | None) -> list[Figure]:
    """Both servers' best steady rates, their ratio, and CPU seconds per answer there."""
    figures = [Figure("goodput_slo", slo_s, "s", detail="first token; the same for both servers")]
    best = {name: best_of(loads, name) for name in ("plain", "kintsugi")}
    plain, ours = best["plain"], best["kintsugi"]
    if plain is None or ours is None or not plain.goodput_per_s:
        without = ", ".join(name for name, load in best.items() if load is None) or "plain"
        detail = f"no steady rate with goodput: {without}"
        figures += [
            Figure(name, None, "×", detail=detail) for name in ("goodput_ratio", "cpu_per_answer_ratio")
        ]
    else:
        detail = (
            f"{ours.goodput_per_s:.3f}/s ÷ {plain.goodput_per_s:.3f}/s within {slo_s:g} s, best steady rates"
        )
        ratio = ours.goodput_per_s / plain.goodput_per_s
        figures.append(Figure.at_least("goodput_ratio", ratio, bar, detail=detail))
        cpu = plain.cpu_per_answer_s / ours.cpu_per_answer_s
        detail = f"{plain.cpu_per_answer_s:.2f} ÷ {ours.cpu_per_answer_s:.2f} s at those rates"
        figures.append(Figure.at_least("cpu_per_answer_ratio", cpu, cpu_bar, detail=detail))
    for number, load in enumerate(loads):
        name = f"{load.server}_load{number}"
        figures += [
            Figure(f"{name}_goodput", load.goodput_per_s, "/s", detail=str(load)),
            Figure(f"{name}_ttft_p95", load.summary.ttft_s.get("p95"), "s", detail=str(load)),
            Figure(f"{name}_itl_p99", load.summary.itl_s.get("p99"), "s", detail=str(load)),
            Figure(
                f"{name}_cpu_per_answer", load.cpu_per_answer_s, "s", detail="the whole tree of processes"
            ),
        ]
    hits = None if ours is None else ours.summary.hit_rate
    return [*figures, Figure("chunk_hit_rate", hits, "", detail="at the best rate")]


def best_of(loads: Sequence[Load], server: str) -> Load | None:
    """The server's steady load with the most goodput; None if no load was steady."""
    steady = [load for load in loads if load.server == server and load.is_steady]
    return max(steady, key=lambda load: load.goodput_per_s, default=None)
