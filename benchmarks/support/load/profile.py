"""Decides what an open-loop load sends, and when: the same seed gives the same requests at the same times.

In an open loop requests arrive on schedule, however long the endpoint takes. A loop that waits for answers
slows down with the server that it measures, and hides the queue.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField
from kintsugi.models.passages import read_bundled_passages

TOKENS_PER_WORD = 1.4
"""Estimate for English prose and a large vocabulary, used without the endpoint's tokenizer."""
SENTENCE_WORDS = 12
CHUNK_GAP = "\n\n"

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class RagWorkload:
    """Questions to a RAG service, each over several documents. Popular documents occur more often."""

    documents: int = 200
    """Number of documents in the corpus; each is one chunk."""
    zipf: float = 0.9
    """Exponent of their popularity: the k-th document is chosen in proportion to k^-zipf. 0: uniformly."""
    chunks: int = 6
    """Number of chunks in a prompt, all different."""
    chunk_tokens: int = 512
    answer_tokens: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("documents", "chunks", "chunk_tokens", "answer_tokens"):
            if getattr(self, name) < 1:
                raise InvalidField(name, f"{getattr(self, name)} must be at least 1")
        if self.chunks > self.documents:
            raise InvalidField(
                "chunks", f"{self.chunks} different chunks need more than {self.documents} documents"
            )
        if not 0.0 <= self.zipf <= 10.0:
            raise InvalidField("zipf", f"{self.zipf} is outside [0, 10]")


@dataclass(frozen=True)
class Request:
    """One question."""

    at_s: float
    """Arrival, in seconds after the start of the load."""
    documents: tuple[int, ...]
    """In prompt order."""
    question: str


def corpus(workload: RagWorkload, count_tokens: CountTokens | None = None) -> list[str]:
    """The documents' texts: made-up sentences of real words.

    With `count_tokens`, each document has as many words as fit into `chunk_tokens`; without, about as many.
    """
    words = sorted({word for passage in read_bundled_passages() for word in passage.text.lower().split()})
    return [_document(words, workload, index, count_tokens) for index in range(workload.documents)]


def _document(
    words: Sequence[str], workload: RagWorkload, index: int, count_tokens: CountTokens | None
) -> str:
    generator = random.Random(f"{workload.seed} document {index}")
    # A token has at least one character, so more words are never needed.
    chosen = [f"Document {index}:"] + [generator.choice(words) for _ in range(workload.chunk_tokens)]
    if count_tokens is None:
        return _sentences(chosen[: max(1, int(workload.chunk_tokens / TOKENS_PER_WORD))])
    fitting = bisect.bisect_right(
        range(1, len(chosen) + 1),
        workload.chunk_tokens,
        key=lambda count: count_tokens(_sentences(chosen[:count])),
    )
    return _sentences(chosen[: max(1, fitting)])


def _sentences(words: Sequence[str]) -> str:
    starts = range(0, len(words), SENTENCE_WORDS)
    return ". ".join(" ".join(words[start : start + SENTENCE_WORDS]) for start in starts) + "."


def requests(workload: RagWorkload, arrivals_s: Sequence[float]) -> list[Request]:
    """One request per arrival. Its documents depend on the seed and its number alone."""
    ranks = list(range(workload.documents))
    random.Random(f"{workload.seed} ranks").shuffle(ranks)
    weights = list(itertools.accumulate((rank + 1) ** -workload.zipf for rank in range(workload.documents)))
    generator = random.Random(f"{workload.seed} requests")
    found = []
    for number, at_s in enumerate(arrivals_s):
        drawn: dict[int, None] = {}
        while len(drawn) < workload.chunks:
            at = bisect.bisect_right(weights, generator.random() * weights[-1])
            drawn[ranks[min(at, len(ranks) - 1)]] = None
        question = f"Question {workload.seed}-{number}: what do these documents have in common?"
        found.append(Request(at_s, tuple(drawn), question))
    return found


def prompt_of(request: Request, texts: Sequence[str]) -> str:
    """The prompt as a stuff-documents chain writes it."""
    return CHUNK_GAP.join([*(texts[document] for document in request.documents), request.question])


def poisson_arrivals(rate_per_s: float, count: int, seed: int = 0) -> list[float]:
    """Arrival times in seconds with exponential gaps; the first gap starts at 0."""
    if not 0 < rate_per_s < float("inf"):
        raise InvalidField("rate", f"{rate_per_s} must be finite and above 0")
    generator = random.Random(f"{seed} arrivals {rate_per_s}")
    return list(itertools.accumulate(generator.expovariate(rate_per_s) for _ in range(count)))
