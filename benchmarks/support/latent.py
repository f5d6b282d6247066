"""Measures the KL divergence of blends ÷ that of full KV reuse on a model with multi-head latent attention.

The model is `benchmarks.testbed.latent`'s, trained first if the cache has none. A configuration is chosen on
some questions, within a quarter of a full prefill's cost, and judged on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.support import grid
from benchmarks.support import testbed_questions as testbed
from benchmarks.support.engines import say
from benchmarks.support.family import NOTHING, divergences
from benchmarks.support.figures import Figure
from benchmarks.support.quality_curve import (
    Setup,
    bench_of,
    count_mismatches,
    exact_mean,
    fit_name,
    judged,
    trained,
)
from benchmarks.support.scores import ratio_bootstrap
from benchmarks.support.trained_models import checkpoint_once
from benchmarks.testbed.latent import make_latent_model, recipe_digest
from kintsugi.core.plan import Selection
from kintsugi.core.report import describe_selection
from kintsugi.core.request import SelectorName
from kintsugi.quality.measure import Bench, measure_selection

COST, SHARE_MAX = 0.25, 0.3


def latent_model_once() -> Path:
    """The checkpoint folder. Trains the model if the cache has none."""
    return checkpoint_once(f"latent-{recipe_digest()}", "the model with latent attention", make_latent_model)


def candidates(num_layers: int, quick: bool) -> list[Selection]:
    """Configurations to choose from; ratios follow from the cost."""
    middle = num_layers // 2
    asking = [Selection(0.5, SelectorName.QUERY, 1, layers) for layers in ((), (middle - 1, middle))]
    if quick:
        return asking[:1]
    names = [SelectorName.HKVD, SelectorName.HKVD_GRADUAL, SelectorName.HYBRID]
    return [*asking, *(Selection(0.5, name, layer) for name in names for layer in range(1, 4))]


def choose(setup: Setup, bench: Bench, num_layers: int) -> Selection:
    """The configuration with the smallest KL divergence within the cost."""
    work, found = grid.workload_of(bench.cases, num_layers), []
    for candidate in candidates(num_layers, setup.quick):
        selection = fit_name(bench, candidate, work, COST)
        if selection is None:
            continue
        scores = measure_selection(bench, selection, range(len(bench.cases)))
        say(f"{describe_selection(selection)}: KL {scores.kl_mean:.4f} at {scores.cost:.3f}")
        row = [describe_selection(selection), scores.cost, exact_mean(scores), scores.kl_mean]
        setup.details.setdefault("chosen_on", []).append(row)
        found.append((scores.kl_mean, selection))
    return min(found, key=lambda pair: pair[0])[1]


def measure(setup: Setup, tasks: Sequence[str] = testbed.TASKS) -> list[Figure]:
    """Return `mla_kl_share`, and the figures that it is computed from. `setup.model` is the model with
    latents."""
    with trained(setup) as running:
        asked = testbed.questions(tasks, testbed.CHOSEN_FROM, setup.chosen_on)
        best = choose(setup, bench_of(running, testbed.cases(running, asked)), running.num_layers)
        scores = judged(setup, running, [NOTHING, best], tasks)
        mismatches = count_mismatches(setup, running)
    blended, reused = scores[best], scores[NOTHING]
    share = ratio_bootstrap(divergences(blended), divergences(reused))
    detail = (
        f"{describe_selection(best)}, cost {blended.cost:.3f}, {share}, KL {blended.kl_mean:.3g} "
        f"after {reused.kl_mean:.3g}, n={len(blended.cases)}"
    )
    full, kept, lost = exact_mean(reused, of_blend=False), exact_mean(blended), exact_mean(reused)
    return [
        Figure.at_most("mla_kl_share", share.mean, SHARE_MAX, unit="", detail=detail),
        Figure("mla_full_em", full, "", detail=f"blended {kept:.3f}, full KV reuse {lost:.3f}"),
        Figure("mla_r1_mismatches", mismatches.value, "", detail=mismatches.detail),
    ]
