"""Prepares chunks after different contexts: none, a fixed sample, the chunk's document, or similar
passages."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from benchmarks.support.protocol.blending import SavedChunk, save
from benchmarks.support.protocol.decoder import KV, Decoder
from benchmarks.support.protocol.workloads import SEED, Passage, Workload
from kintsugi.models.prompt_form import PromptForm
from kintsugi.precompute.similar import SimilarChunks, is_copy, runs_of

CONTEXT_PASSAGES = 2
LEADS_KEPT = 8
"""Contexts whose KV stays in memory."""


class Preparation(StrEnum):
    PLAIN = "plain"
    SAMPLE = "sample"
    DOCUMENT = "document"
    """The document's own chunks before it; the most similar passages for its first chunk."""
    SIMILAR = "similar"
    NEIGHBOUR = "neighbour"
    """The passages most similar to the chunk's most similar passage: what a context that several chunks share
    is to most of them."""


@dataclass
class Preparer:
    """Saves chunks of one workload."""

    decoder: Decoder
    form: PromptForm
    workload: Workload

    def __post_init__(self) -> None:
        self._tokens = self.form.tokenizer(list(self.workload.corpus), add_special_tokens=False).input_ids
        self._similar = SimilarChunks()
        self._similar.add(enumerate(self._tokens))
        self._lead_kv = functools.lru_cache(LEADS_KEPT)(self._compute_lead)

    def context(self, passage: Passage, preparation: Preparation) -> tuple[str, ...]:
        """Return the texts before the chunk, in order: the most similar one stands directly before it."""
        if preparation is Preparation.PLAIN:
            return ()
        if preparation is Preparation.SAMPLE:
            return tuple(random.Random(SEED).sample(self.workload.corpus, CONTEXT_PASSAGES))
        if preparation is Preparation.DOCUMENT and passage.before:
            return passage.before[-CONTEXT_PASSAGES:]
        tokens = self.form.tokenize(passage.text)
        runs = runs_of(tokens)
        if preparation is Preparation.NEIGHBOUR:
            tokens = next((self._tokens[one] for one in self._similar.most_similar(tokens, 1)), tokens)
        near = self._similar.most_similar(tokens, CONTEXT_PASSAGES + 1)
        found = [one for one in near if not is_copy(runs_of(self._tokens[one]), runs)]
        return tuple(self.workload.corpus[one] for one in reversed(found[:CONTEXT_PASSAGES]))

    def _compute_lead(self, token_ids: tuple[int, ...]) -> KV:
        return self.decoder.prefill(torch.tensor(token_ids))

    def lead(self, passage: Passage, preparation: Preparation) -> tuple[int, ...]:
        """Return the token ids that a chunk is prefilled after."""
        texts = self.context(passage, preparation)
        return sum(map(self.form.tokenize, texts), self.form.head)

    def prefill(self, token_ids: Sequence[int], lead: tuple[int, ...]) -> KV:
        """Compute a chunk's KV after `lead`."""
        kv, start = self.decoder.prefill(torch.tensor(token_ids), self._lead_kv(lead)), len(lead)
        return KV(kv.key[:, start:], kv.value[:, start:])

    def save(self, token_ids: Sequence[int], lead: tuple[int, ...]) -> SavedChunk:
        return save(self.decoder, token_ids, lead, self.prefill(token_ids, lead))
