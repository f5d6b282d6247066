"""`kintsugi bench`: measure a running service."""

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

from kintsugi.bench.plot import draw
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
from kintsugi.bench.report import Sample, Summary, summarize_samples
from kintsugi.bench.run import Endpoint, client_of, fetch_model_name, run
from kintsugi.cli.exits import ExitCode, exit_on_error
from kintsugi.cli.lists import floats
from kintsugi.cli.screen import Screen
from kintsugi.core.errors import InvalidField
from kintsugi.quality.figures import prepare_folder

app = typer.Typer(help="Measure a running service.", no_args_is_help=True)

RATES = "0.5,1,2"
PUT_BATCH = 16


@app.callback()
def _group() -> None:
    """Keeps `serve` a command of its own."""


@dataclass(frozen=True)
class BenchTask:
    """What to measure."""

    endpoint: Endpoint
    workload: RagWorkload
    rates_per_s: tuple[float, ...]
    """Or, for a trace, how many times as fast it is played."""
    count: int
    slo_s: float | None = None
    trace: Path | None = None
    tokenizer: Path | None = None
    warm_address: str = ""
    plot: Path | None = None


@app.command()
@exit_on_error
def serve(
    url: Annotated[str, typer.Option(help="OpenAI endpoint, with /v1.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str, typer.Option(help="Default: the first that the endpoint lists.")] = "",
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Of a Kintsugi gateway.")] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token.")] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="Chat completions; the model needs a template.")
    ] = False,
    rates: Annotated[str, typer.Option(help="Requests per second, comma-separated; one load each.")] = RATES,
    count: Annotated[int, typer.Option(min=1, help="Requests of a load.")] = 60,
    slo_ms: Annotated[float | None, typer.Option(help="What a first token may take, for goodput.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="JSON lines with timestamps instead of Poisson arrivals; --rates are speeds."),
    ] = None,
    documents: Annotated[int, typer.Option(help="Of the corpus, each one chunk.")] = 200,
    zipf: Annotated[float, typer.Option(help="Exponent of their popularity.")] = 0.9,
    chunks: Annotated[int, typer.Option(help="Of a prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(help="Of a chunk.")] = 512,
    answer_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 16,
    seed: Annotated[int, typer.Option(help="Same seed, same requests at the same times.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Model folder, to count a chunk's tokens. Without: a guess by words.")
    ] = None,
    warm: Annotated[
        str, typer.Option(help="gRPC address of the gateway: store every document's chunk first.")
    ] = "",
    plot: Annotated[Path | None, typer.Option(help="Picture of TTFT against rate, SVG and PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")] = False,
) -> None:
    """Open-loop load on any OpenAI endpoint: TTFT, ITL, throughput, goodput, hit rates."""
    if slo_ms is not None and not slo_ms > 0:
        raise InvalidField("slo-ms", f"{slo_ms} must be above 0")
    if warm and not namespace:
        raise InvalidField("namespace", "is mandatory with --warm: name the tenant whose chunks are stored")
    rates_per_s = tuple(floats("rates", rates))
    if not rates_per_s:
        raise InvalidField("rates", f"{rates!r} names none; give one or more, comma-separated")
    task = BenchTask(
        Endpoint(url.rstrip("/"), model, api_key, namespace, chat),
        RagWorkload(documents, zipf, chunks, chunk_tokens, answer_tokens, seed),
        rates_per_s,
        count,
        None if slo_ms is None else slo_ms / 1e3,
        trace,
        tokenizer,
        warm,
        plot,
    )
    if not measure(Screen(as_json), task):
        raise typer.Exit(ExitCode.UNAVAILABLE)


def measure(screen: Screen, task: BenchTask) -> bool:
    """Run every load and show the result; whether any request was answered."""
    # All of them before the first is run: a slip in the last would cost what was measured until then.
    arrivals_s = [_arrivals(task, rate) for rate in task.rates_per_s]
    if task.plot is not None:
        prepare_folder(task.plot.parent)
    with screen.step("Writing the corpus"):
        texts = corpus(task.workload, _counter(task.tokenizer))
    if task.warm_address:
        _store(screen, task, texts)
    endpoint = asyncio.run(_resolved(task.endpoint))
    summaries = []
    for rate, times_s in zip(task.rates_per_s, arrivals_s, strict=True):
        samples = _run_load(screen, task, endpoint, texts, rate, times_s)
        summaries.append(summarize_samples(samples, task.slo_s))
    pictures = [] if task.plot is None else draw(task.plot, {endpoint.model: summaries}, task.slo_s)
    document = {
        "endpoint": endpoint.url,
        "model": endpoint.model,
        "workload": dataclasses.asdict(task.workload),
        "trace": None if task.trace is None else str(task.trace),
        "slo_s": task.slo_s,
        "loads": [dataclasses.asdict(summary) for summary in summaries],
        "plots": [str(path) for path in pictures],
    }
    screen.show(document, lambda console: _print(console, endpoint, summaries))
    return any(summary.requests > summary.errors for summary in summaries)


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
        Client(task.warm_address, task.endpoint.namespace, token=task.endpoint.api_key or None) as client,
    ):
        for start in range(0, len(texts), PUT_BATCH):
            say(f"{start} of {len(texts)}")
            for put in client.put_chunks(texts[start : start + PUT_BATCH]):
                if put.state == "failed":
                    screen.note(f"chunk {put.key[:16]} was not stored: {put.reason}")


async def _resolved(endpoint: Endpoint) -> Endpoint:
    """With the model that it lists, where none was named."""
    if endpoint.model:
        return endpoint
    async with client_of(endpoint) as client:
        return dataclasses.replace(endpoint, model=await fetch_model_name(client))


def _arrivals(task: BenchTask, rate: float) -> list[float]:
    """Seconds from the beginning. Raises `InvalidField`, and `NotFound` for a trace that is not there."""
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
