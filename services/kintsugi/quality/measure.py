"""Runs prompts through an engine, with full prefill and with each configuration, and compares the answers.

The engine is the same vLLM that serves. Chunks are stored once; every method starts with an empty prefix
cache, and many prompts share steps. Full prefill's greedy answer is the reference. A blend is compared with
it token by token and forced to continue like it (teacher forcing), so that one early difference does not
count again at every later token. The token that ends an answer is not compared, because both almost always
agree on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from kintsugi.core.accounting import Outcome
from kintsugi.core.errors import InvalidField, NotBlendable, ResourceExhausted
from kintsugi.core.evidence import Deviation, Tally
from kintsugi.core.plan import PromptChunk, RagPrompt, Selection, make_trial
from kintsugi.core.request import KintsugiParams
from kintsugi.discovery.segments import TOKENS_MIN, cut_chunks
from kintsugi.discovery.token_classes import TokenClasses
from kintsugi.engine.local import Generation, LocalEngine, Prompt
from kintsugi.models.prompt_form import PromptForm
from kintsugi.quality import metrics
from kintsugi.quality.metrics import TOP_LOGPROBS
from kintsugi.quality.questions import ROUGE_DATASETS, Question

SAVE_BATCH = 256
CONTINUATION_TOKENS = 8
"""Number of leading tokens of full prefill's answer to compare if no answer is given."""
ANSWER_TOKENS_MAX = 120
ANSWER_SLACK_TOKENS = 8
NAMESPACE = "quality"

Notify = Callable[[str], None]
"""Receives a line of text about the current step."""
Score = Callable[[str, Sequence[str]], float]
"""Scores a text against the right answers."""


@dataclass(frozen=True)
class Case:
    """A question and its tokenised prompt."""

    question: Question
    prompt: RagPrompt


@dataclass(frozen=True)
class CaseAnswer:
    """The answer of one method to one case."""

    text: str
    token_ids: tuple[int, ...]
    steps: tuple[dict[int, float], ...]
    """Highest logprobs at each position, by token id. For full prefill, the token that ends the answer is
    left out unless it is the only one."""
    cost: float
    ttft_s: float


def answer_tokens(questions: Sequence[Question], tokenizer: Any) -> int:
    """Return the number of tokens to generate: the length of the longest answer, plus some slack unless all
    answers are a single token."""
    lengths = [
        len(tokenizer(f" {a}", add_special_tokens=False).input_ids) for q in questions for a in q.answers
    ]
    if not lengths:
        return CONTINUATION_TOKENS
    longest = min(max(lengths), ANSWER_TOKENS_MAX)
    return longest if longest == 1 else longest + ANSWER_SLACK_TOKENS


def tokenize_questions(
    questions: Sequence[Question],
    form: PromptForm,
    positions_max: int,
    max_tokens: int,
    classes: TokenClasses | None = None,
) -> tuple[list[Case], list[str]]:
    """Write the questions in the form. Return the cases that fit the model, and a warning about each question
    that does not fit.

    Raises `InvalidField` if none fits. Chunks are tokenised one by one, as they are stored. With ``classes``,
    the token classes of the model, they are then cut into segments as discovery cuts them. This does not
    change the prompts' tokens.
    """
    tokenize = lru_cache(maxsize=None)(form.tokenize)  # many questions share chunks
    cases, warnings = [], []
    for number, question in enumerate(questions, 1):
        chunks = [PromptChunk("", tokenize(chunk)) for chunk in question.chunks]
        prompt = form.build([c for c in chunks if c.token_ids], question.tail, question.bare)
        nothing = "its chunks have no tokens"
        if classes is not None and prompt.chunks:
            prompt = cut_chunks(prompt, classes)
            nothing = f"none of its chunks holds a segment, which takes {TOKENS_MIN} tokens"
        length = len(prompt.token_ids) + max_tokens
        if length > positions_max:
            warnings.append(
                f"question {number} is left out: it has {length} tokens with its answer, but the model "
                f"reads only {positions_max}; use fewer or shorter chunks"
            )
        elif not prompt.chunks:
            warnings.append(f"question {number} is left out: {nothing}")
        else:
            if any(len(chunk.token_ids) == 1 for chunk in prompt.chunks):
                warnings.append(f"question {number} has a chunk of one token, which is always recomputed")
            cases.append(Case(question, prompt))
    if not cases:
        raise InvalidField("questions", f"none fits the model; {warnings[0]}")
    return cases, warnings


