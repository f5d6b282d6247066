"""Runs prompts through an engine, once with full prefill and once per configuration, and compares.

The engine is real vLLM, so what is measured is what serves. Chunks are stored once; every method starts with
an empty prefix cache, and many prompts share steps. Full prefill's greedy answer is the reference. A blend is
compared with it token by token and forced to continue like it (teacher forcing), so that one early difference
does not count again at every later token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kintsugi.core.accounting import Outcome
from kintsugi.core.baseline import Baseline
from kintsugi.core.errors import InvalidField, NotBlendable, ResourceExhausted
from kintsugi.core.plan import Selection
from kintsugi.core.prompt import PromptChunk, RagPrompt
from kintsugi.core.report import Noise, ReportEntry
from kintsugi.core.request import KintsugiParams
from kintsugi.engine.local import Generation, Prompt
from kintsugi.quality import metrics
from kintsugi.quality.questions import ROUGE_DATASETS, Question

TOP_LOGPROBS = 20
"""vLLM's default limit."""
SAVE_BATCH = 256
CONTINUATION_TOKENS = 8
"""Number of tokens to compare when no answer is known: the first tokens of full prefill's continuation."""
ANSWER_TOKENS_MAX = 120
ANSWER_SLACK_TOKENS = 8
NAMESPACE = "quality"

Notify = Callable[[str], None]
"""Receives a line about the current step."""
OnProgress = Callable[[int, int], None]
"""Receives the number of items done and their total."""


class MeasuredEngine(Protocol):
    """The part of `engine.local.LocalEngine` that measuring needs."""

    def generate(self, prompts: Sequence[Prompt]) -> list[Generation]: ...

    def save(
        self, prefix_token_ids: Sequence[int], chunks: Sequence[Sequence[int]], namespace: str
    ) -> list[Generation]: ...

    def plan_with(self, selection: Selection) -> None: ...

    def reset_prefix_cache(self) -> None: ...


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
    """Highest logprobs at each position of the reference answer, by token id."""
    cost: float
    ttft_s: float


def answer_tokens(questions: Sequence[Question], tokenizer: Any) -> int:
    """Number of tokens to generate: as many as the longest answer has, plus some slack unless answers are a
    single token."""
    lengths = [
        len(tokenizer(f" {a}", add_special_tokens=False).input_ids) for q in questions for a in q.answers
    ]
    if not lengths:
        return CONTINUATION_TOKENS
    longest = min(max(lengths), ANSWER_TOKENS_MAX)
    return longest if longest == 1 else longest + ANSWER_SLACK_TOKENS


def tokenize_questions(
    questions: Sequence[Question],
    tokenizer: Any,
    prefix: tuple[int, ...],
    positions_max: int,
    max_tokens: int,
) -> tuple[list[Case], list[str]]:
    """Tokenise the questions. Returns the cases that fit the model, and a warning about each that does not.

    Raises `InvalidField` if none fits. Chunks are tokenised one by one, as they are stored.
    """
    ids: dict[str, tuple[int, ...]] = {}

    def encode_once(text: str) -> tuple[int, ...]:
        if text not in ids:
            ids[text] = tuple(tokenizer(text, add_special_tokens=False).input_ids)
        return ids[text]

    cases, warnings = [], []
    for number, question in enumerate(questions, 1):
        chunks = tuple(PromptChunk("", encode_once(chunk)) for chunk in question.chunks)
        prompt = RagPrompt(prefix, tuple(c for c in chunks if c.token_ids), encode_once(question.tail))
        length = len(prompt.token_ids) + max_tokens
        if length > positions_max:
            warnings.append(
                f"question {number} is left out: it has {length} tokens with its answer, but the model "
                f"reads only {positions_max}; use fewer or shorter chunks"
            )
        elif not prompt.chunks:
            warnings.append(f"question {number} is left out: its chunks have no tokens")
        else:
            if any(len(chunk.token_ids) == 1 for chunk in prompt.chunks):
                warnings.append(f"question {number} has a chunk of one token, which is always recomputed")
            cases.append(Case(question, prompt))
    if not cases:
        raise InvalidField("questions", f"none fits the model; {warnings[0]}")
    return cases, warnings


