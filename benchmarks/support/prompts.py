"""Makes prompts of chunks with random tokens, for measurements that do not depend on their content."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import Span

NAMESPACE = "bench"
PREFIX = (0,)
"""BOS of the checkpoints that `kintsugi.checkpoints` makes."""
FIRST_TOKEN, LAST_TOKEN = 3, 1000


def tokens(count: int, generator: random.Random) -> list[int]:
    return [generator.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


@dataclass(frozen=True)
class ChunkPrompt:
    """Prefix, chunks, question."""

    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]

    @staticmethod
    def make(sizes: Sequence[int], question: int, seed: int) -> ChunkPrompt:
        generator = random.Random(seed)
        chunks = tuple(tuple(tokens(size, generator)) for size in sizes)
        return ChunkPrompt(chunks, tuple(tokens(question, generator)))

    @property
    def token_ids(self) -> list[int]:
        return [*PREFIX, *(token for chunk in self.chunks for token in chunk), *self.question]

    @property
    def spans(self) -> tuple[Span, ...]:
        spans, at = [], len(PREFIX)
        for chunk in self.chunks:
            spans.append(Span(at, at + len(chunk)))
            at += len(chunk)
        return tuple(spans)

    def params(self, ratio: float | None = None, explain: bool = False) -> KintsugiParams:
        return KintsugiParams(NAMESPACE, spans=self.spans, ratio=ratio, explain=explain)
