"""Questions over chunks, from the files that people have: every form becomes a `Question`.

Read, one record a line (JSONL) or as one JSON list:

- `{"chunks": […], "question": "…", "answers": […]}`, the form to write one's own in; `answers` may be left
  out, and then nothing but agreement with full prefill is measured.
- the testbed's, with `task`, `seed` and one `answer`: chunks and question are concatenated as they are;
- `{"ctxs": [{"title", "text"}], "question", "answers"}`, as the CacheBlend authors evaluate;
- LongBench's, `{"input", "context", "answers", "dataset", …}`: the context is cut at its own passages where
  it has some, else at paragraphs (see `CHUNK_WORDS`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField, NotFound

FILE_BYTES_MAX = 1 << 30
CHUNKS_MAX = 256
CHUNK_WORDS = 350
"""About 512 tokens of English, the paper's chunk."""

ROUGE_DATASETS = frozenset({"gov_report", "qmsum", "multi_news", "vcsum", "samsum"})
"""Of LongBench: summaries, scored by Rouge-L. The others that are in English are scored by F1."""

_PASSAGE = re.compile(r"^(?=Passage \d+:)", re.MULTILINE)


@dataclass(frozen=True)
class Question:
    """Chunks in prompt order, and what is asked about them."""

    chunks: tuple[str, ...]
    tail: str
    """What follows the chunks, as it is tokenised: the question with everything around it."""
    answers: tuple[str, ...] = ()
    """Any of them is right; empty where nobody knows."""
    task: str = "questions"
    """Results are also given by task."""

    def __post_init__(self) -> None:
        if not 0 < len(self.chunks) <= CHUNKS_MAX:
            raise InvalidField("chunks", f"{len(self.chunks)} chunks; a question needs 1 to {CHUNKS_MAX}")
        if any(not chunk for chunk in self.chunks):
            raise InvalidField("chunks", "an empty chunk; leave it out")
        if not self.tail.strip():
            raise InvalidField("question", "is empty; ask something about the chunks")


def format_question(question: str) -> str:
    """The tail for a bare question."""
    if not question.strip():
        raise InvalidField("question", "is empty; ask something about the chunks")
    return f"\nQuestion: {question.strip()}\nAnswer:"


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Every question of a file, or the first `limit`.

    Raises `NotFound`, and `InvalidField` that names the line for a record of no known form, for a file
    without any, and for one that is too large.
    """
    if not path.is_file():
        raise NotFound(f"{path} is not a file; name one with questions (JSON lines)")
    if path.stat().st_size > FILE_BYTES_MAX:
        raise InvalidField("questions", f"{path} exceeds {FILE_BYTES_MAX >> 30} GiB; split it")
    questions: list[Question] = []
    for where, record in _records(path):
        if limit is not None and len(questions) >= limit:
            break
        try:
            questions.append(question_of(record))
        except InvalidField as error:
            raise InvalidField("questions", f"{where}: {error}") from None
    if not questions:
        raise InvalidField("questions", f"{path} holds no question; write one JSON object per line")
    return questions


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, record) pairs. A file that starts with a bracket is one list."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidField("questions", f"{path} is not UTF-8 text") from None
    if text.lstrip().startswith("["):
        for index, record in enumerate(_parsed(text, str(path))):
            yield f"{path}[{index}]", record
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"{path}:{number}", _parsed(line, f"{path}:{number}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField("questions", f"{where} is not JSON ({error})") from None


def question_of(record: Any) -> Question:
    """One record of any known form. Raises `InvalidField`."""
    if not isinstance(record, dict):
        raise InvalidField("record", f"is {type(record).__name__}, not an object")
    if "ctxs" in record:
        return _of_contexts(record)
    if "context" in record and "input" in record:
        return _of_longbench(record)
    if "chunks" in record and "seed" in record and "answer" in record:
        return Question(
            _texts(record, "chunks"), _text(record, "question"), (_text(record, "answer"),), _task(record)
        )
    if "chunks" in record:
        return Question(
            _texts(record, "chunks"),
            format_question(_text(record, "question")),
            _answers(record),
            _task(record),
        )
    raise InvalidField(
        "record",
        f"has {', '.join(sorted(map(str, record))[:8]) or 'no fields'}; expected chunks and question, ctxs "
        "and question, or LongBench's context and input",
    )


def _of_contexts(record: dict[str, Any]) -> Question:
    contexts = record["ctxs"]
    if not isinstance(contexts, list) or not all(
        isinstance(context, dict) and isinstance(context.get("text"), str) for context in contexts
    ):
        raise InvalidField("ctxs", "must be a list of {title, text}")
    chunks = tuple(
        f"{context['title']}\n{context['text']}\n" if context.get("title") else f"{context['text']}\n"
        for context in contexts
    )
    return Question(chunks, format_question(_text(record, "question")), _answers(record), _task(record))


def _of_longbench(record: dict[str, Any]) -> Question:
    task = str(record.get("dataset") or "longbench")
    context, question = _text(record, "context"), record["input"]
    if not isinstance(question, str):
        raise InvalidField("input", f"is {type(question).__name__}, not text")
    tail = format_question(question) if question.strip() else "\nSummary:"
    return Question(tuple(cut_context(context)), tail, _answers(record), task)


def cut_context(context: str) -> list[str]:
    """A long context as chunks that concatenate to it: its passages, or paragraphs of `CHUNK_WORDS`."""
    passages = [part for part in _PASSAGE.split(context) if part.strip()]
    if len(passages) > 1:
        return passages
    chunks, words = [""], 0
    for paragraph in re.split(r"(?<=\n)", context):
        count = len(paragraph.split())
        if words and words + count > CHUNK_WORDS:
            chunks.append("")
            words = 0
        chunks[-1] += paragraph
        words += count
    return [chunk for chunk in chunks if chunk]


def _text(record: dict[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise InvalidField(name, f"must be text, got {type(value).__name__}")
    return value


def _texts(record: dict[str, Any], name: str) -> tuple[str, ...]:
    values = record[name]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise InvalidField(name, "must be a list of texts")
    return tuple(values)


def _answers(record: dict[str, Any]) -> tuple[str, ...]:
    return _texts(record, "answers") if record.get("answers") is not None else ()


def _task(record: dict[str, Any]) -> str:
    return str(record.get("task") or "questions")
