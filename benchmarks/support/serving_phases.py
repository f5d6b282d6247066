"""Measures the two servers: idle answers, stuffed prompts, kills under load.

Only one server is under load at a time; the other is idle beside it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import psutil

from benchmarks.support.engines import say
from benchmarks.support.figures import Figure, spread
from benchmarks.support.load.profile import RagWorkload, Request, poisson_arrivals, prompt_of, requests
from benchmarks.support.load.report import Sample
from benchmarks.support.load.run import client_of, measure_request, run
from benchmarks.support.servers import NAMESPACE, REPOSITORY, Server, tree_cpu_s
from kintsugi.models.passages import read_bundled_passages
from kintsugi.precompute.chunking import Chunker
from kintsugi.sdk.client import Client, ClientOptions

PUT_BATCH = 8
PUT_S = 600.0
STUFFED_CHUNK_TOKENS = 384
KILL_AFTER_S = 8.0
BUSY_SHARE = 0.5
"""Share of a core, over `BUSY_PERIOD_S`: an engine that uses this much is computing an answer."""
BUSY_PERIOD_S = 0.2
BUSY_WAIT_S = 60.0
KILLED = (("storeshard", "StoreShard"), ("engine", "Engine"), ("engine_again", "Engine"))
"""The engine twice: a kernel may have dropped from its page cache what an engine read when it started long
ago. The second start finds it there."""
METRIC_S = 5.0


@dataclass(frozen=True)
class Budget:
    """How much is measured."""

    idle: int
    recovery_load_s: float
    recovery_of_capacity: float
    recovery_requests_min: int
    recovery_slo_s: float
    """Longest time to the first token that counts as in time."""


FULL = Budget(9, 110.0, 0.25, 12, 10.0)
QUICK = Budget(3, 45.0, 0.1, 6, 4.0)


@dataclass
class Idle:
    """Answers of servers with nothing else to do."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def ttft_s(self, server: str) -> list[float]:
        return [sample.ttft_s for sample in self.samples[server] if sample.ttft_s is not None]

    def answer_s(self, server: str) -> float:
        """Median of whole answers."""
        return statistics.median(sample.done_s for sample in self.samples[server])


def store_chunks(server: Server, texts: Sequence[str]) -> None:
    """Put every document as a chunk, as an application does."""
    with Client(server.grpc, NAMESPACE, options=ClientOptions(timeout_s=PUT_S)) as client:
        for start in range(0, len(texts), PUT_BATCH):
            puts = client.put_chunks(texts[start : start + PUT_BATCH])
            failed = [put for put in puts if put.state == "failed"]
            assert not failed, failed
            if start % (8 * PUT_BATCH) == 0:
                say(f"stored {start + len(puts)} of {len(texts)} chunks")


def ask_alone(server: Server, prompt: str, answer_tokens: int) -> Sample:
    """Send one prompt to a server with nothing else to do."""

    async def ask() -> Sample:
        async with client_of(server.endpoint) as client:
            now_s = time.perf_counter()
            return await measure_request(client, server.endpoint, 0.0, now_s, prompt, answer_tokens)

    sample = asyncio.run(ask())
    assert sample.is_ok, sample
    return sample


def measure_idle(servers: Sequence[Server], texts: Sequence[str], workload: RagWorkload, count: int) -> Idle:
    """One request at a time, servers in turns, each prompt to both. The first of each is not counted: it
    prepares kernels."""
    coming = requests(workload, [0.0] * (count + 1))
    idle = Idle({server.name: [] for server in servers})
    for number, request in enumerate(coming):
        for server in servers:
            sample = ask_alone(server, prompt_of(request, texts), workload.answer_tokens)
            if number:
                idle.samples[server.name].append(sample)
        last = {name: [round(s.ttft_s or 0, 2) for s in rows[-1:]] for name, rows in idle.samples.items()}
        say(f"idle {number}/{count}: {last}")
    return idle


def idle_figures(idle: Idle, bar: float | None) -> list[Figure]:
    plain, ours = idle.ttft_s("plain"), idle.ttft_s("kintsugi")
    ratio = statistics.median(plain) / statistics.median(ours)
    accountings = [sample.accounting or {} for sample in idle.samples["kintsugi"]]
    outcomes = sorted({str(one.get("outcome")) for one in accountings})
    transports = sorted({str(one.get("transport")) for one in accountings})
    detail = f"{spread(plain)} ÷ {spread(ours)}; {', '.join(outcomes)} over {', '.join(transports)}"
    answers = idle.answer_s("plain") / idle.answer_s("kintsugi")
    first = Figure.at_least("ttft_ratio_ram", ratio, bar, detail=detail)
    return [first, Figure("answer_ratio_ram", answers, "×", detail="whole answers, as above")]


def measure_stuffing(server: Server, model: Any, bar: float | None) -> list[Figure]:
    """Unmodified LangChain and LlamaIndex, as the examples use them, on the bundled passages."""
    documents = [passage.text for passage in read_bundled_passages()]
    question = "Which of these depended on the sea?"
    chunker = Chunker.of_model(model)
    shares = {}
    for name in ("langchain", "llama_index"):
        example, namespace = _example(f"{name}_rag"), f"stuffing-{name.replace('_', '-')}"
        arguments = (server.endpoint.url, server.grpc, namespace, model, documents, STUFFED_CHUNK_TOKENS, 8)
        before = server.metric('kintsugi_gateway_chunk_tokens_total{result="hit"}')
        if name == "langchain":
            result = example.build_chain(*arguments).invoke({"input": question})
            texts = [document.page_content for document in result["context"]]
        else:
            response = example.build_query_engine(*arguments).query(question)
            texts = [source.node.get_content() for source in response.source_nodes]
        sent = sum(len(chunker.token_ids(text)) for text in texts)
        shares[name] = _hits_since(server, before) / sent
        say(f"{name}: {shares[name]:.3f} of {sent} chunk tokens hit")
    detail = ", ".join(f"{name} {share:.3f}" for name, share in shares.items())
    least = min(shares.values())
    return [Figure.at_least("stuffing_hit_rate", least, bar, unit="", detail=detail)]


