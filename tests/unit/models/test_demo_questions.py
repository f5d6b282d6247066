"""The demo's questions: what is right, which is shown, and that what ships is consistent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kintsugi.models.demo_questions import (
    DemoQuestion,
    RightAnswers,
    Said,
    choose_shown,
    is_right,
    read_demo_questions,
)
from kintsugi.models.passages import read_bundled_passages

ROUNDS = 3
"""How often what full prefill answered right was asked, each time with other rounding."""


def asked(full: str, reuse: str, blend: str) -> DemoQuestion:
    return DemoQuestion("Salt", "Which metal?", ("tin",), (Said(full, reuse, blend),))


WON = asked("It is tin.", "It is glass.", "Tin, I think.")
EASY = asked("tin", "tin", "tin")
HARD = asked("lead", "tin", "tin")
LOST = asked("tin", "lead", "lead")
UNASKED = DemoQuestion("Salt", "Which metal?", ("tin",))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("It is poured on molten tin.", True),
        ("TIN", True),
        ("A thin sheet, containing nothing.", False),
        ("Dal\u00e9n made valves.", True),
        ("Dal\u00e9ns", False),
        ("", False),
    ],
)
def test_an_answer_is_right_if_it_holds_the_words(text: str, right: bool) -> None:
    assert is_right(text, ("tin", "Dal\u00e9n")) is right


def test_the_tally_counts_among_what_full_prefill_gets_right() -> None:
    assert RightAnswers.of([HARD, EASY, WON, LOST, UNASKED]) == RightAnswers(
        asked=5, full_right=3, reuse_right=1, blend_right=2, reuse_wrong=2, blend_mended=1
    )


def test_the_first_question_on_which_blending_shows_is_shown() -> None:
    other = asked("tin", "lead", "tin")
    assert choose_shown([UNASKED, HARD, EASY, LOST, WON, other]) is WON


def test_a_round_that_differs_counts_against_the_blend() -> None:
    def both(first: DemoQuestion, second: DemoQuestion) -> DemoQuestion:
        return replace(WON, said=first.said + second.said)

    assert both(WON, WON).shows_blending
    assert not both(WON, EASY).shows_blending, "full KV reuse was right once"
    assert not both(WON, LOST).shows_blending, "the blend was wrong once"
    assert not both(WON, HARD).full_is_right


def test_every_shipped_question_was_asked_and_is_answered_by_its_passage() -> None:
    passages = {passage.title: passage.text for passage in read_bundled_passages()}
    questions = read_demo_questions()
    for question in questions:
        assert len(question.said) == (ROUNDS if is_right(question.said[0].full, question.answers) else 1)
        assert is_right(passages[question.passage], question.answers), question.question
        assert not is_right(question.question, question.answers), "the question gives its answer away"
    assert len({question.question for question in questions}) == len(questions)
    assert choose_shown(questions).shows_blending
