"""Finds the cheapest configuration that passes: a race over candidates, decided on prompts of its own. Pure.

A `Race` asks for measurements ("these configurations on these prompts") and is told the losses; it never
runs anything. `calibrate` answers with an engine, a benchmark with recorded outcomes. What is asked follows
from the losses alone, never from time.

1. Screening, on the first prompts: rounds of growing length. A configuration that is probably beyond a
   threshold is dropped, and of the others those stay that no cheaper one beats. What is left is thinned to
   at most `FINALISTS_MAX` finalists. Whatever screening saw is forgotten then.
2. Confirmation, on the other prompts: a sequence from the safest finalist to the cheapest. Every round tests
   every loss of a finalist, over all prompts and in each stratum, by betting (`quality.bounds`), so looking
   after every round costs nothing. A finalist passes if all tests succeed with the chance of error that it
   is entitled to (`core.report.entitlements`); one that is probably beyond a threshold is dropped. Once only
   single tasks are undecided, only their prompts are measured, and count for these tasks alone. The race
   ends when the cheapest finalist left has passed, or when the prompts are used up.

All tests of one finalist have to succeed, so their number needs no correction. The number of finalists does:
the entitlements are that correction. Screening needs none, because none of its prompts counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kintsugi.core.plan import Selection
from kintsugi.core.report import (
    LossBound,
    Noise,
    Quantity,
    Thresholds,
    describe_selection,
    entitlements,
)
from kintsugi.quality import metrics
from kintsugi.quality.bounds import BelowTest, upper_bound

SCREENING_ROUNDS = ((4, 40), (4, 24), (8, 16), (16, 14), (32, 12), (64, 12))
"""Prompts of each round, and the most configurations that stay behind it."""
SCREENING_SHARE = 0.2
"""At most this share of the prompts is used for screening."""
FINALISTS_MAX = 8
FINALISTS_MIN = 3
"""Finalists of a race against time: the safest, the cheapest, and one between them."""
COST_STEP = 0.95
"""A finalist costs at most this share of the one before it: more alike ones would only share the error."""
CONFIRMATION_ROUND = 32
CHASE_PROMPTS_MAX = 400
"""Once something has passed, a cheaper finalist is followed while it seems to need no more prompts than
this."""
RISK_MAX = 1.3
"""Greatest risk of a finalist, see `Runner.risk`."""
PRIOR_PROMPTS = 10
"""Screening takes mean losses as if so many more prompts had lost half of each threshold."""


@dataclass(frozen=True)
class PromptLosses:
    """One configuration against full prefill on one prompt."""

    cost: float
    by_quantity: Mapping[Quantity, float]
    """In [-1, 1]. A quantity that the prompt cannot measure is missing."""

    def only(self, quantities: Container[Quantity]) -> PromptLosses:
        """Without the other quantities."""
        return PromptLosses(self.cost, {q: loss for q, loss in self.by_quantity.items() if q in quantities})


TestKey = tuple[Quantity, str]
"""What a test is about: a loss, and a stratum; empty for all prompts."""


@dataclass(frozen=True)
class RacePrompt:
    """What a race knows of a prompt before anything is measured."""

    task: str
    """Empty where the questions name no tasks."""
    lengths: tuple[str, ...] = ()
    """Names of the length strata that it belongs to."""
    quantities: frozenset[Quantity] = frozenset(Quantity)
    """What it can measure."""

    @property
    def strata(self) -> tuple[str, ...]:
        return (*self.lengths, self.task) if self.task else self.lengths


@dataclass(frozen=True)
class Ask:
    """What to measure next: each of these configurations on each of these prompts."""

    selections: tuple[Selection, ...]
    prompts: tuple[int, ...]
    is_confirmation: bool
    tasks: frozenset[str] | None = None
    """The tasks that the prompts were chosen for, and count for alone; None: the prompts are like all."""


@dataclass
class Runner:
    """A configuration in one phase of the race."""

    selection: Selection
    costs: list[float] = field(default_factory=list)
    losses: dict[TestKey, list[float]] = field(default_factory=dict)
    tests: dict[TestKey, BelowTest] = field(default_factory=dict)
    error: float | None = None
    """The chance of error with which it passed; None until it has."""
    is_dropped: bool = False

    @property
    def cost(self) -> float:
        return metrics.mean(self.costs)

    @property
    def is_open(self) -> bool:
        """Whether it is neither dropped nor passed."""
        return self.error is None and not self.is_dropped

    @property
    def risk(self) -> float:
        """The greatest of its mean losses as a share of its threshold, plus their mean, which ranks those
        that have not lost anything yet. Few prompts are taken with a grain of salt."""
        shares = [
            (test.mean * test.count / test.threshold + PRIOR_PROMPTS / 2) / (test.count + PRIOR_PROMPTS)
            for test in self.tests.values()
        ]
        return max(shares) + metrics.mean(shares)

    @property
    def divergence(self) -> float:
        """Mean KL over all prompts: small differences show in it before any answer changes."""
        return self.tests[Quantity.KL, ""].mean

    @property
    def is_failing(self) -> bool:
        """Whether some mean loss is probably above its threshold."""
        return any(test.count > 0 and test.is_above for test in self.tests.values())

    def undecided(self, error: float) -> set[str]:
        """The strata of which some test has not succeeded yet."""
        enough = math.log(1 / error)
        return {stratum for (_, stratum), test in self.tests.items() if test.log_wealth < enough}


class Race:
    """One search. Call `ask`, measure, `tell` the losses of each configuration, until `ask` returns None."""

    def __init__(
        self,
        candidates: Sequence[Selection],
        prompts: Sequence[RacePrompt],
        noise: Noise,
        thresholds: Thresholds,
        screening_max: float = math.inf,
        finalists_max: int = FINALISTS_MAX,
    ) -> None:
        """`prompts` in the order in which they are used: shuffled. Screening ends before a round that would
        take it beyond `screening_max` answers, and has at least one round."""
        self.noise = noise
        self.thresholds = thresholds
        self.screened = [Runner(selection) for selection in candidates]
        self.finalists: list[Runner] = []
        """From the safest to the cheapest; empty until screening is over."""
        self._prompts = prompts
        self._rounds = list(_screening_rounds(len(prompts)))
        self._in_screening = list(self.screened)
        self._screening_left = screening_max
        self._finalists_max = finalists_max
        self.num_screening = count_screening(len(prompts))
        """Prompts that screening may use; those behind them belong to the confirmation."""
        self._unused = list(range(self.num_screening, len(prompts)))
        self.counts = Counter(
            (quantity, stratum)
            for one in prompts[self.num_screening :]
            for stratum in ("", *one.strata)
            for quantity in one.quantities
        )
        """Prompts of the confirmation that can measure each loss in each stratum."""
        self._required = {
            key for key, count in self.counts.items() if not key[1] or count >= thresholds.stratum_prompts_min
        }
        """The tests that a finalist has to pass. One whose prompts have not come up yet counts, too."""
        self.judged = {stratum for _, stratum in self._required if stratum}
        """The strata with enough prompts to be judged on their own."""
        self._tasks = {one.task for one in prompts} & self.judged
        self.has_tasks = any(one.task for one in prompts)

    def ask(self) -> Ask | None:
        """What to measure next; None when the race is over."""
        if self._in_screening:
            now = self._rounds[0]
            return Ask(_selections(self._in_screening), tuple(range(now.first, now.end)), False)
        running, tasks = self.running, self._undecided_tasks()
        some = [n for n in self._unused if tasks is None or self._prompts[n].task in tasks]
        if not running or not some:
            return None
        return Ask(_selections(running), tuple(some[:CONFIRMATION_ROUND]), True, tasks)

    @property
    def running(self) -> list[Runner]:
        """The open finalists that are cheaper than any that passed."""
        passed = [place for place, one in enumerate(self.finalists) if one.error is not None]
        return [one for one in self.finalists[max(passed, default=-1) + 1 :] if one.is_open]

    def _undecided_tasks(self) -> frozenset[str] | None:
        """The tasks that are undecided, once all else is decided; None before."""
        found: set[str] = set()
        for place, runner in enumerate(self.finalists):
            if runner in self.running:
                found |= runner.undecided(self.error_of(place)) if self._is_covered(runner) else {""}
        return frozenset(found) if found and found <= self._tasks else None

    def tell(self, asked: Ask, losses: Sequence[Sequence[PromptLosses]]) -> None:
        """The losses of each configuration of `asked`, one per prompt."""
        runners = self.running if asked.is_confirmation else self._in_screening
        for runner, mine in zip(runners, losses, strict=True):
            if asked.tasks is None:
                runner.costs += [one.cost for one in mine]
            self._add(runner, asked, mine)
        if asked.is_confirmation:
            used = set(asked.prompts)
            self._unused = [number for number in self._unused if number not in used]
            self._decide()
        else:
            self._screening_left -= len(runners) * len(asked.prompts)
            self._thin_out(self._rounds.pop(0).stay)

    def _add(self, runner: Runner, asked: Ask, losses: Sequence[PromptLosses]) -> None:
        """Add losses to the tests that they count for."""
        grouped: dict[TestKey, list[float]] = {}
        for number, one in zip(asked.prompts, losses, strict=True):
            strata: tuple[str, ...] = ("",)
            if asked.tasks is not None:
                strata = (self._prompts[number].task,)
            else:
                strata = ("", *self._prompts[number].strata)
            for stratum in strata:
                for quantity, loss in one.by_quantity.items():
                    if stratum and (quantity, stratum) not in self._required:
                        continue
                    grouped.setdefault((quantity, stratum), []).append(loss)
        for key, values in grouped.items():
            if key not in runner.tests:
                runner.tests[key] = BelowTest(self.thresholds.highest(*key, self.noise))
            runner.tests[key].add(values)
            runner.losses.setdefault(key, []).extend(values)

    def _thin_out(self, stay: int) -> None:
        """Drop what probably fails, then what others beat in cost and risk; after the last round, pick the
        finalists."""
        left = [one for one in self._in_screening if not one.is_failing]
        left.sort(key=lambda one: (one.cost, one.risk, describe_selection(one.selection)))
        kept: list[Runner] = []
        while left and len(kept) < stay:
            front = _unbeaten(left)
            kept += front[-(stay - len(kept)) :]
            left = [one for one in left if one not in front]
        self._in_screening = kept
        if not self._has_next_round(len(kept)) or len(kept) <= 1:
            self.finalists = [Runner(one.selection) for one in _pick_finalists(kept, self._finalists_max)]
            self._in_screening = []

    def _has_next_round(self, count: int) -> bool:
        """Whether there is one, and room for the answers of so many configurations."""
        return bool(self._rounds) and count * self._rounds[0].length <= self._screening_left

    def _decide(self) -> None:
        """Let finalists pass or drop out, from the safest to the cheapest."""
        for place, runner in enumerate(self.finalists):
            error = self.error_of(place)
            if runner.is_open and self._is_covered(runner) and not runner.undecided(error):
                runner.error = error
            elif runner.is_open and (runner.is_failing or not self._is_worth_chasing(place)):
                runner.is_dropped = True

    def _is_worth_chasing(self, place: int) -> bool:
        """Whether a finalist seems near enough to passing, once another one has passed."""
        if all(one.error is None for one in self.finalists):
            return True
        missing = self.prompts_missing(place)
        return missing is not None and missing <= CHASE_PROMPTS_MAX

    def _is_covered(self, runner: Runner) -> bool:
        """Whether every loss that is judged was measured, in every stratum where it is."""
        return self._required <= runner.tests.keys()

    def error_of(self, place: int) -> float:
        """The chance of error of a finalist's bounds: with which it passed, or which it may use now."""
        error = self.finalists[place].error
        if error is not None:
            return error
        passed = [one.error is not None for one in self.finalists[:place]]
        return entitlements(passed, len(self.finalists), self.thresholds)[-1]

    def bounds_of(self, place: int) -> list[LossBound]:
        """The confidence bounds of a finalist, for the report."""
        error = self.error_of(place)
        return [
            LossBound(
                quantity,
                stratum,
                round(metrics.mean(losses), 6),
                round(upper_bound(losses, error), 6),
                len(losses),
            )
            for (quantity, stratum), losses in sorted(self.finalists[place].losses.items())
        ]

    def prompts_missing(self, place: int) -> int | None:
        """About how many more prompts would let a finalist pass; None if it has passed, or if they would not
        help."""
        runner = self.finalists[place]
        if runner.error is not None or runner.is_failing or not runner.tests:
            return None
        needed = 0
        for (_, stratum), test in runner.tests.items():
            missing = test.prompts_missing(self.error_of(place))
            if missing is None:
                return None
            share = 1.0 if stratum in self._tasks else test.count / len(runner.costs)
            needed = max(needed, math.ceil(missing / share))
        return needed


