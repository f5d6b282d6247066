"""The file of the demo's questions."""

from __future__ import annotations

from pathlib import Path

from benchmarks.support.demo_questions import write_questions
from kintsugi.models.bundled import packaged_files
from kintsugi.models.demo_questions import QUESTIONS_FILE, read_demo_questions


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    write_questions(path, read_demo_questions())
    assert path.read_bytes() == (packaged_files() / QUESTIONS_FILE).read_bytes()
