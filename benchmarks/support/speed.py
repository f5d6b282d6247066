"""Measures TTFT on a 16-layer Llama: full prefill, blends, full reuse, and the next turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.support.engines import cold, engine, say, store_chunks, use_check_layer
from benchmarks.support.figures import Figure, spread
from benchmarks.support.prompts import ChunkPrompt, tokens
from kintsugi.core.request import SelectorName
from kintsugi.engine.local import LocalEngine, Prompt

SHAPE = "llama-210m"
RATIO = 0.15

METHODS: tuple[tuple[str, float | None, int, SelectorName], ...] = (
    ("full", None, 1, SelectorName.HKVD),
    ("r15", RATIO, 1, SelectorName.HKVD),
    ("r15_narrow", RATIO, 1, SelectorName.CHUNK_HEAD),
    ("r15_query", RATIO, 1, SelectorName.QUERY),
    ("r15_check2", RATIO, 2, SelectorName.HKVD),
    ("r0", 0.0, 1, SelectorName.HKVD),
)
"""Name, ratio, check layer and selector. Neither `chunk_head`, which needs no signal, nor `query`, which runs
the question alone through the first 0.8 of the layers, computes a layer at full width."""


def measure(quick: bool) -> list[Figure]:
    repetitions, chunk = (3, 160) if quick else (5, 660)
    prompt = ChunkPrompt.make([chunk] * 6, question=40, seed=1)
    with engine(SHAPE) as running:
        store_chunks(running, prompt)
        samples = _sample(running, prompt, repetitions)
        turns = _turns(running, prompt, repetitions)
    full = statistics.median(samples["full"])
    figures = [
        _speedup(samples, "ttft_speedup_r15", "r15", None if quick else 4.6),
        _speedup(samples, "ttft_speedup_narrow_r15", "r15_narrow", None if quick else 6.2),
        _speedup(samples, "ttft_speedup_query_r15", "r15_query", None),
    ]
    figures += _against_bound(samples, full, quick)
    figures.append(_speedup(samples, "ttft_speedup_r15_check2", "r15_check2", None))
    figures.append(_speedup(samples, "ttft_speedup_r0", "r0", None if quick else 14))
    ratio = statistics.median(turns["blended"]) / statistics.median(turns["plain"])
    detail = f"{spread(turns['blended'])} ÷ {spread(turns['plain'])}"
    figures.append(Figure.at_most("turn2_ttft_ratio", ratio, 1.02, detail=detail))
    return figures


def _sample(running: LocalEngine, prompt: ChunkPrompt, repetitions: int) -> dict[str, list[float]]:
    """Seconds by method; `cost_METHOD` holds costs, `forward` the seconds of the engine's own last step."""
    others = ("cost_r15", "cost_r15_narrow", "cost_r15_query", "forward", "first_load")
    samples: dict[str, list[float]] = {name: [] for name in (*(method[0] for method in METHODS), *others)}
    # Unmeasured: the first call of each shape prepares kernels.
    for _, ratio, _, selector in METHODS[:4]:
        params = None if ratio is None else replace(prompt.params(ratio), selector=selector)
        cold(running, Prompt(prompt.token_ids, params, max_tokens=2, ignore_eos=True))
    for repetition in range(repetitions):
        for name, ratio, check_layer, selector in METHODS:
            use_check_layer(running, check_layer)
            explain = name == "r15"
            params = None if ratio is None else replace(prompt.params(ratio, explain), selector=selector)
            generation = cold(running, Prompt(prompt.token_ids, params, max_tokens=2, ignore_eos=True))
            samples[name].append(generation.ttft_s)
            samples["forward"] += generation.itl_s
            if f"cost_{name}" in samples:
                accounting = generation.accounting or {}
                assert accounting["outcome"] == "blended", accounting
                samples[f"cost_{name}"].append(accounting["cost"])
            if name == "r15":
                samples["first_load"].append(accounting["timeline"][0]["load_end_ms"] / 1e3)
        last = {name: round(samples[name][-1], 2) for name in ("full", "r15", "r15_narrow", "r0")}
        say(f"speed {repetition + 1}/{repetitions}: {last}")
    return samples


def _speedup(samples: dict[str, list[float]], name: str, method: str, bar: float | None) -> Figure:
    value = statistics.median(samples["full"]) / statistics.median(samples[method])
    detail = f"{spread(samples['full'])} ÷ {spread(samples[method])}"
    if cost := samples.get(f"cost_{method}"):
        detail += f"; cost {cost[0]:.3f} of a prefill"
    return Figure.at_least(name, value, bar, detail=detail)


def _against_bound(samples: dict[str, list[float]], full: float, quick: bool) -> list[Figure]:
    """The best possible TTFT of the configuration: first load + cost share of a full prefill + the engine's
    last step."""
    cost, forward = samples["cost_r15"][0], statistics.median(samples["forward"])
    bound_s = statistics.median(samples["first_load"]) + cost * full + forward
    share = bound_s / statistics.median(samples["r15"])
    detail = f"bound {full / bound_s:.2f}×: cost {cost:.3f} of a prefill, last step {forward * 1e3:.0f} ms"
    if quick:
        return [Figure("ttft_share_of_bound", share, "", detail=detail)]
    return [Figure.at_least("ttft_share_of_bound", share, 0.88, unit="", detail=detail)]


def _turns(running: LocalEngine, prompt: ChunkPrompt, repetitions: int) -> dict[str, list[float]]:
    """TTFT of a second turn whose first was blended, and of one whose first was an ordinary prefill."""
    import random

    samples: dict[str, list[float]] = {"blended": [], "plain": []}
    follow_up = tokens(30, random.Random(2))
    use_check_layer(running, 1)
    for _ in range(repetitions):
        for name, params in (("plain", None), ("blended", prompt.params(RATIO))):
            first = cold(running, Prompt(prompt.token_ids, params, max_tokens=16, ignore_eos=True))
            second: Sequence[int] = [*prompt.token_ids, *first.token_ids, *follow_up]
            (answer,) = running.generate([Prompt(second, params, max_tokens=1, ignore_eos=True)])
            samples[name].append(answer.ttft_s)
    return samples