def _selections(runners: Sequence[Runner]) -> tuple[Selection, ...]:
    return tuple(one.selection for one in runners)


def _unbeaten(runners: Sequence[Runner]) -> list[Runner]:
    """Those of lower risk than every cheaper one. `runners` are sorted by cost."""
    front: list[Runner] = []
    for one in runners:
        if not front or one.risk < front[-1].risk:
            front.append(one)
    return front


def _pick_finalists(runners: Sequence[Runner], most: int) -> list[Runner]:
    """From the safest to the cheapest, each clearly cheaper than the one before; at most so many, which must
    be two or more.

    The one nearest to full prefill comes first even if others lost no more in screening: it is there if those
    fail. For the same reason, of those of one risk the dearest comes first.
    """
    chosen: list[Runner] = []
    for one in sorted(runners, key=lambda one: (one.risk, -one.cost)):
        if not chosen or (one.risk <= RISK_MAX and one.cost <= COST_STEP * chosen[-1].cost):
            chosen.append(one)
    anchor = min(runners, key=lambda one: (one.divergence, one.cost), default=None)
    if anchor is not None and anchor.cost > chosen[0].cost:
        chosen.insert(0, anchor)
    if len(chosen) <= most:
        return chosen
    step = (len(chosen) - 1) / (most - 1)
    return [chosen[round(number * step)] for number in range(most)]


@dataclass(frozen=True)
class Round:
    """One round of screening: its prompts, and how many configurations may stay behind it."""

    first: int
    end: int
    stay: int

    @property
    def length(self) -> int:
        return self.end - self.first


def count_screening(num_prompts: int) -> int:
    """How many of the prompts screening may use: the first ones. Those behind them are left for the
    confirmation."""
    return list(_screening_rounds(num_prompts))[-1].end


def _screening_rounds(num_prompts: int) -> Iterator[Round]:
    """The rounds that the prompts suffice for, at least one."""
    first = 0
    for length, stay in SCREENING_ROUNDS:
        if first and first + length > SCREENING_SHARE * num_prompts:
            return
        yield Round(first, first + length, stay)
        first += length
