"""Options of the commands, and functions that parse their values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kintsugi.core.errors import InvalidField, NotFound
from kintsugi.core.evidence import Quality
from kintsugi.core.plan import FormName
from kintsugi.core.schema import parse_json
from kintsugi.models.bundled import BUNDLED_NAME
from kintsugi.models.context import NONE
from kintsugi.models.reference import REFERENCE

Model = Annotated[
    str, typer.Option(help=f"Checkpoint folder, {REFERENCE.name}, or a name that vLLM resolves.")
]
SystemPrompt = Annotated[
    Path | None,
    typer.Option("--system", help="Text file with the system prompt; chunks are prefilled after it."),
]
Form = Annotated[
    FormName,
    typer.Option("--form", help="Form of prompts. auto: chat if the model has a template, else plain."),
]
Context = Annotated[
    str,
    typer.Option(help="Text between system prompt and chunks: none, bundled, corpus, or a file."),
]
PlainCopies = Annotated[
    bool,
    typer.Option(help="With a context: also store chunks without it, for prompts that begin with a chunk."),
]
Portable = Annotated[bool, typer.Option(help="Also use chunks in prompts with another system prompt.")]
ENGINE_EXAMPLE = 'give one such as {"max_model_len": 4096}'
EngineArguments = Annotated[str, typer.Option("--engine", help="Arguments of vllm.LLM, as a JSON object.")]

Codec = Annotated[str, typer.Option(help="Codec of chunk KV in the store.")]
QualityLevel = Annotated[
    Quality,
    typer.Option(
        help="How much quality a blend may lose: balanced; strict: a third of that; off: no test, so "
        "answers may be wrong."
    ),
]
SsdTiers = Annotated[list[str] | None, typer.Option(help="SSD tier as FOLDER:SIZE; repeat, fastest first.")]
BucketTier = Annotated[
    str | None,
    typer.Option(help="Bucket below the SSD tiers, as s3://BUCKET/PREFIX:SIZE; set AWS_ variables."),
]
TlsCert = Annotated[Path | None, typer.Option(help="PEM file of the server's own certificate.")]
TlsKey = Annotated[Path | None, typer.Option(help="PEM file of the certificate's private key.")]


@dataclass(frozen=True, kw_only=True)
class GenerateTask:
    """Options of `kintsugi generate`."""

    model: Model
    chunk: Annotated[list[Path], typer.Option(help="Text file with one chunk; repeat in prompt order.")]
    question: Annotated[str, typer.Option(help="Question to ask about the chunks.")]
    form: Form = FormName.AUTO
    ratio: Annotated[
        float | None, typer.Option(help="Share of the chunks' tokens to recompute, from 0 to 1.")
    ] = None
    selector: Annotated[str | None, typer.Option(help="Selector of recomputed tokens, such as hkvd.")] = None
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in the answer.")] = 32
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run full prefill, prefix caching and full KV reuse.")
    ] = False
    report: Annotated[
        Path | None, typer.Option(help="Report of kintsugi calibrate --out, which permits blending.")
    ] = None
    quality: QualityLevel = Quality.BALANCED
    context: Context = NONE


@dataclass(frozen=True, kw_only=True)
class CalibrateTask:
    """Options of `kintsugi calibrate`."""

    model: Model
    questions: Annotated[
        Path | None,
        typer.Option(help="JSON lines of {chunks, question, answers}. Default: the bundled passages."),
    ] = None
    segments: Annotated[
        bool,
        typer.Option(
            "--segments",
            help="Cut the questions' chunks as discovery does, so that the report covers discovered chunks.",
        ),
    ] = False
    store: Annotated[
        str | None, typer.Option(help="URL of the store to publish the report in; its engines read it there.")
    ] = None
    out: Annotated[Path | None, typer.Option(help="File to write the report to.")] = None
    codec: Codec = "raw"
    minutes: Annotated[
        float,
        typer.Option(help="Time limit in minutes. Configurations that are then undecided do not pass."),
    ] = 10.0
    quality: QualityLevel = Quality.BALANCED
    form: Form = FormName.AUTO
    system: SystemPrompt = None
    context: Context = NONE
    engine: EngineArguments = "{}"
    portable: Portable = True


@dataclass(frozen=True, kw_only=True)
class EvaluateTask:
    """Options of `kintsugi eval`."""

    model: Model
    questions: Annotated[
        Path,
        typer.Option(help="JSON lines or list of {chunks, question, answers}, ctxs, or LongBench's fields."),
    ]
    form: Form = FormName.AUTO
    grid: Annotated[
        Path | None,
        typer.Option(help="YAML file with the configurations to compare; see docs/howto/evaluate.md."),
    ] = None
    engine: EngineArguments = "{}"
    context: Context = NONE


@dataclass(frozen=True, kw_only=True)
class ServeTask:
    """Options of `kintsugi serve`. They override the configuration file, where all settings can be set."""

    model: Annotated[
        str | None,
        typer.Option(
            help=f"Checkpoint folder, {REFERENCE.name}, or a name that vLLM resolves. "
            f"Default: {REFERENCE.name} if it can be fetched, else {BUNDLED_NAME}, a tiny model."
        ),
    ] = None
    config: Annotated[Path | None, typer.Option(help="YAML configuration; see docs/howto/serve.md.")] = None
    ram: Annotated[str | None, typer.Option(help="Size of each shard's RAM tier, such as 8GiB.")] = None
    ssd: SsdTiers = None
    shards: Annotated[int | None, typer.Option(min=1, help="Number of store shards.")] = None
    engines: Annotated[int | None, typer.Option(min=1, help="Number of engine replicas.")] = None
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port of the gateway; 0: any free.")] = None
    http_port: Annotated[int | None, typer.Option(help="HTTP port of the gateway; 0: any free.")] = None
    tokens_file: Annotated[Path | None, typer.Option(help="Tokens file; see kintsugi token.")] = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond loopback without tokens and TLS.")
    ] = False
    discover: Annotated[
        list[str] | None,
        typer.Option(
            help="Namespace, or a prefix and *, in which passages that recur are stored; repeat. Its callers "
            "can then find out that a text was sent."
        ),
    ] = None
    quality: Annotated[
        Quality | None,
        typer.Option(help="How much quality a blend may lose: balanced (default), strict, or off: no test."),
    ] = None
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="Print the configuration for Ray's `serve deploy` and exit."),
    ] = False


def parse_engine_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of `vllm.LLM` in `--engine`. Raises `InvalidField`."""
    try:
        values = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField("engine", f"is not JSON ({error}); {ENGINE_EXAMPLE}") from None
    if not isinstance(values, dict):
        raise InvalidField("engine", f"is not a JSON object; {ENGINE_EXAMPLE}")
    return values


def check_writable(option: str, path: Path) -> None:
    """Check that a file can be written, before its content is computed. Raises `InvalidField`."""
    if not path.parent.is_dir():
        raise InvalidField(option, f"{path.parent} is not a folder; create it first")
    if path.is_dir():
        raise InvalidField(option, f"{path} is a folder; name a file in it")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file. Raises `NotFound` and `InvalidField`."""
    import yaml

    class OnceLoader(yaml.SafeLoader):
        """Rejects duplicate keys of a mapping, of which PyYAML would use the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = set()
            for key, _ in node.value:
                if str(key.value) in names:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value!r} occurs twice in a mapping", key.start_mark
                    )
                names.add(str(key.value))
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    try:
        values = yaml.load(path.read_text(encoding="utf-8"), OnceLoader)
    except OSError as error:
        raise NotFound(f"{path} cannot be read ({error.strerror}); name a YAML file") from error
    except (
        Exception
    ) as error:  # PyYAML does not wrap the errors of conversions, such as that of an invalid date
        raise InvalidField("config", f"{path} is not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise InvalidField("config", f"{path} must be a mapping; see docs/howto/serve.md for its keys")
    return values