def _hits_since(server: Server, before: float) -> float:
    """The gateway counts once the answer is out: a moment after its reader has it."""
    deadline_s = time.monotonic() + METRIC_S
    while True:
        hits = server.metric('kintsugi_gateway_chunk_tokens_total{result="hit"}') - before
        if hits or time.monotonic() > deadline_s:
            return hits
        time.sleep(0.1)


def _example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", REPOSITORY / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def measure_recovery(
    server: Server, texts: Sequence[str], workload: RagWorkload, idle: Idle, budget: Budget, bar: float | None
) -> list[Figure]:
    """Kill the shard's process, and then the engine's, each during a separate load."""
    figures = [
        _recovery_from(server, texts, workload, idle, budget, f"recovery_{name}_s", deployment, number)
        for number, (name, deployment) in enumerate(KILLED)
    ]
    worst = max(figure.value or 0.0 for figure in figures)
    return [Figure.at_most("recovery_s", worst, bar, unit="s", detail="the longest of them"), *figures]


def measure_recovery_of_one_in_two(
    server: Server, texts: Sequence[str], workload: RagWorkload, idle: Idle, budget: Budget, bar: float | None
) -> list[Figure]:
    """Kill one of two engines; the other must take over its requests."""
    found = _recovery_from(server, texts, workload, idle, budget, "one_in_two", "Engine", len(KILLED))
    return [Figure.at_most("recovery_two_engines_s", found.value or 0.0, bar, unit="s", detail=found.detail)]


def _recovery_from(
    server: Server,
    texts: Sequence[str],
    workload: RagWorkload,
    idle: Idle,
    budget: Budget,
    name: str,
    deployment: str,
    number: int,
) -> Figure:
    """``number``: of the load, so that no two ask the same."""
    rate = budget.recovery_of_capacity / idle.answer_s("kintsugi")
    count = max(budget.recovery_requests_min, round(rate * budget.recovery_load_s))
    arrivals = poisson_arrivals(rate, count, seed=100 + number)
    coming = requests(replace(workload, seed=workload.seed + 100 + number), arrivals)
    killed_s, samples = asyncio.run(_killed_amidst(server, coming, texts, workload.answer_tokens, deployment))
    back_s = recovered_after(samples, killed_s, budget.recovery_slo_s)
    errors = [sample for sample in samples if not sample.is_ok]
    short = sum(1 for one in samples if one.is_ok and one.completion_tokens != workload.answer_tokens)
    kinds = ", ".join(sorted({one.error for one in errors})) or "none"
    under_way = sum(1 for one in samples if one.at_s < killed_s < one.at_s + one.done_s)
    detail = (
        f"first tokens within {budget.recovery_slo_s:g} s; killed with {under_way} requests under way; "
        f"{len(errors)} errors of {len(samples)} ({kinds}); {short} answers of another length"
    )
    say(f"{name}: back after {back_s:.1f} s; {detail}; (sent, first token) {_times(samples)}")
    return Figure(name, back_s, "s", detail=detail)


def _times(samples: Sequence[Sample]) -> str:
    return ", ".join(f"({one.at_s:.0f}, {one.ttft_s or float('inf'):.1f})" for one in samples)


async def _killed_amidst(
    server: Server, coming: Sequence[Request], texts: Sequence[str], answer_tokens: int, deployment: str
) -> tuple[float, list[Sample]]:
    """The samples of a load in the midst of which a process was killed, and when: an engine only while it
    computes."""
    began_s = time.perf_counter()

    async def kill() -> float:
        await asyncio.sleep(KILL_AFTER_S)
        find = partial(_wait_busy, server) if deployment == "Engine" else server.replica
        victim = await asyncio.to_thread(find, deployment)
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            raise AssertionError(f"{deployment} ended before it was killed") from None
        say(f"killed {deployment}, process {victim.pid}")
        return time.perf_counter() - began_s

    prompts = [prompt_of(request, texts) for request in coming]
    killing = asyncio.create_task(kill())
    samples = await run(server.endpoint, coming, prompts, answer_tokens)
    return await killing, samples


def _wait_busy(server: Server, deployment: str) -> psutil.Process:
    """The first replica that is seen computing."""
    replicas = server.replicas(deployment)
    until_s = time.monotonic() + BUSY_WAIT_S
    while time.monotonic() < until_s:
        before_s = [tree_cpu_s(one) for one in replicas]
        time.sleep(BUSY_PERIOD_S)
        for one, used_s in zip(replicas, before_s, strict=True):
            if tree_cpu_s(one) - used_s >= BUSY_SHARE * BUSY_PERIOD_S:
                return one
    raise AssertionError(f"no {deployment} computed anything within {BUSY_WAIT_S:g} s")


def recovered_after(samples: Sequence[Sample], killed_s: float, slo_s: float) -> float:
    """Seconds from the kill to the end of the last answer that failed, or whose first token was late.

    0 where there is none. Requests that were under way count: their answers are what a caller misses.
    """
    bad = [
        one.at_s + one.done_s
        for one in samples
        if one.at_s + one.done_s >= killed_s
        and not (one.ttft_s is not None and one.is_ok and one.ttft_s <= slo_s)
    ]
    return max(0.0, max(bad, default=killed_s) - killed_s)
