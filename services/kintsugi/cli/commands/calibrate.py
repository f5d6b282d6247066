"""`kintsugi calibrate`: measures whether and how a model may be blended, and writes a report."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.text import Text

from kintsugi.cli.exits import ExitCode
from kintsugi.cli.models import prepare_model
from kintsugi.cli.options import CalibrateTask, check_writable, parse_engine_arguments, parse_json_object
from kintsugi.cli.render import format_count, make_figures_table, print_form
from kintsugi.cli.screen import Screen
from kintsugi.core.errors import InvalidField
from kintsugi.core.report import CalibrationReport, ReportEntry, Thresholds, describe_selection, shortfalls
from kintsugi.models.context import tokenize_context
from kintsugi.quality import reports
from kintsugi.quality.calibrate import Budget, calibrate, check_budget, prepare_bench
from kintsugi.quality.questions import read_questions
from kintsugi.quality.session import MeasuringEngineSpec, load_form_behind, start_measuring_engine
from kintsugi.quality.shadow import utc_now
from kintsugi.store.client.registry import is_process_local, open_store

ROWS_MAX = 24


def run(screen: Screen, task: CalibrateTask) -> ExitCode:
    """`NOT_BLENDABLE` if nothing passes; the report is written all the same and keeps the gate shut."""
    prepare_model(screen, task.model)
    connector = parse_json_object("connector", task.connector, '{"portable": false}')
    if "prefix_token_ids" in connector:
        raise InvalidField("connector", "must not hold prefix_token_ids; use --form and --system")
    arguments = parse_engine_arguments(task.engine)
    budget = Budget(prompts=task.prompts, seed=task.seed)
    check_budget(budget, Thresholds())
    _check_destination(task)
    given = None if task.questions is None else read_questions(task.questions)
    with screen.step("Reading the tokenizer"):
        form = load_form_behind(task.model, task.form, task.system, arguments)
    spec = MeasuringEngineSpec(
        task.model,
        codec=task.codec,
        store=task.chunk_store,
        form=form,
        context_token_ids=tokenize_context(task.context, task.model),
        extra_config=connector,
        vllm_args={**arguments, "dtype": task.dtype},
    )
    with screen.engine_log(), ExitStack() as stack:
        with screen.step("Starting vLLM"):
            engine = stack.enter_context(start_measuring_engine(spec))
        with screen.step("Preparing the questions") as say:
            bench, warnings = prepare_bench(engine, form, given, budget, say)
        with screen.step(f"Calibrating on {format_count(len(bench.cases), 'question')}") as say:
            source = str(task.questions or "bundled passages")
            calibration = calibrate(
                bench, engine.num_layers, engine.binding, budget, Thresholds(), source, utc_now(), say
            )
    warnings = [*warnings, *calibration.warnings]
    for warning in warnings:
        screen.note(f"kintsugi: warning: {warning}")
    report = calibration.report
    if task.out is not None:
        reports.write(task.out, report)
        screen.note(f"wrote {task.out}")
    if task.store is not None:
        with closing(open_store(task.store)) as store:
            reports.publish(store, report)
        screen.note(f"published as {report.binding.report_name} in {task.store}")
    document = {**json.loads(report.to_bytes()), "form": form.name.value, "warnings": warnings}

    def show(console: Console) -> None:
        print_form(console, form.name)
        render(console, report)

    screen.show(document, show)
    return ExitCode.OK if report.choice.selection is not None else ExitCode.NOT_BLENDABLE


def _check_destination(task: CalibrateTask) -> None:
    """Check the destination before minutes are spent.

    Raises `InvalidField`, and `Unavailable` for a store that does not answer.
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


HEADINGS = ("selector", "r", "@", "cost", "KL", "p99", "top-1", "right", "n")


def render(console: Console, report: CalibrationReport) -> None:
    """Print the entries, best first, and the choice below them."""
    console.print(Text(f"{report.binding.codec}, {report.questions}"), style="dim")
    table = make_figures_table(HEADINGS, box=SIMPLE_HEAD, padding=(0, 1))
    ordered = sorted(report.entries, key=lambda entry: (-entry.num_prompts, entry.cost))
    for entry in ordered[:ROWS_MAX]:
        chosen = entry.selection == report.choice.selection
        table.add_row(*_cells(entry, report), style="bold yellow" if chosen else "")
    console.print(table)
    if len(ordered) > ROWS_MAX:
        console.print(
            f"and {len(ordered) - ROWS_MAX} more that were only screened (--json prints all)", style="dim"
        )
    noise = report.noise
    console.print(
        f"r: ratio · @: check layer · cost: share of a full prefill's token-layers · n: questions, fewer "
        f"than {report.thresholds.prompts_min} only screen · !: misses its threshold\n"
        f"full prefill against itself: KL {noise.kl_mean:.2g}, "
        f"top-1 agreement {noise.top1_agreement:.3f}{_full_accuracy(report)}",
        style="dim",
        highlight=False,
    )
    if report.choice.selection is None:
        console.print(Text(f"not blendable: {report.choice.why}", style="red"))
        return
    console.print(Text(f"default: {describe_selection(report.choice.selection)} ({report.choice.why})"))
    least = ", ".join(f"{name} {one.ratio:g}" for name, one in sorted(report.choice.limits.items()))
    console.print(f"minimum ratio by selector: {least}", highlight=False)


def _cells(entry: ReportEntry, report: CalibrationReport) -> list[Text]:
    one = entry.selection
    missed = shortfalls(entry, report.noise, report.thresholds)
    figures = {
        "cost": f"{entry.cost:.3f}",
        "KL mean": f"{entry.kl_mean:.2g}",
        "KL p99": f"{entry.kl_p99:.2g}",
        "top-1": f"{entry.top1_agreement:.3f}",
        "accuracy": "–" if entry.accuracy is None else f"{entry.accuracy:.3f}",
    }
    plain = [Text(text) for text in (one.selector.value, f"{one.ratio:g}", str(one.check_layer))]
    marked = [
        Text(f"{figure}!", style="red") if any(text.startswith(name) for text in missed) else Text(figure)
        for name, figure in figures.items()
    ]
    return [*plain, *marked, Text(str(entry.num_prompts))]


def _full_accuracy(report: CalibrationReport) -> str:
    known = [entry for entry in report.entries if entry.accuracy_full is not None]
    if not known:
        return ""
    widest = max(known, key=lambda entry: entry.num_prompts)
    return f", right {widest.accuracy_full:.3f} of {widest.num_prompts}"
