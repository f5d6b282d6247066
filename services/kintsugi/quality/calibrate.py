"""Calibration: finds configurations of a model that can be trusted, with a fixed budget of prompts.

1. The noise floor: compare full prefill with itself.
2. Screening: measure every affordable configuration on a few prompts.
3. Confirmation: measure the promising ones on all prompts, cheapest first, until one of each selector passes.
   Only confirmed entries can open the gate (`core.report.choose`).

The result depends only on seed, model and questions, never on timing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kintsugi.core.errors import InvalidField
from kintsugi.core.plan import Selection
from kintsugi.core.report import (
    Binding,
    CalibrationReport,
    Noise,
    ReportEntry,
    Thresholds,
    describe_selection,
    shortfalls,
)
from kintsugi.core.request import SelectorName
from kintsugi.engine.local import LocalEngine
from kintsugi.models.passages import BUNDLED_QUESTIONS, read_bundled_passages
from kintsugi.quality import grid
from kintsugi.quality.measure import (
    Bench,
    Notify,
    Scores,
    answer_tokens,
    measure_selection,
    tokenize_questions,
)
from kintsugi.quality.questions import Question, format_question

CONFIRMATIONS_PER_SELECTOR_MAX = 8
"""Enough to reject two ratios at every check layer and still try a third."""
ACCURACY_LOW = 0.5
"""Full prefill's accuracy below this causes a warning."""
PASSAGE_CHUNKS = 4
PASSAGE_TOKENS = 192
"""Tokens of each bundled passage in a prompt: enough for attention across chunks, few enough to measure
often."""


@dataclass(frozen=True)
class Budget:
    """How much to measure. More prompts detect smaller losses and take longer."""

    prompts: int = 96
    screened: int = 24
    seed: int = 0
    ratios: Sequence[float] = grid.RATIOS
    selectors: Sequence[SelectorName] = grid.CANDIDATES
    cost_max: float = grid.COST_MAX


@dataclass(frozen=True)
class Calibration:
    """A report, and warnings for its reader."""

    report: CalibrationReport
    warnings: list[str]


def check_budget(budget: Budget, thresholds: Thresholds) -> None:
    """Raise `InvalidField` if the budget is too small to confirm anything. Call it before starting an
    engine."""
    if budget.prompts < thresholds.prompts_min:
        raise InvalidField(
            "prompts",
            f"{budget.prompts} prompts are too few; allow at least {thresholds.prompts_min}",
        )