class Bench:
    """Runs cases on one engine, with their chunks stored. Not thread-safe."""

    def __init__(
        self, engine: MeasuredEngine, cases: Sequence[Case], max_tokens: int, batch: int = 64
    ) -> None:
        self.engine = engine
        self.cases = list(cases)
        self.max_tokens = max_tokens
        self.batch = batch
        self._full: dict[int, CaseAnswer] = {}
        """Reference answers by case index."""

    def store_chunks(self, on_progress: OnProgress) -> int:
        """Prefill and store every distinct chunk. Returns their number. Raises `NotBlendable` if one cannot
        be stored."""
        prefix = self.cases[0].prompt.prefix
        distinct = list(dict.fromkeys(chunk.token_ids for case in self.cases for chunk in case.prompt.chunks))
        for start in range(0, len(distinct), SAVE_BATCH):
            for saved in self.engine.save(prefix, distinct[start : start + SAVE_BATCH], NAMESPACE):
                accounting = saved.accounting or {}
                if accounting.get("outcome") != Outcome.SAVED.value:
                    reason = str(
                        accounting.get("reason") or "no_answer: the engine runs without our connector"
                    )
                    raise NotBlendable(*(reason.split(": ", 1) if ": " in reason else (reason, "")))
            on_progress(min(start + SAVE_BATCH, len(distinct)), len(distinct))
        return len(distinct)

    def full(self, indices: Sequence[int]) -> list[CaseAnswer]:
        """Full prefill's answers to some cases; each is computed once."""
        missing = [index for index in indices if index not in self._full]
        for index, generation in self._run(missing, None, {}):
            self._full[index] = _make_answer(generation, generation)
        return [self._full[index] for index in indices]

    def noise(self, indices: Sequence[int]) -> Noise:
        """Run full prefill again in other batches: the noise floor, below which differences mean nothing."""
        full = self.full(indices)
        self.batch, batch = max(1, self.batch // 2 - 1), self.batch
        forced = {index: answer.token_ids for index, answer in zip(indices, full, strict=True)}
        again = dict(self._run(indices[::-1], None, forced))
        self.batch = batch
        pairs = [
            pair
            for index, answer in zip(indices, full, strict=True)
            for pair in zip(answer.steps, again[index].top_logprobs, strict=False)
        ]
        divergences = [metrics.kl_divergence(*pair) for pair in pairs]
        agreement = metrics.mean([metrics.same_top(*pair) for pair in pairs])
        return Noise(metrics.mean(divergences), metrics.percentile(divergences, 0.99), agreement)

    def blend(self, selection: Selection, indices: Sequence[int]) -> list[CaseAnswer]:
        """Blended answers to some cases, with distributions along full prefill's answers."""
        full = dict(zip(indices, self.full(indices), strict=True))
        self.engine.plan_with(selection)
        free = dict(self._run(indices, selection, {}))
        # Up to the first different token, a free answer equals a forced one.
        parted = [index for index in indices if tuple(free[index].token_ids) != full[index].token_ids]
        parted = [index for index in parted if len(full[index].token_ids) > 1]
        forced_ids = {index: full[index].token_ids for index in parted}
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
        """The request for one case; `selection` None means full prefill."""
        prompt = self.cases[index].prompt
        params = None if selection is None else KintsugiParams(NAMESPACE, spans=prompt.spans)
        length = self.max_tokens if forced is None else len(forced)
        return Prompt(prompt.token_ids, params, length, top_logprobs=TOP_LOGPROBS, forced=forced)


def _check_blended(generation: Generation) -> None:
    """Raise `NotBlendable` if the prompt was not blended, `ResourceExhausted` if a chunk was missing."""
    accounting = generation.accounting or {}
    if accounting.get("outcome") != Outcome.BLENDED.value:
        reason = str(accounting.get("reason") or accounting.get("outcome") or "no_answer")
        label, _, detail = reason.partition(": ")
        raise NotBlendable(label, f"{detail or 'a prompt was not blended'}; nothing was measured")
    if accounting.get("chunks_missed"):
        raise ResourceExhausted(
            "the chunk store has evicted chunks that were just stored, so blends would recompute them; use "
            "fewer questions, or a larger store: kintsugi store serve --ssd FOLDER:SIZE"
        )


def _make_answer(free: Generation, forced: Generation) -> CaseAnswer:
    cost = 1.0 if free.accounting is None else float(free.accounting.get("cost", 1.0))
    return CaseAnswer(free.text, tuple(free.token_ids), tuple(forced.top_logprobs), cost, free.ttft_s)


@dataclass(frozen=True)
class Scores:
    """One configuration compared with full prefill: one value per case, in the order of the cases."""

    selection: Selection
    cases: Sequence[Case]
    full: Sequence[CaseAnswer]
    blend: Sequence[CaseAnswer]

    @property
    def divergences(self) -> list[float]:
        """KL at every position of every reference answer."""
        return [metrics.kl_divergence(*pair) for pair in self._pairs]

    @property
    def _pairs(self) -> list[tuple[dict[int, float], dict[int, float]]]:
        return [
            pair
            for full, blend in zip(self.full, self.blend, strict=True)
            for pair in zip(full.steps, blend.steps, strict=False)
        ]

    @property
    def cost(self) -> float:
        return metrics.mean([answer.cost for answer in self.blend])

    def score_cases(self, score: Callable[[str, Sequence[str]], float], of_blend: bool = True) -> list[float]:
        """Score each case that has answers."""
        answers = self.blend if of_blend else self.full
        return [
            score(answer.text, case.question.answers)
            for case, answer in zip(self.cases, answers, strict=True)
            if case.question.answers
        ]

    @property
    def entry(self) -> ReportEntry:
        """The entry for a calibration report."""
        divergences = self.divergences
        right = self.score_cases(accuracy_of(self.cases))
        right_full = self.score_cases(accuracy_of(self.cases), of_blend=False)
        return ReportEntry(
            selection=self.selection,
            cost=round(self.cost, 6),
            kl_mean=round(metrics.mean(divergences), 6),
            kl_p99=round(metrics.percentile(divergences, 0.99), 6),
            top1_agreement=round(metrics.mean([metrics.same_top(*pair) for pair in self._pairs]), 6),
            num_prompts=len(self.cases),
            num_positions=len(divergences),
            accuracy=round(metrics.mean(right), 6) if right else None,
            accuracy_full=round(metrics.mean(right_full), 6) if right_full else None,
        )

    @property
    def baseline(self) -> Baseline:
        """What shadowing compares this configuration's answers with."""
        pairs = [
            list(zip(full.steps, blend.steps, strict=False))
            for full, blend in zip(self.full, self.blend, strict=True)
        ]
        return Baseline.of(
            [[metrics.kl_divergence(*pair) for pair in row] for row in pairs],
            [[not metrics.same_top(*pair) for pair in row] for row in pairs],
        )

    def join_scores(self, other: Scores) -> Scores:
        """Join with the scores of the same configuration on other cases."""
        assert other.selection == self.selection
        return Scores(
            self.selection,
            [*self.cases, *other.cases],
            [*self.full, *other.full],
            [*self.blend, *other.blend],
        )

    def of_task(self, task: str) -> Scores:
        """The scores of one task's cases."""
        keep = [index for index, case in enumerate(self.cases) if case.question.task == task]
        return dataclasses.replace(
            self,
            cases=[self.cases[index] for index in keep],
            full=[self.full[index] for index in keep],
            blend=[self.blend[index] for index in keep],
        )


def accuracy_of(cases: Sequence[Case]) -> Callable[[str, Sequence[str]], float]:
    """The accuracy metric for these cases: Rouge-L for summaries, exact match if every answer is one word (as
    in the testbed), else F1."""
    if all(case.question.task in ROUGE_DATASETS for case in cases):
        return metrics.rouge_l
    one_word = all(len(answer.split()) == 1 for case in cases for answer in case.question.answers)
    return metrics.exact_match if one_word else metrics.f1


def measure_selection(bench: Bench, selection: Selection, indices: Sequence[int]) -> Scores:
    """Run some cases with a configuration and compare the answers with full prefill's."""
    full = bench.full(indices)
    blend = bench.blend(selection, indices)
    return Scores(selection, [bench.cases[index] for index in indices], full, blend)
