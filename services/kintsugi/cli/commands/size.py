"""`kintsugi size`: computes the RAM, SSD space and network speed that a corpus needs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console

from kintsugi.cli.models import prepare_model
from kintsugi.cli.render import format_bytes, make_figures_table
from kintsugi.cli.screen import Screen
from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import Codec
from kintsugi.core.sizing import (
    COST,
    HOT_SHARE,
    LOAD,
    ModelSize,
    SizingWorkload,
    blend_s,
    codec_size,
    fleet_size,
    model_size,
    pace_to_hide_loading,
)
from kintsugi.models.checkpoint import read_config
from kintsugi.models.reference import default_dtype

UTILISATION = 0.6
"""Share of a device's peak that prefill reaches; typical of large matrix products on recent GPUs."""

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kMGB]?)")
_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
_SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(bit|b|B)(?:/s|ps)")
_SPEEDS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_NUMBER_MAX = 10**15


def parse_count(name: str, text: str) -> int:
    """Parse a count such as `10M`, `1.5B` or `200000`. Raises `InvalidField`."""
    match = _COUNT.fullmatch(text.strip())
    count = 0 if match is None else round(float(match[1]) * _COUNTS[match[2]])
    if not 0 < count <= _NUMBER_MAX:
        raise InvalidField(name, f"{text[:40]!r} is not a number of tokens from 1 to 10^15, such as 250M")
    return count


def parse_speed(text: str) -> float:
    """Parse `25Gbit/s` or `7GB/s` into bytes per second; a lower-case b means bits. Raises `InvalidField`."""
    match = _SPEED.fullmatch(text.strip())
    speed = 0.0 if match is None else float(match[1]) * _SPEEDS[match[2]] / (1 if match[3] == "B" else 8)
    if not 0 < speed <= _NUMBER_MAX:
        raise InvalidField("bandwidth", f"{text[:40]!r} is not a speed, such as 25Gbit/s or 7GB/s")
    return speed


def prefill_of(
    model: ModelSize, prompt_tokens: int, tokens_per_s: float | None, tflops: float
) -> tuple[float, str]:
    """Return how many seconds a full prefill of one prompt's chunks takes, and where that figure comes from:
    a measured rate or the device's peak. Raises `InvalidField`."""
    if tokens_per_s is not None:
        if not tokens_per_s > 0:
            raise InvalidField("prefill_tokens_per_s", f"{tokens_per_s} is not positive")
        return prompt_tokens / tokens_per_s, f"measured: {tokens_per_s:g} tokens/s"
    if not tflops > 0:
        raise InvalidField("tflops", f"{tflops} is not positive")
    seconds = model.prefill_flops(prompt_tokens) / (tflops * 1e12 * UTILISATION)
    return seconds, f"assumed: {UTILISATION:.0%} of a peak of {tflops:g} TFLOP/s"


def rows_of(
    model: ModelSize,
    work: SizingWorkload,
    full_s: float,
    bytes_per_s: float,
    requests_per_s: float | None = None,
) -> list[dict[str, Any]]:
    """Return the figures of each codec that can store the model's KV, in the order of their ids; with a rate
    of requests, also the fleet that answers it."""
    rows = []
    for codec in filter(model.layout.holds, Codec):
        size = codec_size(model.layout, codec, work)
        timed = (size.prompt_bytes, model.layout.num_layers, full_s, COST)
        fastest_s = blend_s(*timed, bytes_per_s)
        pace = dataclasses.asdict(pace_to_hide_loading(*timed))
        figures = {**dataclasses.asdict(size), "codec": codec.name.lower(), **pace}
        if requests_per_s is not None:
            fleet = fleet_size(size, work, requests_per_s, full_s, bytes_per_s)
            figures["fleet"] = dataclasses.asdict(fleet)
        rows.append({**figures, "blend_s": fastest_s, "pays": fastest_s < full_s})
    return rows


