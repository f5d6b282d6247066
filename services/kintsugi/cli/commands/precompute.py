"""`kintsugi precompute`: prefills a corpus into a store, or reports which chunks are missing."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from kintsugi.cli.exits import ExitCode
from kintsugi.cli.models import prepare_model
from kintsugi.cli.options import (
    Codec,
    Context,
    EngineArguments,
    Form,
    PlainCopies,
    Portable,
    SystemPrompt,
    parse_engine_arguments,
)
from kintsugi.cli.render import format_bytes
from kintsugi.cli.runner import command
from kintsugi.cli.screen import Screen
from kintsugi.core.plan import FormName
from kintsugi.core.schema import load
from kintsugi.models.context import CORPUS, NONE, tokenize_context
from kintsugi.models.prompt_form import load_form_behind
from kintsugi.models.reference import REFERENCE
from kintsugi.precompute.chunking import ChunkingConfig
from kintsugi.precompute.job import Job, survey
from kintsugi.precompute.ledger import Ledger
from kintsugi.precompute.progress import Progress, State
from kintsugi.precompute.sources.files import Format
from kintsugi.precompute.sources.readers import Columns, Failure
from kintsugi.precompute.spec import JobSpec
from kintsugi.precompute.warm import pin as pin_corpus

LEASE_S = 86_400.0
"""Time until the pins of a corpus expire, in seconds."""
LEFT_OUT_SHOWN = 20
"""Number of left-out files on the screen; `--json` lists more."""
DEFAULT_STORE = "grpc://127.0.0.1:7400"


app = typer.Typer(help="Prefill a corpus into the store.", no_args_is_help=True)

StoreUrl = Annotated[str, typer.Option("--store", help="URL of the store.")]
CorpusName = Annotated[str, typer.Argument(help="Name of the corpus.")]
StateFolder = Annotated[Path | None, typer.Option("--state", help="Folder of the ledger.")]


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """Options for the documents and their chunking."""

    source: Annotated[
        str,
        typer.Argument(
            help="File, folder or URL of JSONL, Parquet, CSV, Markdown, HTML, PDF, DOCX or any text."
        ),
    ]
    model: Annotated[
        str, typer.Option("--model", "-m", help=f"Checkpoint folder, {REFERENCE.name}, or a hub name.")
    ]
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the chunks.")]
    store: StoreUrl = DEFAULT_STORE
    tokens_max: Annotated[int, typer.Option(help="Maximum tokens per chunk.")] = 512
    overlap: Annotated[int, typer.Option(help="Maximum tokens that consecutive chunks share.")] = 0
    columns: Annotated[
        str, typer.Option(help="Columns with other names, such as text=body,id=key,version=revision.")
    ] = ""
    file_format: Annotated[
        Format | None, typer.Option("--format", help="Format of all files. Default: by suffix.")
    ] = None
    form: Form = FormName.AUTO
    system: SystemPrompt = None
    portable: Portable = True
    context: Context = NONE
    plain_copies: PlainCopies = True

    def job_spec(self, **options: Any) -> JobSpec:
        """Return the job for these documents; ``options`` are further fields of `JobSpec`. Raises
        `InvalidField`."""
        engine = options.get("engine", {})
        prefix = None  # the default form's prefix
        if self.system is not None or self.form is not FormName.AUTO:
            prefix = list(load_form_behind(self.model, self.form, self.system, engine).head)
        context = tokenize_context(self.context, self.model, engine)
        return JobSpec(
            source=self.source,
            model=self.model,
            store=self.store,
            namespace=self.namespace,
            format=self.file_format,
            columns=parse_columns(self.columns),
            chunking=ChunkingConfig(self.tokens_max, self.overlap),
            prefix_token_ids=prefix,
            portable=self.portable,
            context_token_ids=list(context),
            similar_contexts=self.context == CORPUS,
            plain_copies=self.plain_copies,
            **options,
        )


def parse_columns(text: str) -> Columns:
    """Parse `text=body,id=key`; other columns keep their names. Raises `InvalidField`."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    return load(Columns, {name.strip(): column.strip() for name, _, column in pairs}, "columns")


