"""Questions over passages, and the passage sets that they are asked about."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.support.musique import MUSIQUE
from benchmarks.support.real.corpus import (
    CHOOSING_PASSAGES,
    PER_PROMPT,
    Corpus,
    PassageSet,
    drop_overlapping,
    read_corpus,
    runs_of,
)
from benchmarks.support.real.questions import BEGINNING_WORDS, KINDS, QUOTE, Asked, ask, sentences

NOWHERE = Path("/nowhere/musique_s.json")
SETS, PER_KIND = 8, 2


@pytest.fixture(params=[NOWHERE, MUSIQUE], ids=["bundled", "musique"])
def corpus(request: pytest.FixtureRequest) -> Corpus:
    """The bundled passages always, MuSiQue's where they are."""
    path: Path = request.param
    if path == MUSIQUE and not path.is_file():
        pytest.skip(f"{path} is not here")
    return read_corpus(path)


def judged() -> list[PassageSet]:
    return read_corpus(NOWHERE).judged_sets(SETS, PER_KIND)


def made_up(count: int) -> list[str]:
    """Passages of twelve sentences each; every word is theirs alone but `in` and the year."""
    return [
        "Cut off. "
        + " ".join(
            f"Topic{p}x{s} {' '.join(f'filler{p}x{s}x{at}' for at in range(9))} plainly in {1900 + s} ended."
            for s in range(12)
        )
        + " The last one is also cut"
        for p in range(count)
    ]


def test_the_same_seed_gives_the_same_questions_and_another_seed_others() -> None:
    passages = made_up(6)
    assert ask(passages, 3, "a") == ask(passages, 3, "a")
    assert ask(passages, 3, "a") != ask(passages, 3, "b")
    assert judged() == judged()


def test_an_answer_follows_its_opening_in_exactly_one_place(corpus: Corpus) -> None:
    for one in (*corpus.choosing_sets(SETS, PER_KIND), *corpus.judged_sets(SETS, PER_KIND)):
        everything = " ".join(one.passages)
        for asked in one.asked:
            assert asked.opening.startswith(QUOTE)
            assert everything.count(asked.quoted) == 1
            after = everything.split(asked.quoted)[1].strip()
            assert after.lstrip("\"'(").startswith(asked.answer), asked
            assert asked.is_right(after)
            assert f'"{" ".join(asked.sentence.split(" ")[:BEGINNING_WORDS])}"' in asked.user


def test_no_sentence_is_asked_about_twice(corpus: Corpus) -> None:
    asked = [one.sentence for part in corpus.judged_sets(SETS, PER_KIND) for one in part.asked]
    assert len(set(asked)) == len(asked) > 0


def test_kinds_are_balanced_where_sentences_suffice() -> None:
    counts = Counter(asked.kind for asked in ask(made_up(6), 3, "a"))
    assert counts == {"year": 3, "word": 3, "phrase": 3}  # there is no other number
    assert {kind.name for kind in KINDS} - set(counts) == {"number"}


def test_a_sentence_that_was_used_is_not_asked_about_again() -> None:
    passages = made_up(1)
    first = {asked.sentence for asked in ask(passages, 2, "a")}
    rest = {asked.sentence for asked in ask(passages, 2, "a", without=first)}
    assert first
    assert rest
    assert not first & rest


def test_a_quote_that_may_go_on_in_two_ways_is_not_asked_for() -> None:
    sentence = "Alpha beta gamma delta epsilon zeta eta theta in {} it ended there."
    passage = "Cut. {} Middle. {} Cut"
    twice = [passage.format(sentence.format(1901), ""), passage.format(sentence.format(1902), "")]
    assert [asked.answer for asked in ask(twice[:1], 1, "a") if asked.kind == "year"] == ["1901"]
    assert not [asked for asked in ask(twice, 1, "a") if asked.kind == "year"]


def test_the_first_and_the_last_piece_of_a_passage_are_left_out() -> None:
    whole = "One two three four five six seven eight nine ten eleven."
    assert sentences(f"is the end of one. {whole} And the beginning of another that was cut off here") == [
        whole
    ]


@pytest.mark.parametrize(
    ("text", "right"),
    [(" 1994, and it expired", True), ("1994", True), (" in 1994", False), ("", False), ("19945", False)],
)
def test_an_answer_is_right_if_it_comes_first(text: str, right: bool) -> None:
    asked = Asked("year", "What?", QUOTE + "it was passed in", "1994", "it was passed in 1994.")
    assert asked.is_right(text) is right


def test_parts_of_musique_share_no_passage() -> None:
    if not MUSIQUE.is_file():
        pytest.skip(f"{MUSIQUE} is not here")
    corpus = read_corpus(MUSIQUE)
    every = [*corpus.choosing, *corpus.judged]
    assert len(every) == len(set(every))
    assert len(corpus.choosing) == CHOOSING_PASSAGES
    others = {run for passage in (corpus.sample, *corpus.choosing) for run in runs_of(passage)}
    assert all(len(runs_of(passage) & others) < 0.2 * len(runs_of(passage)) for passage in corpus.judged)
    assert not corpus.is_small


def test_passages_that_repeat_others_are_dropped() -> None:
    words = [f"word{index}" for index in range(60)]
    first, shifted, other = " ".join(words[:40]), " ".join(words[5:45]), " ".join(words[38:])
    assert drop_overlapping([first, shifted, other]) == [first, other]


def test_each_round_uses_every_passage_once(tmp_path: Path) -> None:
    passages = made_up(400)
    entries = [{"question": f"Q{at}?", "ctxs": [{"text": text}]} for at, text in enumerate(passages)]
    path = tmp_path / "musique.json"
    path.write_text(json.dumps(entries))
    corpus = read_corpus(path)
    a_round = len(corpus.judged) // PER_PROMPT
    sets = corpus.judged_sets(2 * a_round, 1)
    for turn in (sets[:a_round], sets[a_round:]):
        used = [passage for one in turn for passage in one.passages]
        assert len(used) == len(set(used)) == a_round * PER_PROMPT
    assert [one.number for one in sets] == list(range(2 * a_round))
    for one in sets:
        assert one.open_question in {corpus.questions[passage] for passage in one.passages}


def test_without_musique_the_passages_that_ship_are_read() -> None:
    corpus = read_corpus(NOWHERE)
    assert corpus.is_small
    assert not runs_of(corpus.sample) & {run for passage in corpus.judged for run in runs_of(passage)}
    assert {len(one.passages) for one in corpus.judged_sets(3, 1)} == {PER_PROMPT}
