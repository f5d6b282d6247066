"""Probes contexts: measures a few cheap blends behind each, on the prompts of the screening."""

from __future__ import annotations

import time
from collections.abc import Callable

from kintsugi.core.report import Thresholds, describe_selection
from kintsugi.quality import metrics
from kintsugi.quality.calibrate import FORM_PROMPTS, Budget, check_full_prefill, sample_cases
from kintsugi.quality.contexts.choice import (
    PROMPTS_MIN,
    ContextChoice,
    ContextTrial,
    choose_context,
    make_probes,
)
from kintsugi.quality.measure import Bench, Notify, measure_selection
from kintsugi.quality.racing import count_screening

PROMPTS_MAX = 32
MINUTES_SHARE = 0.25
"""At most this share of the minutes is spent on probing, divided evenly among the contexts."""


class ContextProber:
    """Collects what the probes measure behind each context. The time counts from when it is made."""

    def __init__(
        self,
        count: int,
        budget: Budget,
        thresholds: Thresholds,
        form: str,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``count``: how many contexts will be probed. ``form``: the name of the prompt form."""
        self._count = count
        self._budget = budget
        self._thresholds = thresholds
        self._form = form
        self._clock_s = clock_s
        self._started_s = clock_s()
        self._trials: list[ContextTrial] = []

    @property
    def minutes(self) -> float:
        """The time since the start."""
        return (self._clock_s() - self._started_s) / 60

    def probe(self, context: str, bench: Bench, num_layers: int, notify: Notify = lambda text: None) -> None:
        """Measure the probes on an engine with this context.

        Runs some prompts at a time until there are enough or the context's share of the minutes is used up.
        Raises `InvalidField` as `calibrate` does for too few questions and for a form that does not work.
        """
        order = sample_cases(len(bench.cases), self._budget, self._thresholds)
        if not self._trials:
            check_full_prefill(bench, order[:FORM_PROMPTS], self._form, notify)
        order = order[: min(PROMPTS_MAX, count_screening(len(order)))]
        found: list[float] = []
        while len(found) < len(order) and (not found or self._has_time()):
            some = order[len(found) : len(found) + PROMPTS_MIN]
            notify(f"storing the chunks of {len(some)} prompts")
            bench.store_chunks(indices=some)
            by_probe = []
            for probe in make_probes(num_layers):
                notify(f"{describe_selection(probe)} on prompts {len(found) + 1}-{len(found) + len(some)}")
                scores = measure_selection(bench, probe, some).by_prompt
                by_probe.append([metrics.mean(score.divergences) for score in scores])
            found += [metrics.mean(values) for values in zip(*by_probe, strict=True)]
        self._trials.append(ContextTrial(context, tuple(found)))

    def _has_time(self) -> bool:
        if self._budget.minutes is None:
            return True
        share = (len(self._trials) + 1) / self._count
        return self.minutes < share * MINUTES_SHARE * self._budget.minutes

    def choose(self) -> ContextChoice:
        """The choice among the contexts that were probed."""
        return choose_context(self._trials)
