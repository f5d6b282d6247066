"""`kintsugi bench`: measures a running service."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kintsugi.bench.profile import (
    CountTokens,
    RagWorkload,
    Request,
    corpus,
    poisson_arrivals,
    prompt_of,
    requests,
    trace_arrivals,
)
from kintsugi.bench.report import Sample, Summary, plot_ttft, summarize_samples
from kintsugi.bench.run import Endpoint, client_of, fetch_model_name, run
from kintsugi.cli.exits import ExitCode
from kintsugi.cli.options import parse_floats
from kintsugi.cli.runner import command
from kintsugi.cli.screen import Screen
from kintsugi.core.errors import InvalidField
from kintsugi.quality.figures import prepare_folder

app = typer.Typer(help="Measure a running service.", no_args_is_help=True)

PUT_BATCH = 16


@app.callback()
def _group() -> None:
    """Makes `serve` a subcommand: Typer would merge a single command into its group."""


@dataclass(frozen=True, kw_only=True)
class BenchTask:
    """`kintsugi bench serve`."""

    url: Annotated[str, typer.Option(help="URL of an OpenAI endpoint, with /v1.")] = (
        "http://127.0.0.1:8000/v1"
    )
    model: Annotated[str, typer.Option(help="Model name. Default: the first that the endpoint lists.")] = ""
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Namespace at a Kintsugi gateway.")] = ""
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token.")] = ""
    chat: Annotated[
        bool, typer.Option("--chat", help="Use chat completions; the model needs a template.")
    ] = False
    rates: Annotated[str, typer.Option(help="Comma-separated requests per second, one load each.")] = (
        "0.5,1,2"
    )
    count: Annotated[int, typer.Option(min=1, help="Requests per load.")] = 60
    slo_ms: Annotated[
        float | None, typer.Option(help="Longest time to first token that counts as goodput.")
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(help="JSON lines with timestamps to replay; --rates are then speeds."),
    ] = None
    documents: Annotated[int, typer.Option(help="Documents in the corpus, one chunk each.")] = 200
    zipf: Annotated[float, typer.Option(help="Exponent of the documents' popularity.")] = 0.9
    chunks: Annotated[int, typer.Option(help="Chunks per prompt.")] = 6
    chunk_tokens: Annotated[int, typer.Option(help="Tokens per chunk.")] = 512
    answer_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 16
    seed: Annotated[int, typer.Option(help="The same seed sends the same requests at the same times.")] = 0
    tokenizer: Annotated[
        Path | None, typer.Option(help="Model folder, to count tokens. Default: an estimate by words.")
    ] = None
    warm: Annotated[str, typer.Option(help="gRPC address of the gateway, to store all documents first.")] = ""
    plot: Annotated[Path | None, typer.Option(help="Write a plot of TTFT by rate, as SVG and PNG.")] = None

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.url.rstrip("/"), self.model, self.api_key, self.namespace, self.chat)

    @property
    def workload(self) -> RagWorkload:
        return RagWorkload(
            self.documents, self.zipf, self.chunks, self.chunk_tokens, self.answer_tokens, self.seed
        )


@command(app)
def serve(screen: Screen, task: BenchTask) -> ExitCode:
    """Send an open-loop load to an OpenAI endpoint; measure TTFT, ITL, throughput, goodput and hit rates."""
    if task.slo_ms is not None and not task.slo_ms > 0:
        raise InvalidField("slo-ms", f"{task.slo_ms} must be above 0")
    if task.warm and not task.namespace:
        raise InvalidField("namespace", "is required with --warm: name the namespace to store the chunks in")
    rates_per_s = parse_floats("rates", task.rates)
    if not rates_per_s:
        raise InvalidField("rates", f"{task.rates!r} has no rate; give one or more, comma-separated")
    slo_s = None if task.slo_ms is None else task.slo_ms / 1e3
    # All before the first load runs: a bad rate at the end would cost what was measured until then.
    arrivals_s = [_arrivals(task, rate) for rate in rates_per_s]
    if task.plot is not None:
        prepare_folder(task.plot.parent)
    with screen.step("Writing the corpus"):
        texts = corpus(task.workload, _counter(task.tokenizer))
    if task.warm:
        _store(screen, task, texts)
    endpoint = asyncio.run(_resolve_model(task.endpoint))
    summaries = []
    for rate, times_s in zip(rates_per_s, arrivals_s, strict=True):
        samples = _run_load(screen, task, endpoint, texts, rate, times_s)
        summaries.append(summarize_samples(samples, slo_s))
    pictures = [] if task.plot is None else plot_ttft(task.plot, {endpoint.model: summaries}, slo_s)
    document = {
        "endpoint": endpoint.url,
        "model": endpoint.model,
        "workload": dataclasses.asdict(task.workload),
        "trace": None if task.trace is None else str(task.trace),
        "slo_s": slo_s,
        "loads": [dataclasses.asdict(summary) for summary in summaries],
        "plots": [str(path) for path in pictures],
    }
    screen.show(document, lambda console: _print(console, endpoint, summaries))
    answered = any(summary.requests > summary.errors for summary in summaries)
    return ExitCode.OK if answered else ExitCode.UNAVAILABLE


def _counter(folder: Path | None) -> CountTokens | None:
    if folder is None:
        return None
    from kintsugi.precompute.chunking import Chunker  # of the extra `chunking`

    chunker = Chunker.of_model(folder)
    return lambda text: len(chunker.token_ids(text))


def _store(screen: Screen, task: BenchTask, texts: Sequence[str]) -> None:
    from kintsugi.sdk.client import Client

    with (
        screen.step("Storing the chunks") as say,
        Client(task.warm, task.namespace, token=task.api_key or None) as client,
    ):
        for start in range(0, len(texts), PUT_BATCH):
            say(f"{start} of {len(texts)}")
            for put in client.put_chunks(texts[start : start + PUT_BATCH]):
                if put.state == "failed":
                    screen.note(f"chunk {put.key[:16]} was not stored: {put.reason}")


async def _resolve_model(endpoint: Endpoint) -> Endpoint:
    """The endpoint, with the first model that it lists if the user named none."""
    if endpoint.model:
        return endpoint
    async with client_of(endpoint) as client:
        return dataclasses.replace(endpoint, model=await fetch_model_name(client))


def _arrivals(task: BenchTask, rate: float) -> list[float]:
    """Arrival times in seconds. Raises `InvalidField`, and `NotFound` for a missing trace."""
    if task.trace is not None:
        return trace_arrivals(task.trace, rate, task.count)
    return poisson_arrivals(rate, task.count, task.workload.seed)


def _run_load(
    screen: Screen,
    task: BenchTask,
    endpoint: Endpoint,
    texts: Sequence[str],
    rate: float,
    arrivals_s: Sequence[float],
) -> list[Sample]:
    workload = task.workload
    name = f"{rate:g} requests/s"
    if task.trace is not None:
        name = f"{task.trace.name} at {rate:g} times its speed"
    coming: list[Request] = requests(workload, arrivals_s)
    prompts = [prompt_of(request, texts) for request in coming]
    with screen.step(name) as say:
        return asyncio.run(
            run(
                endpoint,
                coming,
                prompts,
                workload.answer_tokens,
                lambda done: say(f"{done} of {len(coming)}"),
            )
        )


def _print(console: Console, endpoint: Endpoint, summaries: Sequence[Summary]) -> None:
    table = Table(
        *("rate/s", "errors", "TTFT p50", "p95", "p99", "ITL p50", "p99"),
        *("answers/s", "tokens/s", "goodput/s", "chunk hits"),
        title=f"{endpoint.model} at {endpoint.url}",
    )
    for one in summaries:
        table.add_row(
            f"{one.rate_per_s:.2f}",
            str(one.errors),
            *(_ms(one.ttft_s, name) for name in ("p50", "p95", "p99")),
            *(_ms(one.itl_s, name) for name in ("p50", "p99")),
            f"{one.requests_per_s:.2f}",
            f"{one.output_tokens_per_s:.1f}",
            "" if one.goodput_per_s is None else f"{one.goodput_per_s:.2f}",
            "" if one.hit_rate is None else f"{one.hit_rate:.1%}",
        )
    console.print(table)
    for one in summaries:
        for kind, times in one.error_kinds.items():
            console.print(f"{one.rate_per_s:.2f}/s: {times} × {kind}", highlight=False)


def _ms(values: dict[str, Any], name: str) -> str:
    return f"{values[name] * 1e3:.0f} ms" if name in values else ""