def state_folder(given: Path | None) -> Path:
    """Return the folder of the ledger: `--state`, or `kintsugi/precompute` in the user's XDG state folder."""
    base = os.environ.get("XDG_STATE_HOME")
    return given or (Path(base) if base else Path.home() / ".local/state") / "kintsugi/precompute"


@command(app)
def run(
    screen: Screen,
    documents: CorpusOptions,
    corpus: Annotated[str, typer.Option(help="Name of the corpus. Default: derived from the source.")] = "",
    state: StateFolder = None,
    codec: Codec = "raw",
    workers: Annotated[int, typer.Option(min=1, help="Number of engines.")] = 1,
    gpus_per_worker: Annotated[float, typer.Option(min=0, help="GPUs per engine; 0: the CPU.")] = 0.0,
    tokens_per_s: Annotated[float, typer.Option(min=0, help="Maximum tokens per second; 0: no limit.")] = 0.0,
    errors_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of documents that may fail without failing the job.")
    ] = 0.05,
    replace_model: Annotated[
        bool, typer.Option(help="Prefill for a new model; keep the old model's chunks.")
    ] = False,
    retire: Annotated[
        bool,
        typer.Option("--retire", help="After the run, delete chunks of models that earlier runs replaced."),
    ] = False,
    engine: EngineArguments = "{}",
    dry_run: Annotated[
        bool, typer.Option(help="Only print what is stored, by tier, what is missing, and whether it fits.")
    ] = False,
) -> ExitCode:
    """Prefill the chunks of a corpus that the store lacks. A run that was stopped continues when repeated."""
    prepare_model(screen, documents.model)
    spec = documents.job_spec(
        corpus=corpus,
        codec=codec,
        workers=workers,
        gpus_per_worker=gpus_per_worker,
        tokens_per_s_max=tokens_per_s,
        errors_share_max=errors_share,
        replace_model=replace_model,
        retire=retire,
        engine=parse_engine_arguments(engine),
    )
    with closing(Ledger(state_folder(state))) as ledger:
        with screen.step("Comparing with the store" if dry_run else "Prefilling") as say:
            if dry_run:
                progress = survey(spec, lambda so_far: say(_format_progress(so_far)))
            else:
                job = Job(spec, ledger, on_progress=lambda so_far: say(_format_progress(so_far)))
                with _cancel_on_signals(job, screen.note):
                    progress = job.run()
        rate = ledger.tokens_per_s(progress.fingerprint)
    _report(screen, progress, rate, spec.workers)
    return ExitCode.INTERRUPTED if progress.state is State.CANCELLED else ExitCode.OK


@command(app)
def pin(
    screen: Screen,
    corpus: CorpusName,
    store: StoreUrl = DEFAULT_STORE,
    state: StateFolder = None,
) -> None:
    """Protect a corpus from eviction for a day."""
    chunks, pinned = pin_corpus(Ledger(state_folder(state)), store, corpus, LEASE_S)
    document = {"corpus": corpus, "chunks": chunks, "pinned": pinned, "lease_s": LEASE_S}
    screen.show(document, f"{pinned} of {chunks} chunks pinned")


@command(app, "list")
def list_corpora(screen: Screen, state: StateFolder = None) -> None:
    """List the corpora of the ledger, one row for each corpus and model."""
    editions = Ledger(state_folder(state)).editions()
    table = Table("corpus", "namespace", "model", "documents", "chunks", "complete")
    for one in editions:
        counts = (str(one.documents), str(one.chunks), "yes" if one.completed else "no")
        table.add_row(one.corpus, one.namespace, f"{Path(one.model).name} {one.fingerprint[:16]}", *counts)
    screen.show([dataclasses.asdict(edition) for edition in editions], table)


