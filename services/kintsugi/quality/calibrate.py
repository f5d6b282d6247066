"""Calibration: measures configurations on a file of questions, or on bundled passages, before any traffic.

It is one more source of the evidence that engines collect on served prompts (`quality.stream`), with the same
losses, tests and report. Exact match is tested, too, if the questions have answers. Configurations are
measured from the safest to the cheapest, some prompts at a time, until each has passed or is beyond the
limit, or the time is over. The time limit determines how many configurations are measured, never what passes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import blake3

from kintsugi.core.errors import InvalidField
from kintsugi.core.evidence import Quality
from kintsugi.core.report import FILE, Cell, Report, describe_selection
from kintsugi.core.spaces import token_bytes
from kintsugi.discovery.token_classes import TokenClasses
from kintsugi.engine.local import LocalEngine
from kintsugi.models.prompt_form import PromptForm
from kintsugi.quality import metrics
from kintsugi.quality.measure import (
    Bench,
    CaseAnswer,
    Notify,
    answer_tokens,
    choose_score,
    measure_selection,
    tokenize_questions,
)
from kintsugi.quality.questions import INSTRUCTION, Question, make_passage_questions, shape_segments
from kintsugi.quality.reports import ReportKeeper
from kintsugi.quality.stream import list_undecided

ANSWER_TOKENS_MIN = 32
"""Minimum number of tokens of full prefill's answer that are compared, unless it ends earlier."""
BATCH = 16
"""Number of prompts that are measured together."""
TRIED_TOGETHER = 2
"""Number of configurations that each prompt of a batch is measured with."""
FORM_PROMPTS = 32
PROMPTS_MIN = 40
"""Minimum number of questions: fewer cannot pass anything."""
RIGHT_MIN = 0.3
"""Minimum mean score of full prefill, if answers are given."""
ENDED_MAX = 0.5
"""Largest share of prompts whose answer ends with its first token."""
SHOWN_CHARACTERS = 60
PASSAGE_PROMPTS = 400
"""Maximum number of prompts that are made of the bundled passages."""
PASSAGE_TOKENS = 192
"""Tokens of each bundled passage in a prompt."""
PASSAGE_COUNT = (4,)
"""Number of bundled passages in a prompt."""
QUESTION_TOKENS = 128
"""Tokens of a prompt that are reserved for instruction, question, the form's foot and the answer."""
MINUTES = 10.0


