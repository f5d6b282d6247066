"""The demo's questions about the bundled passages, and the reference model's answers to them.

Each question was written before the model answered it. `benchmarks/support/demo_questions.py` asked the
reference model each question with full prefill, full KV reuse and the demo's blend, in several rounds with
different rounding errors, and recorded the answers in `demo_questions.jsonl.xz`. The demo shows the first
question that shows the effect of blending, and the number of such questions. Full prefill and the blend must
be right in every round; full KV reuse counts as right if it is right in any round. The answers were computed
in float32, because in bfloat16 they depend on the CPU.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kintsugi.models.bundled import packaged_files

QUESTIONS_FILE = "demo_questions.jsonl.xz"


def is_right(text: str, answers: Sequence[str]) -> bool:
    """Whether `text` holds one of the answers as whole words, in any case."""
    return any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) for answer in answers)


@dataclass(frozen=True)
class Said:
    """The reference model's answers to one question."""

    full: str
    """With full prefill."""
    reuse: str
    """With full KV reuse."""
    blend: str
    """With the demo's blend."""


@dataclass(frozen=True)
class DemoQuestion:
    """A question that one passage answers in a few words."""

    passage: str
    """Title of the passage."""
    question: str
    answers: tuple[str, ...]
    """An answer is right if it contains one of these."""
    said: tuple[Said, ...] = ()
    """The answers of each round. Later rounds ask only questions that full prefill has answered right."""

    @staticmethod
    def from_mapping(fields: dict[str, Any]) -> DemoQuestion:
        said = tuple(Said(**texts) for texts in fields.get("said", ()))
        return DemoQuestion(fields["passage"], fields["question"], tuple(fields["answers"]), said)

    @property
    def full_is_right(self) -> bool:
        return bool(self.said) and all(is_right(texts.full, self.answers) for texts in self.said)

    @property
    def reuse_is_right(self) -> bool:
        return any(is_right(texts.reuse, self.answers) for texts in self.said)

    @property
    def blend_is_right(self) -> bool:
        return bool(self.said) and all(is_right(texts.blend, self.answers) for texts in self.said)

    @property
    def shows_blending(self) -> bool:
        """Whether full prefill and the blend were right and full KV reuse was wrong."""
        return self.full_is_right and self.blend_is_right and not self.reuse_is_right


@dataclass(frozen=True)
class RightAnswers:
    """Counts of the reference model's right answers."""

    asked: int
    full_right: int
    """Questions that full prefill answered right. The next two fields count only such questions."""
    reuse_right: int
    blend_right: int
    reuse_wrong: int
    """Questions that full prefill answered right and full KV reuse answered wrong."""
    blend_mended: int
    """Questions counted in `reuse_wrong` that the blend answered right."""

    @staticmethod
    def of(questions: Sequence[DemoQuestion]) -> RightAnswers:
        right = [question for question in questions if question.full_is_right]
        lost = [question for question in right if not question.reuse_is_right]
        return RightAnswers(
            asked=len(questions),
            full_right=len(right),
            reuse_right=len(right) - len(lost),
            blend_right=sum(question.blend_is_right for question in right),
            reuse_wrong=len(lost),
            blend_mended=sum(question.blend_is_right for question in lost),
        )


@lru_cache(maxsize=1)
def read_demo_questions() -> tuple[DemoQuestion, ...]:
    """Return all questions, in the order in which they were written. Raises `Unavailable`."""
    text = lzma.decompress((packaged_files() / QUESTIONS_FILE).read_bytes()).decode()
    return tuple(DemoQuestion.from_mapping(json.loads(line)) for line in text.splitlines())


def choose_shown(questions: Sequence[DemoQuestion]) -> DemoQuestion:
    """Return the first question that shows the effect of blending."""
    return next(question for question in questions if question.shows_blending)
