"""Measures how long a running decode waits while a long prompt is blended, or prefilled in full."""

from __future__ import annotations

import statistics
import time

from benchmarks.support.engines import engine, say, store_chunks
from benchmarks.support.figures import Figure, spread
from benchmarks.support.prompts import ChunkPrompt
from kintsugi.engine.local import LocalEngine, Prompt

BATCHED_TOKENS = 512
WARM_STEPS = 5


def measure(quick: bool) -> list[Figure]:
    repetitions, chunk = (2, 160) if quick else (5, 660)
    prompt = ChunkPrompt.make([chunk] * 6, question=40, seed=3)
    samples: dict[str, list[tuple[float, float]]] = {"plain": [], "blended": []}
    with engine("llama-210m", max_num_batched_tokens=BATCHED_TOKENS) as running:
        store_chunks(running, prompt)
        for repetition in range(repetitions):
            for name, params in (("plain", None), ("blended", prompt.params(0.15))):
                request = Prompt(prompt.token_ids, params, max_tokens=1, ignore_eos=True)
                samples[name].append(_beside_a_decode(running, request))
            say(f"stalls {repetition + 1}/{repetitions}: {samples['plain'][-1]} {samples['blended'][-1]}")
    longest = {name: [itl for itl, _ in rows] for name, rows in samples.items()}
    ttft = {name: [first for _, first in rows] for name, rows in samples.items()}
    stall = statistics.median(longest["blended"]) / statistics.median(longest["plain"])
    speedup = statistics.median(ttft["plain"]) / statistics.median(ttft["blended"])
    detail = f"{spread(longest['blended'])} ÷ {spread(longest['plain'])}"
    beside = f"{spread(ttft['plain'])} ÷ {spread(ttft['blended'])}"
    if quick:
        return [
            Figure("itl_stall_ratio", stall, "×", detail=detail),
            Figure("ttft_speedup_beside_decode", speedup, "×", detail=beside),
        ]
    return [
        Figure.at_most("itl_stall_ratio", stall, 0.6, detail=detail),
        Figure.at_least("ttft_speedup_beside_decode", speedup, 2.8, detail=beside),
    ]


def _beside_a_decode(running: LocalEngine, request: Prompt) -> tuple[float, float]:
    """(longest inter-token latency of a decode while `request` is prefilled, TTFT of `request`), seconds."""
    running.reset_prefix_cache()
    llm = running.llm.llm_engine
    running._submit("decode", Prompt([0, 5, 6, 7], None, max_tokens=4000, ignore_eos=True))
    for _ in range(WARM_STEPS):
        llm.step()
    running._submit("long", request)
    started = last = time.perf_counter()
    longest, first = 0.0, None
    while first is None:
        for output in llm.step():
            now = time.perf_counter()
            if output.request_id == "decode":
                longest, last = max(longest, now - last), now
            elif output.outputs[0].token_ids:
                first = now - started
    llm.abort_request(["decode"])
    while llm.has_unfinished_requests():
        llm.step()
    return longest, first
