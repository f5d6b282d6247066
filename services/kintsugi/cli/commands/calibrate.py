"""`kintsugi calibrate`: measures whether and how a model may be blended, and writes a report."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.text import Text

from kintsugi.cli.exits import ExitCode
from kintsugi.cli.models import prepare_model
from kintsugi.cli.options import CalibrateTask, check_writable, parse_engine_arguments
from kintsugi.cli.render import format_count, make_figures_table
from kintsugi.cli.screen import Screen
from kintsugi.core.errors import InvalidField
from kintsugi.core.plan import Selection
from kintsugi.core.prompt import LENGTH_TOLERANCE, LengthRange
from kintsugi.core.report import (
    LOSS_TOLERANCE,
    QUANTITY_NAMES,
    CalibrationReport,
    Quantity,
    ReportEntry,
    Thresholds,
    describe_selection,
    passing,
)
from kintsugi.engine.local import LocalEngine
from kintsugi.models.context import NONE, encode_context
from kintsugi.models.prompt_form import PromptForm
from kintsugi.quality import reports
from kintsugi.quality.calibrate import Budget, calibrate, check_budget, prepare_bench
from kintsugi.quality.contexts import ContextChoice, ContextProber, check_contexts
from kintsugi.quality.measure import Bench
from kintsugi.quality.questions import Question, describe_prompts, read_questions
from kintsugi.quality.session import MeasuringEngineSpec, load_form_behind, start_measuring_engine
from kintsugi.quality.shadow import utc_now
from kintsugi.store.client.registry import is_process_local, open_store


def run(screen: Screen, task: CalibrateTask) -> ExitCode:
    """Calibrate and write the report. Returns `NOT_BLENDABLE` if no configuration passes; the report then
    keeps the gate closed."""
    prepare_model(screen, task.model)
    arguments = parse_engine_arguments(task.engine)
    budget = Budget(minutes=task.minutes)
    check_budget(budget, Thresholds())
    _check_destination(task)
    given = None if task.questions is None else read_questions(task.questions)
    with screen.step("Reading the tokenizer"):
        form = load_form_behind(task.model, task.form, task.system, arguments)
    contexts = task.context or [NONE]
    token_ids = [encode_context(context, form.tokenizer) for context in contexts]
    check_contexts(contexts, token_ids)
    specs = {
        context: MeasuringEngineSpec(
            task.model,
            codec=task.codec,
            form=form,
            context_token_ids=ids,
            extra_config={"portable": task.portable},
            vllm_args=arguments,
        )
        for context, ids in zip(contexts, token_ids, strict=True)
    }
    source = describe_prompts(str(task.questions) if task.questions else None, task.segments)
    measured = _measure(screen, specs, form, given, budget, source, task.segments)
    for warning in measured.warnings:
        screen.note(f"kintsugi: warning: {warning}")
    _keep_report(screen, task, measured.report)
    screen.show(measured.document, measured.render)
    blends = measured.report.choice.selection is not None
    return ExitCode.OK if blends else ExitCode.NOT_BLENDABLE


@dataclass(frozen=True)
class _Measured:
    """The result of the command."""

    report: CalibrationReport
    warnings: list[str]
    context: ContextChoice | None
    """None if there was only one context."""

    @property
    def document(self) -> dict[str, Any]:
        """The report as JSON, with the warnings and the choice of the context added."""
        beside: dict[str, Any] = {"warnings": self.warnings}
        if self.context is not None:
            beside["context"] = asdict(self.context)
        return {**json.loads(self.report.to_bytes()), **beside}

    def render(self, console: Console) -> None:
        if self.context is not None:
            render_contexts(console, self.context)
        render(console, self.report)
        if self.context is not None:
            setting = f"model.expert.context: {self.context.context}"
            console.print(Text(setting), style="bold", soft_wrap=True)


def _measure(
    screen: Screen,
    specs: Mapping[str, MeasuringEngineSpec],
    form: PromptForm,
    given: Sequence[Question] | None,
    budget: Budget,
    source: str,
    segments: bool,
) -> _Measured:
    """Choose a context if there are several, then calibrate on an engine with it."""
    prober = ContextProber(len(specs), budget, Thresholds(), form.name.value)
    bench: Bench | None = None
    warnings: list[str] = []
    choice: ContextChoice | None = None
    with screen.engine_log():
        if len(specs) > 1:
            for context, spec in specs.items():
                with _start_engine(screen, spec, f" with the context {context}") as engine:
                    if bench is None:
                        bench, warnings = _prepare(screen, engine, form, given, budget, segments)
                    with screen.step(f"Trying the context {context}") as say:
                        prober.probe(context, bench.on_engine(engine), engine.num_layers, say)
            choice = prober.choose()
            screen.note(f"calibrating with the context {choice.context}: {choice.why}")
        spec = specs[choice.context] if choice is not None else next(iter(specs.values()))
        with _start_engine(screen, spec) as engine:
            if bench is None:
                bench, warnings = _prepare(screen, engine, form, given, budget, segments)
            if choice is not None:
                budget = _leave_minutes(budget, prober, choice)
            with screen.step(f"Calibrating on {format_count(len(bench.cases), 'question')}") as say:
                calibration = calibrate(
                    bench.on_engine(engine),
                    engine.num_layers,
                    engine.binding,
                    budget,
                    Thresholds(),
                    source,
                    utc_now(),
                    form.name.value,
                    say,
                )
    return _Measured(calibration.report, [*warnings, *calibration.warnings], choice)


@contextmanager
def _start_engine(screen: Screen, spec: MeasuringEngineSpec, which: str = "") -> Iterator[LocalEngine]:
    with ExitStack() as stack:
        with screen.step(f"Starting vLLM{which}"):
            engine = stack.enter_context(start_measuring_engine(spec))
        yield engine


def _prepare(
    screen: Screen,
    engine: LocalEngine,
    form: PromptForm,
    given: Sequence[Question] | None,
    budget: Budget,
    segments: bool,
) -> tuple[Bench, list[str]]:
    with screen.step("Reading the questions"):
        return prepare_bench(engine, form, given, budget, segments)


def _leave_minutes(budget: Budget, prober: ContextProber, choice: ContextChoice) -> Budget:
    """Return the remaining budget. Raises `InvalidField` if the minutes are used up."""
    if budget.minutes is None:
        return budget
    left = budget.minutes - prober.minutes
    if left <= 0:
        raise InvalidField(
            "minutes",
            f"choosing the context took {prober.minutes:.1f} of {budget.minutes:g} minutes and chose "
            f"{choice.context}; allow more, or calibrate with --context {choice.context} alone",
        )
    return replace(budget, minutes=left)


def _keep_report(screen: Screen, task: CalibrateTask, report: CalibrationReport) -> None:
    """Write the report to the file and publish it in the store that the options name."""
    if task.out is not None:
        reports.write(task.out, report)
        screen.note(f"wrote {task.out}")
    if task.store is not None:
        with closing(open_store(task.store)) as store:
            reports.publish(store, report)
        screen.note(f"published as {report.binding.report_name} in {task.store}")


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


def render_contexts(console: Console, choice: ContextChoice) -> None:
    """Print the measurements with each context, and which context was chosen."""
    table = make_figures_table(("", "context", "KL", "lower than none"), box=SIMPLE_HEAD)
    for one in choice.tried:
        chosen = one.context == choice.context
        gain = "–" if one.gain is None else str(one.gain)
        cells = [Text("✓" if chosen else ""), Text(one.context), Text(f"{one.kl_mean:.3f}"), Text(gain)]
        table.add_row(*cells, style="bold yellow" if chosen else "")
    console.print(table)
    console.print(Text(f"context: {choice.context} ({choice.why})"))


HEADINGS = ("", "configuration", "cost", "KL", "differs", "EM lost", "F1 lost", "n")
SHOWN = (Quantity.KL, Quantity.DISAGREEMENT, Quantity.EXACT_MATCH, Quantity.F1)


def render(console: Console, report: CalibrationReport) -> None:
    """Print the confirmed configurations, from the safest to the cheapest, and the choice."""
    console.print(Text(f"{report.binding.codec}, {report.questions}"), style="dim")
    confirmed = [entry for entry in report.entries if entry.place is not None]
    passed = {entry.selection for entry in passing(report.entries, report.noise, report.thresholds)}
    if confirmed:
        table = make_figures_table(HEADINGS, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for entry in confirmed:
            chosen = entry.selection == report.choice.selection
            cells = _cells(entry, report, entry.selection in passed)
            table.add_row(*cells, style="bold yellow" if chosen else "")
        console.print(table)
        console.print(
            "mean loss < bound that holds with "
            f"{report.thresholds.confidence:.0%} confidence, in percent (KL in nats; a prompt counts as at "
            "most 1) · differs: share of positions with another most likely token · n: questions · "
            "✓ passes · ? undecided · !: bound misses its threshold",
            style="dim",
            highlight=False,
        )
    search, noise = report.search, report.noise
    console.print(
        f"{search.candidates} configurations tried, {search.confirmed} confirmed on other questions, "
        f"{search.minutes:.1f} minutes · full prefill against itself: KL {noise.kl_mean:.2g}, "
        f"top-1 agreement {noise.top1_agreement:.3f}{_full_accuracy(confirmed)}",
        style="dim",
        highlight=False,
    )
    console.print(f"holds for {_describe_domain(report)}", highlight=False)
    for line in _undecided(report, confirmed, passed):
        console.print(Text(line))
    if report.choice.selection is None:
        console.print(Text(f"not blendable: {report.choice.why}", style="red"))
        return
    console.print(Text(f"default: {describe_selection(report.choice.selection)} ({report.choice.why})"))
    _print_worst(console, report)
    limits = "; ".join(describe_selection(one) for _, one in sorted(report.choice.limits.items()))
    console.print(Text(f"passed by selector: {limits}"))


def _cells(entry: ReportEntry, report: CalibrationReport, has_passed: bool) -> list[Text]:
    by_quantity = {bound.quantity: bound for bound in entry.bounds if not bound.stratum}
    is_open = entry.prompts_missing is not None
    mark = "✓" if has_passed else "?" if is_open else "✗"
    cells = [Text(mark), Text(describe_selection(entry.selection)), Text(f"{entry.cost:.3f}")]
    for quantity in SHOWN:
        bound = by_quantity.get(quantity)
        if bound is None:
            cells.append(Text("–"))
            continue
        text = f"{bound.mean:.3f}<{bound.upper:.3f}"
        if quantity is not Quantity.KL:
            text = f"{100 * bound.mean:.1f}<{100 * bound.upper:.1f}"
        highest = report.thresholds.highest(quantity, "", report.noise)
        cells.append(Text(f"{text}!", style="red") if bound.upper > highest + LOSS_TOLERANCE else Text(text))
    return [*cells, Text(str(entry.num_prompts))]


def _describe_domain(report: CalibrationReport) -> str:
    """Describe the prompts that the report covers, in one line."""
    domain = report.domain
    beyond = f"{LENGTH_TOLERANCE - 1:.0%}"
    return (
        f"prompts of {_describe_range(domain.prompt_tokens)} tokens, {_describe_range(domain.chunks)} chunks "
        f"of {_describe_range(domain.chunk_tokens)} tokens, in the form {domain.form!r}, and up to {beyond} "
        f"beyond; {_describe_range(domain.answer_tokens)} answer tokens were compared"
    )


def _describe_range(lengths: LengthRange) -> str:
    return str(lengths.low) if lengths.low == lengths.high else f"{lengths.low}-{lengths.high}"


def _undecided(
    report: CalibrationReport, confirmed: Sequence[ReportEntry], passed: Container[Selection]
) -> Iterator[str]:
    for entry in confirmed:
        if entry.selection not in passed and entry.prompts_missing:
            minutes = report.search.more_minutes
            time = "" if minutes is None else f"; the first of them in about {minutes:.1f} more minutes"
            yield (
                f"undecided: {describe_selection(entry.selection)} needs about {entry.prompts_missing} more "
                f"questions like these{time}"
            )


def _print_worst(console: Console, report: CalibrationReport) -> None:
    """Print the stratum bound of the default configuration that is closest to its threshold."""
    (entry,) = (entry for entry in report.entries if entry.selection == report.choice.selection)
    highest = {
        bound: report.thresholds.highest(bound.quantity, bound.stratum, report.noise)
        for bound in entry.bounds
        if bound.stratum
    }
    if highest:
        worst = max(highest, key=lambda bound: (bound.mean / highest[bound], bound.upper / highest[bound]))
        console.print(
            f"worst of {len({bound.stratum for bound in highest})} kinds of questions: {worst.stratum}, "
            f"{QUANTITY_NAMES[worst.quantity]} {worst.mean:.3f} < {worst.upper:.3f} ({worst.num_prompts} "
            f"questions; at most {highest[worst]:.3g} passes)",
            highlight=False,
        )


def _full_accuracy(confirmed: Sequence[ReportEntry]) -> str:
    known = [entry for entry in confirmed if entry.exact_match_full is not None]
    if not known:
        return ""
    widest = max(known, key=lambda entry: entry.num_prompts)
    return f", exact match {widest.exact_match_full:.3f} of {widest.num_prompts}"
