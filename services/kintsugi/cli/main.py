"""The command line: options only. What a command does is in the module of its name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kintsugi import __version__
from kintsugi.cli.commands.size import size
from kintsugi.cli.exits import ExitCode, exit_on_error
from kintsugi.cli.options import EngineArguments, Json, Model, SystemPrompt
from kintsugi.cli.screen import Screen

EXIT_CODES = (
    "Exit codes: 0 success · 1 unexpected failure · 2 bad input · 3 not blendable, or the self-test failed · "
    "4 engine or store unavailable · 5 data corrupted or from another version · 130 interrupted."
)

app = typer.Typer(
    name="kintsugi",
    help="Answer questions from chunks whose KV cache is already stored: CacheBlend on unmodified vLLM.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Repeat = Annotated[int, typer.Option(min=1, max=100, help="Time each method this often; print medians.")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit(ExitCode.OK)


@app.command()
@exit_on_error
def demo(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Text files to use as chunks; requires --model.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder. Default: a small trained model with its own question."),
    ] = None,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="Use a larger model with random weights: only times are real."),
    ] = False,
    question: Annotated[str | None, typer.Option(help="Question to ask; requires --model.")] = None,
    repeat: Repeat = 1,
    as_json: Json = False,
) -> None:
    """Answer one question from several chunks in four ways; compare the answers and times to first token."""
    from kintsugi.cli.commands import demo as command

    command.run(Screen(as_json), command.DemoTask(model, random_weights, files or [], question, repeat))


@app.command()
@exit_on_error
def generate(
    model: Model,
    chunk: Annotated[list[Path], typer.Option(help="Text file with one chunk; repeat in prompt order.")],
    question: Annotated[str, typer.Option(help="Question to ask about the chunks.")],
    ratio: Annotated[
        float | None, typer.Option(help="Share of the chunks' tokens to recompute, from 0 to 1.")
    ] = None,
    selector: Annotated[
        str | None, typer.Option(help="How to choose the tokens to recompute: hkvd, …")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens in the answer.")] = 32,
    namespace: Annotated[str, typer.Option(help="Namespace to store the chunks in.")] = "cli",
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run full prefill, prefix caching and full KV reuse.")
    ] = False,
    repeat: Repeat = 1,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with each token's recomputed layers and a timeline.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Calibration report that permits blending (kintsugi calibrate --out).")
    ] = None,
    allow_uncalibrated: Annotated[
        bool, typer.Option("--allow-uncalibrated", help="Blend without a report. Answers may be wrong.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer a question from chunks by blending, and print what it cost."""
    from kintsugi.cli.commands import generate as command
    from kintsugi.cli.methods import BlendChoice
    from kintsugi.cli.session import Trust
    from kintsugi.core.request import KintsugiParams, parse_selector

    chosen = None if selector is None else parse_selector(selector)
    KintsugiParams(namespace=namespace, ratio=ratio)  # refuses bad values before an engine is started
    task = command.GenerateTask(
        model=model,
        chunks=chunk,
        question=question,
        choice=BlendChoice(namespace, ratio, chosen, explain=html is not None),
        max_tokens=max_tokens,
        compare=compare,
        repeat=repeat,
        html=html,
        trust=Trust(report, allow_uncalibrated),
    )
    code = command.run(Screen(as_json), task)
    if code is not ExitCode.OK:
        raise typer.Exit(code)


