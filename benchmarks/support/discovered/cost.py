"""Measures the cost of discovery for a prompt in which nothing recurs: TTFT with and without discovery.

Both kinds of prompts go to one engine in turns, one at a time: requests that are discovered, and requests
that the connector leaves alone. So the cost includes looking for chunks, which a gateway asks for anyway.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from benchmarks.support.engines import say
from benchmarks.support.figures import Figure, spread
from kintsugi.core.request import KintsugiParams
from kintsugi.engine.local import LocalEngine, Prompt
from tests.fakes.random_models.factory import make_checkpoint_once

PROMPT_TOKENS, QUICK_TOKENS = 2400, 1200
PAIRS, QUICK_PAIRS = 80, 12
BAR = 1.02
DISCOVERED = KintsugiParams("cost", discover=True)


def measure(quick: bool) -> list[Figure]:
    model = make_checkpoint_once("tiny-llama" if quick else "llama-210m")
    config = {"store": "ram://discovery-cost", "quality": "off"}
    arguments = {"dtype": "bfloat16", "max_model_len": 4096, "kv_cache_memory_bytes": 512 << 20}
    with LocalEngine.start(model, extra_config=config, **arguments) as engine:
        on, off = _measure_pairs(engine, quick)
    ratios = {name: at(on) / at(off) for name, at in (("p50", statistics.median), ("p95", _p95))}
    detail = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    detail += f"; {spread(on)} ÷ {spread(off)}, {len(on)} prompts each"
    return [Figure.at_most("discovery_cost", max(ratios.values()), None if quick else BAR, detail=detail)]


def _measure_pairs(engine: LocalEngine, quick: bool) -> tuple[list[float], list[float]]:
    generator = random.Random("discovery cost")
    vocabulary = len(engine.tokenizer)
    tokens, pairs = (QUICK_TOKENS, QUICK_PAIRS) if quick else (PROMPT_TOKENS, PAIRS)
    times_s: dict[bool, list[float]] = {True: [], False: []}
    for number in range(pairs + 1):
        for is_on in (number % 2 == 0, number % 2 == 1):
            ids = [generator.randrange(3, vocabulary) for _ in range(tokens)]
            prompt = Prompt([*engine.prefix_token_ids, *ids], DISCOVERED if is_on else None, max_tokens=1)
            (answer,) = engine.generate([prompt])
            if number:  # the first of each prepares kernels
                times_s[is_on].append(answer.ttft_s)
        say(f"cost {number}/{pairs}")
    return times_s[True], times_s[False]


def _p95(samples: Sequence[float]) -> float:
    return statistics.quantiles(samples, n=20)[-1]
