"""An engine that answers at once, and what its connector would have said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kintsugi.core.plan import PromptChunk, RagPrompt
from kintsugi.core.request import Op
from kintsugi.engine.local import Generation, Prompt

PROMPT = RagPrompt(
    prefix=(0,),
    chunks=(PromptChunk("A & <b>", (10, 11, 12)), PromptChunk("Second", (20, 21))),
    question=(30, 31),
)
NUM_LAYERS = 4


def explained_accounting(ratio: float = 0.15) -> dict[str, Any]:
    """Layer 0 computes everything; deeper ones one token of the first chunk, and the question."""
    deep = [2, 6, 7]
    return {
        "outcome": "blended",
        "selector": "hkvd",
        "ratio": ratio,
        "chunks_hit": 2,
        "chunks_missed": 0,
        "tokens_hit": 5,
        "tokens_recomputed": 1,
        "tokens_question": 2,
        "tokens_prefix_cached": 0,
        "bytes_loaded": 4096,
        "transport": "ram",
        "load_wait_ms": 1.5,
        "compute_ms": 20.0,
        "blend_ms": 25.0,
        "cost": 0.4,
        "recomputed_positions": {0: list(range(8)), **dict.fromkeys(range(1, NUM_LAYERS), deep)},
        "timeline": [
            {
                "load_start_ms": 5.0 * layer,
                "load_end_ms": 5.0 * layer + 4,
                "compute_start_ms": 6.0 * layer + 4,
                "compute_end_ms": 6.0 * layer + 9,
            }
            for layer in range(NUM_LAYERS)
        ],
    }


def generation(token_ids: list[int], ttft_s: float, accounting: dict[str, Any] | None = None) -> Generation:
    return Generation(
        token_ids=token_ids,
        text=" ".join(map(str, token_ids)),
        ttft_s=ttft_s,
        itl_s=[0.01] * (len(token_ids) - 1),
        logprobs=[-1.0] * len(token_ids),
        top_logprobs=[{token: -1.0} for token in token_ids],
        finish_reason="length",
        num_cached_tokens=0,
        accounting=accounting,
    )


class FakeEngine:
    """Answers plain prompts with 1 2 3 4, blends with 1 2 9 9 and reuse with 8 8 8 8."""

    def __init__(self, declined_because: str | None = None) -> None:
        self.declined_because = declined_because
        self.prompts: list[Prompt] = []
        self.resets = 0
        """What it was started with last."""

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def save(self, prefix: object, chunks: list[object], namespace: str) -> list[Generation]:
        outcome = {"outcome": "saved"}
        if self.declined_because is not None:
            outcome = {"outcome": "declined", "reason": self.declined_because}
        return [generation([1], 0.1, outcome) for _ in chunks]

    def generate(self, prompts: list[Prompt]) -> list[Generation]:
        self.prompts += prompts
        return [self._answer(prompt) for prompt in prompts]

    def _answer(self, prompt: Prompt) -> Generation:
        params = prompt.params
        if params is None:
            return generation([1, 2, 3, 4][: prompt.max_tokens], 1.0)
        assert params.op is Op.BLEND
        if self.declined_because is not None:
            declined = {"outcome": "declined", "reason": self.declined_because, "cost": 1.0}
            return generation([1, 2, 3, 4], 1.0, declined)
        if params.trial is not None and params.trial.ratio == 0.0:
            return generation([8, 8, 8, 8], 0.05, {**explained_accounting(0.0), "cost": 0.01})
        accounting = explained_accounting()
        if not params.explain:
            del accounting["recomputed_positions"], accounting["timeline"]
        return generation([1, 2, 9, 9], 0.25, accounting)


class FakeTokenizer:
    """One id per word."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        words = [len(word) + 2 for word in text.split()]
        return SimpleNamespace(input_ids=[0, *words] if add_special_tokens else words)

    def decode(self, token_ids: list[int]) -> str:
        return f"<t{token_ids[0]}> "
