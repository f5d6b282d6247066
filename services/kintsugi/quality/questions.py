"""Questions about chunks: read from files of several formats, or made of the bundled passages.

A file holds one JSON record per line (JSONL) or one JSON list, compressed if its name ends in `.gz` or
`.xz`.
Formats of a record:

- ours, `{"chunks": […], "question": "…", "answers": […]}`; without `answers`, only agreement with full
  prefill is measured;
- the testbed's, with `task`, `seed` and one `answer`: chunks and question are concatenated unchanged;
- the CacheBlend authors', `{"ctxs": [{"title", "text"}], "question", "answers"}`;
- LongBench's, `{"input", "context", "answers", "dataset", …}`: the context is cut at its "Passage N:" marks,
  or at paragraphs if it has none (see `CHUNK_WORDS`).
"""

from __future__ import annotations

import gzip
import json
import lzma
import random
import re
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField, NotFound
from kintsugi.models.passages import BUNDLED_QUESTIONS, read_bundled_passages

FILE_BYTES_MAX = 1 << 30
_OPENERS: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
CHUNKS_MAX = 256
CHUNK_WORDS = 350
"""About 512 tokens of English, the paper's chunk."""

ROUGE_DATASETS = frozenset({"gov_report", "qmsum", "multi_news", "vcsum", "samsum"})
"""LongBench data sets whose answers are summaries. They are scored by Rouge-L, the other English ones by
F1."""

SEGMENT_LENGTHS = (80, 160, 360, 720)
"""Tokens of each bundled passage in a prompt that is cut into segments. The shortest segment has 64 tokens,
and evidence about 80 tokens covers it. Passages of up to 384 tokens stay whole; passages of 720 become two or
more."""
INSTRUCTION = "Read these passages before you answer.\n\n"
"""Text before the passages, too short for a segment. A segment directly after the prefix would be exact, and
would not represent segments that follow other text."""

_PASSAGE = re.compile(r"^(?=Passage \d+:)", re.MULTILINE)


@dataclass(frozen=True)
class Question:
    """Chunks in prompt order, and a question about them."""

    chunks: tuple[str, ...]
    tail: str
    """The question, or the whole text after the chunks. It is tokenised alone."""
    answers: tuple[str, ...] = ()
    """All right answers; empty if none is known."""
    task: str = "questions"
    """Results are also reported per task."""
    bare: bool = False
    """Whether `tail` is only the question, to which the prompt's form adds text (`models.prompt_form`)."""

    def __post_init__(self) -> None:
        if not 0 < len(self.chunks) <= CHUNKS_MAX:
            raise InvalidField("chunks", f"{len(self.chunks)} chunks; a question needs 1 to {CHUNKS_MAX}")
        if any(not chunk for chunk in self.chunks):
            raise InvalidField("chunks", "contains an empty chunk; leave it out")
        if not self.tail.strip():
            raise InvalidField("question", "is empty; ask something about the chunks")


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Read every question of a file, or the first `limit`.

    Raises `NotFound`; `InvalidField` for a file that is too large or holds no question, and, naming the line,
    for a record of an unknown format.
    """
    if not path.is_file():
        raise NotFound(f"{path} is not a file; name a file of questions (JSON lines)")
    questions: list[Question] = []
    for where, record in _read_records(path):
        if limit is not None and len(questions) >= limit:
            break
        try:
            questions.append(parse_question(record))
        except InvalidField as error:
            raise InvalidField("questions", f"{where}: {error}") from None
    if not questions:
        raise InvalidField("questions", f"{path} holds no questions; write one JSON object per line")
    return questions


def _read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (location, record) pairs. A file that starts with a bracket is one list."""
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise InvalidField("questions", f"{path} exceeds {FILE_BYTES_MAX >> 30} GiB; split it")
        text = data.decode()
    except UnicodeDecodeError:
        raise InvalidField("questions", f"{path} is not UTF-8 text") from None
    except (gzip.BadGzipFile, lzma.LZMAError, EOFError, zlib.error) as error:
        raise InvalidField("questions", f"{path} is not a whole {path.suffix} file: {error}") from None
    if text.lstrip().startswith("["):
        for index, record in enumerate(_parse_json(text, str(path))):
            yield f"{path}[{index}]", record
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"{path}:{number}", _parse_json(line, f"{path}:{number}")


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField("questions", f"{where} is not JSON ({error})") from None


