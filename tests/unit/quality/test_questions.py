"""Every form of a file of questions, and what is refused."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField, NotFound
from kintsugi.quality.questions import Question, cut_context, parse_question, read_questions

OWN = {"chunks": ["one ", "two "], "question": "Which?", "answers": ["one"]}
COMPRESS: Mapping[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress}


def written(folder: Path, *records: Any) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def test_ones_own_form() -> None:
    assert parse_question(OWN) == Question(("one ", "two "), "Which?", ("one",), bare=True)
    unanswered = parse_question({"chunks": ["one"], "question": "Which?", "task": "mine"})
    assert (unanswered.answers, unanswered.task) == ((), "mine")


def test_the_testbeds_form_is_concatenated_as_it_is() -> None:
    record = {"task": "alias", "chunks": [" a", " b"], "question": "Q: x", "answer": "attic", "seed": 1}
    assert parse_question(record) == Question((" a", " b"), "Q: x", ("attic",), "alias")


def test_the_form_with_contexts() -> None:
    record = {
        "ctxs": [{"title": "", "text": "one"}, {"title": "T", "text": "two"}],
        "question": "Which?",
        "answers": ["one"],
    }
    assert parse_question(record).chunks == ("one\n", "T\ntwo\n")


def test_longbenchs_form() -> None:
    context = "Passage 1:\nAda\nwas here.\nPassage 2:\nBob\nwas there."
    record = {"input": "Who?", "context": context, "answers": ["Ada"], "dataset": "hotpotqa", "length": 9}
    question = parse_question(record)
    assert question.chunks == ("Passage 1:\nAda\nwas here.\n", "Passage 2:\nBob\nwas there.")
    assert (question.task, question.tail, question.bare) == ("hotpotqa", "Who?", True)
    summary = parse_question({**record, "input": "", "dataset": "multi_news"})
    assert summary.tail == "\nSummary:"


def test_a_context_without_passages_is_cut_at_paragraphs() -> None:
    context = "".join(f"{'word ' * 100}{index}\n" for index in range(10))
    chunks = cut_context(context)
    assert "".join(chunks) == context
    assert 2 < len(chunks) < 10
    assert cut_context("short") == ["short"]


def test_lines_and_lists_are_read(tmp_path: Path) -> None:
    lines = read_questions(written(tmp_path, OWN, OWN, OWN))
    path = tmp_path / "list.json"
    path.write_text(json.dumps([OWN, OWN, OWN]))
    assert read_questions(path) == lines
    assert len(lines) == 3
    assert len(read_questions(path, limit=2)) == 2
    for suffix, compress in COMPRESS.items():
        packed = tmp_path / f"lines.jsonl{suffix}"
        packed.write_bytes(compress((json.dumps(OWN) + "\n").encode() * 3))
        assert read_questions(packed) == lines


@pytest.mark.parametrize(
    ("record", "word"),
    [
        ([], "not an object"),
        ({}, "no fields"),
        ({"text": "x"}, "expected chunks"),
        ({**OWN, "chunks": []}, "0 chunks"),
        ({**OWN, "chunks": ["a"] * 257}, "257 chunks"),
        ({**OWN, "chunks": ["a", ""]}, "empty chunk"),
        ({**OWN, "chunks": "text"}, "list of texts"),
        ({**OWN, "question": " "}, "ask something"),
        ({**OWN, "question": 3}, "must be text"),
        ({**OWN, "answers": "one"}, "list of texts"),
        ({"ctxs": ["x"], "question": "?"}, "title, text"),
        ({"context": "x", "input": 3}, "not text"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, record: Any, word: str) -> None:
    with pytest.raises(InvalidField, match=word) as caught:
        read_questions(written(tmp_path, OWN, record))
    assert "questions.jsonl:2" in str(caught.value)


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(InvalidField, match="holds no question"):
        read_questions(empty)
    with pytest.raises(NotFound, match="is not a file"):
        read_questions(tmp_path / "absent")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidField, match="UTF-8"):
        read_questions(binary)
    for suffix, compress in COMPRESS.items():
        cut = tmp_path / f"cut{suffix}"
        cut.write_bytes(compress(json.dumps(OWN).encode())[:-9])
        plain = tmp_path / f"plain{suffix}"
        plain.write_text(json.dumps(OWN))
        for path in (cut, plain):
            with pytest.raises(InvalidField, match=f"not a whole {suffix} file"):
                read_questions(path)
    broken = tmp_path / "broken"
    broken.write_text("{")
    with pytest.raises(InvalidField, match="broken:1 is not JSON"):
        read_questions(broken)


def test_the_authors_evaluation_file_is_read() -> None:
    path = Path(__file__).parents[4] / "shared/data/musique_s.json"
    if not path.is_file():
        pytest.skip("the shared data folder is not here")
    questions = read_questions(path)
    assert len(questions) == 150
    assert all(len(question.chunks) == 10 and question.answers for question in questions)
