"""What asking for chunks costs a prompt that gets none: the store lacks them all, or is dead."""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
from pathlib import Path

from benchmarks.store import served
from benchmarks.support.engines import engine, say
from benchmarks.support.figures import Figure
from benchmarks.support.prompts import ChunkPrompt
from kintsugi.core.request import KintsugiParams
from kintsugi.engine.local import LocalEngine, Prompt

JUDGED, TINY = "llama-18m", "tiny-llama"
"""The smaller the model, the more a fixed cost shows: `TINY`, of 0.8 M parameters, has no bar."""
CHUNKS, CHUNK_TOKENS, QUESTION = 6, 160, 40
UNCOUNTED = 10
BAR = 1.05
DEADLINES = {"lookup_deadline_ms": 500, "layer_deadline_ms": 2_000}
"""As they are by default: a dead store is what they are for."""


def measure(quick: bool) -> list[Figure]:
    """`miss_*` and `down_*`: interleaved with plain requests of the same engine, percentile by percentile."""
    return _of_shape(JUDGED, 60 if quick else 400, "", BAR) + _of_shape(TINY, 100 if quick else 400, "tiny_")


def _of_shape(shape: str, requests: int, prefix: str, bar: float | None = None) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), "64MiB") as shard:
        extra = {"store": f"grpc://{shard.address}", "loading_controller": True, **DEADLINES}
        with engine(shape, extra=extra) as running:
            figures = _compared(running, f"{prefix}miss", "no_chunk_cached", requests, bar)
            os.kill(shard.pid, signal.SIGKILL)
            figures += _compared(running, f"{prefix}down", "store_unavailable", requests, bar)
    return figures


def _compared(running: LocalEngine, name: str, reason: str, requests: int, bar: float | None) -> list[Figure]:
    generator = random.Random(name)  # else plain prompts would be in the prefix cache from before
    plain: list[float] = []
    ours: list[float] = []
    for index in range(requests + UNCOUNTED):
        pair = [(plain, False), (ours, True)]
        generator.shuffle(pair)
        for samples, asks in pair:
            prompt = ChunkPrompt.make([CHUNK_TOKENS] * CHUNKS, QUESTION, seed=generator.randrange(1 << 30))
            ttft_s = _ttft_s(running, prompt, prompt.params() if asks else None, reason)
            if index >= UNCOUNTED:
                samples.append(ttft_s)
    figures = []
    for percentile in (50, 95):
        ratio = _percentile(ours, percentile) / _percentile(plain, percentile)
        detail = (
            f"{_percentile(ours, percentile) * 1e3:.1f} ÷ {_percentile(plain, percentile) * 1e3:.1f} ms, "
            f"{requests} requests each"
        )
        full_name = f"{name}_ttft_p{percentile}"
        figures.append(Figure.at_most(full_name, ratio, bar, detail=detail))
        say(f"{full_name}: {ratio:.3f} ({detail})")
    return figures


def _ttft_s(running: LocalEngine, prompt: ChunkPrompt, params: KintsugiParams | None, reason: str) -> float:
    (answer,) = running.generate([Prompt(prompt.token_ids, params, max_tokens=1, ignore_eos=True)])
    if params is not None:
        said = str((answer.accounting or {}).get("reason"))
        assert said.startswith(reason), said
    return answer.ttft_s


def _percentile(samples: list[float], percentile: int) -> float:
    return statistics.quantiles(samples, n=100, method="inclusive")[percentile - 1]
