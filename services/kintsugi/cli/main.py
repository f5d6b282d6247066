"""The command line: arguments only. Each command's work is in the module of its name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kintsugi import __version__
from kintsugi.cli.exits import ExitCode, reported
from kintsugi.cli.screen import Screen

EXIT_CODES = (
    "Exit codes: 0 done · 1 unforeseen failure · 2 bad input · 3 not blendable, or the self-test failed · "
    "4 engine or store unavailable · 5 corrupted or of another version · 130 interrupted."
)

app = typer.Typer(
    name="kintsugi",
    help="Answer questions over chunks whose KV cache was computed before: CacheBlend on unmodified vLLM.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]
Repeat = Annotated[int, typer.Option(min=1, max=100, help="Timed runs per method; medians are shown.")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit(ExitCode.OK)


@app.command()
@reported
def demo(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Text files to use instead of the bundled passages.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder. Without it: a small model with random weights.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="Ask this instead.")] = None,
    repeat: Repeat = 1,
    as_json: Json = False,
) -> None:
    """Answer one question over six passages four ways, and compare times to first token."""
    from kintsugi.cli import demo as command

    command.run(Screen(as_json), model, files or [], question, repeat)


@app.command()
@reported
def generate(
    model: Annotated[str, typer.Option(help="Checkpoint folder, or a name that vLLM resolves.")],
    chunk: Annotated[list[Path], typer.Option(help="Text file that is one chunk; repeat in prompt order.")],
    question: Annotated[str, typer.Option(help="What to ask about the chunks.")],
    ratio: Annotated[
        float | None, typer.Option(help="Share of the chunks' tokens to recompute, 0 to 1.")
    ] = None,
    selector: Annotated[str | None, typer.Option(help="Which tokens to recompute: hkvd, random, …")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer.")] = 32,
    namespace: Annotated[str, typer.Option(help="Tenant whose chunks may be used.")] = "cli",
    compare: Annotated[
        bool, typer.Option("--compare", help="Also full prefill, prefix caching and full KV reuse.")
    ] = False,
    repeat: Repeat = 1,
    html: Annotated[
        Path | None, typer.Option(help="Write a page: tokens by recomputed depth, timeline per layer.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer a question from chunks, blended, and say what it cost."""
    from kintsugi.cli import generate as command
    from kintsugi.cli.methods import BlendChoice
    from kintsugi.core.request import KintsugiParams, parsed_selector

    chosen = None if selector is None else parsed_selector(selector)
    KintsugiParams(namespace=namespace, ratio=ratio)  # Refuses bad values before an engine is started.
    task = command.Task(
        model=model,
        chunks=chunk,
        question=question,
        choice=BlendChoice(namespace, ratio, chosen, explain=html is not None),
        max_tokens=max_tokens,
        compare=compare,
        repeat=repeat,
        html=html,
    )
    code = command.run(Screen(as_json), task)
    if code is not ExitCode.OK:
        raise typer.Exit(code)


@app.command()
@reported
def doctor(
    model: Annotated[
        str | None, typer.Option(help="Also start an engine on this checkpoint and run its self-test.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say whether this installation, and with --model a model, can blend."""
    from kintsugi.cli import doctor as command

    code = command.run(Screen(as_json), model)
    if code is not ExitCode.OK:
        raise typer.Exit(code)


if find_spec("lmdb") is not None:  # the extra `store` is installed
    from kintsugi.cli.store import app as store_app

    app.add_typer(store_app, name="store")

if all(find_spec(name) for name in ("lmdb", "ray", "semantic_text_splitter", "inscriptis")):
    from kintsugi.cli.precompute import app as precompute_app
    from kintsugi.cli.precompute import coverage

    app.add_typer(precompute_app, name="precompute")
    app.command()(coverage)


def main() -> None:
    """The console script."""
    app()
