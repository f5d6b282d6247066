"""The command line: arguments only. Each command's work is in the module of its name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kintsugi import __version__
from kintsugi.cli.arguments import engine_arguments, json_object
from kintsugi.cli.commands.size import size
from kintsugi.cli.exits import ExitCode, exit_on_error
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
@exit_on_error
def demo(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Text files that are the chunks; needs --model.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder. Without it: a small trained model, and its question."),
    ] = None,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="A larger model with random weights: times alone are real."),
    ] = False,
    question: Annotated[str | None, typer.Option(help="Ask this; needs --model.")] = None,
    repeat: Repeat = 1,
    as_json: Json = False,
) -> None:
    """Answer one question over several chunks four ways, and compare answers and times to first token."""
    from kintsugi.cli.commands import demo as command

    command.run(Screen(as_json), command.DemoTask(model, random_weights, files or [], question, repeat))


@app.command()
@exit_on_error
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
    report: Annotated[
        Path | None, typer.Option(help="Calibration report that allows blending (kintsugi calibrate --out).")
    ] = None,
    allow_uncalibrated: Annotated[
        bool, typer.Option("--allow-uncalibrated", help="Blend without one. Answers may be wrong.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer a question from chunks, blended, and say what it cost."""
    from kintsugi.cli.commands import generate as command
    from kintsugi.cli.methods import BlendChoice
    from kintsugi.cli.session import Trust
    from kintsugi.core.request import KintsugiParams, parse_selector

    chosen = None if selector is None else parse_selector(selector)
    KintsugiParams(namespace=namespace, ratio=ratio)  # Refuses bad values before an engine is started.
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
        str | None, typer.Option(help="Also start an engine on this checkpoint and run its self-test.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say whether this installation, and with --model a model, can blend."""
    from kintsugi.cli.commands import doctor as command

    code = command.run(Screen(as_json), model)
    if code is not ExitCode.OK:
        raise typer.Exit(code)


@app.command()
@exit_on_error
def calibrate(
    model: Annotated[str, typer.Option(help="Checkpoint folder, or a name that vLLM resolves.")],
    questions: Annotated[
        Path | None,
        typer.Option(help="JSON lines of {chunks, question, answers}. Without: the bundled passages."),
    ] = None,
    store: Annotated[str | None, typer.Option(help="Publish here: the store that engines name.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report to a file, for --report.")] = None,
    codec: Annotated[str, typer.Option(help="How chunk KV is encoded in the store.")] = "raw",
    prompts: Annotated[int, typer.Option(help="Questions per confirmed configuration, at least 32.")] = 96,
    seed: Annotated[int, typer.Option(help="Which questions, in which order. Same seed, same report.")] = 0,
    dtype: Annotated[str, typer.Option(help="As the engine will serve: part of the fingerprint.")] = "auto",
    chunk_store: Annotated[
        str | None, typer.Option(help="Store for the chunks meanwhile. Without: this process's memory.")
    ] = None,
    system: Annotated[
        Path | None, typer.Option(help="Text file of the system prompt that chunks are prefilled behind.")
    ] = None,
    engine: Annotated[str, typer.Option(help="More arguments of vllm.LLM, as a JSON object.")] = "{}",
    connector: Annotated[
        str, typer.Option(help="More of the connector's configuration, as a JSON object.")
    ] = "{}",
    as_json: Json = False,
) -> None:
    """Measure how well a model blends, and write the report that allows it to."""
    from kintsugi.cli.commands import calibrate as command
    from kintsugi.core.report import Thresholds
    from kintsugi.quality.calibrate import Budget
    from kintsugi.quality.session import MeasuringEngineSpec, tokenize_prefix

    spec = MeasuringEngineSpec(
        model,
        codec=codec,
        store=chunk_store,
        prefix_token_ids=None if system is None else tokenize_prefix(model, system),
        extra_config=json_object("connector", connector, '{"portable": false}'),
        vllm_args={**engine_arguments(engine), "dtype": dtype},
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
    model: Annotated[str, typer.Option(help="Checkpoint folder, or a name that vLLM resolves.")],
    questions: Annotated[
        Path, typer.Option(help="JSON lines of {chunks, question, answers}, ctxs, LongBench's, or a list.")
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many questions.")] = None,
    selectors: Annotated[
        str, typer.Option(help="Comma-separated.")
    ] = "hkvd,hkvd_gradual,chunk_head,query,hybrid",
    ratios: Annotated[
        str, typer.Option(help="Comma-separated shares of tokens to recompute.")
    ] = "0.05,0.15,0.3",
    check_layers: Annotated[str, typer.Option(help="Comma-separated. Default: a few by depth.")] = "",
    codecs: Annotated[str, typer.Option(help="Comma-separated: raw, int8, fp8, …")] = "raw",
    chunk_tokens: Annotated[str, typer.Option(help="Cut chunks anew, comma-separated sizes.")] = "",
    chunks: Annotated[str, typer.Option(help="Keep the first so many chunks, comma-separated.")] = "",
    batches: Annotated[str, typer.Option(help="Prompts submitted together, comma-separated.")] = "32",
    tiers: Annotated[str, typer.Option(help="Bytes per second of a slower tier, comma-separated.")] = "",
    rates: Annotated[str, typer.Option(help="Requests per second for TTFT, comma-separated.")] = "",
    plots: Annotated[Path | None, typer.Option(help="Folder for the plots, SVG and PNG.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer.")] = None,
    dtype: Annotated[str, typer.Option(help="vLLM's.")] = "auto",
    chunk_store: Annotated[
        str | None, typer.Option(help="Store for the chunks. Without: this process's memory.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare blended answers with full prefill's: quality, cost, time."""
    from kintsugi.cli.commands import evaluate as command
    from kintsugi.cli.lists import floats, integers, selector_names
    from kintsugi.quality.session import MeasuringEngineSpec

    axes = {
        "codecs": [codec.strip() for codec in codecs.split(",")],
        "chunk_tokens": integers("chunk_tokens", chunk_tokens),
        "chunk_counts": integers("chunks", chunks),
        "batches": integers("batches", batches),
        "tier_bytes_per_s": floats("tiers", tiers),
        "rates_per_s": floats("rates", rates),
    }
    task = command.EvaluateTask(
        MeasuringEngineSpec(model, store=chunk_store, vllm_args={"dtype": dtype}),
        questions,
        limit,
        selector_names(selectors),
        floats("ratios", ratios),
        integers("check_layers", check_layers) or None,
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
    name: Annotated[str, typer.Argument(help="Whose token it is: for logs, and to revoke it by.")],
    namespace: Annotated[
        list[str],
        typer.Option("--namespace", "-n", help="What it may use: a namespace, or a prefix and *; repeat."),
    ],
    file: Annotated[Path, typer.Option(help="The gateway's file of tokens; made where it is missing.")],
    as_json: Json = False,
) -> None:
    """Make a bearer token for a gateway. It is shown once; the file keeps its hash."""
    from kintsugi.cli.commands import token as command

    command.run(Screen(as_json), name, namespace, file)


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
            typer.Option(help="Checkpoint folder or a name that vLLM resolves. Without: the bundled one."),
        ] = None,
        config: Annotated[Path | None, typer.Option(help="YAML file; see docs/SERVING.md.")] = None,
        ram: Annotated[str | None, typer.Option(help="RAM of each shard, such as 8GiB.")] = None,
        ssd: Annotated[list[str] | None, typer.Option(help="FOLDER:SIZE; repeat, fastest first.")] = None,
        data_dir: Annotated[Path | None, typer.Option(help="Identities and reports of the shards.")] = None,
        shards: Annotated[int | None, typer.Option(min=1, help="Store shards.")] = None,
        engines: Annotated[int | None, typer.Option(min=1, help="Engine replicas.")] = None,
        grpc_port: Annotated[int | None, typer.Option(help="Of the gateway; 0: any.")] = None,
        http_port: Annotated[int | None, typer.Option(help="Of the gateway; 0: any.")] = None,
        tokens_file: Annotated[Path | None, typer.Option(help="Who may call; see kintsugi token.")] = None,
        tls_cert: Annotated[Path | None, typer.Option(help="Of the gateway, with --tls-key.")] = None,
        tls_key: Annotated[Path | None, typer.Option(help="Of the gateway, with --tls-cert.")] = None,
        insecure: Annotated[
            bool, typer.Option("--insecure", help="Let the gateway listen beyond loopback without these.")
        ] = False,
        read_only: Annotated[
            bool, typer.Option("--read-only", help="Nobody stores or deletes chunks through the gateway.")
        ] = False,
        allow_uncalibrated: Annotated[
            bool, typer.Option("--allow-uncalibrated", help="Blend without a report. Answers may be wrong.")
        ] = False,
        print_config: Annotated[
            bool, typer.Option("--print-config", help="Print what `serve deploy` takes, and exit.")
        ] = False,
        as_json: Json = False,
    ) -> None:
        """Serve a model with its chunk store and gateway on this machine until told to stop."""
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
