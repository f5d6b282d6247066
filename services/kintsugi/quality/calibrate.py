"""Calibration: which configurations of this model may be trusted, found on a fixed budget of prompts.

1. The noise floor: full prefill against itself.
2. Screening: every affordable configuration on a few prompts.
3. Confirmation: those that look right, cheapest first, on all prompts, until one passes overall and each
   selector has had its chance. Only confirmed entries can open the gate (`core.report.choose`).

Deterministic in seed, model and questions: nothing depends on how long anything took.
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
from kintsugi.quality.measure import Bench, Scores, answer_tokens, measure_selection, tokenize_questions
from kintsugi.quality.questions import Question, format_question

CONFIRMATIONS_PER_SELECTOR_MAX = 8
"""Two ratios that only seemed right, at every check layer, leave the next ratio its chance."""
ACCURACY_LOW = 0.5
PASSAGE_CHUNKS = 4
PASSAGE_TOKENS = 192
"""Of each bundled passage in a prompt: enough to attend across, little enough to measure often."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Budget:
    """How much is measured. More prompts find smaller losses, and take longer."""

    prompts: int = 96
    screened: int = 24
    seed: int = 0
    ratios: Sequence[float] = grid.RATIOS
    selectors: Sequence[SelectorName] = grid.CANDIDATES
    cost_max: float = grid.COST_MAX


@dataclass(frozen=True)
class Calibration:
    """A report, and what its reader should know."""

    report: CalibrationReport
    warnings: list[str]


def check_budget(budget: Budget, thresholds: Thresholds) -> None:
    """Before an engine is started: raises `InvalidField` where nothing could be confirmed."""
    if budget.prompts < thresholds.prompts_min:
        raise InvalidField(
            "prompts",
            f"{budget.prompts} are too few to trust a blend by; allow at least {thresholds.prompts_min}",
        )


def prepare_bench(
    engine: LocalEngine,
    given: Sequence[Question] | None,
    budget: Budget,
    tell: Tell = lambda text: None,
) -> tuple[Bench, list[str]]:
    """What `calibrate` measures on, its chunks stored, and warnings: the given questions, or prompts of the
    bundled passages. Raises `InvalidField` for questions that the engine cannot be asked."""
    tokenizer = engine.tokenizer
    questions = given or passage_questions(
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
    bench.store_chunks(lambda done, total: tell(f"storing chunks, {done} of {total}"))
    return bench, warnings


def calibrate(
    bench: Bench,
    num_layers: int,
    binding: Binding,
    budget: Budget,
    thresholds: Thresholds,
    source: str,
    created: str,
    tell: Tell = lambda text: None,
) -> Calibration:
    """Measure and decide. `bench` has its chunks stored.

    Raises `InvalidField` for too few questions or prompts, and for a model whose full prefill answers none
    of them.
    """
    chosen = _sample_cases(len(bench.cases), budget, thresholds)
    screening, rest = chosen[: budget.screened], chosen[budget.screened :]
    tell("full prefill")
    bench.full(chosen)
    warnings = _full_prefill_is_right(bench, chosen)
    tell("noise floor")
    noise = bench.noise(screening)
    cases = [bench.cases[index] for index in chosen]
    candidates = grid.affordable(
        grid.selections(budget.selectors, budget.ratios, num_layers),
        grid.workload_of(cases, num_layers),
        budget.cost_max,
    )
    screened: dict[Selection, Scores] = {}
    for number, selection in enumerate(candidates, 1):
        tell(f"screening {number} of {len(candidates)}, {describe_selection(selection)}")
        screened[selection] = measure_selection(bench, selection, screening)
    entries = {selection: scores.entry for selection, scores in screened.items()}
    promising = _filter_promising(entries, noise, thresholds)
    entries |= _confirm_selections(bench, promising, screened, rest, noise, thresholds, tell)
    report = CalibrationReport.of(
        binding, created, source, budget.seed, noise, thresholds, list(entries.values())
    )
    return Calibration(report, warnings)


def _filter_promising(
    entries: dict[Selection, ReportEntry], noise: Noise, thresholds: Thresholds
) -> list[Selection]:
    """What passed on the few screening prompts, cheapest first."""
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
    tell: Tell,
) -> dict[Selection, ReportEntry]:
    """Entries on all prompts: of each selector cheapest first, until one passes."""
    confirmed: dict[Selection, ReportEntry] = {}
    passed: set[SelectorName] = set()
    tried: Counter[SelectorName] = Counter()
    for selection in promising:
        name = selection.selector
        if name in passed or tried[name] == CONFIRMATIONS_PER_SELECTOR_MAX:
            continue
        tell(f"confirming {describe_selection(selection)}")
        tried[name] += 1
        entry = screened[selection].joined(measure_selection(bench, selection, rest)).entry if rest else None
        confirmed[selection] = entry or screened[selection].entry
        if not shortfalls(confirmed[selection], noise, thresholds):
            passed.add(name)
    return confirmed


def _sample_cases(count: int, budget: Budget, thresholds: Thresholds) -> list[int]:
    """Indices of the cases to use, shuffled by the seed."""
    check_budget(budget, thresholds)
    if count < thresholds.prompts_min:
        raise InvalidField(
            "questions",
            f"{count} can be asked, but a calibration needs {thresholds.prompts_min}; give more of them",
        )
    order = list(range(count))
    random.Random(budget.seed).shuffle(order)
    return order[: budget.prompts]


def _full_prefill_is_right(bench: Bench, indices: Sequence[int]) -> list[str]:
    """Warnings about accuracy. Raises `InvalidField` where full prefill is never right."""
    full = bench.full(indices)
    itself = Scores(Selection(1.0), [bench.cases[index] for index in indices], full, full).entry
    if itself.accuracy_full is None:
        return ["no question has an answer: only agreement with full prefill is measured, not accuracy"]
    if itself.accuracy_full == 0:
        raise InvalidField(
            "questions",
            f"full prefill answers none of {len(indices)} right, so no loss could be seen; check that the "
            "answers belong to the questions and the form fits the model, or leave the answers out",
        )
    unanswered = sum(not bench.cases[index].question.answers for index in indices)
    warnings = []
    if unanswered:
        warnings.append(f"{unanswered} of {len(indices)} questions have no answer: accuracy is of the others")
    if itself.accuracy_full < ACCURACY_LOW:
        warnings.append(
            f"full prefill's own accuracy is {itself.accuracy_full:.2f}: losses hide where it is wrong; "
            "easier questions would show them"
        )
    return warnings


def passage_questions(
    count_tokens: Callable[[str], int], chunk_tokens: int, count: int, seed: int
) -> list[Question]:
    """Prompts of the bundled passages, for whoever has no questions: nobody knows their answers.

    Each is `PASSAGE_CHUNKS` passages in an order of its own, each cut to about `chunk_tokens`.
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
