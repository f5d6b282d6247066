"""Measures the quality of answers from chunks stored in 8 bits, for each codec, on the same prompts.

One engine stores chunks as they are; they are then written anew as each codec would have stored them, which
gives the same bytes without starting an engine for each. `int8`, which has bars, has an engine of its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from benchmarks.support import testbed_questions as testbed
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.quality_curve import (
    Setup,
    bench_of,
    exact,
    exact_mean,
    judged,
    share,
    summary_of,
    trained,
)
from benchmarks.support.rewriting import put_back, stored
from benchmarks.support.scores import join_scores
from kintsugi.core.layout import Codec
from kintsugi.core.plan import Selection
from kintsugi.core.report import LADDER, describe_selection
from kintsugi.engine.local import LocalEngine
from kintsugi.quality import metrics
from kintsugi.quality.measure import NAMESPACE, Scores, measure_selection
from kintsugi.quality.metrics import Interval
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.registry import open_store

REWRITTEN = (Codec.FP8, Codec.INT8_SINKS, Codec.FP8_SINKS)
SERVED = LADDER[-1]
"""Configuration of the blends: the ladder's cheapest, which passes on the testbed's questions."""


def measure(setup: Setup) -> list[Figure]:
    """Answers and bytes with each codec."""
    store = open_store(url := f"ram://quality-{uuid.uuid4().hex[:8]}")
    assert isinstance(store, RamStore)
    with trained(setup, url=url) as running:
        by_codec = _judged_by_codec(setup, running, store)
        raw_bytes = _stored_bytes(running)
    raw = by_codec.pop(Codec.RAW)
    with trained(setup, codec="int8") as running:
        quantised = judged(setup, running, [SERVED], testbed.TASKS)[SERVED]
        ratio = _stored_bytes(running) / raw_bytes
    loss = lost_points(raw, quantised)
    detail = f"{loss}, n={len(raw.cases)}; {describe_selection(SERVED)}, cost {raw.cost:.3f}, {share(raw)}"
    return [
        Figure.at_most("int8_loss_points", loss.mean, 0.5, unit="points", detail=detail),
        Figure.at_most("int8_bytes_ratio", ratio, 0.53, unit="", detail="stored bytes of the same chunks"),
        *_figures(raw, by_codec),
    ]


def _stored_bytes(running: LocalEngine) -> int:
    """Bytes of one prompt's chunks of each task in the engine's store."""
    asked = testbed.questions(testbed.TASKS, testbed.JUDGED_FROM, 1)
    bench = bench_of(running, testbed.cases(running, asked))
    prompts = [bench.prompt(index, Selection(0.0)) for index in range(len(bench.cases))]
    return sum((answer.accounting or {})["bytes_loaded"] for answer in running.generate(prompts))


def _judged_by_codec(setup: Setup, running: LocalEngine, store: RamStore) -> dict[Codec, Scores]:
    """Scores of `Codec.RAW` and, unless `setup.quick`, `REWRITTEN`, over every task's judging questions."""
    found: dict[Codec, Scores] = {}
    rewritten = () if setup.quick else REWRITTEN
    for task in testbed.TASKS:
        asked = testbed.questions([task], testbed.JUDGED_FROM, setup.prompts)
        bench = bench_of(running, testbed.cases(running, asked))
        chunks = stored(store)
        for codec in (Codec.RAW, *rewritten):
            for chunk in chunks if codec is not Codec.RAW else ():
                put_back(store, chunk, codec)
            scores = measure_selection(bench, SERVED, range(len(bench.cases)))
            found[codec] = join_scores(found[codec], scores) if codec in found else scores
            row = [task, codec.name.lower(), *summary_of(scores)]
            setup.details.setdefault("judged_by_codec", []).append(row)
        store.delete(NAMESPACE, [chunk.manifest.key for chunk in chunks])
        say(f"judged {task}: " + ", ".join(f"{exact_mean(s):.3f}" for s in found.values()))
    return found


def lost_points(raw: Scores, quantised: Scores) -> Interval:
    """Exact match of `raw` over that of `quantised`, in points, prompt by prompt."""
    return metrics.bootstrap([100 * (a - b) for a, b in zip(exact(raw), exact(quantised), strict=True)])


def _figures(raw: Scores, by_codec: Mapping[Codec, Scores]) -> list[Figure]:
    """One per codec, without a bar."""
    found = []
    for codec, scores in by_codec.items():
        loss = lost_points(raw, scores)
        detail = f"{loss}, n={len(scores.cases)}, KL {scores.kl_mean:.4f} (raw {raw.kl_mean:.4f})"
        found.append(Figure(f"{codec.name.lower()}_loss_points", loss.mean, "points", detail=detail))
    return found
