"""`kintsugi eval`: measures quality, cost and time over a grid of configurations."""

from __future__ import annotations

import dataclasses
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from kintsugi.cli.exits import error_document
from kintsugi.cli.models import prepare_model
from kintsugi.cli.options import EvaluateTask, parse_engine_arguments, read_yaml
from kintsugi.cli.render import format_count, make_figures_table, print_form
from kintsugi.cli.screen import Screen
from kintsugi.core.errors import KintsugiError
from kintsugi.core.plan import FormName
from kintsugi.core.schema import load
from kintsugi.models.context import tokenize_context
from kintsugi.models.prompt_form import load_form
from kintsugi.models.reference import find_packaged
from kintsugi.quality.evaluate import (
    EvaluationGrid,
    EvaluationRow,
    evaluate,
)
from kintsugi.quality.measure import answer_tokens, tokenize_questions
from kintsugi.quality.metrics import Interval
from kintsugi.quality.questions import read_questions
from kintsugi.quality.session import MeasuringEngineSpec, start_measuring_engine
from kintsugi.store.client.registry import ram_url


@dataclass
class Evaluation:
    """The results of `kintsugi eval`."""

    model: str
    questions: str
    form: str
    """Name of the prompt form."""
    rows: list[EvaluationRow]
    warnings: list[str]
    error: dict[str, Any] | None
    """The error that ended the evaluation early: type, message, exit code. None if it completed."""


def run(screen: Screen, task: EvaluateTask) -> Evaluation:
    """Measure and print. If an engine fails, print the results of the engines before it."""
    prepare_model(screen, task.model)
    packaged = find_packaged(task.model)
    model = packaged.title if packaged else task.model
    found = Evaluation(model, str(task.questions), task.form.value, [], [], None)
    try:
        _measure(screen, task, found)
    except KintsugiError as error:
        if not found.rows:
            raise
        found.error = error_document(error)
        screen.note(f"kintsugi: {found.error['message']}")
    for warning in dict.fromkeys(found.warnings):
        screen.note(f"kintsugi: warning: {warning}")
    screen.show(dataclasses.asdict(found), lambda console: render(console, found))
    return found


def _measure(screen: Screen, task: EvaluateTask, found: Evaluation) -> None:
    """Measure with every engine in turn, and add the results to `found`."""
    grid = EvaluationGrid() if task.grid is None else load(EvaluationGrid, read_yaml(task.grid), "grid")
    questions = read_questions(task.questions, grid.limit)
    with screen.step("Reading the tokenizer"):
        form = load_form(task.model, task.form)
        context = tokenize_context(task.context, task.model)
    found.form = form.name.value
    for codec, speed in grid.engines():
        store = ram_url(f"eval-{uuid.uuid4().hex[:8]}", speed)
        spec = MeasuringEngineSpec(
            task.model,
            codec=codec,
            store=store,
            form=form,
            context_token_ids=context,
            vllm_args=parse_engine_arguments(task.engine),
        )
        with screen.engine_log(), ExitStack() as stack:
            with screen.step(f"Starting vLLM, {codec}{'' if speed is None else f', {speed:g} bytes/s'}"):
                engine = stack.enter_context(start_measuring_engine(spec))
            max_tokens = grid.max_tokens or answer_tokens(questions, form.tokenizer)
            cases, warnings = tokenize_questions(questions, form, engine.max_model_len, max_tokens)
            found.warnings += warnings
            selections = grid.selections(engine.num_layers)
            with screen.step(f"Measuring {format_count(len(cases), 'question')}") as say:
                found.rows += evaluate(engine, cases, selections, grid, codec, speed, max_tokens, say)


HEADINGS = ("method", "cost", "ms", "EM", "EM lost", "F1", "R-L", "KL", "top-1")


def render(console: Console, evaluation: Evaluation) -> None:
    """Print one table per setting."""
    print_form(console, FormName(evaluation.form))
    for setting in dict.fromkeys(row.setting for row in evaluation.rows):
        parts = [setting.codec, f"batch {setting.batch}"]
        parts += [f"{setting.chunk_tokens} tokens a chunk"] if setting.chunk_tokens else []
        parts += [f"{setting.chunk_count} chunks"] if setting.chunk_count else []
        parts += [f"{setting.tier_bytes_per_s:g} bytes/s"] if setting.tier_bytes_per_s else []
        rows = [row for row in evaluation.rows if row.setting == setting]
        parts.append(f"{rows[0].num_prompts} questions")
        console.print("\n" + ", ".join(parts))
        table = make_figures_table(HEADINGS, box=None, padding=(0, 1, 0, 0))
        for row in rows:
            table.add_row(*_cells(row))
        console.print(table)
    console.print(
        "cost: share of a full prefill's token-layers · ms: mean TTFT · EM: exact match, and points "
        "lost to full prefill · R-L: Rouge-L · KL: nats · ranges are 95 % bootstrap intervals",
        style="dim",
    )


def _cells(row: EvaluationRow) -> list[str]:
    return [
        row.method,
        f"{row.cost:.2f}",
        f"{row.ttft.mean * 1e3:.0f}",
        _mean(row.exact_match),
        "–" if row.em_loss is None else _span(row.em_loss, 100, 1),
        _mean(row.f1),
        _mean(row.rouge_l),
        f"{row.kl_mean:.2g}",
        f"{row.top1_agreement:.2f}",
    ]


def _mean(interval: Interval | None) -> str:
    return "–" if interval is None else f"{interval.mean:.2f}"


def _span(interval: Interval, scale: float, digits: int) -> str:
    low, high = (f"{value * scale:.{digits}f}" for value in (interval.low, interval.high))
    return f"{interval.mean * scale:.{digits}f} [{low}, {high}]"
