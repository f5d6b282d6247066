"""Measures what blends lose on models with recurrent layers.

The models are those of `benchmarks.testbed.hybrid`, trained first if the cache has none. A configuration is
chosen on a quarter as many questions, within a quarter of a full prefill's cost, and judged on others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.support import testbed_questions as testbed
from benchmarks.support.family import NOTHING, divergences
from benchmarks.support.figures import Figure
from benchmarks.support.latent import COST, SHARE_MAX, choose
from benchmarks.support.quality_curve import Setup, bench_of, count_mismatches, exact, judged, share, trained
from benchmarks.support.scores import ratio_bootstrap
from benchmarks.support.trained_models import checkpoint_once
from benchmarks.testbed.hybrid import make_hybrid_model, recipe_digest
from kintsugi.core.report import describe_selection
from kintsugi.quality import metrics

ANSWERS_MIN, GAP_MIN = 0.96, 25
DTYPES = {"mamba2": "float32", "delta_net": "bfloat16"}
"""By kind of recurrence. vLLM computes Gated DeltaNet on a CPU in bfloat16 alone."""


def hybrid_model_once(kind: str) -> Path:
    """Return the checkpoint folder. Trains the model if the cache has none."""
    make: Callable[[Path], None] = partial(make_hybrid_model, kind)
    return checkpoint_once(f"{kind}-{recipe_digest()}", f"the hybrid with {kind}", make)


def measure(kind: str, setup: Setup, tasks: Sequence[str] = testbed.TASKS) -> list[Figure]:
    """Return `hybrid_kl_share`, `hybrid_answers_share`, and the figures that they are computed from.
    `setup.model` is the hybrid."""
    # vLLM's Mamba-2 on a CPU fails with prefix caching: its scan returns final states alone.
    arguments: dict[str, Any] = {"dtype": DTYPES[kind], "enable_prefix_caching": False}
    with trained(setup, **arguments) as running:
        asked = testbed.questions(tasks, testbed.CHOSEN_FROM, max(2, setup.prompts // 4))
        best = choose(setup, bench_of(running, testbed.cases(running, asked)), running.num_layers)
        scores = judged(setup, running, [NOTHING, best], tasks)
        mismatches = count_mismatches(setup, running)
    blended, reused = scores[best], scores[NOTHING]
    kl = ratio_bootstrap(divergences(blended), divergences(reused))
    answers = share(blended)
    pairs = zip(exact(reused, of_blend=False), exact(reused), strict=True)
    lost = metrics.bootstrap([100 * (full - kept) for full, kept in pairs])
    full = metrics.bootstrap(exact(blended, of_blend=False))
    how = f"{describe_selection(best)}, cost {blended.cost:.3f} (at most {COST}), n={len(blended.cases)}"
    means = f"KL {blended.kl_mean:.3g} after {reused.kl_mean:.3g}"
    return [
        Figure.at_most(
            f"hybrid_kl_share [{kind}]", kl.mean, SHARE_MAX, unit="", detail=f"{how}, {kl}, {means}"
        ),
        Figure.at_least(
            f"hybrid_answers_share [{kind}]", answers.mean, ANSWERS_MIN, unit="", detail=f"{how}, {answers}"
        ),
        Figure.at_least(
            f"hybrid_reuse_gap_points [{kind}]", lost.mean, GAP_MIN, unit="points", detail=str(lost)
        ),
        Figure(f"hybrid_full_em [{kind}]", full.mean, "", detail=str(full)),
        Figure(f"hybrid_r1_mismatches [{kind}]", mismatches.value, "", detail=mismatches.detail),
    ]
