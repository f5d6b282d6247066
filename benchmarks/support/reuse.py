"""Measures whether reuse lasts: compares the last with the first of many shuffled queries over few documents.

Each query takes some of the documents in an order of its own, so that a prefix cache alone finds little. Both
servers get every query, in turns, and a query that begins with each document before anything is counted.
Reuse could decline because chunks are evicted or quarantined, the controller learns wrong costs, or memory
grows.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.support.engines import say
from benchmarks.support.figures import Figure, spread
from benchmarks.support.load.profile import RagWorkload, Request, prompt_of
from benchmarks.support.servers import Server
from benchmarks.support.serving_phases import ask_alone


@dataclass(frozen=True)
class ReusePlan:
    """What is measured."""

    workload: RagWorkload
    queries: int
    window: int
    """Queries at either end that are compared."""
    shape: str
    """The model: small, because both servers answer every query."""
    kv_cache_bytes: int
    """Size of vLLM's KV cache: room for ten prompts, as in the other sections."""
    small_ram_gib: float
    """Memory of a store that holds about half of the documents, and no disk."""


FULL = ReusePlan(
    RagWorkload(documents=14, chunks=6, chunk_tokens=256, answer_tokens=1),
    500,
    50,
    "llama-18m",
    64 << 20,
    0.007,
)
QUICK = ReusePlan(
    RagWorkload(documents=14, chunks=4, chunk_tokens=128, answer_tokens=1),
    24,
    8,
    "tiny-llama",
    64 << 20,
    0.001,
)


def queries(plan: ReusePlan) -> list[Request]:
    """One that begins with each document, then `plan.queries` that are counted."""
    workload = plan.workload
    generator = random.Random(f"{workload.seed} reuse")
    drawn = []
    for document in range(workload.documents):
        others = [other for other in range(workload.documents) if other != document]
        drawn.append((document, *generator.sample(others, workload.chunks - 1)))
    for _ in range(plan.queries):
        drawn.append(tuple(generator.sample(range(workload.documents), workload.chunks)))
    return [Request(0.0, one, f"Question {number}: what is new?") for number, one in enumerate(drawn)]


def measure(
    servers: Sequence[Server], texts: Sequence[str], plan: ReusePlan, name: str, bar: float | None
) -> list[Figure]:
    """`NAME`: the speed-up of the last queries ÷ that of the first ones."""
    ttft_s: dict[str, list[float]] = {server.name: [] for server in servers}
    outcomes: dict[str, int] = {}
    for number, query in enumerate(queries(plan)):
        for server in servers:
            sample = ask_alone(server, prompt_of(query, texts), plan.workload.answer_tokens)
            if number >= plan.workload.documents and sample.ttft_s is not None:
                ttft_s[server.name].append(sample.ttft_s)
                if sample.accounting is not None:
                    outcome = str(sample.accounting.get("outcome"))
                    outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if number % plan.window == 0:
            say(f"{name}: {number}/{plan.queries}, {outcomes}")
    return figures_of(ttft_s["plain"], ttft_s["kintsugi"], plan.window, name, bar, str(outcomes))


def figures_of(
    plain: Sequence[float],
    ours: Sequence[float],
    window: int,
    name: str,
    bar: float | None,
    outcomes: str,
) -> list[Figure]:
    """The ratio of the speed-ups, and either of them."""
    ends = {"first": slice(None, window), "last": slice(-window, None)}
    speedups = {end: statistics.median(plain[at]) / statistics.median(ours[at]) for end, at in ends.items()}
    detail = (
        f"{speedups['last']:.2f} ÷ {speedups['first']:.2f}, {window} of {len(ours)} queries each; {outcomes}"
    )
    figures = [Figure.at_least(name, speedups["last"] / speedups["first"], bar, unit="", detail=detail)]
    for end, at in ends.items():
        detail = f"{spread(plain[at])} ÷ {spread(ours[at])}"
        figures.append(Figure(f"{name}_{end}_speedup", speedups[end], "×", detail=detail))
    return figures
