"""Which prompt forms are refused, and what the refusal shows."""

from __future__ import annotations

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.quality.form import FullAnswer, check_form

RIGHT = FullAnswer("red", False, ("red",), 1.0)
WRONG = FullAnswer("The question is a question " * 9, False, ("red attic",), 0.0)
NOTHING = FullAnswer("", True, (), 0.0)


def test_a_form_in_which_full_prefill_is_rarely_right_is_refused_with_an_example() -> None:
    check_form("chat", [RIGHT] * 3 + [WRONG] * 7)
    with pytest.raises(InvalidField, match=r"form 'plain' .* scores 0\.17 in 12 prompts") as caught:
        check_form("plain", [RIGHT] * 2 + [WRONG] * 10)
    assert f"said {WRONG.text[:60] + '…'!r} where" in str(caught.value)
    assert "'red attic' was expected" in str(caught.value)


def test_a_form_that_mostly_ends_at_once_is_refused() -> None:
    said = FullAnswer("some text", False, (), 0.0)
    check_form("plain", [NOTHING, said])
    with pytest.raises(InvalidField, match=r"says nothing in 75% of 4 prompts"):
        check_form("plain", [NOTHING, NOTHING, NOTHING, said])


def test_without_answers_only_silence_is_refused() -> None:
    check_form("plain", [FullAnswer("whatever", False, (), 0.0)] * 5)
