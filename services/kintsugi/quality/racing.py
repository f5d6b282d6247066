"""Finds the cheapest configuration that passes: a race over candidates. Pure.

A `Race` requests measurements ("these configurations on these prompts") and receives the losses; it never
runs anything. `calibrate` measures with an engine, a benchmark uses recorded outcomes. The requests depend
only on the losses, never on time.

1. Screening, on the first prompts: rounds of growing length. A configuration that is probably beyond a
   threshold is dropped. Of the others, those remain that have a lower risk than every cheaper one. At most
   `FINALISTS_MAX` of them become finalists. The losses of the screening are not used again.
2. Confirmation, on the other prompts: a sequence from the safest finalist to the cheapest. Every round tests
   every loss of a finalist, over all prompts and in each stratum, by betting (`quality.bounds`), which stays
   valid if it is checked after every round. A finalist passes if all tests succeed with its allowed error
   probability (`core.report.entitlements`); a finalist that is probably beyond a threshold is dropped. When
   only single tasks are undecided, only their prompts are measured, and count only for these tasks. The race
   ends when the cheapest remaining finalist has passed, or when no prompts are left.

All tests of one finalist must succeed, so no correction for their number is needed. The entitlements correct
for the number of finalists. Screening needs no correction, because its prompts do not count.
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
"""For each round, the number of prompts, and the maximum number of configurations that remain after it."""
SCREENING_SHARE = 0.2
"""Maximum share of the prompts that is used for screening."""
FINALISTS_MAX = 8
FINALISTS_MIN = 3
"""Number of finalists if time is short: the safest, the cheapest, and one between them."""
COST_STEP = 0.95
"""A finalist costs at most this share of the previous one: more similar ones would only share the allowed
error."""
CONFIRMATION_ROUND = 32
CHASE_PROMPTS_MAX = 400
"""After a finalist has passed, a cheaper one is measured further only if it needs at most this many more
prompts."""
RISK_MAX = 1.3
"""Greatest risk of a finalist, see `Runner.risk`."""
PRIOR_PROMPTS = 10
"""Number of imaginary prompts, each with half of the threshold as its loss, that screening adds to the mean
losses."""


@dataclass(frozen=True)
class PromptLosses:
    """Cost and losses of one configuration on one prompt."""

    cost: float
    by_quantity: Mapping[Quantity, float]
    """Losses in [-1, 1]. Quantities that the prompt cannot measure are missing."""

    def only(self, quantities: Container[Quantity]) -> PromptLosses:
        """Return a copy with only these quantities."""
        return PromptLosses(self.cost, {q: loss for q, loss in self.by_quantity.items() if q in quantities})


TestKey = tuple[Quantity, str]
"""Quantity and stratum of a test; the stratum is empty for all prompts."""


@dataclass(frozen=True)
class RacePrompt:
    """Strata and quantities of a prompt, which are known before anything is measured."""

    task: str
    """Empty if all questions belong to one task."""
    lengths: tuple[str, ...] = ()
    """Names of the length strata that it belongs to."""
    quantities: frozenset[Quantity] = frozenset(Quantity)
    """The quantities that it can measure."""

    @property
    def strata(self) -> tuple[str, ...]:
        return (*self.lengths, self.task) if self.task else self.lengths


@dataclass(frozen=True)
class Ask:
    """A request to measure each of these configurations on each of these prompts."""

    selections: tuple[Selection, ...]
    prompts: tuple[int, ...]
    is_confirmation: bool
    tasks: frozenset[str] | None = None
    """The tasks for which the prompts were chosen; they count only for these. None: they count for all."""


@dataclass
class Runner:
    """A configuration in one phase of the race."""

    selection: Selection
    costs: list[float] = field(default_factory=list)
    losses: dict[TestKey, list[float]] = field(default_factory=dict)
    tests: dict[TestKey, BelowTest] = field(default_factory=dict)
    error: float | None = None
    """The error probability with which it passed; None if it has not passed."""
    is_dropped: bool = False

    @property
    def cost(self) -> float:
        return metrics.mean(self.costs)

    @property
    def is_open(self) -> bool:
        """Whether it has neither been dropped nor passed."""
        return self.error is None and not self.is_dropped

    @property
    def risk(self) -> float:
        """The largest mean loss as a share of its threshold, plus the mean of these shares, which ranks
        configurations without losses. `PRIOR_PROMPTS` dampens results from few prompts."""
        shares = [
            (test.mean * test.count / test.threshold + PRIOR_PROMPTS / 2) / (test.count + PRIOR_PROMPTS)
            for test in self.tests.values()
        ]
        return max(shares) + metrics.mean(shares)

    @property
    def divergence(self) -> float:
        """Mean KL over all prompts: it shows small differences before any answer changes."""
        return self.tests[Quantity.KL, ""].mean

    @property
    def is_failing(self) -> bool:
        """Whether some mean loss is probably above its threshold."""
        return any(test.count > 0 and test.is_above for test in self.tests.values())

    def undecided(self, error: float) -> set[str]:
        """Return the strata with a test that has not succeeded yet."""
        enough = math.log(1 / error)
        return {stratum for (_, stratum), test in self.tests.items() if test.log_wealth < enough}


class Race:
    """One search. Call `ask`, measure, and pass the losses to `tell`, until `ask` returns None."""

    def __init__(
        self,
        candidates: Sequence[Selection],
        prompts: Sequence[RacePrompt],
        noise: Noise,
        thresholds: Thresholds,
        screening_max: float = math.inf,
        finalists_max: int = FINALISTS_MAX,
    ) -> None:
        """`prompts` must be shuffled; they are used in their order. Screening has at least one round, and
        ends before a round that would exceed `screening_max` answers."""
        self.noise = noise
        self.thresholds = thresholds
        self.screened = [Runner(selection) for selection in candidates]
        self.finalists: list[Runner] = []
        """From the safest to the cheapest; empty during the screening."""
        self._prompts = prompts
        self._rounds = list(_screening_rounds(len(prompts)))
        self._in_screening = list(self.screened)
        self._screening_left = screening_max
        self._finalists_max = finalists_max
        self.num_screening = count_screening(len(prompts))
        """Number of prompts that screening may use. The prompts after them belong to the confirmation."""
        self._unused = list(range(self.num_screening, len(prompts)))
        self.counts = Counter(
            (quantity, stratum)
            for one in prompts[self.num_screening :]
            for stratum in ("", *one.strata)
            for quantity in one.quantities
        )
        """Number of the confirmation's prompts that can measure each quantity in each stratum."""
        self._required = {
            key for key, count in self.counts.items() if not key[1] or count >= thresholds.stratum_prompts_min
        }
        """The tests that a finalist must pass, including those whose prompts have not been measured yet."""
        self.judged = {stratum for _, stratum in self._required if stratum}
        """The strata with enough prompts to be judged separately."""
        self._tasks = {one.task for one in prompts} & self.judged
        self.has_tasks = any(one.task for one in prompts)

    def ask(self) -> Ask | None:
        """Return what to measure next; None when the race is over."""
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
        """The open finalists that are cheaper than all that passed."""
        passed = [place for place, one in enumerate(self.finalists) if one.error is not None]
        return [one for one in self.finalists[max(passed, default=-1) + 1 :] if one.is_open]

    def _undecided_tasks(self) -> frozenset[str] | None:
        """Return the undecided tasks if everything else is decided; otherwise None."""
        found: set[str] = set()
        for place, runner in enumerate(self.finalists):
            if runner in self.running:
                found |= runner.undecided(self.error_of(place)) if self._is_covered(runner) else {""}
        return frozenset(found) if found and found <= self._tasks else None

    def tell(self, asked: Ask, losses: Sequence[Sequence[PromptLosses]]) -> None:
        """Add the losses of each configuration of `asked`, one per prompt."""
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
        """Drop configurations that probably fail, then those that others beat in cost and risk. After the
        last round, pick the finalists."""
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
        """Whether there is another round, and room for the answers of `count` configurations."""
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
        """Whether a finalist is probably near passing. Always true until a finalist has passed."""
        if all(one.error is None for one in self.finalists):
            return True
        missing = self.prompts_missing(place)
        return missing is not None and missing <= CHASE_PROMPTS_MAX

    def _is_covered(self, runner: Runner) -> bool:
        """Whether every required test has measurements."""
        return self._required <= runner.tests.keys()

    def error_of(self, place: int) -> float:
        """Return the error probability of a finalist's bounds: the one with which it passed, or may pass
        now."""
        error = self.finalists[place].error
        if error is not None:
            return error
        passed = [one.error is not None for one in self.finalists[:place]]
        return entitlements(passed, len(self.finalists), self.thresholds)[-1]

    def bounds_of(self, place: int) -> list[LossBound]:
        """Return the confidence bounds of a finalist, for the report."""
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
        """Estimate how many more prompts a finalist needs to pass; None if it has passed, or if more prompts
        do not help."""
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
    """Return the runners with a lower risk than every cheaper one. `runners` are sorted by cost."""
    front: list[Runner] = []
    for one in runners:
        if not front or one.risk < front[-1].risk:
            front.append(one)
    return front


def _pick_finalists(runners: Sequence[Runner], most: int) -> list[Runner]:
    """Return at most `most` (at least 2) finalists, from the safest to the cheapest, each clearly cheaper
    than the previous one.

    The configuration closest to full prefill comes first, even if others lost no more in screening, so that
    it remains if they fail. For the same reason, the most expensive of those with equal risk comes first.
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
    """One round of screening: its prompts, and the maximum number of configurations that remain after it."""

    first: int
    end: int
    stay: int

    @property
    def length(self) -> int:
        return self.end - self.first


def count_screening(num_prompts: int) -> int:
    """Return the number of leading prompts that screening may use. The others are left for the
    confirmation."""
    return list(_screening_rounds(num_prompts))[-1].end


def _screening_rounds(num_prompts: int) -> Iterator[Round]:
    """Yield the rounds for which there are enough prompts, at least one."""
    first = 0
    for length, stay in SCREENING_ROUNDS:
        if first and first + length > SCREENING_SHARE * num_prompts:
            return
        yield Round(first, first + length, stay)
        first += length
