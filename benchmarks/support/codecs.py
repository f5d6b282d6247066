"""What storing chunks in 8 bits costs in answers, codec by codec, on the same prompts and one engine.

The engine stores chunks as they are; they are then written anew as each codec would have stored them, which
gives the same bytes without starting an engine for each.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.support import testbed_questions as testbed
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.quality_curve import Setup, bench_of, exact
from benchmarks.support.rewriting import put_back, stored
from benchmarks.support.scores import join_scores
from kintsugi.core.layout import Codec
from kintsugi.core.plan import Selection
from kintsugi.engine.local import LocalEngine
from kintsugi.quality import metrics
from kintsugi.quality.measure import NAMESPACE, Scores, measure_selection
from kintsugi.quality.metrics import Interval
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.registry import open_store

REWRITTEN = (Codec.FP8, Codec.INT8_SINKS, Codec.FP8_SINKS)
"""`int8` has an engine of its own: it has a bar."""


def store_at(url: str) -> RamStore:
    """The store of an engine in this process."""
    store = open_store(url)
    assert isinstance(store, RamStore)
    return store


def judged_by_codec(
    setup: Setup, running: LocalEngine, store: RamStore, selection: Selection
) -> dict[Codec, Scores]:
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
            scores = measure_selection(bench, selection, range(len(bench.cases)))
            found[codec] = join_scores(found[codec], scores) if codec in found else scores
            entry = scores.entry
            setup.details.setdefault("judged_by_codec", []).append(
                [
                    task,
                    codec.name.lower(),
                    entry.cost,
                    entry.exact_match,
                    entry.exact_match_full,
                    entry.kl_mean,
                ]
            )
        store.delete(NAMESPACE, [chunk.manifest.key for chunk in chunks])
        say(f"judged {task}: " + ", ".join(f"{metrics.mean(exact(s)):.3f}" for s in found.values()))
    return found


def lost_points(raw: Scores, quantised: Scores) -> Interval:
    """Exact match of `raw` over that of `quantised`, in points, prompt by prompt."""
    return metrics.bootstrap([100 * (a - b) for a, b in zip(exact(raw), exact(quantised), strict=True)])


def figures(raw: Scores, by_codec: Mapping[Codec, Scores]) -> list[Figure]:
    """One per codec, without a bar."""
    found = []
    for codec, scores in by_codec.items():
        loss = lost_points(raw, scores)
        detail = f"{loss}, n={len(scores.cases)}, KL {scores.entry.kl_mean:.4f} (raw {raw.entry.kl_mean:.4f})"
        found.append(Figure(f"{codec.name.lower()}_loss_points", loss.mean, "points", detail=detail))
    return found