@contextmanager
def _cancel_on_signals(job: Job, note: Callable[[str], None]) -> Iterator[None]:
    """Make Ctrl-C and SIGTERM end the job after the running batches, and a second Ctrl-C immediately."""

    def stop(number: int, frame: object) -> None:
        job.cancel()
        note("stopping after the running batches; press Ctrl-C again to stop now and discard them")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _format_progress(progress: Progress) -> str:
    """Format the completed share, the counts, the throughput and the remaining time."""
    done = progress.chunks_resident + progress.chunks_filled
    share = progress.share_read * done / progress.chunks if progress.chunks else 0.0
    text = (
        f"{share:.0%}, {progress.documents} documents, {progress.chunks} chunks, "
        f"{progress.chunks_resident} hits skipped"
    )
    if progress.dry:
        return f"{text}, {format_bytes(progress.bytes_missing)} missing"
    if progress.chunks_missing and not (progress.chunks_filled or progress.chunks_failed):
        return (
            f"the engine starts and prefills its first batch; {progress.documents} documents read, "
            f"{progress.chunks} chunks, {progress.chunks_resident} hits skipped"
        )
    left = "?" if progress.seconds_left is None else f"{progress.seconds_left:.0f} s"
    filled = format_bytes(progress.bytes_filled)
    return f"{text}, {progress.tokens_per_s:.0f} tokens/s, {filled}, {left} left"


def _report(screen: Screen, progress: Progress, tokens_per_s: float | None, workers: int) -> None:
    """Print the result. For a dry run, the time is predicted from the ``tokens_per_s`` of earlier runs."""
    predicted = None
    if progress.dry and tokens_per_s:
        predicted = progress.tokens_missing / tokens_per_s / workers
    document = {**progress.to_mapping(), "predicted_s": predicted}
    screen.show(document, lambda console: _print_report(console, progress, predicted))


def _print_report(console: Console, progress: Progress, predicted: float | None) -> None:
    what = " (dry run)" if progress.dry else ""
    console.print(f"{progress.corpus}: {progress.state.value}{what}")
    table = Table("", Column(justify="right"), show_header=False)
    rows = [
        ("documents", f"{progress.documents} ({progress.documents_unchanged} unchanged)"),
        ("failed · vanished", f"{progress.documents_failed} · {progress.documents_vanished}"),
        ("files left out", str(progress.files_left_out)),
        ("distinct chunks", f"{progress.chunks} ({format_bytes(progress.bytes_total)})"),
        ("resident before", str(progress.chunks_resident)),
        *((f"in {tier}", str(count)) for tier, count in sorted(progress.tiers.items())),
        ("missing", f"{progress.chunks_missing} ({format_bytes(progress.bytes_missing)})"),
    ]
    if progress.dry:
        time_text = "unknown: no run with this model yet" if predicted is None else f"{predicted:.0f} s"
        rows += [("predicted time", time_text), ("fits the store", "yes" if progress.fits else "NO")]
    else:
        rows += [
            ("prefilled", f"{progress.chunks_filled} ({progress.tokens_per_s:.0f} tokens/s)"),
            ("chunks failed · invalidated", f"{progress.chunks_failed} · {progress.chunks_invalidated}"),
            ("evicted during the run", str(progress.chunks_evicted)),
        ]
    rows += [("resident now", f"{progress.coverage:.1%}"), ("time", f"{progress.elapsed_s:.1f} s")]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    _print_failures(console, progress)


def _print_failures(console: Console, progress: Progress) -> None:
    """Print the recorded failures and left-out files, and the number of further ones."""
    failed = progress.documents_failed + progress.chunks_failed
    for title, shown, count in (
        ("failed", progress.failures, failed),
        ("left out", progress.left_out[:LEFT_OUT_SHOWN], progress.files_left_out),
    ):
        for failure in shown:
            line = f"{title}: {_locate(failure)}: {failure.reason}"
            console.print(line, markup=False, soft_wrap=True)
        if count > len(shown):
            console.print(f"{title}: {count - len(shown)} more")


def _locate(failure: Failure) -> str:
    """Describe where a failure occurred: the file, the position in it, and the document's id if it has
    one."""
    path = failure.url.removeprefix("file://")
    place = f"{path}@{failure.place}" if failure.place else path
    named = failure.document_id and not path.endswith(failure.document_id)
    return f"{place} ({failure.document_id})" if place and named else place or failure.document_id
