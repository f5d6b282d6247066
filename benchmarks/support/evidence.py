"""How far a calibration can be believed: 300 of them, resampled from recorded outcomes, and one as users
run it.

`benchmarks/support/outcomes.py` recorded what many configurations do on the same fresh questions. A resampled
calibration draws questions from these records, with replacement, and lets `quality.racing` decide. The means
over all records are then the truth, without error.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.support import testbed_questions as testbed
from benchmarks.support.calibrated import default_of
from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from benchmarks.support.outcomes import PromptRecord, Records, read_records
from benchmarks.support.quality_curve import Setup, judged, trained
from kintsugi.core.plan import Selection
from kintsugi.core.report import Noise, Quantity, Thresholds, describe_selection
from kintsugi.quality import metrics
from kintsugi.quality.racing import PromptLosses, Race, RacePrompt

CALIBRATIONS = 300
PROMPTS = 2800
"""Questions that a calibration may draw; most stop long before."""
QUIET = Noise(0.0, 0.0, 1.0)
"""The bundled model repeats its answers exactly."""
MARGIN = 0.5
"""Share of every threshold that a configuration with a margin stays below."""


@dataclass(frozen=True)
class World:
    """The records, as the race sees them."""

    prompts: list[PromptRecord]
    losses: dict[Selection, list[PromptLosses]]

    @staticmethod
    def of(records: Records) -> World:
        found = {}
        for one in records.outcomes:
            columns = zip(records.prompts, one.cost, one.kl, one.disagreement, one.right, strict=True)
            found[one.selection] = [
                PromptLosses(cost, _losses(float(prompt.right) - right, kl, disagreement))
                for prompt, cost, kl, disagreement, right in columns
            ]
        return World(records.prompts, found)

    def cost(self, selection: Selection) -> float:
        return metrics.mean([one.cost for one in self.losses[selection]])

    def worst(self, selection: Selection, thresholds: Thresholds) -> float:
        """The true loss of exact match or agreement that comes nearest to its threshold, over all prompts
        or in a task, as a share of the threshold; above 1 it must not pass."""
        shares = []
        for task in ("", *{prompt.task for prompt in self.prompts}):
            pairs = zip(self.prompts, self.losses[selection], strict=True)
            some = [one for prompt, one in pairs if task in ("", prompt.task)]
            for quantity in (Quantity.EXACT_MATCH, Quantity.DISAGREEMENT):
                mean = metrics.mean([one.by_quantity[quantity] for one in some])
                shares.append(mean / thresholds.highest(quantity, task, QUIET))
        return max(shares)


def _losses(lost: float, kl: float, disagreement: float) -> dict[Quantity, float]:
    """Answers are one word, so F1 is exact match."""
    return {
        Quantity.KL: min(1.0, kl),
        Quantity.DISAGREEMENT: disagreement,
        Quantity.EXACT_MATCH: lost,
        Quantity.F1: lost,
    }


def resample(world: World, thresholds: Thresholds, seed: int) -> Race:
    """One calibration on questions drawn with this seed."""
    picks = random.Random(seed)
    drawn = picks.choices(range(len(world.prompts)), k=PROMPTS)
    middle = sorted(prompt.tokens for prompt in world.prompts)[len(world.prompts) // 2]
    prompts = [
        RacePrompt(f"task {one.task}", (f"prompts {'up to' if one.tokens <= middle else 'over'} {middle}",))
        for one in (world.prompts[number] for number in drawn)
    ]
    race = Race(list(world.losses), prompts, QUIET, thresholds)
    while (asked := race.ask()) is not None:
        numbers = [drawn[number] for number in asked.prompts]
        race.tell(asked, [[world.losses[one][n] for n in numbers] for one in asked.selections])
    return race


def measure(setup: Setup) -> list[Figure]:
    return [*_resampled(setup), _fresh_loss(setup)]


def _resampled(setup: Setup) -> list[Figure]:
    world, thresholds = World.of(read_records()), Thresholds()
    worst = {selection: world.worst(selection, thresholds) for selection in world.losses}
    with_margin = sorted((one for one in worst if worst[one] <= MARGIN), key=world.cost)[:3]
    dearest = world.cost(with_margin[-1])
    count = 30 if setup.quick else CALIBRATIONS
    wrong, found, among = 0, 0, 0
    choices: Counter[str] = Counter()
    for seed in range(count):
        passed = [
            one.selection for one in resample(world, thresholds, seed).finalists if one.error is not None
        ]
        wrong += any(worst[one] > 1 for one in passed)
        chosen = passed[-1] if passed else None
        choices["none" if chosen is None else describe_selection(chosen)] += 1
        if chosen is not None and worst[chosen] <= 1:
            found += world.cost(chosen) <= dearest
            among += chosen in with_margin
    say(f"{count} calibrations chose {dict(choices.most_common())}")
    setup.details["calibrations_chose"] = dict(choices)
    setup.details["true_share_of_threshold"] = {
        describe_selection(one): [round(world.cost(one), 3), round(share, 3)] for one, share in worst.items()
    }
    records = f"{len(world.prompts)} recorded questions, {len(worst)} configurations, {count} calibrations"
    cheapest = ", ".join(describe_selection(one) for one in with_margin)
    return [
        Figure.at_most("calibration_false_pass", wrong / count, 0.05, "", f"{wrong} of them; {records}"),
        Figure.at_least(
            "calibration_power",
            found / count,
            0.8,
            "",
            f"chose what passes at no more than the cost of the third of {cheapest}; {among} chose one of "
            f"these, {found - among} something cheaper that truly passes",
        ),
    ]


def _fresh_loss(setup: Setup) -> Figure:
    """Points of exact match that the calibrated default loses on fresh questions, in its worst task."""
    default = default_of(setup)
    tasks: Sequence[str] = (*testbed.TASKS, testbed.CONTROL)
    with trained(setup) as running:
        scores = judged(setup, running, [default], tasks)[default]
    losses = {
        task: metrics.bootstrap(
            [100 * one.losses.by_quantity[Quantity.EXACT_MATCH] for one in scores.of_task(task).by_prompt]
        )
        for task in tasks
    }
    worst = max(losses, key=lambda task: (losses[task].high, losses[task].mean))
    detail = f"{describe_selection(default)}, worst of {len(tasks)} tasks: {worst} {losses[worst]}"
    detail += f", {setup.prompts} questions a task"
    return Figure.at_most("calibrated_loss_fresh", losses[worst].high, 3.0, "points", detail)