def size(
    screen: Screen,
    model: Annotated[str, typer.Option(help="Checkpoint folder; only its config.json is read.")],
    corpus_tokens: Annotated[str, typer.Option(help="Tokens of the whole corpus, such as 250M.")],
    bandwidth: Annotated[str, typer.Option(help="Slowest link to an engine, such as 25Gbit/s or 7GB/s.")],
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens per chunk.")] = 512,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks per prompt.")] = 6,
    replication: Annotated[int, typer.Option(min=1, help="Number of shards that hold each chunk.")] = 1,
    prefill_tokens_per_s: Annotated[
        float | None, typer.Option(help="Measured prefill rate of one engine with such prompts.")
    ] = None,
    tflops: Annotated[
        float, typer.Option(help="Peak TFLOP/s of an engine's devices. Ignored if a rate is given.")
    ] = 989.0,
    requests_per_s: Annotated[
        float | None, typer.Option(help="Peak requests per second; also prints the fleet that serves them.")
    ] = None,
) -> None:
    """Compute the RAM and SSD that a corpus needs, the network speed above which blending pays, and the pods
    that a rate of requests needs."""
    work = SizingWorkload(parse_count("corpus_tokens", corpus_tokens), chunk_tokens, chunks, replication)
    bytes_per_s = parse_speed(bandwidth)
    prepare_model(screen, model)
    shape = model_size(read_config(model), default_dtype(model))
    full_s, source = prefill_of(shape, work.prompt_tokens, prefill_tokens_per_s, tflops)
    document = {
        "model": model,
        "dtype": shape.layout.dtype,
        **dataclasses.asdict(work),
        "prompt_tokens": work.prompt_tokens,
        "hot_share": HOT_SHARE,
        "cost": COST,
        "bandwidth_bytes_per_s": bytes_per_s,
        "full_prefill_s": full_s,
        "full_prefill_source": source,
        "requests_per_s": requests_per_s,
        "codecs": rows_of(shape, work, full_s, bytes_per_s, requests_per_s),
    }
    screen.show(document, lambda console: render(console, document))


FLEET_HEADINGS = (
    "codec",
    "engines",
    "gateways",
    "shards",
    "RAM/shard",
    "SSD/shard",
    "in/engine",
    "out/shard",
)
HEADINGS = ("codec", "B/token", "corpus", "RAM", "SSD", "pays", "hides", "ms", "wins")


def render(console: Console, document: Mapping[str, Any]) -> None:
    """Print a table of codecs, and the assumptions below it. ``document``: the JSON form."""
    table = make_figures_table(HEADINGS, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in document["codecs"]:
        table.add_row(
            row["codec"],
            f"{row['bytes_per_token']:,.0f}",
            *(format_bytes(row[name]) for name in ("corpus_bytes", "ram_bytes", "ssd_bytes")),
            _gbits(row["pays_bytes_per_s"]),
            _gbits(row["hides_bytes_per_s"]),
            f"{row['blend_s'] * 1e3:,.0f}",
            "blend" if row["pays"] else "prefill",
        )
    console.print(table)
    console.print(
        "pays, hides: Gbit/s above which a blend beats a full prefill, and above which it hides loading · "
        f"ms: blend at {_gbits(document['bandwidth_bytes_per_s'])} Gbit/s · wins: the faster one\n"
        f"A prompt has {document['chunks_per_prompt']} chunks of {document['chunk_tokens']} tokens. Its full "
        f"prefill takes {document['full_prefill_s'] * 1e3:,.0f} ms ({document['full_prefill_source']}); a "
        f"blend computes {COST:g} of it. RAM holds {HOT_SHARE:.0%} of the corpus, SSD all of it; bytes are "
        f"sums over all shards, with {document['replication']} copies of each chunk. Times are lower bounds.",
        style="dim",
    )
    if document["requests_per_s"] is not None:
        render_fleet(console, document)


def render_fleet(console: Console, document: Mapping[str, Any]) -> None:
    """Print the fleet that serves the rate of requests, for each codec with which a blend is faster."""
    table = make_figures_table(FLEET_HEADINGS, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in document["codecs"]:
        if row["pays"]:
            fleet = row["fleet"]
            table.add_row(
                row["codec"],
                *(str(fleet[name]) for name in ("engines", "gateways", "shards")),
                *(format_bytes(fleet[f"{tier}_bytes_per_shard"]) for tier in ("ram", "ssd")),
                *(_gbits(fleet[f"{part}_link_bytes_per_s"]) for part in ("engine", "shard")),
            )
    console.print(table)
    console.print(
        f"For {document['requests_per_s']:g} requests/s whose chunks all hit, with engines, gateways and "
        f"links busy {LOAD:.0%} of the time. in, out: mean Gbit/s. Engines only prefill: add more to decode.",
        style="dim",
    )


def _gbits(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.3g}"