def parse_question(record: Any) -> Question:
    """Parse a record of any known format. Raises `InvalidField`."""
    if not isinstance(record, dict):
        raise InvalidField("record", f"is {type(record).__name__}, not an object")
    task = str(record.get("task") or "questions")
    if "ctxs" in record:
        chunks, question = _context_texts(record["ctxs"]), _text(record, "question")
        return Question(chunks, question, _answers(record), task, bare=True)
    if "context" in record and "input" in record:
        return _parse_longbench(record)
    if "chunks" in record:
        is_whole = "seed" in record and "answer" in record
        answers = (_text(record, "answer"),) if is_whole else _answers(record)
        return Question(_texts(record, "chunks"), _text(record, "question"), answers, task, not is_whole)
    raise InvalidField(
        "record",
        f"has {', '.join(sorted(map(str, record))[:8]) or 'no fields'}; expected chunks and question, ctxs "
        "and question, or LongBench's context and input",
    )


def _context_texts(contexts: Any) -> tuple[str, ...]:
    """Return the texts of `ctxs`, each after its title if it has one."""
    if not isinstance(contexts, list) or not all(
        isinstance(context, dict) and isinstance(context.get("text"), str) for context in contexts
    ):
        raise InvalidField("ctxs", "must be a list of {title, text}")
    return tuple(
        f"{context['title']}\n{context['text']}\n" if context.get("title") else f"{context['text']}\n"
        for context in contexts
    )


def _parse_longbench(record: dict[str, Any]) -> Question:
    task = str(record.get("dataset") or "longbench")
    context, question = _text(record, "context"), record["input"]
    if not isinstance(question, str):
        raise InvalidField("input", f"is {type(question).__name__}, not text")
    bare = bool(question.strip())
    tail = question if bare else "\nSummary:"
    return Question(tuple(cut_context(context)), tail, _answers(record), task, bare)


def cut_context(context: str) -> list[str]:
    """Cut a long context into its passages, or else into groups of paragraphs of up to `CHUNK_WORDS` words.
    Concatenated, the chunks are the context."""
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


def make_passage_questions(
    count_tokens: Callable[[str], int],
    shapes: Mapping[int, Sequence[int]],
    count: int,
    seed: int,
    head: tuple[str, ...] = (),
) -> list[Question]:
    """Make questions about the bundled passages, for users without questions. They have no answers.

    ``shapes``: numbers of passages by the tokens that each is cut to. Every question has one of these
    lengths and numbers at random, after ``head``.
    """
    texts = [passage.text.split() for passage in read_bundled_passages()]
    passages = {tokens: [_cut_words(words, tokens, count_tokens) for words in texts] for tokens in shapes}
    picks = random.Random(seed)
    questions = []
    for _ in range(count):
        tokens = picks.choice(list(shapes))
        chunks = (*head, *picks.sample(passages[tokens], picks.choice(shapes[tokens])))
        questions.append(Question(chunks, picks.choice(BUNDLED_QUESTIONS), (), "passages", bare=True))
    return questions


def shape_segments(room: int) -> dict[int, range]:
    """Return ``shapes`` of prompts with up to ``room`` tokens of passages that are cut into segments, so that
    the mean length of a prompt's chunks varies, too. Raises `InvalidField` if no passage fits."""
    most = len(read_bundled_passages())
    shapes = {one: range(1, min(most, room // one) + 1) for one in SEGMENT_LENGTHS if one <= room}
    if not shapes:
        raise InvalidField(
            "segments",
            f"a prompt has room for {max(0, room)} tokens of passages, but a segment needs "
            f"{SEGMENT_LENGTHS[0]}; raise --engine max_model_len, or calibrate without segments",
        )
    return shapes


def _cut_words(words: Sequence[str], tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Return the first words as one paragraph of at most `tokens` tokens, followed by a blank line."""
    number = bisect_right(
        range(len(words) + 1), tokens, key=lambda taken: count_tokens(_paragraph(words[:taken]))
    )
    return _paragraph(words[: number - 1])


def _paragraph(words: Sequence[str]) -> str:
    return " ".join(words) + "\n\n"
