"""The options of the commands, those that several share, and parsers for text that is more than a word."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kintsugi.core.errors import InvalidField
from kintsugi.core.prompt import FormName
from kintsugi.core.request import parse_selector
from kintsugi.models.context import NONE
from kintsugi.models.reference import REFERENCE

Model = Annotated[
    str, typer.Option(help=f"Checkpoint folder, {REFERENCE.name}, or a name that vLLM resolves.")
]
SystemPrompt = Annotated[
    Path | None,
    typer.Option("--system", help="Text file of the system prompt that chunks are prefilled behind."),
]
Form = Annotated[
    FormName,
    typer.Option("--form", help="How prompts are written. auto: chat where the model has a chat template."),
]
Context = Annotated[
    str,
    typer.Option(help="Text that chunks are prefilled behind after the prefix: none, bundled, or a file."),
]
Contexts = Annotated[
    list[str] | None,
    typer.Option(
        help="Text that chunks are prefilled behind after the prefix: none (default), bundled, or a file. "
        "Repeat to try several and calibrate with the best."
    ),
]
PlainCopies = Annotated[
    bool, typer.Option(help="With a context: also store chunks for the first place of a prompt.")
]
EngineArguments = Annotated[
    str, typer.Option("--engine", help="Further arguments of vllm.LLM, as a JSON object.")
]

Dtype = Annotated[str, typer.Option(help="Data type that engines will serve with.")]
Codec = Annotated[str, typer.Option(help="Encoding of chunk KV in the store.")]
Repeat = Annotated[int, typer.Option(min=1, max=100, help="Time each method this often; print medians.")]
AllowUncalibrated = Annotated[
    bool, typer.Option("--allow-uncalibrated", help="Blend without a report. Answers may be wrong.")
]
SsdTiers = Annotated[list[str] | None, typer.Option(help="SSD tier as FOLDER:SIZE; repeat, fastest first.")]
BucketTier = Annotated[
    str | None,
    typer.Option(help="Bucket below SSD tiers, as s3://BUCKET/PREFIX:SIZE; see AWS_ variables."),
]
TlsCert = Annotated[Path | None, typer.Option(help="PEM file of this side's certificate.")]
TlsKey = Annotated[Path | None, typer.Option(help="PEM file of this side's private key.")]


@dataclass(frozen=True, kw_only=True)
class DemoTask:
    """`kintsugi demo`. Without a model it uses the reference model, or else the bundled one."""

    files: Annotated[list[Path] | None, typer.Argument(help="Text files to use as chunks.")] = None
    model: Annotated[
        str | None,
        typer.Option(
            help=f"Checkpoint folder or a name that vLLM resolves. Default: {REFERENCE.name}, or the bundled "
            "model where that cannot be fetched."
        ),
    ] = None
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="Use a larger model with random weights: only times are real."),
    ] = False
    question: Annotated[str | None, typer.Option(help="Question to ask about the chunks.")] = None
    form: Form = FormName.AUTO
    repeat: Repeat = 3
    open_console: Annotated[
        bool,
        typer.Option("--open", help="Then keep serving the model, and open the console in a browser."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class GenerateTask:
    """`kintsugi generate`."""

    model: Model
    chunk: Annotated[list[Path], typer.Option(help="Text file with one chunk; repeat in prompt order.")]
    question: Annotated[str, typer.Option(help="Question to ask about the chunks.")]
    form: Form = FormName.AUTO
    ratio: Annotated[
        float | None, typer.Option(help="Share of the chunks' tokens to recompute, from 0 to 1.")
    ] = None
    selector: Annotated[str | None, typer.Option(help="Which tokens to recompute: hkvd, …")] = None
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens in the answer.")] = 32
    namespace: Annotated[str, typer.Option(help="Namespace to store the chunks in.")] = "cli"
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run full prefill, prefix caching and full KV reuse.")
    ] = False
    repeat: Repeat = 1
    report: Annotated[
        Path | None, typer.Option(help="Calibration report that permits blending (kintsugi calibrate --out).")
    ] = None
    allow_uncalibrated: AllowUncalibrated = False
    context: Context = NONE


@dataclass(frozen=True, kw_only=True)
class CalibrateTask:
    """`kintsugi calibrate`."""

    model: Model
    questions: Annotated[
        Path | None,
        typer.Option(help="JSON lines of {chunks, question, answers}. Default: the bundled passages."),
    ] = None
    segments: Annotated[
        bool,
        typer.Option(
            "--segments",
            help="Cut the questions' chunks as discovery does, so that what it finds is blended.",
        ),
    ] = False
    store: Annotated[
        str | None, typer.Option(help="Publish the report in this store, where engines look.")
    ] = None
    out: Annotated[Path | None, typer.Option(help="Write the report to this file, for --report.")] = None
    codec: Codec = "raw"
    prompts: Annotated[
        int, typer.Option(help="Use at most so many questions; at least 32. Only as many as needed are run.")
    ] = 2000
    minutes: Annotated[
        float,
        typer.Option(
            help="End the search, with the choice of a context, after so many; what is undecided then does "
            "not pass."
        ),
    ] = 12.0
    seed: Annotated[int, typer.Option(help="Seed for choosing questions. Same seed, same report.")] = 0
    dtype: Dtype = "auto"
    chunk_store: Annotated[
        str | None, typer.Option(help="Store for the chunks meanwhile. Default: this process's memory.")
    ] = None
    form: Form = FormName.AUTO
    system: SystemPrompt = None
    context: Contexts = None
    engine: EngineArguments = "{}"
    connector: Annotated[
        str, typer.Option(help="Further configuration of the connector, as a JSON object.")
    ] = "{}"


@dataclass(frozen=True, kw_only=True)
class EvaluateTask:
    """`kintsugi eval`."""

    model: Model
    questions: Annotated[
        Path,
        typer.Option(
            help="JSON lines of {chunks, question, answers}, ctxs or LongBench's fields; or a list."
        ),
    ]
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first questions.")] = None
    form: Form = FormName.AUTO
    selectors: Annotated[str, typer.Option(help="Comma-separated selectors to compare.")] = (
        "hkvd,hkvd_gradual,chunk_head,query,hybrid"
    )
    ratios: Annotated[str, typer.Option(help="Comma-separated shares to recompute.")] = "0.05,0.15,0.3"
    check_layers: Annotated[str, typer.Option(help="Comma-separated layers. Default: a few by depth.")] = ""
    codecs: Annotated[str, typer.Option(help="Comma-separated codecs: raw, int8, fp8, …")] = "raw"
    chunk_tokens: Annotated[str, typer.Option(help="Comma-separated sizes to cut chunks to.")] = ""
    chunks: Annotated[str, typer.Option(help="Comma-separated numbers of chunks to keep.")] = ""
    batches: Annotated[str, typer.Option(help="Comma-separated numbers of prompts to submit at once.")] = "32"
    tiers: Annotated[
        str, typer.Option(help="Comma-separated speeds of slower tiers, in bytes per second.")
    ] = ""
    rates: Annotated[str, typer.Option(help="Comma-separated request rates per second, for TTFT.")] = ""
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens in an answer.")] = None
    dtype: Annotated[str, typer.Option(help="Data type of the engine.")] = "auto"
    chunk_store: Annotated[
        str | None, typer.Option(help="Store for the chunks. Default: this process's memory.")
    ] = None
    context: Context = NONE


@dataclass(frozen=True, kw_only=True)
class ServeTask:
    """`kintsugi serve`. The options override the configuration file."""

    model: Annotated[
        str | None,
        typer.Option(
            help=f"Checkpoint folder, {REFERENCE.name}, or a name that vLLM resolves. "
            "Default: the bundled model."
        ),
    ] = None
    config: Annotated[Path | None, typer.Option(help="YAML configuration; see docs/howto/serve.md.")] = None
    ram: Annotated[str | None, typer.Option(help="Size of each shard's RAM tier, such as 8GiB.")] = None
    ssd: SsdTiers = None
    bucket: BucketTier = None
    data_dir: Annotated[Path | None, typer.Option(help="Folder for shards' identities and reports.")] = None
    shards: Annotated[int | None, typer.Option(min=1, help="Number of store shards.")] = None
    engines: Annotated[int | None, typer.Option(min=1, help="Number of engine replicas.")] = None
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port of the gateway; 0: any free.")] = None
    http_port: Annotated[int | None, typer.Option(help="HTTP port of the gateway; 0: any free.")] = None
    tokens_file: Annotated[Path | None, typer.Option(help="Token file; see kintsugi token.")] = None
    keys_file: Annotated[
        Path | None, typer.Option(help="Key file of encrypted namespaces; see kintsugi keys.")
    ] = None
    audit_dir: Annotated[
        Path | None, typer.Option(help="Folder of the audit logs of gateway and shards.")
    ] = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond loopback without tokens and TLS.")
    ] = False
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Refuse to store or delete chunks through the gateway.")
    ] = False
    discover: Annotated[
        list[str] | None,
        typer.Option(
            help="Namespace, or a prefix and *, in whose prompts passages that recur are found and stored, "
            "such as default; repeat. Its callers can then tell that a text was sent."
        ),
    ] = None
    allow_uncalibrated: AllowUncalibrated = False
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration for `serve deploy` and exit.")
    ] = False


def parse_json_object(option: str, text: str, example: str) -> dict[str, Any]:
    """Raises `InvalidField`, which shows the example."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InvalidField(option, f"is not JSON ({error}); give an object, such as {example}") from None
    if not isinstance(values, dict):
        raise InvalidField(option, f"must be a JSON object, such as {example}")
    return values


