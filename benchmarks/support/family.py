"""Compares every selector at equal cost on a model of another family, which is trained if the cache has none.

A configuration of each selector is chosen on some questions and judged on others, as in the section
`curve`: by exact match at one cost, by KL at another. No figure has a bar: the section shows which selector
wins on this model, not whether the model is good enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from benchmarks.support import testbed_questions as testbed
from benchmarks.support.figures import Figure
from benchmarks.support.quality_curve import (
    Setup,
    bench_of,
    count_mismatches,
    exact,
    exact_mean,
    judged,
    measure_curve,
    trained,
)
from benchmarks.support.scores import ratio_bootstrap
from benchmarks.support.trained_models import checkpoint_once
from benchmarks.testbed.export import export
from benchmarks.testbed.recipes import RECIPES, Recipe
from benchmarks.testbed.train import train
from kintsugi.core.plan import Selection
from kintsugi.core.report import describe_selection
from kintsugi.quality import metrics
from kintsugi.quality.measure import Scores

RECIPE = "qwen3"
EXACT_MATCH_BUDGET, KL_BUDGET = 0.25, 0.20
CHOSEN_ON = 25
"""Questions of each task to choose on."""
NOTHING = Selection(0.0)
Picks = dict[str, Selection]
"""One configuration of each selector."""


def train_once(recipe: Recipe) -> Path:
    """The checkpoint folder of the recipe's model. Trains it if the cache has none."""
    model_type = recipe.shape.model_type
    title = f"a {model_type} of the recipe {recipe.digest}"
    return checkpoint_once(f"{model_type}-{recipe.digest}", title, lambda draft: _train(recipe, draft))


def _train(recipe: Recipe, folder: Path) -> None:
    train(folder, recipe)
    state = folder / "state.pt"
    export(state, folder)
    state.unlink()


def measure(setup: Setup, folder: Path | None) -> list[Figure]:
    """Compare the selectors on the model in `folder`; None: on the one that `RECIPE` trains."""
    model = testbed.checkpoint(str(folder or train_once(RECIPES[RECIPE])))
    family = Setup(model, setup.quick, prompts_asked=setup.prompts_asked)
    family.details["model"] = folder.name if folder else f"recipe {RECIPE}"
    family.details["weights_sha256"] = sha256((model / "model.safetensors").read_bytes()).hexdigest()
    setup.details["family"] = family.details
    with trained(family) as running:
        asked = testbed.questions(testbed.TASKS, testbed.CHOSEN_FROM, min(CHOSEN_ON, setup.chosen_on))
        choosing = bench_of(running, testbed.cases(running, asked))
        curves = {
            budget: measure_curve(family, choosing, running.num_layers, budget)
            for budget in (EXACT_MATCH_BUDGET, KL_BUDGET)
        }
        by_match = pick_each(curves[EXACT_MATCH_BUDGET], lambda one: -exact_mean(one))
        by_kl = pick_each(curves[KL_BUDGET], lambda one: one.kl_mean)
        wanted = {NOTHING, *by_match.values(), *by_kl.values()}
        scores = judged(family, running, sorted(wanted, key=describe_selection), testbed.TASKS)
        mismatches = count_mismatches(family, running)
    return [
        *make_figures(scores, by_match, by_kl),
        replace(mismatches, name="family_r1_mismatches", bar=None, holds=None),
    ]


def pick_each(curve: Sequence[Scores], loss: Callable[[Scores], float]) -> Picks:
    """The configuration of each selector with the smallest loss, then KL; the best selector first."""
    found: Picks = {}
    for one in sorted(curve, key=lambda one: (loss(one), one.kl_mean)):
        found.setdefault(one.selection.selector, one.selection)
    return found


def make_figures(scores: Mapping[Selection, Scores], by_match: Picks, by_kl: Picks) -> list[Figure]:
    reused = scores[NOTHING]
    right = exact(reused, of_blend=False)
    full, reuse = metrics.bootstrap(right), metrics.bootstrap(exact(reused))
    detail = f"{full}, full KV reuse {reuse}, n={len(right)}"
    return [
        Figure("family_full_em", full.mean, "", detail=detail),
        *compare("family_em_share_cost25", scores, by_match, exact, right, largest_wins=True),
        *compare("family_kl_share_cost20", scores, by_kl, divergences, divergences(reused)),
    ]


def divergences(scores: Scores) -> list[float]:
    """KL to full prefill of each prompt."""
    return [metrics.mean(one.divergences) for one in scores.by_prompt]


def compare(
    name: str,
    scores: Mapping[Selection, Scores],
    picks: Picks,
    measured: Callable[[Scores], list[float]],
    reference: Sequence[float],
    largest_wins: bool = False,
) -> list[Figure]:
    """Return each selector's share of the reference, first that of the selector that was best on the choosing
    prompts. Its detail names the order on the judged prompts and the lead of the first."""
    values = {selector: measured(scores[selection]) for selector, selection in picks.items()}
    shares = {selector: ratio_bootstrap(mine, reference) for selector, mine in values.items()}
    order = sorted(picks, key=lambda selector: shares[selector].mean, reverse=largest_wins)
    details = {
        selector: f"{describe_selection(picks[selector])}, cost {scores[picks[selector]].cost:.3f}, "
        f"{shares[selector]}, n={len(reference)}"
        for selector in order
    }
    rows = [
        Figure(f"{name}_{selector}", shares[selector].mean, "", detail=details[selector])
        for selector in order
    ]
    chosen = next(iter(picks))
    detail = f"{details[chosen]}; order {' '.join(order)}"
    if len(order) > 1:
        pairs = zip(values[order[0]], values[order[1]], strict=True)
        detail += f"; the first differs from the second by {metrics.bootstrap([a - b for a, b in pairs])}"
    return [Figure(name, shares[chosen].mean, "", detail=detail), *rows]
