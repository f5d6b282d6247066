"""Measures of an answer and of a distribution, and what a sample of them is worth. Pure."""

from __future__ import annotations

import math
import random
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
RESAMPLES = 1000
CONFIDENCE = 0.95


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation and articles: as SQuAD and LongBench compare answers."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, answers: Sequence[str]) -> float:
    return float(any(normalize_answer(text) == normalize_answer(answer) for answer in answers))


def f1(text: str, answers: Sequence[str]) -> float:
    """Best token F1 over the answers."""
    return max(
        (_f1(normalize_answer(text).split(), normalize_answer(a).split()) for a in answers), default=0.0
    )


def _f1(mine: list[str], theirs: list[str]) -> float:
    common = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * common / (len(mine) + len(theirs)) if common else float(mine == theirs)


def rouge_l(text: str, answers: Sequence[str]) -> float:
    """Best F-measure of the longest common subsequence of words. Cost: words x words of each answer."""
    return max(
        (_rouge_l(normalize_answer(text).split(), normalize_answer(a).split()) for a in answers), default=0.0
    )


def _rouge_l(mine: list[str], theirs: list[str]) -> float:
    if not mine or not theirs:
        return float(mine == theirs)
    row = [0] * (len(theirs) + 1)
    for word in mine:
        diagonal = 0
        for index, other in enumerate(theirs, 1):
            diagonal, row[index] = (
                row[index],
                diagonal + 1 if word == other else max(row[index], row[index - 1]),
            )
    return 2 * row[-1] / (len(mine) + len(theirs))


Distribution = Mapping[int, float]
"""Token id to logprob, of the most likely tokens only."""


def kl_divergence(full: Distribution, blend: Distribution) -> float:
    """KL(full ‖ blend) in nats, over the tokens that `full` reports and one bucket for all others.

    A lower bound on the true one, and equal where both report the whole vocabulary: merging tokens only
    lowers it, and a token that `blend` leaves out is taken to be as likely as the least it reports.
    """
    unreported = min(blend.values())
    total, rest_full, rest_blend = 0.0, 1.0, 1.0
    for token, logprob in full.items():
        share = math.exp(logprob)
        total += share * (logprob - blend.get(token, unreported))
        rest_full -= share
        if token in blend:
            rest_blend -= math.exp(blend[token])
    if rest_full > _REST_MIN:
        total += rest_full * math.log(rest_full / max(rest_blend, _REST_MIN))
    return max(total, 0.0)


_REST_MIN = 1e-6
"""Below it a rest is rounding of the sum: logprobs come as float32."""


def same_top(full: Distribution, blend: Distribution) -> bool:
    """Whether both prefer the same token."""
    return top_token(full) == top_token(blend)


def top_token(distribution: Distribution) -> int:
    """The most likely token; the lower id wins a tie."""
    return min(distribution, key=lambda token: (-distribution[token], token))


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile: a value that was measured."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class Interval:
    """A mean and its bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}-{self.high:.3f}]"


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """95 % interval of a mean. For a paired difference, give the differences: prompts are resampled."""
    picks = random.Random(seed)
    means = sorted(mean(picks.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    return Interval(mean(values), means[int(tail * RESAMPLES)], means[int((1 - tail) * RESAMPLES) - 1])


def ratio_bootstrap(tops: Sequence[float], bottoms: Sequence[float], seed: int = 0) -> Interval:
    """95 % interval of mean(tops) ÷ mean(bottoms), pairs resampled together; NaN where the bottom is 0."""
    picks = random.Random(seed)
    pairs = list(zip(tops, bottoms, strict=True))

    def share(sample: Sequence[tuple[float, float]]) -> float:
        below = sum(bottom for _, bottom in sample)
        return sum(top for top, _ in sample) / below if below else float("nan")

    shares = sorted(share(picks.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    return Interval(share(pairs), shares[int(tail * RESAMPLES)], shares[int((1 - tail) * RESAMPLES) - 1])