def prepare_bench(
    engine: LocalEngine,
    form: PromptForm,
    given: Sequence[Question] | None,
    segments: bool = False,
) -> tuple[Bench, list[str]]:
    """Write the given questions, or questions about the bundled passages, in the engine's form. Return the
    bench for `calibrate`, and warnings.

    With ``segments``, the chunks are cut as discovery cuts them, and prompts hold bundled passages of varying
    number and length. Raises `InvalidField` if too few questions fit the model.
    """

    def count_tokens(text: str) -> int:
        return len(form.tokenize(text))

    if given:
        questions = list(given)
    elif segments:
        shapes = shape_segments(engine.max_model_len - len(form.head) - QUESTION_TOKENS)
        questions = make_passage_questions(count_tokens, shapes, PASSAGE_PROMPTS, 0, (INSTRUCTION,))
    else:
        tokens = min(PASSAGE_TOKENS, engine.max_model_len // 6)
        questions = make_passage_questions(count_tokens, {tokens: PASSAGE_COUNT}, PASSAGE_PROMPTS, 0)
    classes = TokenClasses.of_tokenizer(form.tokenizer) if segments else None
    max_tokens = max(ANSWER_TOKENS_MIN, answer_tokens(questions, form.tokenizer))
    cases, warnings = tokenize_questions(questions, form, engine.max_model_len, max_tokens, classes)
    if len(cases) < PROMPTS_MIN:
        raise InvalidField(
            "questions", f"{len(cases)} fit the model, but a calibration needs {PROMPTS_MIN}; provide more"
        )
    return Bench(engine, cases, max_tokens, BATCH), warnings


def identify_evidence(bench: Bench) -> str:
    """Return the writer id of the evidence from these prompts. A repeated measurement replaces the evidence,
    because equal prompts are no further evidence."""
    prompts = (token_bytes(case.prompt.token_ids) for case in bench.cases)
    return f"file-{blake3.blake3(b''.join(prompts)).hexdigest()[:32]}"


def calibrate(
    bench: Bench,
    keeper: ReportKeeper,
    quality: Quality,
    form: str,
    segments: bool = False,
    minutes: float | None = MINUTES,
    seed: int = 0,
    notify: Notify = lambda text: None,
    clock_s: Callable[[], float] = time.monotonic,
    keep: Callable[[Report], None] = lambda report: None,
) -> None:
    """Measure configurations, and add the evidence to the keeper's report.

    ``minutes`` None: until all questions are used. ``form`` names the prompt form. ``keep`` gets
    the report after every `BATCH` prompts. Raises `InvalidField` for
    a form in which full prefill is rarely right or mostly answers nothing.
    """
    started_s = clock_s()
    order = list(range(len(bench.cases)))
    random.Random(seed).shuffle(order)
    cells = [Cell.of(segments, len(case.prompt.token_ids)) for case in bench.cases]
    notify(f"full prefill of {min(FORM_PROMPTS, len(order))} prompts")
    check_answers(form, bench, order[:FORM_PROMPTS])
    has_answers = any(case.question.answers for case in bench.cases)
    for start in range(0, len(order), BATCH):
        tried = {
            cell: list_undecided(keeper.report, cell, FILE, quality, TRIED_TOGETHER) for cell in set(cells)
        }
        some = [index for index in order[start : start + BATCH] if tried[cells[index]]]
        if minutes is not None and clock_s() - started_s > 60 * minutes:
            break
        if not some:
            continue
        bench.store_chunks(some)
        for selection in keeper.report.ladder:
            asking = [index for index in some if selection in tried[cells[index]]]
            if not asking:
                continue
            done = f"{start + len(some)} of at most {len(order)} prompts"
            notify(f"{describe_selection(selection)}, {done}{_describe_passed(keeper, cells, quality)}")
            scores = measure_selection(bench, selection, asking, is_free=has_answers)
            for index, score in zip(asking, scores.by_prompt, strict=True):
                lengths = [len(chunk.token_ids) for chunk in bench.cases[index].prompt.chunks]
                keeper.record(cells[index], FILE, selection, score.tally(lengths))
        keep(keeper.report)


def _describe_passed(keeper: ReportKeeper, cells: Sequence[Cell], quality: Quality) -> str:
    passed = [one for cell in set(cells) for one in keeper.report.standing(cell, FILE, quality).passed]
    return f"; {describe_selection(min(passed, key=lambda one: one.ratio))} passes" if passed else ""


def check_answers(form: str, bench: Bench, indices: Sequence[int]) -> None:
    """Raise `InvalidField` if most of full prefill's answers are empty or few are right: no loss could be
    seen on them."""
    questions = [bench.cases[index].question for index in indices]
    answers: list[CaseAnswer] = bench.full(indices)
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
        _, *example = min(scored)
        # Not `textwrap.shorten`, which cuts between words: a Chinese text is one word.
        text, expected = (one[:SHOWN_CHARACTERS] + "…" * (len(one) > SHOWN_CHARACTERS) for one in example)
        raise InvalidField(
            "form",
            f"in the prompt form {form!r} full prefill is rarely right: it scores {right:.2f} in "
            f"{len(scored)} prompts, and at least {RIGHT_MIN} is needed to see a loss; it answered "
            f"{text!r} where {expected!r} was expected; use the form that the model was "
            "trained for, easier questions, or leave the answers out",
        )
