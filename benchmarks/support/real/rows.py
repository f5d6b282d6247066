"""The configurations that are compared on the real model, and the choice among them from the records. Pure.
Keys of records begin with what was measured: `full` or `blend`, the part of the corpus (`choosing` or
`judged`), the set's number and the question (`OPEN`, or an index). Keys of blends end with the configuration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.support.quality_curve import at_budget
from benchmarks.support.real.corpus import PassageSet
from benchmarks.support.real.records import Key, Records
from kintsugi.core.plan import Selection
from kintsugi.core.report import describe_selection
from kintsugi.core.request import SelectorName
from kintsugi.fusor.control.cost import PassWorkload
from kintsugi.models.context import NONE

CHOOSING, JUDGED = "choosing", "judged"
OPEN = "open"
"""The question whose answer has no known wording."""
SAMPLE = "sample"
"""The context that is the corpus's public sample, beside `NONE` and `BUNDLED`."""
BUDGETS = (0.1, 0.2)
QUESTIONS_MIN = 300
"""Judged questions with known answers."""
SAFETY = 0.95
"""Share of a budget that a configuration is predicted to cost: prompts differ, and predictions take a typical
projection."""
RIGHT_MIN = 0.7
"""A kind of question stays if full prefill is right in at least this share of the choosing prompts'."""


@dataclass(frozen=True)
class Configuration:
    """A selection, over chunks that were prepared after a context."""

    context: str
    selection: Selection

    @property
    def name(self) -> str:
        return f"{describe_selection(self.selection)} behind {self.context}"


REUSE = Configuration(NONE, Selection(0.0))
"""Full KV reuse: chunks saved alone after the prompt's head, nothing recomputed."""


@dataclass(frozen=True)
class Item:
    """One answer to measure; without a configuration, full prefill's."""

    part: str
    number: int
    """The set's."""
    question: str | int
    configuration: Configuration | None = None

    @property
    def name(self) -> str:
        """The configuration's; empty for full prefill's."""
        return "" if self.configuration is None else self.configuration.name

    @property
    def context(self) -> str:
        """The context of the engine that answers."""
        return NONE if self.configuration is None else self.configuration.context

    @property
    def key(self) -> Key:
        place = (self.part, self.number, self.question)
        return ("full", *place) if self.configuration is None else ("blend", *place, self.configuration.name)


def families(num_layers: int) -> list[Selection]:
    """The selections to fit to a budget. Their ratios do not count."""
    late = tuple(range(round(0.4 * num_layers), round(0.8 * num_layers)))
    return [
        Selection(0.5, SelectorName.QUERY),
        Selection(0.5, SelectorName.QUERY, 1, late),
        Selection(0.5, SelectorName.QUERY, 1, tuple(range(num_layers))),
        Selection(0.5, SelectorName.HYBRID),
    ]


def baselines(work: PassWorkload) -> dict[float, Configuration]:
    """CacheBlend's `hkvd`, as published: check layer 1, no preparation. By budget."""
    fitted = {budget: at_budget(Selection(0.5), work, budget * SAFETY) for budget in BUDGETS}
    return {budget: Configuration(NONE, one) for budget, one in fitted.items() if one is not None}


def candidates(contexts: Sequence[str], work: PassWorkload) -> list[Configuration]:
    """Every family at every budget after every context, and every context with nothing recomputed."""
    fitted = [
        selection
        for budget in BUDGETS
        for family in families(work.num_layers)
        if (selection := at_budget(family, work, budget * SAFETY)) is not None
    ]
    return [Configuration(context, one) for context in contexts for one in (Selection(0.0), *fitted)]


@dataclass(frozen=True)
class Choice:
    """The configurations that are judged: the best of each budget, and with nothing recomputed."""

    reuse: Configuration
    nothing: Configuration
    by_budget: dict[float, Configuration]
    baselines: dict[float, Configuration] = field(default_factory=dict)

    @property
    def configurations(self) -> list[Configuration]:
        """Each once."""
        return list(
            dict.fromkeys([self.reuse, self.nothing, *self.by_budget.values(), *self.baselines.values()])
        )


def choose(records: Records, tried: Sequence[Configuration], work: PassWorkload) -> Choice:
    """The lowest KL within each budget on the choosing prompts.

    Configurations are compared on the prompts that all of them answered. Raises `LookupError` if a budget has
    no configuration.
    """
    measured = {one: open_answers(records, CHOOSING, one) for one in tried}
    common = set.intersection(*(set(found) for found in measured.values()))
    if not common:
        raise LookupError("no choosing prompt was answered by every configuration; measure on")

    def mean(one: Configuration, field: str) -> float:
        return sum(measured[one][number][field] for number in common) / len(common)

    def best(budget: float, ones: Sequence[Configuration]) -> Configuration:
        fitting = [one for one in ones if mean(one, "cost") <= budget]
        if not fitting:
            raise LookupError(f"no configuration costs at most {budget}")
        return min(fitting, key=lambda one: mean(one, "kl"))

    unselected = [one for one in tried if one.selection.ratio == 0.0]
    return Choice(
        REUSE, best(1.0, unselected), {budget: best(budget, tried) for budget in BUDGETS}, baselines(work)
    )


def open_answers(records: Records, part: str, configuration: Configuration) -> dict[int, dict[str, float]]:
    """Return the records of a configuration's answers to the open questions, by set."""
    return {
        int(number): values
        for (number, question, name), values in records.below("blend", part).items()
        if question == OPEN and name == configuration.name
    }


@dataclass(frozen=True)
class KindRight:
    """How often full prefill answers a kind of question rightly."""

    right: int
    asked: int

    @property
    def share(self) -> float:
        return self.right / self.asked


def kinds_right(records: Records) -> dict[str, KindRight]:
    """By kind, on the choosing prompts."""
    found: dict[str, list[bool]] = defaultdict(list)
    for (_, question), values in records.below("full", CHOOSING).items():
        if question != OPEN:
            found[values["kind"]].append(bool(values["right"]))
    return {kind: KindRight(sum(right), len(right)) for kind, right in sorted(found.items())}


def kinds_that_stay(right: dict[str, KindRight]) -> list[str]:
    """It does not depend on any blend."""
    return [kind for kind, one in right.items() if one.share >= RIGHT_MIN]


def full_items(part: str, sets: Sequence[PassageSet], kinds: Collection[str], per_kind: int) -> list[Item]:
    """Full prefill's answers: to each set's open question, and to its first ``per_kind`` of each kind."""
    items = []
    for one in sets:
        items.append(Item(part, one.number, OPEN))
        for kind in kinds:
            of_kind = [index for index, asked in enumerate(one.asked) if asked.kind == kind]
            items += [Item(part, one.number, index) for index in of_kind[:per_kind]]
    return items


def questions_per_kind(sets: int, kinds: int) -> int:
    """How many of each kind each set needs for `QUESTIONS_MIN` in all."""
    return -(-QUESTIONS_MIN // (sets * kinds)) if kinds else 0


def blend_items(items: Sequence[Item], configurations: Sequence[Configuration]) -> list[Item]:
    """The same questions, answered by each configuration."""
    return [replace(item, configuration=one) for one in configurations for item in items]
