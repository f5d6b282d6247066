"""Calibration: finds configurations of a model whose losses are within the thresholds, and reports bounds.

1. Full prefill answers some prompts. A form in which it is rarely right is refused (`check_answers`).
2. The noise floor: full prefill is compared with itself.
3. A race over configurations (`quality.racing`): screening on some prompts, confirmation on others.
4. The report: confidence bounds, and the lengths of the prompts on which they were measured.

This module runs prompts for the race and writes the report. The result depends only on seed, model and
questions, unless `Budget.minutes` ends the search.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from kintsugi.core.baseline import POSITIONS_MAX, PROMPTS_MAX
from kintsugi.core.errors import InvalidField
from kintsugi.core.plan import Selection
from kintsugi.core.prompt import Domain, LengthRange
from kintsugi.core.report import (
    REPORT_BYTES_MAX,
    Binding,
    CalibrationReport,
    LossBound,
    Quantity,
    ReportEntry,
    Search,
    Thresholds,
    describe_selection,
)
from kintsugi.discovery.token_classes import TokenClasses
from kintsugi.engine.local import LocalEngine
from kintsugi.models.prompt_form import PromptForm
from kintsugi.quality import grid, metrics
from kintsugi.quality.bounds import prompts_needed
from kintsugi.quality.measure import (
    Bench,
    Case,
    CaseAnswer,
    Notify,
    PromptScore,
    answer_tokens,
    choose_score,
    make_baseline,
    measure_selection,
    summarize,
    tokenize_questions,
)
from kintsugi.quality.questions import Question, make_passage_questions, make_segment_questions
from kintsugi.quality.racing import FINALISTS_MAX, FINALISTS_MIN, SCREENING_ROUNDS, Ask, Race, RacePrompt

AGREEMENT = frozenset({Quantity.KL, Quantity.DISAGREEMENT})
"""The quantities that can be measured without given answers."""
ANSWER_TOKENS_MIN = 32
"""Minimum number of tokens of full prefill's answer that are compared, unless it ends earlier."""
FORM_PROMPTS = 32
NOISE_PROMPTS = 16
RIGHT_MIN = 0.3
"""Minimum mean score of full prefill, if answers are given."""
ENDED_MAX = 0.5
"""Largest share of prompts whose answer ends with its first token."""
SHOWN_CHARACTERS = 60
ACCURACY_LOW = 0.5
"""A lower score of full prefill causes a warning."""
LENGTHS_APART = 1.5
"""Prompts or answers are judged in two halves, by length, if the longest has at least this many times the
tokens of the shortest."""
DOMAIN_TAIL = 0.02
"""Share of the shortest and of the longest prompts that does not widen the domain, because single prompts
show nothing."""
PASSAGE_PROMPTS = 400
"""Maximum number of prompts that are made of the bundled passages."""
PASSAGE_TOKENS = 192
"""Tokens of each bundled passage in a prompt: enough for attention across chunks, but few enough for many
measurements."""
QUESTION_TOKENS = 128
"""Tokens of a prompt that are reserved for instruction, question, the form's foot and the answer."""
_WIDEST = 0.123456
"""A measurement with the maximum number of digits in a report."""
_POSITION_BYTES = 16
"""Bytes of a report that are reserved for one position of its baseline."""
_OTHER_BYTES = 1 << 14
"""Bytes that are reserved for all other fields."""
PROMPTS = 2000
MINUTES = 12.0
SCREENING_TIME_SHARE = 0.25
"""Share of the minutes that screening may take, by an estimate made before it starts."""
CONFIRMATION_TIME_SHARE = 0.6
"""Share of the minutes that is left for the confirmation."""
DECIDING_PROMPTS = 200
"""Approximate number of prompts that decide about a configuration whose losses are half of the thresholds."""


@dataclass(frozen=True)
class Budget:
    """Limits of a calibration, and the configurations to try."""

    prompts: int = PROMPTS
    """Maximum number of prompts. The search stops earlier when it is decided."""
    minutes: float | None = MINUTES
    """Maximum duration of the search; configurations that are undecided then do not pass. None: no limit."""
    seed: int = 0
    ratios: Sequence[float] = grid.RATIOS
    selectors: Sequence[str] = field(default_factory=grid.candidate_names)
    cost_max: float = grid.COST_MAX


