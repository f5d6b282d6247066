"""Questions of the testbed's evaluation split, in disjoint slices: to choose on, to judge on, to watch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.testbed.generator import CONTROL_TASK, CROSS_CHUNK_TASKS, EVAL_SHAPE, Shape, eval_example
from kintsugi.core.errors import NotFound
from kintsugi.engine.local import LocalEngine
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.models.prompt_form import PromptForm
from kintsugi.quality.measure import Case, tokenize_questions
from kintsugi.quality.questions import Question

TASKS = CROSS_CHUNK_TASKS
CONTROL = CONTROL_TASK
JUDGED_FROM = 0
CHOSEN_FROM = 100_000
"""Configurations are chosen on these, so that the choice does not depend on the judging questions."""
WATCHED_FROM = 300_000


def checkpoint(model: str | None) -> Path:
    """The trained model: the one named, or the bundled one."""
    folder = bundled_checkpoint() if model is None else Path(model)
    if not (folder / "model.safetensors").is_file():
        raise NotFound(f"{folder} holds no trained model; train one (benchmarks/testbed), or give --model")
    return folder


def questions(tasks: Sequence[str], first: int, count: int, shape: Shape = EVAL_SHAPE) -> list[Question]:
    """`count` of each task, tasks taking turns."""
    found = []
    for index in range(first, first + count):
        for task in tasks:
            example = eval_example(task, index, shape)
            found.append(Question(example.chunks, example.question, (example.answer,), task))
    return found


def cases(running: LocalEngine, asked: Sequence[Question]) -> list[Case]:
    """The questions as this engine tokenises them; every one must fit."""
    form = PromptForm.of(running.tokenizer)
    found, warnings = tokenize_questions(asked, form, running.max_model_len, 1)
    dropped = [warning for warning in warnings if "left out" in warning]
    assert not dropped, dropped[0]
    return found


def long_shape(tokens: int) -> Shape:
    """Return documents of about this many tokens: the same facts among more filler sentences."""
    chunks = 6
    fillers = max(2, round((tokens / chunks - 24) / 6))
    return replace(EVAL_SHAPE, chunks=(chunks, chunks), fillers_per_chunk=(fillers, fillers))
