"""How a prompt is written: the one place that has to know the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kintsugi.core.prompt import PromptChunk, RagPrompt

_CONTENT = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for the user's message while the template is rendered."""


@dataclass(frozen=True)
class ChatForm:
    """What the chat template writes around one user message."""

    head: tuple[int, ...]
    foot: str
    tokenizer: Any

    @staticmethod
    def of(tokenizer: Any) -> ChatForm:
        message = [{"role": "user", "content": _CONTENT}]
        rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        head, foot = rendered.split(_CONTENT)
        return ChatForm(tuple(tokenizer(head, add_special_tokens=False).input_ids), foot, tokenizer)

    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def build(self, chunks: Sequence[PromptChunk], question: str) -> RagPrompt:
        return RagPrompt(self.head, tuple(chunks), self.tokenize(f"\n{question}{self.foot}"))
