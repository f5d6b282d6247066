"""Which prompt forms are refused, and what the refusal shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.quality.calibrate import check_answers
from kintsugi.quality.measure import CaseAnswer
from kintsugi.quality.questions import Question

RIGHT, WRONG, NOTHING = "red attic", "The question is a question " * 9, ""


def check(form: str, texts: list[str], answers: tuple[str, ...] = ("red attic",)) -> None:
    """Check the form on questions that full prefill answers with these texts."""
    question = Question(("a chunk",), "Where?", answers)
    said = [CaseAnswer(text, tuple(range(1 + 2 * len(text))), (), 1.0, 0.1) for text in texts]
    bench: Any = SimpleNamespace(cases=[SimpleNamespace(question=question)] * len(texts), full=lambda _: said)
    check_answers(form, bench, range(len(texts)))


def test_a_form_in_which_full_prefill_is_rarely_right_is_refused_with_an_example() -> None:
    check("chat", [RIGHT] * 3 + [WRONG] * 7)
    with pytest.raises(InvalidField, match=r"form 'plain' .* scores 0\.17 in 12 prompts") as caught:
        check("plain", [RIGHT] * 2 + [WRONG] * 10)
    assert f"answered {WRONG[:60] + '…'!r} where" in str(caught.value)
    with pytest.raises(InvalidField, match=r"答案{59}…' where"):
        check("plain", ["答" + "案" * 99])
    assert "'red attic' was expected" in str(caught.value)


def test_a_form_that_mostly_ends_at_once_is_refused() -> None:
    check("plain", [NOTHING, "some text"], ())
    with pytest.raises(InvalidField, match=r"answers nothing in 75% of 4 prompts"):
        check("plain", [NOTHING, NOTHING, NOTHING, "some text"], ())


def test_without_answers_only_silence_is_refused() -> None:
    check("plain", ["whatever"] * 5, ())