@app.command()
@exit_on_error
def doctor(
    model: Annotated[
        str | None, typer.Option(help="Also start an engine with this checkpoint and run its self-test.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check whether this installation can blend, and with --model whether a model can."""
    from kintsugi.cli.commands import doctor as command

    code = command.run(Screen(as_json), model)
    if code is not ExitCode.OK:
        raise typer.Exit(code)


@app.command()
@exit_on_error
def calibrate(
    model: Model,
    questions: Annotated[
        Path | None,
        typer.Option(help="JSON lines of {chunks, question, answers}. Default: the bundled passages."),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="Publish the report in this store, where engines look.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report to this file, for --report.")] = None,
    codec: Annotated[str, typer.Option(help="Encoding of chunk KV in the store.")] = "raw",
    prompts: Annotated[int, typer.Option(help="Questions per confirmed configuration; at least 32.")] = 96,
    seed: Annotated[int, typer.Option(help="Seed for choosing questions. Same seed, same report.")] = 0,
    dtype: Annotated[str, typer.Option(help="Data type that engines will serve with.")] = "auto",
    chunk_store: Annotated[
        str | None, typer.Option(help="Store for the chunks meanwhile. Default: this process's memory.")
    ] = None,
    system: SystemPrompt = None,
    engine: EngineArguments = "{}",
    connector: Annotated[
        str, typer.Option(help="Further configuration of the connector, as a JSON object.")
    ] = "{}",
    as_json: Json = False,
) -> None:
    """Measure how well a model blends, and write the report that permits it."""
    from kintsugi.cli.commands import calibrate as command
    from kintsugi.cli.options import parse_engine_arguments, parse_json_object
    from kintsugi.core.report import Thresholds
    from kintsugi.quality.calibrate import Budget
    from kintsugi.quality.session import MeasuringEngineSpec, tokenize_prefix

    spec = MeasuringEngineSpec(
        model,
        codec=codec,
        store=chunk_store,
        prefix_token_ids=None if system is None else tokenize_prefix(model, system),
        extra_config=parse_json_object("connector", connector, '{"portable": false}'),
        vllm_args={**parse_engine_arguments(engine), "dtype": dtype},
    )
    budget = Budget(prompts=prompts, seed=seed)
    code = command.run(
        Screen(as_json), command.CalibrateTask(spec, questions, store, out, budget, Thresholds())
    )
    if code is not ExitCode.OK:
        raise typer.Exit(code)


@app.command(name="eval")
@exit_on_error
def evaluate(
    model: Model,
    questions: Annotated[
        Path,
        typer.Option(
            help="JSON lines of {chunks, question, answers}, ctxs or LongBench's fields; or a list."
        ),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first questions.")] = None,
    selectors: Annotated[
        str, typer.Option(help="Comma-separated selectors to compare.")
    ] = "hkvd,hkvd_gradual,chunk_head,query,hybrid",
    ratios: Annotated[
        str, typer.Option(help="Comma-separated shares of tokens to recompute.")
    ] = "0.05,0.15,0.3",
    check_layers: Annotated[str, typer.Option(help="Comma-separated layers. Default: a few by depth.")] = "",
    codecs: Annotated[str, typer.Option(help="Comma-separated codecs: raw, int8, fp8, …")] = "raw",
    chunk_tokens: Annotated[str, typer.Option(help="Comma-separated sizes to cut chunks to.")] = "",
    chunks: Annotated[str, typer.Option(help="Comma-separated numbers of chunks to keep.")] = "",
    batches: Annotated[
        str, typer.Option(help="Comma-separated numbers of prompts to submit at once.")
    ] = "32",
    tiers: Annotated[
        str, typer.Option(help="Comma-separated speeds of slower tiers, in bytes per second.")
    ] = "",
    rates: Annotated[str, typer.Option(help="Comma-separated request rates per second, for TTFT.")] = "",
    plots: Annotated[Path | None, typer.Option(help="Folder for plots, as SVG and PNG.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens in an answer.")] = None,
    dtype: Annotated[str, typer.Option(help="Data type of the engine.")] = "auto",
    chunk_store: Annotated[
        str | None, typer.Option(help="Store for the chunks. Default: this process's memory.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare blended answers with those of full prefill by quality, cost and time."""
    from kintsugi.cli.commands import evaluate as command
    from kintsugi.cli.options import parse_floats, parse_integers, parse_selectors
    from kintsugi.quality.session import MeasuringEngineSpec

    axes = {
        "codecs": [codec.strip() for codec in codecs.split(",")],
        "chunk_tokens": parse_integers("chunk_tokens", chunk_tokens),
        "chunk_counts": parse_integers("chunks", chunks),
        "batches": parse_integers("batches", batches),
        "tier_bytes_per_s": parse_floats("tiers", tiers),
        "rates_per_s": parse_floats("rates", rates),
    }
    task = command.EvaluateTask(
        MeasuringEngineSpec(model, store=chunk_store, vllm_args={"dtype": dtype}),
        questions,
        limit,
        parse_selectors(selectors),
        parse_floats("ratios", ratios),
        parse_integers("check_layers", check_layers) or None,
        {name: values for name, values in axes.items() if values},
        plots,
        max_tokens,
    )
    error = command.run(Screen(as_json), task).error
    if error is not None:
        raise typer.Exit(error["exit_code"])


@app.command()
@exit_on_error
def token(
    name: Annotated[str, typer.Argument(help="Name of the caller, for logs and for revoking the token.")],
    namespace: Annotated[
        list[str],
        typer.Option("--namespace", "-n", help="Namespace that it may use, or a prefix and *; repeat."),
    ],
    file: Annotated[Path, typer.Option(help="The gateway's token file; created if missing.")],
    as_json: Json = False,
) -> None:
    """Create a bearer token for a gateway. It is printed once; the file stores its hash."""
    from kintsugi.gateway.access import add_grant, new_token

    screen = Screen(as_json)
    text, grant = new_token(name, namespace)
    add_grant(file, grant)
    screen.show(
        {"token": text, "name": name, "namespaces": namespace, "file": str(file)},
        lambda console: console.print(text, highlight=False, soft_wrap=True, markup=False),
    )
    screen.note(f"{file} stores only its hash; this is the only time that the token is printed")


app.command()(size)

if find_spec("lmdb") is not None:  # the extra `store` is installed
    from kintsugi.cli.commands.store import app as store_app

    app.add_typer(store_app, name="store")

if find_spec("httpx") is not None:  # of the extra `serving`
    from kintsugi.cli.commands.bench import app as bench_app

    app.add_typer(bench_app, name="bench")

if all(find_spec(name) for name in ("lmdb", "ray", "starlette", "uvicorn", "yaml")):

    @app.command()
    @exit_on_error
    def serve(
        model: Annotated[
            str | None,
            typer.Option(help="Checkpoint folder, or a name that vLLM resolves. Default: the bundled model."),
        ] = None,
        config: Annotated[Path | None, typer.Option(help="YAML configuration; see docs/SERVING.md.")] = None,
        ram: Annotated[str | None, typer.Option(help="Size of each shard's RAM tier, such as 8GiB.")] = None,
        ssd: Annotated[
            list[str] | None, typer.Option(help="SSD tier as FOLDER:SIZE; repeat, fastest first.")
        ] = None,
        data_dir: Annotated[
            Path | None, typer.Option(help="Folder for the shards' identities and reports.")
        ] = None,
        shards: Annotated[int | None, typer.Option(min=1, help="Number of store shards.")] = None,
        engines: Annotated[int | None, typer.Option(min=1, help="Number of engine replicas.")] = None,
        grpc_port: Annotated[int | None, typer.Option(help="gRPC port of the gateway; 0: any free.")] = None,
        http_port: Annotated[int | None, typer.Option(help="HTTP port of the gateway; 0: any free.")] = None,
        tokens_file: Annotated[Path | None, typer.Option(help="Token file; see kintsugi token.")] = None,
        tls_cert: Annotated[Path | None, typer.Option(help="The gateway's TLS certificate.")] = None,
        tls_key: Annotated[Path | None, typer.Option(help="Private key of --tls-cert.")] = None,
        insecure: Annotated[
            bool, typer.Option("--insecure", help="Listen beyond loopback without tokens and TLS.")
        ] = False,
        read_only: Annotated[
            bool, typer.Option("--read-only", help="Refuse to store or delete chunks through the gateway.")
        ] = False,
        allow_uncalibrated: Annotated[
            bool, typer.Option("--allow-uncalibrated", help="Blend without a report. Answers may be wrong.")
        ] = False,
        print_config: Annotated[
            bool, typer.Option("--print-config", help="Print the configuration for `serve deploy` and exit.")
        ] = False,
        as_json: Json = False,
    ) -> None:
        """Serve a model with its chunk store and gateway on this machine until interrupted."""
        from kintsugi.cli.commands import serve as command

        task = command.ServeTask(
            model=model,
            config=config,
            ram=ram,
            ssd=ssd or (),
            data_dir=data_dir,
            shards=shards,
            engines=engines,
            grpc_port=grpc_port,
            http_port=http_port,
            tokens_file=tokens_file,
            tls_cert=tls_cert,
            tls_key=tls_key,
            insecure=insecure,
            read_only=read_only,
            allow_uncalibrated=allow_uncalibrated,
            print_config=print_config,
        )
        code = command.run(Screen(as_json), task)
        if code is not ExitCode.OK:
            raise typer.Exit(code)


if all(find_spec(name) for name in ("lmdb", "ray", "semantic_text_splitter", "inscriptis")):
    from kintsugi.cli.commands.precompute import app as precompute_app
    from kintsugi.cli.commands.precompute import coverage

    app.add_typer(precompute_app, name="precompute")
    app.command()(coverage)


def main() -> None:
    """The console script."""
    app()