class Bench:
    """Runs cases on one engine, with their chunks stored. Not thread-safe."""

    def __init__(self, engine: LocalEngine, cases: Sequence[Case], max_tokens: int, batch: int = 64) -> None:
        self.engine = engine
        self.cases = list(cases)
        self.max_tokens = max_tokens
        self.batch = batch
        self._full: dict[int, CaseAnswer] = {}
        """Reference answers by case index."""
        self._stored: set[tuple[int, ...]] = set()

    def store_chunks(self, indices: Sequence[int] | None = None) -> None:
        """Prefill and store every distinct chunk of the cases `indices`; None: of all cases. Raises
        `NotBlendable` if one cannot be stored."""
        prefix = self.cases[0].prompt.prefix
        cases = self.cases if indices is None else [self.cases[index] for index in indices]
        wanted = dict.fromkeys(chunk.token_ids for case in cases for chunk in case.prompt.chunks)
        distinct = [token_ids for token_ids in wanted if token_ids not in self._stored]
        for start in range(0, len(distinct), SAVE_BATCH):
            for saved in self.engine.save(prefix, distinct[start : start + SAVE_BATCH], NAMESPACE):
                if not saved.is_saved:
                    _raise_declined(saved, "no_answer: the engine runs without our connector")
        self._stored.update(distinct)

    def full(self, indices: Sequence[int]) -> list[CaseAnswer]:
        """Return full prefill's answers to some cases. Each is computed once."""
        missing = [index for index in indices if index not in self._full]
        for index, generation in self._run(missing, None, {}):
            answer = _make_answer(generation, generation)
            if generation.finish_reason == "stop" and len(answer.steps) > 1:
                answer = dataclasses.replace(answer, steps=answer.steps[:-1])
            self._full[index] = answer
        return [self._full[index] for index in indices]

    def blend(self, selection: Selection, indices: Sequence[int], is_free: bool = True) -> list[CaseAnswer]:
        """Return blended answers to some cases, with distributions along full prefill's answers. Unless
        ``is_free``, the answers are full prefill's own, which takes half of the time."""
        full = dict(zip(indices, self.full(indices), strict=True))
        if not is_free:
            along = {index: answer.token_ids[: len(answer.steps)] for index, answer in full.items()}
            return [_make_answer(one, one) for _, one in self._run(indices, selection, along)]
        free = dict(self._run(indices, selection, {}))
        # A free answer equals a forced one up to the first different token.
        parted = [index for index in indices if tuple(free[index].token_ids) != full[index].token_ids]
        parted = [index for index in parted if len(full[index].steps) > 1]
        forced_ids = {index: full[index].token_ids[: len(full[index].steps)] for index in parted}
        forced = dict(self._run(parted, selection, forced_ids))
        return [_make_answer(free[index], forced.get(index, free[index])) for index in indices]

    def _run(
        self, indices: Sequence[int], selection: Selection | None, forced: dict[int, tuple[int, ...]]
    ) -> list[tuple[int, Generation]]:
        done: list[tuple[int, Generation]] = []
        for start in range(0, len(indices), self.batch):
            some = indices[start : start + self.batch]
            prompts = [self.prompt(index, selection, forced.get(index)) for index in some]
            self.engine.reset_prefix_cache()
            generations = self.engine.generate(prompts)
            if selection is not None:
                for generation in generations:
                    _check_blended(generation)
            done += zip(some, generations, strict=True)
        return done

    def prompt(
        self, index: int, selection: Selection | None, forced: tuple[int, ...] | None = None
    ) -> Prompt:
        """Return the request for one case; `selection` None means full prefill."""
        prompt = self.cases[index].prompt
        params = None
        if selection is not None:
            params = KintsugiParams(NAMESPACE, spans=prompt.spans, trial=make_trial(selection))
        length = self.max_tokens if forced is None else len(forced)
        return Prompt(prompt.token_ids, params, length, top_logprobs=TOP_LOGPROBS, forced=forced)


def _check_blended(generation: Generation) -> None:
    """Raise `NotBlendable` if the prompt was not blended, `ResourceExhausted` if a chunk was missing."""
    accounting = generation.accounting or {}
    if accounting.get("outcome") != Outcome.BLENDED.value:
        outcome = accounting.get("outcome") or "no_answer"
        _raise_declined(generation, f"{outcome}: a prompt was not blended, so nothing was measured")
    if accounting.get("chunks_missed"):
        raise ResourceExhausted(
            "the chunk store has evicted chunks that were just stored, so blends would recompute them; use "
            "fewer questions, or a larger store: kintsugi store serve --ssd FOLDER:SIZE"
        )