def parse_engine_arguments(text: str) -> dict[str, Any]:
    """The arguments of `vllm.LLM` in `--engine`. Raises `InvalidField`."""
    return parse_json_object("engine", text, '{"max_model_len": 4096}')


def check_writable(option: str, path: Path) -> None:
    """Check that a file can be written, before minutes are spent on its content. Raises `InvalidField`."""
    if not path.parent.is_dir():
        raise InvalidField(option, f"{path.parent} is not a folder; create it first")
    if path.is_dir():
        raise InvalidField(option, f"{path} is a folder; name a file in it")


def parse_integers(name: str, text: str) -> list[int]:
    """`1,2,3`; empty text is an empty list. Raises `InvalidField`."""
    try:
        return [int(part) for part in _split(text)]
    except ValueError:
        raise InvalidField(name, f"{text!r} is not a comma-separated list of whole numbers") from None


def parse_floats(name: str, text: str) -> list[float]:
    """`0.1,0.2`; empty text is an empty list. Raises `InvalidField`."""
    try:
        return [float(part) for part in _split(text)]
    except ValueError:
        raise InvalidField(name, f"{text!r} is not a comma-separated list of numbers") from None


def parse_selectors(text: str) -> list[str]:
    """`hkvd,query`. Raises `InvalidField`."""
    return [parse_selector(part) for part in _split(text)]


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
