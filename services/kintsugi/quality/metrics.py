"""Metrics of answers and of token distributions, and bootstrap intervals of their means. Pure."""

from __future__ import annotations

import math
import random
import re
import statistics
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
RESAMPLES = 1000


def normalize_answer(text: str) -> str:
    """Lower-case the text and drop punctuation and articles, as SQuAD and LongBench compare answers."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, answers: Sequence[str]) -> float:
    return float(any(normalize_answer(text) == normalize_answer(answer) for answer in answers))


def f1(text: str, answers: Sequence[str]) -> float:
    """Best token F1 over the answers."""
    return _best_f(text, answers, lambda mine, theirs: (Counter(mine) & Counter(theirs)).total())


def rouge_l(text: str, answers: Sequence[str]) -> float:
    """Best F-measure of the longest common subsequence of words. Cost: words × words of each answer."""
    return _best_f(text, answers, _longest_common_subsequence)


def _best_f(text: str, answers: Sequence[str], count_common: Callable[[list[str], list[str]], int]) -> float:
    """Best F-measure over the answers. ``count_common`` counts the words that two texts have in common."""
    mine, best = normalize_answer(text).split(), 0.0
    for answer in answers:
        theirs = normalize_answer(answer).split()
        length = len(mine) + len(theirs)
        best = max(best, 2 * count_common(mine, theirs) / length if length else 1.0)
    return best


def _longest_common_subsequence(mine: list[str], theirs: list[str]) -> int:
    row = [0] * (len(theirs) + 1)
    for word in mine:
        diagonal = 0
        for index, other in enumerate(theirs, 1):
            longer = diagonal + 1 if word == other else max(row[index], row[index - 1])
            diagonal, row[index] = row[index], longer
    return row[-1]


TOP_LOGPROBS = 20
"""Most likely tokens that are compared at a position: vLLM's default limit."""
mean = statistics.fmean
Distribution = Mapping[int, float]
"""Logprobs by token id, of the most likely tokens only."""
TIE = 0.1
"""Nats: a token that full prefill finds at least 0.9 times as likely as its first choice is no change."""
KL_MAX = 1000.0
"""Nats. A model with broken KV produces NaN, which must count as the worst value."""


def kl_divergence(full: Distribution, blend: Distribution) -> float:
    """KL(full ‖ blend) in nats, over the tokens that `full` reports and one bucket for all others.

    It is a lower bound of the true KL, and equal to it if both report the whole vocabulary: merging tokens
    only lowers it, and a token that `blend` does not report is assumed to be as likely as the least likely
    token that it reports. It is at most `KL_MAX`, which is also returned for invalid distributions.
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
    return min(max(total, 0.0), KL_MAX) if math.isfinite(total) else KL_MAX


_REST_MIN = 1e-6
"""A smaller remainder is a rounding error of the sum, because logprobs are float32."""


def same_top(full: Distribution, blend: Distribution, tie: float = 0.0) -> bool:
    """Whether both have the same most likely token, or the blend's is at most ``tie`` nats less likely in
    `full` than its own; False if one of them holds NaN."""
    if any(map(math.isnan, (*full.values(), *blend.values()))):
        return False
    mine, other = top_token(full), top_token(blend)
    return mine == other or full[mine] - full.get(other, -math.inf) < tie


def top_token(distribution: Distribution) -> int:
    """The most likely token; the lower id wins a tie."""
    return min(distribution, key=lambda token: (-distribution[token], token))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile, which is always one of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True)
class Interval:
    """A mean, or another statistic, and its bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}-{self.high:.3f}]"


def bootstrap(sample: Sequence[Any], statistic: Callable[[Sequence[Any]], float] = mean) -> Interval:
    """A statistic and its 95 % bootstrap interval. For a paired difference, pass the differences."""
    picks = random.Random(0)
    found = sorted(statistic(picks.choices(sample, k=len(sample))) for _ in range(RESAMPLES))
    tail = RESAMPLES // 40
    return Interval(statistic(sample), found[tail], found[-tail - 1])