def _raise_declined(generation: Generation, otherwise: str) -> NoReturn:
    """Raise `NotBlendable` with the reason that the engine states, or else with ``otherwise``."""
    label, _, detail = str((generation.accounting or {}).get("reason") or otherwise).partition(": ")
    raise NotBlendable(label, detail)


def _make_answer(free: Generation, forced: Generation) -> CaseAnswer:
    cost = 1.0 if free.accounting is None else float(free.accounting.get("cost", 1.0))
    return CaseAnswer(free.text, tuple(free.token_ids), tuple(forced.top_logprobs), cost, free.ttft_s)


@dataclass(frozen=True)
class PromptScore:
    """Comparison of one configuration with full prefill on one prompt."""

    cost: float
    divergences: tuple[float, ...]
    """KL at each position of full prefill's answer."""
    disagreements: tuple[bool, ...]
    """Whether the most likely token differs there."""
    changes: tuple[bool, ...]
    """Whether it differs by more than a near tie."""
    right: tuple[float, float] | None = None
    """Exact match of the blend and of full prefill; None without answers."""

    @property
    def deviation(self) -> Deviation:
        return Deviation.of(self.divergences, self.changes)

    def tally(self, chunk_tokens: Sequence[int]) -> Tally:
        """The evidence of this pair, of a prompt with chunks of these lengths."""
        wrong = None if self.right is None else round(self.right[1] - self.right[0])
        return Tally.of(self.deviation, self.cost, chunk_tokens, wrong)


def choose_score(question: Question) -> Score:
    """Rouge-L for questions that ask for a summary, F1 for others."""
    return metrics.rouge_l if question.task in ROUGE_DATASETS else metrics.f1


@dataclass(frozen=True)
class Scores:
    """One configuration compared with full prefill: one value per case, in the order of the cases."""

    selection: Selection
    cases: Sequence[Case]
    full: Sequence[CaseAnswer]
    blend: Sequence[CaseAnswer]

    @property
    def cost(self) -> float:
        return metrics.mean([answer.cost for answer in self.blend])

    def score_cases(self, score: Score, of_blend: bool = True) -> list[float]:
        """Score each case that has answers."""
        answers = self.blend if of_blend else self.full
        return [
            score(answer.text, case.question.answers)
            for case, answer in zip(self.cases, answers, strict=True)
            if case.question.answers
        ]

    @property
    def by_prompt(self) -> list[PromptScore]:
        """One score per case."""
        found = []
        for case, full, blend in zip(self.cases, self.full, self.blend, strict=True):
            right = None
            if answers := case.question.answers:
                right = (metrics.exact_match(blend.text, answers), metrics.exact_match(full.text, answers))
            pairs = list(zip(full.steps, blend.steps, strict=False))
            found.append(
                PromptScore(
                    blend.cost,
                    tuple(metrics.kl_divergence(*pair) for pair in pairs),
                    tuple(not metrics.same_top(*pair) for pair in pairs),
                    tuple(not metrics.same_top(*pair, metrics.TIE) for pair in pairs),
                    right,
                )
            )
        return found

    @property
    def kl_mean(self) -> float:
        """Mean KL over all positions, in nats."""
        return metrics.mean(self._divergences)

    @property
    def kl_p99(self) -> float:
        """99th percentile of the KL over all positions, in nats."""
        return metrics.percentile(self._divergences, 0.99)

    @property
    def top1_agreement(self) -> float:
        """Share of positions with the same most likely token."""
        return 1 - metrics.mean([value for one in self.by_prompt for value in one.disagreements])

    @property
    def _divergences(self) -> list[float]:
        return [value for one in self.by_prompt for value in one.divergences]

    def of_task(self, task: str) -> Scores:
        """The scores of one task's cases."""
        keep = [index for index, case in enumerate(self.cases) if case.question.task == task]
        return dataclasses.replace(
            self,
            cases=[self.cases[index] for index in keep],
            full=[self.full[index] for index in keep],
            blend=[self.blend[index] for index in keep],
        )


def measure_selection(
    bench: Bench, selection: Selection, indices: Sequence[int], is_free: bool = True
) -> Scores:
    """Run some cases with a configuration and compare the answers with those of full prefill. ``is_free``: as
    in `Bench.blend`."""
    blend = bench.blend(selection, indices, is_free)
    return Scores(selection, [bench.cases[index] for index in indices], bench.full(indices), blend)
