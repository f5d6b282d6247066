"""Compares a service with discovery with plain vLLM, on prompts of six recurring passages in random order.

The client is unmodified: it sends whole prompts to `kintsugi serve`, whose namespace allows discovery. Both
servers get the same requests at the same Poisson times, one server after the other, at half of what the
slower of them answers one after the other. Time to first token counts from the arrival, saving included.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.load.profile import (
    RagWorkload,
    Request,
    corpus,
    poisson_arrivals,
    prompt_of,
    requests,
)
from benchmarks.support.load.report import Sample
from benchmarks.support.load.run import run
from benchmarks.support.servers import Server, Setting, checkpoint, our_server, plain_server
from benchmarks.support.serving_phases import ask_alone
from kintsugi.precompute.chunking import Chunker

DISCOVER = {"*": {"discover": True}}
LOAD_OF_CAPACITY = 0.5
IDLE = 2
SIGHTS = 2
HIT_BAR, TTFT_BAR = 0.9, 1.6

FULL = Setting("llama-210m", max_model_len=4096, kv_cache_bytes=1 << 30, privacy=DISCOVER)
QUICK = Setting(
    "tiny-llama",
    max_model_len=4096,
    kv_cache_bytes=64 << 20,
    loading_controller=False,
    ram_gib=0.5,
    ssd_gib=0.5,
    privacy=DISCOVER,
)
FULL_WORKLOAD = RagWorkload(documents=200, zipf=0.9, chunks=6, chunk_tokens=300, answer_tokens=8)
QUICK_WORKLOAD = RagWorkload(documents=12, zipf=0.9, chunks=4, chunk_tokens=200, answer_tokens=2)
REQUESTS, QUICK_REQUESTS = 200, 16


def measure(quick: bool) -> list[Figure]:
    setting, workload = (QUICK, QUICK_WORKLOAD) if quick else (FULL, FULL_WORKLOAD)
    count = QUICK_REQUESTS if quick else REQUESTS
    with checkpoint(setting.shape) as model:
        chunker = Chunker.of_model(model)
        texts = corpus(workload, lambda text: len(chunker.token_ids(text)))
        sizes = [len(chunker.token_ids(text)) for text in texts]
        with plain_server(model, setting) as plain, our_server(model, setting) as ours:
            samples = measure_load((plain, ours), texts, workload, count)
    coming = requests(workload, [0.0] * count)
    bars = (None, None) if quick else (HIT_BAR, TTFT_BAR)
    return [
        hit_figure(coming, samples["kintsugi"], sizes, bars[0]),
        ttft_figure("discovered_ttft_ratio", samples, bars[1]),
    ]


def measure_load(
    servers: Sequence[Server], texts: Sequence[str], workload: RagWorkload, count: int
) -> dict[str, list[Sample]]:
    """Each server's samples of the same load."""
    warm_up = requests(replace(workload, seed=workload.seed + 1), [0.0] * IDLE)
    # Not a text of the load, because it would count as one sighting.
    words = [" ".join(reversed(text.split())) for text in texts]
    answers_s = {
        server.name: [
            ask_alone(server, prompt_of(request, words), workload.answer_tokens).done_s for request in warm_up
        ]
        for server in servers
    }
    slowest_s = max(min(times_s) for times_s in answers_s.values())
    arrivals_s = poisson_arrivals(LOAD_OF_CAPACITY / slowest_s, count, seed=workload.seed)
    coming = requests(workload, arrivals_s)
    prompts = [prompt_of(request, texts) for request in coming]
    samples = {}
    for server in servers:
        say(f"{server.name}: {count} requests in {arrivals_s[-1]:.0f} s")
        samples[server.name] = asyncio.run(run(server.endpoint, coming, prompts, workload.answer_tokens))
        failed = Counter(str(sample.error) for sample in samples[server.name] if not sample.is_ok)
        if failed:
            say(f"{server.name}: {failed.total()} of {count} failed: {dict(failed)}")
    return samples


def hit_figure(
    coming: Sequence[Request], samples: Sequence[Sample], sizes: Sequence[int], bar: float | None
) -> Figure:
    """Tokens hit ÷ tokens of passages that were seen `SIGHTS` times before, in the order of arrival. What the
    prefix cache holds of such passages at a prompt's beginning is not loaded, and hit all the same."""
    seen: Counter[int] = Counter()
    hit = expected = 0
    for request, sample in zip(coming, samples, strict=True):
        due = sum(sizes[document] for document in request.documents if seen[document] >= SIGHTS)
        leading = takewhile(lambda document: seen[document] >= SIGHTS, request.documents)
        found = sample.accounting or {}
        cached = min(
            int(found.get("tokens_prefix_cached") or 0), sum(sizes[document] for document in leading)
        )
        hit += min(due, int(found.get("tokens_discovered") or 0) + cached)
        expected += due
        seen.update(request.documents)
    outcomes = Counter(str((sample.accounting or {}).get("outcome")) for sample in samples)
    detail = f"{hit:,} of {expected:,} tokens from a passage's third sight on; {dict(outcomes)}"
    return Figure.at_least("discovered_hit_rate", hit / max(1, expected), bar, "", detail)


def ttft_figure(name: str, samples: dict[str, list[Sample]], bar: float | None) -> Figure:
    """Plain vLLM's mean time to first token ÷ ours, of requests that both answered. Does not hold if one
    failed."""
    pairs = [
        (plain.ttft_s or 0.0, ours.ttft_s or 0.0)
        for plain, ours in zip(samples["plain"], samples["kintsugi"], strict=True)
        if plain.is_ok and ours.is_ok
    ]
    failed = len(samples["plain"]) - len(pairs)
    if not pairs:
        return Figure(name, None, "×", detail=f"all {failed} failed")
    plain_s, ours_s = (statistics.mean(times) for times in zip(*pairs, strict=True))
    detail = f"means of {len(pairs)}: {plain_s:.2f} s ÷ {ours_s:.2f} s"
    figure = Figure.at_least(name, plain_s / ours_s, bar, detail=detail)
    return replace(figure, detail=f"{detail}; {failed} failed", holds=False) if failed else figure