def prepare_bench(
    engine: LocalEngine,
    given: Sequence[Question] | None,
    budget: Budget,
    notify: Notify = lambda text: None,
) -> tuple[Bench, list[str]]:
    """Tokenise the given questions (or prompts of the bundled passages) and store their chunks. Returns the
    bench for `calibrate`, and warnings. Raises `InvalidField` if no question fits the model."""
    tokenizer = engine.tokenizer
    questions = given or make_passage_questions(
        lambda text: len(tokenizer(text, add_special_tokens=False).input_ids),
        min(PASSAGE_TOKENS, engine.max_model_len // 6),
        budget.prompts,
        budget.seed,
    )
    max_tokens = answer_tokens(questions, tokenizer)
    cases, warnings = tokenize_questions(
        questions, tokenizer, engine.prefix_token_ids, engine.max_model_len, max_tokens
    )
    bench = Bench(engine, cases, max_tokens)
    bench.store_chunks(lambda done, total: notify(f"storing chunks, {done} of {total}"))
    return bench, warnings


def calibrate(
    bench: Bench,
    num_layers: int,
    binding: Binding,
    budget: Budget,
    thresholds: Thresholds,
    source: str,
    created: str,
    notify: Notify = lambda text: None,
) -> Calibration:
    """Measure configurations and write a report. The chunks of `bench` must be stored (`prepare_bench`).

    Raises `InvalidField` for too few questions or prompts, and if full prefill answers none of them
    correctly.
    """
    chosen = _sample_cases(len(bench.cases), budget, thresholds)
    screening, rest = chosen[: budget.screened], chosen[budget.screened :]
    notify("full prefill")
    bench.full(chosen)
    warnings = _check_full_prefill(bench, chosen)
    notify("noise floor")
    noise = bench.noise(screening)
    cases = [bench.cases[index] for index in chosen]
    candidates = grid.affordable(
        grid.selections(budget.selectors, budget.ratios, num_layers),
        grid.workload_of(cases, num_layers),
        budget.cost_max,
    )
    screened: dict[Selection, Scores] = {}
    for number, selection in enumerate(candidates, 1):
        notify(f"screening {number} of {len(candidates)}, {describe_selection(selection)}")
        screened[selection] = measure_selection(bench, selection, screening)
    entries = {selection: scores.entry for selection, scores in screened.items()}
    promising = _filter_promising(entries, noise, thresholds)
    confirmed = _confirm_selections(bench, promising, screened, rest, noise, thresholds, notify)
    entries |= {selection: scores.entry for selection, scores in confirmed.items()}
    report = CalibrationReport.of(
        binding, created, source, budget.seed, noise, thresholds, list(entries.values())
    )
    if report.choice.selection is not None:
        report = replace(report, baseline=(screened | confirmed)[report.choice.selection].baseline)
    return Calibration(report, warnings)


def _filter_promising(
    entries: dict[Selection, ReportEntry], noise: Noise, thresholds: Thresholds
) -> list[Selection]:
    """Keep what passed on the screening prompts, cheapest first."""
    lenient = replace(thresholds, prompts_min=1)
    passed = [entry for entry in entries.values() if not shortfalls(entry, noise, lenient)]
    passed.sort(key=lambda entry: (entry.cost, describe_selection(entry.selection)))
    return [entry.selection for entry in passed]


def _confirm_selections(
    bench: Bench,
    promising: Sequence[Selection],
    screened: dict[Selection, Scores],
    rest: Sequence[int],
    noise: Noise,
    thresholds: Thresholds,
    notify: Notify,
) -> dict[Selection, Scores]:
    """Measure each selector's configurations on all prompts, cheapest first, until one passes."""
    confirmed: dict[Selection, Scores] = {}
    passed: set[SelectorName] = set()
    tried: Counter[SelectorName] = Counter()
    for selection in promising:
        name = selection.selector
        if name in passed or tried[name] == CONFIRMATIONS_PER_SELECTOR_MAX:
            continue
        notify(f"confirming {describe_selection(selection)}")
        tried[name] += 1
        scores = screened[selection]
        if rest:
            scores = scores.join_scores(measure_selection(bench, selection, rest))
        confirmed[selection] = scores
        if not shortfalls(scores.entry, noise, thresholds):
            passed.add(name)
    return confirmed


def _sample_cases(count: int, budget: Budget, thresholds: Thresholds) -> list[int]:
    """Choose the indices of the cases to use, shuffled by the seed."""
    check_budget(budget, thresholds)
    if count < thresholds.prompts_min:
        raise InvalidField(
            "questions",
            f"{count} fit the model, but a calibration needs {thresholds.prompts_min}; provide more",
        )
    order = list(range(count))
    random.Random(budget.seed).shuffle(order)
    return order[: budget.prompts]


def _check_full_prefill(bench: Bench, indices: Sequence[int]) -> list[str]:
    """Return warnings about full prefill's accuracy. Raises `InvalidField` if it is never right."""
    full = bench.full(indices)
    itself = Scores(Selection(1.0), [bench.cases[index] for index in indices], full, full).entry
    if itself.accuracy_full is None:
        return ["no question has an answer, so only agreement with full prefill is measured, not accuracy"]
    if itself.accuracy_full == 0:
        raise InvalidField(
            "questions",
            f"full prefill answers none of {len(indices)} correctly, so no loss can be detected; check that "
            "the answers belong to the questions and the format suits the model, or leave the answers out",
        )
    unanswered = sum(not bench.cases[index].question.answers for index in indices)
    warnings = []
    if unanswered:
        warnings.append(
            f"{unanswered} of {len(indices)} questions have no answer; accuracy covers only the others"
        )
    if itself.accuracy_full < ACCURACY_LOW:
        warnings.append(
            f"full prefill's own accuracy is {itself.accuracy_full:.2f}: where it is wrong, losses stay "
            "hidden; use easier questions"
        )
    return warnings


def make_passage_questions(
    count_tokens: Callable[[str], int], chunk_tokens: int, count: int, seed: int
) -> list[Question]:
    """Make questions about the bundled passages, for users without questions. Their answers are not known.

    Each has `PASSAGE_CHUNKS` passages in random order, each cut to about `chunk_tokens`.
    """
    texts = [passage.text for passage in read_bundled_passages()]
    words_max = max(8, chunk_tokens * len(texts[0].split()) // max(1, count_tokens(texts[0])))
    cut = [" ".join(text.split()[:words_max]) + "\n" for text in texts]
    picks = random.Random(seed)
    return [
        Question(
            tuple(picks.sample(cut, PASSAGE_CHUNKS)),
            format_question(picks.choice(BUNDLED_QUESTIONS)),
            (),
            "passages",
        )
        for _ in range(count)
    ]
