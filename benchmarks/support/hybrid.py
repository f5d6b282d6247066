"""Measures what blends lose on a model with recurrent layers.

The model is `benchmarks.testbed.hybrid`'s, trained first if the cache has none. A configuration is chosen on
some questions, within a quarter of a full prefill's cost, and judged on others.
"""

from __future__ import annotations

from collections.abc import Sequence
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
CHOSEN_ON = 12
"""Prompts per task that a configuration is chosen on."""
NO_PREFIX_CACHE: dict[str, Any] = {"dtype": "float32", "enable_prefix_caching": False}
"""vLLM's Mamba-2 on a CPU fails with prefix caching: its scan returns final states alone."""


def hybrid_model_once() -> Path:
    """The checkpoint folder. Trains the model if the cache has none."""
    return checkpoint_once(f"hybrid-{recipe_digest()}", "the hybrid", make_hybrid_model)


def measure(setup: Setup, tasks: Sequence[str] = testbed.TASKS) -> list[Figure]:
    """Return `hybrid_kl_share`, `hybrid_answers_share`, and the figures that they are computed from.
    `setup.model` is the hybrid."""
    with trained(setup, **NO_PREFIX_CACHE) as running:
        asked = testbed.questions(tasks, testbed.CHOSEN_FROM, min(CHOSEN_ON, setup.chosen_on))
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
        Figure.at_most("hybrid_kl_share", kl.mean, SHARE_MAX, unit="", detail=f"{how}, {kl}, {means}"),
        Figure.at_least(
            "hybrid_answers_share", answers.mean, ANSWERS_MIN, unit="", detail=f"{how}, {answers}"
        ),
        Figure.at_least("hybrid_reuse_gap_points", lost.mean, GAP_MIN, unit="points", detail=str(lost)),
        Figure("hybrid_full_em", full.mean, "", detail=str(full)),
        Figure("hybrid_r1_mismatches", mismatches.value, "", detail=mismatches.detail),
    ]
