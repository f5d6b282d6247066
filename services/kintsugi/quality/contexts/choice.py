"""Chooses the context that chunks are prepared behind, from what a few probes measured behind each. Pure.

The probes are blends that cost little. Each context is probed on the same prompts, so the contexts are
compared prompt by prompt. The prompts are those of the screening: whatever is chosen here, a calibration
confirms it on other prompts. A wrong choice therefore costs stored bytes or speed, never answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField
from kintsugi.core.plan import Selection
from kintsugi.core.request import SelectorName
from kintsugi.models.context import NONE
from kintsugi.quality import grid, metrics

PROBE_RATIO = 0.15
PROMPTS_MIN = 8
"""A context is preferred to `none` on no fewer prompts than this."""
CONTEXTS_MAX = 8
"""Each context takes an engine start and its share of the minutes."""


def make_probes(num_layers: int) -> list[Selection]:
    """What is measured behind each context: nothing recomputed, then a little by two selectors."""
    layer = grid.check_layers(num_layers)[0]
    return [
        Selection(0.0, SelectorName.HKVD, layer),
        Selection(PROBE_RATIO, SelectorName.HKVD, layer),
        Selection(PROBE_RATIO, SelectorName.QUERY, layer),
    ]


@dataclass(frozen=True)
class ContextTrial:
    """What the probes measured behind one context."""

    context: str
    divergences: tuple[float, ...]
    """Mean KL of the probes, one per prompt, in the order in which all contexts use the prompts. In nats."""


@dataclass(frozen=True)
class ComparedContext:
    """One context beside `none`."""

    context: str
    kl_mean: float
    """Nats, over the prompts that every context was probed on."""
    gain: metrics.Interval | None
    """How much lower its KL is than behind `none`, with prompts paired. None for `none` itself, and where
    `none` was not tried."""

    @property
    def is_clearly_better(self) -> bool:
        return self.gain is not None and self.gain.low > 0


@dataclass(frozen=True)
class ContextChoice:
    """The context to calibrate with, and why."""

    context: str
    why: str
    num_prompts: int
    tried: tuple[ComparedContext, ...]


def check_contexts(contexts: Sequence[str], token_ids: Sequence[tuple[int, ...]]) -> None:
    """Raise `InvalidField` for too many contexts, and for two that have the same tokens."""
    if len(contexts) > CONTEXTS_MAX:
        raise InvalidField("context", f"{len(contexts)} are too many; try at most {CONTEXTS_MAX} at once")
    for index, ids in enumerate(token_ids):
        if (first := list(token_ids).index(ids)) != index:
            raise InvalidField(
                "context",
                f"{contexts[index]} is the same context as {contexts[first]}; name each context once",
            )


def choose_context(trials: Sequence[ContextTrial]) -> ContextChoice:
    """The context with the lowest mean KL.

    `none`, if it was tried, stays unless another one is clearly better: the interval of the paired difference
    lies above 0. A context doubles the stored bytes. Without `none` the contexts cost the same, and the
    lowest mean is enough.
    """
    count = min(len(trial.divergences) for trial in trials)
    assert count > 0, "every context is probed on at least one prompt"
    behind_none = next((trial.divergences[:count] for trial in trials if trial.context == NONE), None)
    compared = tuple(_compare(trial, count, behind_none) for trial in trials)
    if behind_none is None:
        best = min(compared, key=lambda one: one.kl_mean)
        return ContextChoice(best.context, f"the lowest KL on {count} prompts", count, compared)
    if count < PROMPTS_MIN:
        why = f"{count} prompts are too few to prefer a context; {PROMPTS_MIN} are needed"
        return ContextChoice(NONE, why, count, compared)
    better = [one for one in compared if one.is_clearly_better]
    if not better:
        why = f"nothing is clearly better on {count} prompts, and a context doubles the stored bytes"
        return ContextChoice(NONE, why, count, compared)
    best = min(better, key=lambda one: one.kl_mean)
    return ContextChoice(
        best.context, f"its KL is lower than behind {NONE} by {best.gain} on {count} prompts", count, compared
    )


def _compare(trial: ContextTrial, count: int, behind_none: Sequence[float] | None) -> ComparedContext:
    mine = trial.divergences[:count]
    gain = None
    if behind_none is not None and trial.context != NONE:
        gain = metrics.bootstrap([none - one for none, one in zip(behind_none, mine, strict=True)])
    return ComparedContext(trial.context, metrics.mean(mine), gain)
