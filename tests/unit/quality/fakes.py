"""An engine whose blends are as good as their ratio, and questions that it answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kintsugi.core.accounting import Accounting, ChunkAudit, Outcome
from kintsugi.core.layout import ChunkManifest, Codec, KVLayout
from kintsugi.core.plan import PromptChunk, RagPrompt, Selection, selection_of
from kintsugi.core.request import Op
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.engine.local import Generation, Prompt
from kintsugi.quality.measure import Case
from kintsugi.quality.questions import Question
from kintsugi.store.client.ram import RamStore

VOCABULARY = 8
RIGHT = 5
LAYOUT = KVLayout.uniform(1, 1, 2, "float32")


class WordTokenizer:
    """One id per word, by its length; BOS in front where asked."""

    added_tokens_decoder: Mapping[int, object] = {}

    def __len__(self) -> int:
        return 16

    def batch_decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return [" ".join("x" * token for token in sequence) for sequence in sequences]

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        ids = [len(word) for word in text.split()]
        return SimpleNamespace(input_ids=[0, *ids] if add_special_tokens else ids)


def case(index: int, answers: tuple[str, ...] = ("w5",), task: str = "alias") -> Case:
    """Every case has a chunk of its own and one that all share."""
    chunks = (PromptChunk("", (1, 2, 3)), PromptChunk("", (4, index + 10)))
    return Case(Question(("one", "two"), "?", answers, task), RagPrompt((0,), chunks, (7, index)))


def distribution(best: int, sure: float) -> dict[int, float]:
    rest = (1 - sure) / (VOCABULARY - 1)
    return {token: math.log(sure if token == best else rest) for token in range(VOCABULARY)}


class FakeEngine:
    """Full prefill answers `RIGHT`. A blend does, where `right_from(selection, index)` says so; a cost is
    the selection's ratio."""

    def __init__(self, full_is_right: bool = True) -> None:
        self.full_token = RIGHT if full_is_right else 1
        self.saved: list[tuple[int, ...]] = []
        self.submitted: list[Prompt] = []
        self.accounting: dict[str, Any] = {"outcome": "blended", "chunks_missed": 0}
        self.save_outcome: dict[str, Any] = {"outcome": "saved"}
        self.finish_reason = "length"
        self.right_from: Callable[[Selection, int], bool] = lambda selection, index: (
            selection.ratio >= 0.15 or index % 2 == 0
        )
        self.error_of = lambda token_ids: 0.0
        """By a chunk's tokens behind the prefix, how far an audit finds its values off."""
        self.audited: list[Prompt] = []

    def reset_prefix_cache(self) -> None:
        pass

    def space(self, namespace: str) -> ChunkSpace:
        return ChunkSpace(ModelFingerprint.of({"model": "fake"}), namespace, (0,))

    def save(
        self, prefix_token_ids: Sequence[int], chunks: Sequence[Sequence[int]], namespace: str
    ) -> list[Generation]:
        self.saved += [tuple(chunk) for chunk in chunks]
        return [answer(1, 0.9, self.save_outcome) for _ in chunks]

    def generate(self, prompts: Sequence[Prompt]) -> list[Generation]:
        self.submitted += prompts
        return [self._answer(prompt) for prompt in prompts]

    def _answer(self, prompt: Prompt) -> Generation:
        if prompt.params is None:
            return self._finish(answer(self.full_token, 0.99, None, prompt))
        if prompt.params.op is Op.AUDIT:
            return self._audit(prompt)
        assert prompt.params.op is Op.BLEND
        assert prompt.params.trial is not None
        selection = selection_of(prompt.params.trial)
        right = self.right_from(selection, prompt.token_ids[-1])
        accounting = {**self.accounting, "cost": selection.ratio}
        return self._finish(answer(self.full_token if right else 2, 0.99, accounting, prompt))

    def _audit(self, prompt: Prompt) -> Generation:
        self.audited.append(prompt)
        audit = ChunkAudit("raw", [0.0, 0.0], [0.0, self.error_of(tuple(prompt.token_ids[1:-1]))])
        return answer(1, 0.9, Accounting(Outcome.AUDITED, audit=audit).to_mapping())

    def _finish(self, generation: Generation) -> Generation:
        return dataclasses.replace(generation, finish_reason=self.finish_reason)


def answer(
    token: int, sure: float, accounting: dict[str, Any] | None, prompt: Prompt | None = None
) -> Generation:
    length = 1 if prompt is None else prompt.max_tokens
    chosen = list(prompt.forced) if prompt is not None and prompt.forced else [token] * length
    return Generation(
        token_ids=chosen,
        text=" ".join(f"w{one}" for one in chosen),
        ttft_s=0.1,
        itl_s=[0.01] * (length - 1),
        logprobs=[-0.01] * length,
        top_logprobs=[distribution(token, sure)] * length,
        finish_reason="length",
        num_cached_tokens=0,
        accounting=accounting,
    )


def put_chunk(store: RamStore, space: ChunkSpace, chunk: Sequence[int]) -> None:
    """A chunk whose frames say nothing."""
    frames = [bytes(LAYOUT.frame_bytes(Codec.RAW, len(chunk)))]
    key = ChunkKey.of(space, chunk)
    store.put(ChunkManifest.of(space, key, (), len(chunk), LAYOUT, Codec.RAW, frames), frames)