@dataclass(frozen=True)
class Calibration:
    """A report, and warnings for the user."""

    report: CalibrationReport
    warnings: list[str]


def check_budget(budget: Budget, thresholds: Thresholds) -> None:
    """Raise `InvalidField` if the budget is too small to confirm anything. Call this before an engine
    starts."""
    if budget.prompts < thresholds.prompts_min:
        raise InvalidField(
            "prompts",
            f"{budget.prompts} prompts are too few; allow at least {thresholds.prompts_min}",
        )
    if budget.minutes is not None and not budget.minutes > 0:
        raise InvalidField("minutes", f"{budget.minutes:g} must be above 0")


def prepare_bench(
    engine: LocalEngine,
    form: PromptForm,
    given: Sequence[Question] | None,
    budget: Budget,
    segments: bool = False,
) -> tuple[Bench, list[str]]:
    """Write the given questions, or questions about the bundled passages, in the engine's form. Return the
    bench for `calibrate`, and warnings.

    With ``segments``, the chunks are cut as discovery cuts them, and prompts hold bundled passages of varying
    number and length. Raises `InvalidField` if no question fits the model.
    """

    def count_tokens(text: str) -> int:
        return len(form.tokenize(text))

    prompts = min(budget.prompts, PASSAGE_PROMPTS)
    if given:
        questions = list(given)
    elif segments:
        room = engine.max_model_len - len(form.head) - QUESTION_TOKENS
        questions = make_segment_questions(count_tokens, room, prompts, budget.seed)
    else:
        tokens = min(PASSAGE_TOKENS, engine.max_model_len // 6)
        questions = make_passage_questions(count_tokens, tokens, prompts, budget.seed)
    classes = TokenClasses.of_tokenizer(form.tokenizer) if segments else None
    max_tokens = max(ANSWER_TOKENS_MIN, answer_tokens(questions, form.tokenizer))
    cases, warnings = tokenize_questions(questions, form, engine.max_model_len, max_tokens, classes)
    return Bench(engine, cases, max_tokens), warnings


def calibrate(
    bench: Bench,
    num_layers: int,
    binding: Binding,
    budget: Budget,
    thresholds: Thresholds,
    source: str,
    created: str,
    form: str,
    notify: Notify = lambda text: None,
    clock_s: Callable[[], float] = time.monotonic,
) -> Calibration:
    """Measure configurations and return a report.

    `form` names the prompt form, for the report. Raises `InvalidField` for too few questions, and for a
    form in which full prefill is rarely right or mostly answers nothing.
    """
    started_s = clock_s()
    order = sample_cases(len(bench.cases), budget, thresholds)
    warnings = check_full_prefill(bench, order[:FORM_PROMPTS], form, notify)
    notify("noise floor")
    bench.full(order[:NOISE_PROMPTS])
    noise_s = clock_s()
    noise = bench.noise(order[:NOISE_PROMPTS])
    affordable = _affordable_answers(budget, (clock_s() - noise_s) / NOISE_PROMPTS)
    cases = [bench.cases[index] for index in order]
    quantities, unjudged = _judged_quantities(cases, thresholds)
    tried = grid.affordable(
        grid.candidates(budget.selectors, budget.ratios, num_layers),
        grid.workload_of(cases, num_layers),
        budget.cost_max,
    )
    tried = grid.thin(tried, affordable / (2 * SCREENING_ROUNDS[0][0]))
    finalists_max = count_affordable_finalists(affordable)
    race = Race(tried, race_prompts(cases, quantities), noise, thresholds, affordable, finalists_max)
    _check_report_size(race, tried, min(len(cases), PROMPTS_MAX) * min(bench.max_tokens, POSITIONS_MAX))
    warnings += unjudged + _warn_of_few(race, cases, quantities, thresholds)
    runner = _RaceRunner(bench, order, race, quantities, notify)
    deadline_s = None if budget.minutes is None else started_s + 60 * budget.minutes
    runner.run(lambda: deadline_s is None or clock_s() < deadline_s)
    minutes = (clock_s() - started_s) / 60
    report = CalibrationReport.of(
        binding,
        created,
        source,
        budget.seed,
        noise,
        thresholds,
        runner.domain(form),
        runner.search(len(tried), minutes),
        runner.entries(),
    )
    if report.choice.selection is not None:
        report = replace(report, baseline=make_baseline(runner.scores[report.choice.selection]))
    return Calibration(report, warnings)


def _affordable_answers(budget: Budget, full_s: float) -> float:
    """Return the number of blended answers for which screening has time, if each takes as long as an answer
    of full prefill: a blend is cheaper, but may run twice, freely and along full prefill's answer."""
    if budget.minutes is None:
        return math.inf
    return SCREENING_TIME_SHARE * 60 * budget.minutes / max(full_s, 1e-6)


def count_affordable_finalists(screening_max: float) -> int:
    """Return the number of finalists that can be decided in the time after a screening of `screening_max`
    answers. Every prompt is also prefilled in full."""
    if math.isinf(screening_max):
        return FINALISTS_MAX
    answers = screening_max * CONFIRMATION_TIME_SHARE / SCREENING_TIME_SHARE
    return max(FINALISTS_MIN, min(FINALISTS_MAX, int(answers / DECIDING_PROMPTS) - 1))


class _RaceRunner:
    """Runs the measurements that a race requests, and keeps the scores of every prompt."""

    def __init__(
        self, bench: Bench, order: Sequence[int], race: Race, quantities: frozenset[Quantity], notify: Notify
    ) -> None:
        self.race = race
        self.scores: dict[Selection, list[PromptScore]] = {}
        """Scores of each configuration in its last phase, without prompts that were chosen for single
        tasks."""
        self.confirmed: list[int] = []
        """Indices of the cases that the confirmation used."""
        self.screened: list[int] = []
        """Indices of the cases that the screening used."""
        self._bench = bench
        self._order = order
        self._quantities = quantities
        self._notify = notify

    def run(self, has_time: Callable[[], bool]) -> None:
        """Run rounds until the race is over or `has_time` returns False. An unfinished round does not
        count."""
        while (asked := self.race.ask()) is not None:
            indices = [self._order[number] for number in asked.prompts]
            measured: list[list[PromptScore]] = []
            for number, selection in enumerate(asked.selections, 1):
                if not has_time():
                    return
                if number == 1:
                    self._bench.store_chunks(indices)
                    self._bench.full(indices)
                self._notify(self._progress(asked, number, len(indices)))
                scores = measure_selection(self._bench, selection, indices)
                measured.append(scores.by_prompt)
            self._keep(asked, indices, measured)
            self.race.tell(asked, [[one.losses.only(self._quantities) for one in mine] for mine in measured])

    def _keep(self, asked: Ask, indices: Sequence[int], measured: Sequence[list[PromptScore]]) -> None:
        if asked.is_confirmation:
            if not self.confirmed:
                self.scores = {s: v for s, v in self.scores.items() if s not in asked.selections}
            self.confirmed += indices
        else:
            self.screened += indices
        if asked.tasks is None:
            for selection, scores in zip(asked.selections, measured, strict=True):
                self.scores.setdefault(selection, []).extend(scores)

    def _progress(self, asked: Ask, number: int, prompts: int) -> str:
        now = describe_selection(asked.selections[number - 1])
        if not asked.is_confirmation:
            return f"screening {number} of {len(asked.selections)} on {len(asked.prompts)} prompts: {now}"
        passed = [one.selection for one in self.race.finalists if one.error is not None]
        leader = f"; {describe_selection(passed[-1])} passes" if passed else ""
        tasks = sorted(asked.tasks or ())
        some = f", now of {tasks[0] if len(tasks) == 1 else f'{len(tasks)} tasks'}" if tasks else ""
        return f"confirming {now} on {len(self.confirmed) + prompts} prompts{some}{leader}"

    def entries(self) -> list[ReportEntry]:
        """Return an entry for each measured configuration: first the finalists, then those that were only
        screened."""
        found = []
        for place, finalist in enumerate(self.race.finalists):
            if not finalist.tests:
                continue
            found.append(
                replace(
                    summarize(finalist.selection, self.scores[finalist.selection]),
                    place=place,
                    error=self.race.error_of(place),
                    bounds=self.race.bounds_of(place),
                    prompts_missing=self.race.prompts_missing(place),
                )
            )
        confirmed = {entry.selection for entry in found}
        return found + [
            summarize(selection, scores)
            for selection, scores in self.scores.items()
            if selection not in confirmed
        ]

    def domain(self, form: str) -> Domain:
        """Return the domain of the prompts that the confirmation used; without a confirmation, of the
        screened prompts, or else of the first prompts."""
        used = self.confirmed or self.screened or self._order[:FORM_PROMPTS]
        cases = [self._bench.cases[index] for index in used]
        chunks = [len(case.prompt.chunks) for case in cases]
        tokens = [sum(len(c.token_ids) for c in case.prompt.chunks) for case in cases]
        answers = [len(answer.steps) for answer in self._bench.full(used)]
        return Domain(
            form,
            _range([len(case.prompt.token_ids) for case in cases]),
            _range(chunks),
            _range([round(total / count) for total, count in zip(tokens, chunks, strict=True)]),
            _range(answers),
        )

    def search(self, candidates: int, minutes: float) -> Search:
        missing = [self.race.prompts_missing(place) for place in range(len(self.race.finalists))]
        known = [count for count in missing if count]
        more = None
        if known and self.confirmed:
            more = round(minutes * min(known) / len(self.confirmed), 1)
        confirmed = sum(bool(one.tests) for one in self.race.finalists)
        return Search(candidates, confirmed, round(minutes, 2), more)


def _range(lengths: Sequence[int]) -> LengthRange:
    """Return the range from the shortest to the longest, without the tails."""
    return LengthRange(
        int(metrics.percentile(lengths, DOMAIN_TAIL)), int(metrics.percentile(lengths, 1 - DOMAIN_TAIL))
    )


def race_prompts(cases: Sequence[Case], quantities: frozenset[Quantity]) -> list[RacePrompt]:
    """Return the strata of each prompt (its task, and the half of the prompts' and the answers' lengths that
    it belongs to), and the quantities that it can measure: without answers only agreement."""
    tasks = {case.question.task for case in cases}
    by_prompt = _halves("prompts", [len(case.prompt.token_ids) for case in cases])
    by_answer = _halves("answers", [len(case.answer_ids) for case in cases])
    return [
        RacePrompt(
            f"task {case.question.task}" if len(tasks) > 1 else "",
            tuple(name for name in (*mine, *theirs) if name),
            quantities if case.question.answers else quantities & AGREEMENT,
        )
        for case, mine, theirs in zip(cases, by_prompt, by_answer, strict=True)
    ]


def _halves(what: str, lengths: Sequence[int]) -> list[tuple[str, ...]]:
    """Return the name of the half that each length belongs to; no name for a length of 0, or if the lengths
    are similar."""
    known = sorted(length for length in lengths if length)
    if not known or known[-1] < LENGTHS_APART * known[0]:
        return [()] * len(lengths)
    middle = known[(len(known) - 1) // 2]
    names = (f"{what} up to {middle} tokens", f"{what} over {middle} tokens")
    return [(names[length > middle],) if length else () for length in lengths]


def sample_cases(count: int, budget: Budget, thresholds: Thresholds) -> list[int]:
    """Return the indices of the cases to use, shuffled by the seed. Raises `InvalidField` for too few."""
    check_budget(budget, thresholds)
    if count < thresholds.prompts_min:
        raise InvalidField(
            "questions",
            f"{count} fit the model, but a calibration needs {thresholds.prompts_min}; provide more",
        )
    order = list(range(count))
    random.Random(budget.seed).shuffle(order)
    return order[: budget.prompts]


def _judged_quantities(
    cases: Sequence[Case], thresholds: Thresholds
) -> tuple[frozenset[Quantity], list[str]]:
    """Return the quantities that are judged, and warnings. Accuracy is judged only if enough questions have
    answers."""
    answered = sum(bool(case.question.answers) for case in cases)
    if answered >= thresholds.stratum_prompts_min or answered == len(cases):
        missing = len(cases) - answered
        warning = f"{missing} of {len(cases)} questions have no answer; accuracy covers only the others"
        return frozenset(Quantity), [warning] if missing else []
    few = (
        f"only {answered} of {len(cases)} questions have an answer"
        if answered
        else "no question has an answer"
    )
    return (
        AGREEMENT,
        [f"{few}, so only agreement with full prefill is judged, not accuracy"],
    )


def _warn_of_few(
    race: Race, cases: Sequence[Case], quantities: frozenset[Quantity], thresholds: Thresholds
) -> list[str]:
    """Return warnings about tasks that are too small to be judged, and if there are too few prompts for any
    configuration to pass."""
    warnings = []
    for name, count in sorted(Counter(case.question.task for case in cases).items()):
        if race.has_tasks and f"task {name}" not in race.judged:
            warnings.append(
                f"task {name} is not judged separately: it has {count} questions, and fewer than "
                f"{thresholds.stratum_prompts_min} are left for the confirmation"
            )
    error = 1 - thresholds.confidence
    left, needed = min(
        (
            (race.counts[quantity, ""], prompts_needed(thresholds.highest(quantity, "", race.noise), error))
            for quantity in quantities
        ),
        key=lambda found: found[0] - found[1],
    )
    if left < needed:
        what = "questions" if left == len(cases) - race.num_screening else "questions with answers"
        warnings.append(
            f"{left} {what} are left for the confirmation, but even a blend without any loss needs "
            f"{needed}; provide about {needed - left + 100} more"
        )
    return warnings


def check_full_prefill(bench: Bench, indices: Sequence[int], form: str, notify: Notify) -> list[str]:
    """Run full prefill on some prompts, and return what `check_answers` returns."""
    notify(f"storing the chunks of {len(indices)} prompts")
    bench.store_chunks(indices)
    notify(f"full prefill of {len(indices)} prompts")
    return check_answers(form, [bench.cases[index].question for index in indices], bench.full(indices))


def check_answers(form: str, questions: Sequence[Question], answers: Sequence[CaseAnswer]) -> list[str]:
    """Return warnings about the accuracy of full prefill.

    Raises `InvalidField` if most of its answers are empty or few are right: no loss could be seen on them.
    """
    ended = metrics.mean([len(answer.token_ids) == 1 and not answer.text.strip() for answer in answers])
    if ended > ENDED_MAX:
        raise InvalidField(
            "form",
            f"in the prompt form {form!r} full prefill answers nothing in {ended:.0%} of {len(answers)} "
            "prompts: its first token ends the text; use the form that the model was trained for (its chat "
            "template)",
        )
    scored = [
        (choose_score(question)(answer.text, question.answers), answer.text, question.answers[0])
        for question, answer in zip(questions, answers, strict=True)
        if question.answers
    ]
    right = metrics.mean([score for score, _, _ in scored]) if scored else 1.0
    if right < RIGHT_MIN:
        _, text, expected = min(scored)
        raise InvalidField(
            "form",
            f"in the prompt form {form!r} full prefill is rarely right: it scores {right:.2f} in "
            f"{len(scored)} prompts, and at least {RIGHT_MIN} is needed to see a loss; it answered "
            f"{_shorten(text)!r} where {_shorten(expected)!r} was expected; use the form that the model was "
            "trained for, easier questions, or leave the answers out",
        )
    if right < ACCURACY_LOW:
        return [
            f"full prefill itself scores {right:.2f}: where it is wrong, losses stay hidden; use easier "
            "questions"
        ]
    return []


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def _check_report_size(race: Race, tried: Sequence[Selection], positions: int) -> None:
    """Raise `InvalidField` if the report may be too large for a store: it has the bounds of each finalist in
    every stratum, and a baseline of `positions` positions. Call this before the search."""
    bounds = [
        LossBound(quantity, stratum, -_WIDEST, _WIDEST, len(race.counts))
        for stratum in ("", *race.judged)
        for quantity in Quantity
    ]
    rates = dict.fromkeys(("exact_match", "exact_match_full", "f1", "f1_full"), _WIDEST)
    screened = [
        ReportEntry(one, _WIDEST, _WIDEST, _WIDEST, _WIDEST, 1000, 100_000, **rates)  # type: ignore[arg-type]
        for one in tried
    ]
    finalists = [
        replace(one, place=0, error=_WIDEST, bounds=bounds, prompts_missing=1000)
        for one in screened[:FINALISTS_MAX]
    ]
    entries = [*screened, *finalists]
    num_bytes = len(json.dumps({"entries": [asdict(one) for one in entries]}, indent=1))
    room = REPORT_BYTES_MAX - _OTHER_BYTES - _POSITION_BYTES * positions
    if num_bytes > room:
        raise InvalidField(
            "questions",
            f"{len(race.judged)} kinds of questions would be judged separately, which takes about "
            f"{num_bytes} bytes of the report, but only {room} are available; use at most "
            f"{room * len(race.judged) // num_bytes} tasks, or give them shorter names",
        )
