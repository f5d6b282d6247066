"""`kintsugi calibrate`: measure on a file of questions how much blends of a model lose, before any traffic.

Engines measure the same on the prompts that they serve, without this command. A file leads to a verdict
sooner, and only a file with answers can test them.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.text import Text

from kintsugi.cli.exits import ExitCode
from kintsugi.cli.models import prepare_model
from kintsugi.cli.options import CalibrateTask, check_writable, parse_engine_arguments
from kintsugi.cli.render import format_count, make_figures_table
from kintsugi.cli.screen import Screen
from kintsugi.core.errors import InvalidField, KintsugiError
from kintsugi.core.evidence import Quality
from kintsugi.core.gate import describe_progress
from kintsugi.core.report import FILE, Cell, Report, Standing, describe_selection
from kintsugi.models.context import encode_context
from kintsugi.models.prompt_form import load_form_behind
from kintsugi.quality import reports
from kintsugi.quality.calibrate import calibrate, identify_evidence, prepare_bench
from kintsugi.quality.questions import read_questions
from kintsugi.quality.reports import ReportKeeper
from kintsugi.quality.session import MeasuringEngineSpec, start_measuring_engine
from kintsugi.quality.stream import list_undecided
from kintsugi.store.client.registry import is_process_local, open_store

ERROR_SHOWN = 0.05


def run(screen: Screen, task: CalibrateTask) -> ExitCode:
    """Calibrate and write the report. Returns `NOT_BLENDABLE` if no configuration passes; its evidence is
    saved anyway."""
    prepare_model(screen, task.model)
    arguments = parse_engine_arguments(task.engine)
    if task.minutes is not None and not task.minutes > 0:
        raise InvalidField("minutes", f"{task.minutes:g} must be above 0")
    quality = Quality(task.quality)
    if quality is Quality.OFF:
        raise InvalidField("quality", "off tests nothing; choose balanced or strict")
    _check_destination(task)
    given = None if task.questions is None else read_questions(task.questions)
    with screen.step("Reading the tokenizer"):
        form = load_form_behind(task.model, task.form, task.system, arguments)
    spec = MeasuringEngineSpec(
        task.model,
        codec=task.codec,
        form=form,
        context_token_ids=encode_context(task.context, form.tokenizer),
        extra_config={"portable": task.portable},
        vllm_args=arguments,
    )
    with screen.engine_log(), ExitStack() as stack:
        with screen.step("Starting vLLM"):
            engine = stack.enter_context(start_measuring_engine(spec))
        with screen.step("Reading the questions"):
            bench, warnings = prepare_bench(engine, form, given, task.segments)
        keeper = ReportKeeper(None, engine.binding, engine.versions, quality, writer=identify_evidence(bench))
        with screen.step(f"Calibrating on {format_count(len(bench.cases), 'question')}") as say:
            calibrate(
                bench,
                keeper,
                quality,
                form.name.value,
                task.segments,
                task.minutes,
                notify=say,
                keep=lambda report: _keep_so_far(screen, task, report),
            )
    for warning in warnings:
        screen.note(f"kintsugi: warning: {warning}")
    _keep_report(screen, task, keeper.report)
    screen.show(
        _document(keeper.report, quality, warnings),
        lambda console: render(console, keeper.report, quality),
    )
    passed = any(standing.passed for _, standing in _standings(keeper.report, quality))
    return ExitCode.OK if passed else ExitCode.NOT_BLENDABLE


def _standings(report: Report, quality: Quality) -> list[tuple[Cell, Standing]]:
    return [(cell, report.standing(cell, FILE, quality)) for cell in report.cells]


def _is_over(report: Report, cell: Cell, quality: Quality) -> bool:
    """Whether more questions would not help: all passed, or the next configuration is beyond the limit."""
    return not list_undecided(report, cell, FILE, quality, 1)


def _keep_report(screen: Screen, task: CalibrateTask, report: Report) -> None:
    """Write the report to the file and publish it in the store that the options name."""
    _save(task, report)
    if task.out is not None:
        screen.note(f"wrote {task.out}")
    if task.store is not None:
        screen.note(f"published as {report.binding.report_name} in {task.store}")


def _keep_so_far(screen: Screen, task: CalibrateTask, report: Report) -> None:
    """Save the report of an unfinished calibration, so that a kill does not lose it."""
    try:
        _save(task, report)
    except KintsugiError as error:
        screen.note(f"kintsugi: warning: the evidence so far was not saved: {error}")


def _save(task: CalibrateTask, report: Report) -> None:
    if task.out is not None:
        reports.write(task.out, report)
    if task.store is not None:
        with closing(open_store(task.store)) as store:
            reports.publish(store, report)


def _check_destination(task: CalibrateTask) -> None:
    """Check the report's destination before the measurements start.

    Raises `InvalidField`, or `Unavailable` if the store does not answer.
    """
    if task.store is None and task.out is None:
        raise InvalidField(
            "store", "give --store URL, where engines look for reports, or --out FILE, or both"
        )
    if task.store is not None and is_process_local(task.store):
        raise InvalidField(
            "store", f"{task.store!r} exists only in this process; name a shard, or use --out FILE"
        )
    if task.out is not None:
        check_writable("out", task.out)
    if task.store is not None:
        with closing(open_store(task.store)) as store:
            store.stats()


def _document(report: Report, quality: Quality, warnings: list[str]) -> dict[str, Any]:
    """Return the result as JSON."""
    return {
        "quality": quality.value,
        "loss_max": quality.loss_max,
        "binding": asdict(report.binding),
        "cells": [
            {
                "prompts": str(cell),
                "passed": [describe_selection(passed) for passed in standing.passed],
                "configurations": _rows(report, cell, standing),
                "is_over": _is_over(report, cell, quality),
                "pairs_missing": None if _is_over(report, cell, quality) else standing.missing,
            }
            for cell, standing in _standings(report, quality)
        ],
        "warnings": warnings,
    }


def _rows(report: Report, cell: Cell, standing: Standing) -> list[dict[str, Any]]:
    rows = []
    for selection in report.ladder:
        tally = report.tally(cell, FILE, selection)
        if not tally.pairs:
            continue
        answers = sum(pairs for _, pairs in tally.answers)
        wrong = sum(value * pairs for value, pairs in tally.answers)
        rows.append(
            {
                "configuration": describe_selection(selection),
                "passed": selection in standing.passed,
                "pairs": tally.pairs,
                "cost": round(tally.cost / tally.pairs, 4),
                "loss": round(tally.loss, 4),
                "loss_upper": round(tally.loss_upper(ERROR_SHOWN), 4),
                "kl": round(tally.kl / tally.pairs, 5),
                "changed": round(tally.changed, 4),
                "answers_lost": round(wrong / answers, 4) if answers else None,
            }
        )
    return rows


def render(console: Console, report: Report, quality: Quality) -> None:
    """Print the measured configurations of each cell, and what passes."""
    for cell, standing in _standings(report, quality):
        console.print(Text(f"{cell}, codec {report.binding.codec}"), style="dim")
        headings = ("", "configuration", "cost", "loss", "KL", "changed", "EM lost", "n")
        table = make_figures_table(headings, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for row in _rows(report, cell, standing):
            lost = "–" if row["answers_lost"] is None else f"{100 * row['answers_lost']:.1f}"
            table.add_row(
                "✓" if row["passed"] else "",
                row["configuration"],
                f"{row['cost']:.3f}",
                f"{row['loss']:.3f}<{row['loss_upper']:.3f}",
                f"{row['kl']:.4f}",
                f"{100 * row['changed']:.1f}",
                lost,
                str(row["pairs"]),
            )
        console.print(table)
        if standing.passed:
            console.print(Text(f"passes: {describe_selection(standing.passed[-1])}"))
        if standing.next is not None:
            state = "does not pass" if _is_over(report, cell, quality) else "undecided"
            name = describe_selection(standing.next)
            console.print(Text(f"{state}: {name}: {describe_progress(standing)}"))
    console.print(
        f"loss: mean < 95 % bound; a mean below {quality.loss_max:.3f} passes ({quality.value}) · KL in nats "
        "· changed: percent of tokens · EM lost: points of exact match · ✓ passes",
        style="dim",
        highlight=False,
    )
