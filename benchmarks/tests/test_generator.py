"""The generator is deterministic, keeps its splits apart, and its answers follow from its text."""

from __future__ import annotations

import re

import pytest

from benchmarks.testbed.generator import (
    ANSWER_WEIGHT,
    CONTROL_TASK,
    CROSS_CHUNK_TASKS,
    END,
    EVAL_SEEDS,
    TASKS,
    TRAIN_SEEDS,
    SeedError,
    Shape,
    eval_example,
    make_eval_example,
    make_training_text,
)

PATTERNS = {
    "topic": re.compile(r"Now meet (\w+)"),
    "place": re.compile(r"We reach (\w+)"),
    "link": re.compile(r"(\w+) is her"),
    "alias": re.compile(r"(\w+) is (\w+)"),
    "code": re.compile(r"(\w+) means (\w+)"),
    "camp": re.compile(r"(\w+) lies here"),
    "hid": re.compile(r"(\w+) hid in (\w+) by (\w+)"),
    "sold": re.compile(r"(\w+) sold by (\w+) in (\w+)"),
    "traded": re.compile(r"(\w+) traded by (\w+) for (\w+)"),
    "filler": re.compile(r"The \w+ \w+ \w+ \w+"),
}


def read(text: str) -> dict[tuple[str, str, str], str]:
    """Reads a text from left to right, as a person would: (verb, subject, object) to answer."""
    meanings: dict[str, str] = {}
    answers: dict[tuple[str, str, str], str] = {}
    asked: set[tuple[str, str]] = set()
    for sentence in filter(None, (part.strip(" -\n") for part in text.split("."))):
        kind, match = next(
            (kind, found) for kind, pattern in PATTERNS.items() if (found := pattern.fullmatch(sentence))
        )
        parts = match.groups()
        if kind == "topic":
            meanings["her"] = parts[0]
        elif kind == "place":
            meanings["here"] = parts[0]
        elif kind == "link":
            meanings[parts[0]] = meanings["her"]
        elif kind in ("alias", "code"):
            meanings[parts[0]] = parts[1]
        elif kind == "camp":
            meanings[parts[0]] = meanings["here"]
        elif kind != "filler":
            obj, subject, answer = parts
            assert (kind, subject) not in asked, "a question would have two answers"
            asked.add((kind, subject))
            answers[kind, subject, obj] = meanings.get(answer, answer)
    return answers


def parse_question(question: str) -> tuple[str, str, str]:
    asked = r"Q: what (?:person|city|metal) were (\w+) (\w+) (?:in|by) (\w+) (?:in|by|for)"
    found = re.fullmatch(asked, question)
    assert found is not None
    obj, verb, subject = found.groups()
    return verb, subject, obj


@pytest.mark.parametrize("task", TASKS)
def test_answers_follow_from_the_text(task: str) -> None:
    for index in range(60):
        example = eval_example(task, index)
        assert read("".join(example.chunks))[parse_question(example.question)] == example.answer


@pytest.mark.parametrize("task", CROSS_CHUNK_TASKS)
def test_the_fact_asked_for_cannot_be_resolved_inside_its_chunk(task: str) -> None:
    for index in range(60):
        example = eval_example(task, index)
        verb, subject, obj = parse_question(example.question)
        for chunk in example.chunks:
            try:
                alone = read(chunk)
            except KeyError:  # a link whose topic stands in an earlier chunk binds nothing here
                continue
            assert alone.get((verb, subject, obj)) != example.answer, chunk


def test_control_is_stated_in_one_sentence() -> None:
    for index in range(60):
        example = eval_example(CONTROL_TASK, index)
        verb, subject, obj = parse_question(example.question)
        sentence = re.compile(rf"{obj} {verb} (in|by) {subject} (in|by|for) {example.answer}\.")
        assert any(sentence.search(chunk) for chunk in example.chunks)


def test_same_seed_same_example_and_other_seed_another() -> None:
    for task in TASKS:
        assert eval_example(task, 5) == eval_example(task, 5)
        assert eval_example(task, 5) != eval_example(task, 6)
    assert make_training_text(5, Shape(), 256) == make_training_text(5, Shape(), 256)


def test_the_first_example_is_what_it_was() -> None:
    """A change of this text makes published figures incomparable: bump them together."""
    example = eval_example("pronoun", 1)
    assert example.question == "Q: what person were books hid in attic by"
    assert example.answer == "Karen"


@pytest.mark.parametrize("seed", [EVAL_SEEDS.start, EVAL_SEEDS.stop - 1, -1])
def test_training_refuses_seeds_that_are_not_its_own(seed: int) -> None:
    with pytest.raises(SeedError, match="never mix"):
        make_training_text(seed, Shape(), 256)


@pytest.mark.parametrize("seed", [0, TRAIN_SEEDS.stop - 1, EVAL_SEEDS.stop])
def test_evaluation_refuses_seeds_that_are_not_its_own(seed: int) -> None:
    with pytest.raises(SeedError, match="never mix"):
        make_eval_example("alias", seed)


def test_splits_are_disjoint() -> None:
    assert TRAIN_SEEDS.stop <= EVAL_SEEDS.start


def test_training_weights_mark_answers() -> None:
    text = make_training_text(11, Shape(), 384)
    assert len(text.pieces) == len(text.weights) == len(text.stands_for) <= 384
    ends = [index for index, piece in enumerate(text.pieces) if piece == END]
    assert ends
    assert all(text.weights[index - 1] == ANSWER_WEIGHT for index in ends)
    assert text.weights.count(ANSWER_WEIGHT) == len(ends)


@pytest.mark.parametrize("seed", range(20))
def test_what_pieces_stand_for_follows_from_the_text_before_them(seed: int) -> None:
    text = make_training_text(seed, Shape(), 384)
    stated = [index for index, value in enumerate(text.stands_for) if value is not None]
    assert stated
    for index in stated:
        if text.pieces[index - 1] in (" is", " lies"):
            continue  # a link states nothing that can be asked for
        answers = read("".join(text.pieces[: index + 1]))
        assert list(answers.values())[-1] == text.stands_for[index]


def test_prompt_sizes_cover_what_they_should() -> None:
    long = Shape(chunks=(12, 12), fillers_per_chunk=(18, 24))
    sizes = [len("".join(eval_example("alias", index, long).chunks).split()) for index in range(5)]
    assert all(1000 < size < 2048 for size in sizes)
    short = Shape(chunks=(3, 4), facts_per_chunk=(2, 3), same_chunk_rate=0.0)
    assert all(2 < len(eval_example("code", index, short).chunks) <= 4 for index in range(5))
