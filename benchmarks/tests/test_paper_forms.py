"""The forms of CacheBlend's four data sets, and the figures that are made of a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.support.paper import forms
from benchmarks.support.paper.sections import PaperSetup, _figures
from kintsugi.core.plan import Selection
from kintsugi.core.request import SelectorName
from kintsugi.quality.evaluate import FULL, EvaluationRow, Setting
from kintsugi.quality.metrics import Interval
from kintsugi.quality.questions import Question

WORDS = ["alphas", "betas", "gammas", "deltas", "epsilon", "thetas", "iotas", "kappas", "lambda", "omicron"]


def passage(number: int) -> str:
    """Sentences that no other passage has, with a number at the end of each."""
    body = [f"Passage {number} {' '.join(WORDS)} {WORDS[at]} in {1900 + number + at}." for at in range(6)]
    return " ".join(["Opening words.", *body, "Closing words."])


PASSAGES = [passage(number) for number in range(20)]


def made(form: str) -> list[Question]:
    return {
        "2wiki": lambda: forms.two_wiki_form(PASSAGES, 3),
        "samsum": lambda: forms.samsum_form(3),
        "news": lambda: forms.multi_news_form(PASSAGES, 3),
    }[form]()


@pytest.mark.parametrize(("form", "chunks"), [("2wiki", 10), ("samsum", 5), ("news", 6)])
def test_made_questions_have_the_shape_of_their_data_set(form: str, chunks: int) -> None:
    questions = made(form)
    assert questions == made(form)
    assert [len(one.chunks) for one in questions] == [chunks] * 3
    assert all(one.bare and all(one.answers) for one in questions)
    assert len({one.tail for one in questions} | {one.chunks for one in questions}) > 3


def test_a_short_answer_stands_in_one_of_the_paragraphs() -> None:
    for question in made("2wiki"):
        assert any(question.answers[0] in chunk for chunk in question.chunks)
        assert question.answers[0] not in question.tail


def test_a_dialogue_is_summarised_by_what_its_speakers_agreed_on() -> None:
    for question in made("samsum"):
        one, other = question.answers[0].split()[0], question.answers[0].split()[2]
        assert f"{one}: " in question.tail
        assert f"{other}: " in question.tail
        assert "Summary: " not in question.tail
        assert all("Summary: " in chunk for chunk in question.chunks)


def test_musique_keeps_six_passages(tmp_path: Path) -> None:
    entry = {"ctxs": [{"text": text} for text in PASSAGES[:10]], "question": "Who?", "answers": ["Ada"]}
    path = tmp_path / "musique.json"
    path.write_text(json.dumps([entry] * 3))
    first, second = forms.musique(path, 2)
    assert len(first.chunks) == len(second.chunks) == 6
    assert (first.tail, first.answers) == ("Who?", ("Ada",))
    assert PaperSetup(musique=path).passages() == PASSAGES[:1]  # the others repeat it


def row(method: str, batch: int, ttft_s: float) -> EvaluationRow:
    selection = None if method == FULL else Selection(0.15, SelectorName.HKVD)
    setting = Setting("raw", None, None, None, batch)
    return EvaluationRow(setting, method, selection, 0.2, Interval(ttft_s, ttft_s, ttft_s), 8)


def test_each_method_is_compared_with_full_prefill_in_its_own_setting() -> None:
    rows = [row(FULL, 1, 4.0), row("hkvd", 1, 1.0), row(FULL, 4, 9.0), row("hkvd", 4, 3.0)]
    found = {one.name: one.value for one in _figures("batch", rows, "batch")}
    assert found == {"paper_batch_1_hkvd": 4.0, "paper_batch_4_hkvd": 3.0}
