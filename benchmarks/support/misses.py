"""Measures the cost of a lookup for a prompt that gets no chunks: the store lacks them all, is dead, or
hangs.

The store that hangs holds every chunk. It stops in the middle of layer 3 of a blend, behind a TCP proxy
(`benchmarks.support.proxy`), and answers nothing more. The first prompt waits for its deadline: it counts,
and its wait is a figure of its own.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.store import served
from benchmarks.support.engines import engine, say, store_chunks
from benchmarks.support.figures import Figure
from benchmarks.support.prompts import NAMESPACE, PREFIX, ChunkPrompt, tokens
from benchmarks.support.proxy import hanging_proxy
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import Span
from kintsugi.engine.local import LocalEngine, Prompt
from kintsugi.quality import metrics
from kintsugi.store.shard.eviction.policy import DEFAULT_POLICY

JUDGED, TINY = "llama-18m", "tiny-llama"
"""The smaller the model, the more a fixed cost shows: `TINY`, of 0.8 M parameters, has no bar."""
CHUNKS, CHUNK_TOKENS, QUESTION = 6, 160, 40
HANGS_IN_LAYER = 3
OPENING = 150
"""Tokens before the chunks that differ from prompt to prompt: more than a cache block, so that no prompt
finds another's blocks."""
REQUESTS = 1000
"""Pairs behind each judged percentile: so the 50 slowest decide about the 95th."""
UNCOUNTED = 10
BAR = 1.05
DEADLINES = {"lookup_deadline_ms": 500, "layer_deadline_ms": 2_000}
"""The default deadlines: they exist for a dead store."""


def measure(quick: bool) -> list[Figure]:
    """`miss_*`, `down_*` and `hang_*`: interleaved with plain requests of the same engine, percentile by
    percentile."""
    figures = _of_shape(JUDGED, 60 if quick else REQUESTS, "", BAR)
    figures += _of_shape(TINY, 100 if quick else 400, "tiny_")
    return figures + _of_hanging(200 if quick else REQUESTS)


def _of_shape(shape: str, requests: int, prefix: str, bar: float | None = None) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), "64MiB") as shard:
        extra = {"store": f"grpc://{shard.address}", "loading_controller": True, **DEADLINES}
        with engine(shape, extra=extra) as running:
            figures = _compared(running, f"{prefix}miss", "no_chunk_cached", requests, bar)
            os.kill(shard.pid, signal.SIGKILL)
            figures += _compared(running, f"{prefix}down", "store_unavailable", requests, bar)
    return figures


def _of_hanging(requests: int) -> list[Figure]:
    generator = random.Random("hang")
    stored = ChunkPrompt.make([CHUNK_TOKENS] * CHUNKS, QUESTION, seed=1)
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder), "64MiB", "", DEFAULT_POLICY, "--no-share-arena") as shard,
        hanging_proxy(shard.address) as proxy,
    ):
        # For such a small model the controller would not load, and then nothing would hang.
        extra = {"store": f"grpc://{proxy.address}", "loading_controller": False, **DEADLINES}
        with engine(JUDGED, extra=extra) as running:
            store_chunks(running, stored)
            for _ in range(UNCOUNTED):
                before = proxy.returned_bytes
                (answer,) = running.generate([_opened(stored, generator, asks=True)])
                assert (answer.accounting or {}).get("outcome") == "blended", answer.accounting
                running.generate([_opened(stored, generator, asks=False)])
            of_a_blend = proxy.returned_bytes - before
            proxy.hang_after(int(of_a_blend * (HANGS_IN_LAYER + 0.5) / running.num_layers))
            return _hanging_figures(running, stored, generator, requests)


def _opened(prompt: ChunkPrompt, generator: random.Random, asks: bool) -> Prompt:
    """Return the prompt, preceded by tokens that no other prompt has."""
    opening = tokens(OPENING, generator)
    token_ids = [*PREFIX, *opening, *prompt.token_ids[len(PREFIX) :]]
    spans = tuple(Span(span.start + OPENING, span.end + OPENING) for span in prompt.spans)
    params = KintsugiParams(NAMESPACE, spans=spans) if asks else None
    return Prompt(token_ids, params, max_tokens=1, ignore_eos=True)


def _hanging_figures(
    running: LocalEngine, stored: ChunkPrompt, generator: random.Random, requests: int
) -> list[Figure]:
    plain: list[float] = []
    ours: list[float] = []
    reasons: Counter[str] = Counter()
    for _ in range(requests):
        pair = [(plain, False), (ours, True)]
        generator.shuffle(pair)
        for samples, asks in pair:
            (answer,) = running.generate([_opened(stored, generator, asks)])
            samples.append(answer.ttft_s)
            if asks:
                accounting = answer.accounting or {}
                assert accounting.get("outcome") in ("declined", "failed"), accounting
                reasons[str(accounting.get("reason")).split(":")[0]] += 1
    detail = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    longest = Figure("hang_ttft_longest", max(ours), "s", detail=detail)
    say(f"hang: longest {max(ours):.2f} s; {detail}")
    return [*_ratios("hang", ours, plain, BAR), longest]


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
    return _ratios(name, ours, plain, bar)


def _ratios(name: str, ours: list[float], plain: list[float], bar: float | None) -> list[Figure]:
    """With a 95 % interval from resampled pairs."""
    figures = []
    for percentile in (50, 95):
        ratio = metrics.bootstrap(list(zip(ours, plain, strict=True)), partial(_ratio, percentile))
        detail = (
            f"{_percentile(ours, percentile) * 1e3:.1f} ÷ {_percentile(plain, percentile) * 1e3:.1f} ms, "
            f"{len(ours)} requests each; resampled {ratio.low:.3f} to {ratio.high:.3f}"
        )
        full_name = f"{name}_ttft_p{percentile}"
        figures.append(Figure.at_most(full_name, ratio.mean, bar, detail=detail))
        say(f"{full_name}: {ratio.mean:.3f} ({detail})")
    return figures


def _ratio(percentile: int, pairs: Sequence[tuple[float, float]]) -> float:
    ours, plain = zip(*pairs, strict=True)
    return _percentile(ours, percentile) / _percentile(plain, percentile)


def _ttft_s(running: LocalEngine, prompt: ChunkPrompt, params: KintsugiParams | None, reason: str) -> float:
    (answer,) = running.generate([Prompt(prompt.token_ids, params, max_tokens=1, ignore_eos=True)])
    if params is not None:
        said = str((answer.accounting or {}).get("reason"))
        assert said.startswith(reason), said
    return answer.ttft_s


def _percentile(samples: Sequence[float], percentile: int) -> float:
    return statistics.quantiles(samples, n=100, method="inclusive")[percentile - 1]
