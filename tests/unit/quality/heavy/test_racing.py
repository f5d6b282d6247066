"""The race over configurations whose true losses are known: what passes, what never does, what is asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from kintsugi.core.plan import Selection
from kintsugi.core.report import Noise, Quantity, ReportEntry, Thresholds, choose, passing
from kintsugi.quality.racing import Ask, PromptLosses, Race, RacePrompt

QUIET = Noise(0.0, 0.0, 1.0)
AGREEMENT = frozenset({Quantity.KL, Quantity.DISAGREEMENT})
THRESHOLDS = Thresholds()
Wrong = Callable[[Selection, int], float]
"""The chance that a configuration (named by its ratio, which is also its cost) is wrong on a prompt."""


class Recorded:
    """Outcomes of a world: the same prompt always has the same one."""

    def __init__(self, wrong: Wrong, seed: int = 0) -> None:
        self._wrong = wrong
        self._seed = seed
        self.asks: list[Ask] = []

    def losses(self, selection: Selection, prompt: int) -> PromptLosses:
        picks = random.Random(f"{self._seed} {selection} {prompt}")
        loss = float(picks.random() < self._wrong(selection, prompt))
        return PromptLosses(selection.ratio, dict.fromkeys(Quantity, loss))

    def drive(self, race: Race) -> Race:
        while (asked := race.ask()) is not None:
            self.asks.append(asked)
            race.tell(asked, [[self.losses(one, n) for n in asked.prompts] for one in asked.selections])
        return race


def candidates(*ratios: float) -> list[Selection]:
    return [Selection(ratio) for ratio in ratios]


def passed(race: Race) -> list[float]:
    return [one.selection.ratio for one in race.finalists if one.error is not None]


def prompts(count: int, tasks: Sequence[str] = ("",)) -> list[RacePrompt]:
    return [RacePrompt(tasks[number % len(tasks)]) for number in range(count)]


def rates(**by_ratio: float) -> Wrong:
    """`r15=0.01`: the ratio 0.15 is wrong in a hundredth of the prompts; others always are."""
    known = {int(name[1:]): rate for name, rate in by_ratio.items()}
    return lambda selection, prompt: known.get(round(100 * selection.ratio), 1.0)


def race_of(world: Recorded, count: int, *ratios: float, tasks: Sequence[str] = ("",)) -> Race:
    return world.drive(Race(candidates(*ratios), prompts(count, tasks), QUIET, THRESHOLDS))


@pytest.mark.parametrize("seed", range(5))
def test_the_cheapest_good_configuration_is_found_among_many(seed: int) -> None:
    world = Recorded(rates(r20=0.001, r30=0.001, r40=0.0, r50=0.0), seed)
    race = race_of(world, 1200, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
    assert passed(race)[-1] == 0.2
    used = {prompt for asked in world.asks for prompt in asked.prompts}
    assert len(used) < 500, "it stops when the cheapest has passed"


def test_screening_ends_before_a_round_that_there_is_no_time_for() -> None:
    world = Recorded(rates(r20=0.001, r30=0.0))
    ratios = [0.2, 0.3] + [0.4 + n / 1000 for n in range(30)]
    race = Race(candidates(*ratios), prompts(1200), QUIET, THRESHOLDS, screening_max=4 * 32 + 4 * 3)
    world.drive(race)
    screened = [asked for asked in world.asks if not asked.is_confirmation]
    assert sum(len(asked.selections) * len(asked.prompts) for asked in screened) <= 4 * 32 + 4 * 3
    assert race.finalists
    assert all(min(asked.prompts) >= race.num_screening for asked in world.asks if asked.is_confirmation)


def test_a_race_against_time_has_few_finalists_from_the_safest_to_the_cheapest() -> None:
    ratios = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
    world = Recorded(rates(r10=0.02, r15=0.015, r20=0.01, r30=0.005, r40=0.001, r50=0.0))
    every, few = (
        world.drive(Race(candidates(*ratios), prompts(1200), QUIET, THRESHOLDS, finalists_max=most))
        for most in (8, 3)
    )
    assert len(every.finalists) > len(few.finalists) == 3
    for end in (0, -1):
        assert few.finalists[end].selection == every.finalists[end].selection


def test_no_prompt_of_the_screening_counts_in_the_confirmation() -> None:
    world = Recorded(rates(r20=0.002, r40=0.0))
    race = race_of(world, 800, 0.1, 0.2, 0.4)
    phases = [
        {p for a in world.asks if a.is_confirmation is phase for p in a.prompts} for phase in (False, True)
    ]
    assert phases[0]
    assert phases[1]
    assert not phases[0] & phases[1]
    for place, finalist in enumerate(race.finalists):
        for bound in race.bounds_of(place):
            assert bound.num_prompts <= len(phases[1])
        assert finalist.tests


def test_luck_in_the_screening_is_not_trusted() -> None:
    """0.1 is right on every prompt of the screening and often wrong later."""
    fresh = Race(candidates(0.1, 0.4), prompts(900), QUIET, THRESHOLDS)

    def lucky(selection: Selection, prompt: int) -> float:
        return 0.0 if prompt < fresh.num_screening or selection.ratio > 0.1 else 0.1

    assert passed(Recorded(lucky).drive(fresh)) == [0.4]


def test_what_is_beyond_a_threshold_seldom_passes_however_many_are_tried() -> None:
    """Twelve configurations at 1.1 times the threshold: without a correction one of them would often pass."""
    ratios = [0.05 * step for step in range(1, 13)]
    wrong = sum(bool(passed(race_of(Recorded(lambda *_: 0.033, seed), 500, *ratios))) for seed in range(100))
    assert wrong <= 5


def test_a_task_cannot_hide_behind_the_others() -> None:
    """One of eight tasks loses 8 %: 1 % of all, which passes where no tasks are named."""
    tasks = [f"task {name}" for name in "abcdefgh"]

    def wrong(selection: Selection, prompt: int) -> float:
        return 0.08 * (prompt % 8 == 3) if selection.ratio < 0.4 else 0.0

    assert passed(race_of(Recorded(wrong), 3000, 0.2, 0.4, tasks=tasks)) == [0.4]
    assert passed(race_of(Recorded(wrong), 3000, 0.2, 0.4)) == [0.4, 0.2]


def test_once_only_single_tasks_are_undecided_only_their_prompts_are_measured() -> None:
    tasks = [f"task {name}" for name in "abcde"]
    world = Recorded(lambda selection, prompt: 0.025 * (prompt % 5 == 3))
    race = race_of(world, 4000, 0.3, tasks=tasks)
    focused = [asked for asked in world.asks if asked.tasks is not None]
    assert passed(race) == [0.3]
    assert focused[-1].tasks == {"task d"}
    assert {prompt % 5 for asked in focused if asked.tasks == {"task d"} for prompt in asked.prompts} == {3}
    alike = sum(len(asked.prompts) for asked in world.asks if asked.is_confirmation and asked.tasks is None)
    counts = {bound.stratum: bound.num_prompts for bound in race.bounds_of(0)}
    assert counts[""] == alike, "prompts chosen for a task say nothing about all"
    assert counts["task d"] > alike / 5


def test_small_tasks_are_not_judged() -> None:
    asked = [RacePrompt("task rare" if number % 40 == 0 else "task a") for number in range(800)]
    race = Race(candidates(0.3), asked, QUIET, THRESHOLDS)
    assert race.judged == {"task a"}
    assert passed(Recorded(lambda *_: 0.0).drive(race)) == [0.3]


def test_what_stays_undecided_says_how_much_more_it_takes() -> None:
    world = Recorded(rates(r30=0.015), 3)
    race = race_of(world, 250, 0.3)
    assert passed(race) == []
    missing = race.prompts_missing(0)
    assert missing is not None
    longer = race_of(Recorded(rates(r30=0.015), 3), 250 + 6 * missing, 0.3)
    assert passed(longer) == [0.3]
    assert longer.prompts_missing(0) is None


def test_a_finalist_that_fails_is_dropped_and_hopeless_ones_are_none() -> None:
    nothing = race_of(Recorded(lambda *_: 0.9), 400, 0.1, 0.3)
    assert nothing.finalists == []
    assert nothing.ask() is None
    world = Recorded(lambda selection, prompt: 0.25 if prompt >= 100 else 0.0)
    race = race_of(world, 1000, 0.3)
    assert race.finalists[0].is_dropped
    assert len({prompt for asked in world.asks for prompt in asked.prompts}) < 400
    assert race.prompts_missing(0) is None


def test_the_same_losses_are_decided_alike_and_the_report_agrees() -> None:
    wrong = rates(r15=0.02, r20=0.004, r40=0.0)
    first, again = (race_of(Recorded(wrong, 5), 1000, 0.1, 0.15, 0.2, 0.4) for _ in range(2))
    assert passed(first) == passed(again) != []
    entries = [
        ReportEntry(
            one.selection,
            one.cost,
            0.0,
            0.0,
            1.0,
            9,
            9,
            place=place,
            error=first.error_of(place),
            bounds=first.bounds_of(place),
        )
        for place, one in enumerate(first.finalists)
    ]
    agreed = passing(entries, QUIET, THRESHOLDS)
    assert [entry.selection.ratio for entry in agreed] == passed(first)
    chosen = choose(entries, QUIET, THRESHOLDS).selection
    assert chosen is not None
    assert chosen.ratio == min(passed(first))


def test_a_prompt_without_answers_counts_for_agreement_alone() -> None:
    losses = PromptLosses(0.2, {Quantity.KL: 0.0, Quantity.DISAGREEMENT: 0.0})
    race = Race(candidates(0.2), [RacePrompt("", (), AGREEMENT)] * 300, QUIET, THRESHOLDS)
    while (asked := race.ask()) is not None:
        race.tell(asked, [[losses] * len(asked.prompts)])
    assert {bound.quantity for bound in race.bounds_of(0)} == {Quantity.KL, Quantity.DISAGREEMENT}
    assert passed(race) == [0.2]
    only = PromptLosses(0.2, dict.fromkeys(Quantity, 0.5)).only({Quantity.KL})
    assert only == PromptLosses(0.2, {Quantity.KL: 0.5})


class FewAnswers:
    """Every blend agrees with full prefill, and some prompts have an answer."""

    def __init__(self, lost: float, has_answer: Callable[[int], bool]) -> None:
        self._lost = lost
        self._has_answer = has_answer

    def drive(self, race: Race) -> Race:
        while (asked := race.ask()) is not None:
            race.tell(asked, [[self._losses(number) for number in asked.prompts] for _ in asked.selections])
        return race

    def prompts(self, count: int, task: Callable[[int], str] = lambda number: "") -> list[RacePrompt]:
        return [
            RacePrompt(task(number), (), frozenset(Quantity) if self._has_answer(number) else AGREEMENT)
            for number in range(count)
        ]

    def _losses(self, number: int) -> PromptLosses:
        found = dict.fromkeys(AGREEMENT, 0.0)
        if self._has_answer(number):
            found |= dict.fromkeys(set(Quantity) - AGREEMENT, self._lost)
        return PromptLosses(0.3, found)


def test_nothing_passes_before_every_loss_was_measured() -> None:
    late = FewAnswers(0.9, lambda number: number >= 1950)
    assert passed(late.drive(Race(candidates(0.3), late.prompts(2000), QUIET, THRESHOLDS))) == []


def test_the_few_answers_of_a_task_are_not_judged_on_their_own() -> None:
    world = FewAnswers(0.0, lambda number: number % 2 == 0 or number % 200 == 1)
    asked = world.prompts(1200, lambda number: "task b" if number % 2 else "task a")
    race = world.drive(Race(candidates(0.3), asked, QUIET, THRESHOLDS))
    assert passed(race) == [0.3]
    judged = {(bound.quantity, bound.stratum) for bound in race.bounds_of(0)}
    assert (Quantity.KL, "task b") in judged
    assert (Quantity.F1, "task a") in judged
    assert (Quantity.F1, "task b") not in judged
