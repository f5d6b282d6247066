"""Chooses the context behind which chunks are prepared, from a few cheap blends behind each.

Each context is probed on the same prompts, so the contexts are compared prompt by prompt. The prompts are
those of the screening: calibration confirms the choice on other prompts. A wrong choice therefore costs
stored bytes or speed, and never answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField
from kintsugi.core.plan import Selection
from kintsugi.core.report import Thresholds, describe_selection
from kintsugi.core.request import SelectorName
from kintsugi.models.context import NONE
from kintsugi.quality import grid, metrics
from kintsugi.quality.calibrate import FORM_PROMPTS, Budget, check_full_prefill, sample_cases
from kintsugi.quality.measure import Bench, Notify, measure_selection
from kintsugi.quality.racing import count_screening

PROBE_RATIO = 0.15
PROMPTS_MIN = 8
"""Minimum number of prompts on which a context is preferred to `none`."""
PROMPTS_MAX = 32
CONTEXTS_MAX = 8
"""Each context takes an engine start and its share of the minutes."""
MINUTES_SHARE = 0.25
"""Maximum share of the minutes that probing takes, divided evenly among the contexts."""


def make_probes(num_layers: int) -> list[Selection]:
    """Return the blends to measure behind each context: full KV reuse, then a small ratio by two
    selectors."""
    layer = grid.check_layers(num_layers)[0]
    return [
        Selection(0.0, SelectorName.HKVD, layer),
        Selection(PROBE_RATIO, SelectorName.HKVD, layer),
        Selection(PROBE_RATIO, SelectorName.QUERY, layer),
    ]


@dataclass(frozen=True)
class ComparedContext:
    """One context compared with `none`."""

    context: str
    kl_mean: float
    """Nats, over the prompts on which every context was probed."""
    gain: metrics.Interval | None
    """By how much the KL is lower than behind `none`, with paired prompts. None for `none` itself, and if
    `none` was not probed."""

    @property
    def is_clearly_better(self) -> bool:
        return self.gain is not None and self.gain.low > 0


@dataclass(frozen=True)
class ContextChoice:
    """The context to calibrate with, and the reason."""

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


def choose_context(trials: Mapping[str, Sequence[float]]) -> ContextChoice:
    """Choose the context with the lowest mean KL.

    ``trials``: for each context the mean KL of the probes in nats, one value per prompt, in the same order of
    prompts. If `none` is among them, it stays unless another context is clearly better (the interval of the
    paired difference is above 0), because a context doubles the stored bytes.
    """
    count = min(map(len, trials.values()))
    assert count > 0, "every context is probed on at least one prompt"
    behind_none = trials[NONE][:count] if NONE in trials else None
    compared = tuple(_compare(context, kl[:count], behind_none) for context, kl in trials.items())
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


def _compare(context: str, kl: Sequence[float], behind_none: Sequence[float] | None) -> ComparedContext:
    gain = None
    if behind_none is not None and context != NONE:
        gain = metrics.bootstrap([none - one for none, one in zip(behind_none, kl, strict=True)])
    return ComparedContext(context, metrics.mean(kl), gain)


class ContextProber:
    """Measures the probes behind each context. Its time counts from its construction."""

    def __init__(
        self,
        count: int,
        budget: Budget,
        thresholds: Thresholds,
        form: str,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``count``: number of contexts to probe. ``form``: name of the prompt form."""
        self._count = count
        self._budget = budget
        self._thresholds = thresholds
        self._form = form
        self._clock_s = clock_s
        self._started_s = clock_s()
        self._trials: dict[str, list[float]] = {}

    @property
    def minutes(self) -> float:
        """Minutes since the start."""
        return (self._clock_s() - self._started_s) / 60

    def probe(self, context: str, bench: Bench, num_layers: int, notify: Notify = lambda text: None) -> None:
        """Measure the probes on an engine that uses this context.

        Runs some prompts at a time, until there are enough or the context's share of the minutes has passed.
        Raises `InvalidField` as `calibrate` does, for too few questions and for a form that does not work.
        """
        order = sample_cases(len(bench.cases), self._budget, self._thresholds)
        if not self._trials:
            check_full_prefill(bench, order[:FORM_PROMPTS], self._form, notify)
        order = order[: min(PROMPTS_MAX, count_screening(len(order)))]
        found: list[float] = []
        while len(found) < len(order) and (not found or self._has_time()):
            some = order[len(found) : len(found) + PROMPTS_MIN]
            notify(f"storing the chunks of {len(some)} prompts")
            bench.store_chunks(some)
            by_probe = []
            for probe in make_probes(num_layers):
                notify(f"{describe_selection(probe)} on prompts {len(found) + 1}-{len(found) + len(some)}")
                scores = measure_selection(bench, probe, some).by_prompt
                by_probe.append([metrics.mean(score.divergences) for score in scores])
            found += [metrics.mean(values) for values in zip(*by_probe, strict=True)]
        self._trials[context] = found

    def _has_time(self) -> bool:
        if self._budget.minutes is None:
            return True
        share = (len(self._trials) + 1) / self._count
        return self.minutes < share * MINUTES_SHARE * self._budget.minutes

    def choose(self) -> ContextChoice:
        """Choose among the contexts that were probed."""
        return choose_context(self._trials)
