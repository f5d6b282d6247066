"""Measures what scattered queries gain from sharing their KV reads: `python
benchmarks/gpu/scattered_attention.py`.

One layer's attention over a paged bf16 cache, 15 % of the context's tokens as queries, on a CUDA device.
Compared: the tiled kernel; the same kernel with one token per tile (what n pseudo requests of one query
do); torch's SDPA with a dense mask; FlexAttention, compiled, with its block mask built outside the timing.
SDPA and FlexAttention read K and V gathered into contiguous tensors beforehand, so the paged kernels are
at a disadvantage. Prints a table of medians in milliseconds and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kintsugi.fusor.attention import gather_head, visible_positions

SHAPES = {"mistral-7b": (32, 8, 128), "llama-70b": (64, 8, 128), "llama-70b-rank-of-8": (8, 1, 128)}
"""Query heads, kv heads, head size."""

BLOCK_SIZE = 16
REPEATS = 20
SHARE = 0.15


@dataclass
class Layer:
    """One layer's arguments on a device."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    positions: Tensor

    @property
    def scale(self) -> float:
        return float(self.query.shape[2] ** -0.5)


def layer_of(shape: str, context: int, device: str, seed: int = 0) -> Layer:
    """Random K, V and queries at a random, sorted `SHARE` of the positions; shuffled blocks."""
    heads, kv_heads, dim = SHAPES[shape]
    generator = torch.Generator(device).manual_seed(seed)
    blocks = -(-context // BLOCK_SIZE)
    cache = torch.randn(2, blocks, BLOCK_SIZE, kv_heads, dim, device=device, generator=generator).bfloat16()
    table = torch.randperm(blocks, device=device, generator=generator).int()
    chosen = torch.randperm(context, device=device, generator=generator)[: int(SHARE * context)]
    query = torch.randn(len(chosen), heads, dim, device=device, generator=generator).bfloat16()
    return Layer(query, cache[0], cache[1], table, chosen.sort().values.int())


def tiled(layer: Layer, tokens_per_tile: int | None = None) -> Callable[[], Tensor]:
    """Run the kernel. `tokens_per_tile`: number of tokens in a tile; by default the kernel chooses it."""
    from kintsugi.fusor.kernels.scattered import Tile, triton_attention

    group = layer.query.shape[1] // layer.key_cache.shape[2]
    tile = None
    if tokens_per_tile is not None:
        rows = max(16, 1 << (tokens_per_tile * group - 1).bit_length())
        tile = Tile(tokens_per_tile, rows, columns=64, warps=4, stages=2)
    return lambda: triton_attention(
        layer.query,
        layer.key_cache,
        layer.value_cache,
        layer.block_table,
        layer.positions,
        scale=layer.scale,
        tile=tile,
    )


def gathered(layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Query `[1, heads, n, dim]`, K and V `[1, kv_heads, L, dim]`, contiguous."""
    length = int(layer.positions[-1]) + 1
    key, value = (
        torch.stack([gather_head(cache, layer.block_table, head, length) for head in range(cache.shape[2])])[
            None
        ].to(layer.query.dtype)
        for cache in (layer.key_cache, layer.value_cache)
    )
    return layer.query.transpose(0, 1)[None].contiguous(), key, value


def dense_sdpa(layer: Layer) -> Callable[[], Tensor]:
    query, key, value = gathered(layer)
    mask = visible_positions(layer.positions, None)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(query, key, value, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def flex(layer: Layer) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = gathered(layer)
    positions = layer.positions

    def visible(_batch: Tensor, _head: Tensor, query_index: Tensor, kv_index: Tensor) -> Tensor:
        return kv_index <= positions[query_index]

    mask = create_block_mask(visible, None, None, len(positions), key.shape[2], device=str(query.device))
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend() -> Tensor:
        output: Tensor = compiled(query, key, value, block_mask=mask, enable_gqa=True)
        return output[0].transpose(0, 1)

    return attend


WAYS: dict[str, Callable[[Layer], Callable[[], Tensor]]] = {
    "tiled": tiled,
    "one_token_per_tile": lambda layer: tiled(layer, tokens_per_tile=1),
    "dense_sdpa": dense_sdpa,
    "flex_attention": flex,
}


def median_ms(run: Callable[[], Tensor]) -> float:
    """Median of `REPEATS` runs by CUDA events, after three to warm up, each with a flushed L2 cache."""
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    times: list[float] = []
    for repeat in range(REPEATS + 3):
        flush.zero_()
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def measured(shape: str, context: int) -> dict[str, float | str | int]:
    """Milliseconds of each way, and the largest difference of any output from the tiled kernel's."""
    layer = layer_of(shape, context, "cuda")
    expected = WAYS["tiled"](layer)().float()
    row: dict[str, float | str | int] = {
        "shape": shape,
        "context": context,
        "queries": len(layer.positions),
    }
    worst = 0.0
    for name, prepare in WAYS.items():
        try:
            run = prepare(layer)
            worst = max(worst, float((run().float() - expected).abs().max()))
            row[f"{name}_ms"] = median_ms(run)
        except (RuntimeError, ImportError) as error:
            row[f"{name}_error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    row["max_abs_difference"] = worst
    return row


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    print(f"{'shape':<20}{'context':>8}{'queries':>8}" + "".join(f"{name:>20}" for name in WAYS))
    rows = []
    for shape in arguments.shapes:
        for context in arguments.contexts:
            row = measured(shape, context)
            rows.append(row)
            cells = "".join(f"{row.get(f'{name}_ms', float('nan')):>20.3f}" for name in WAYS)
            print(f"{shape:<20}{context:>8}{row['queries']:>8}{cells}", flush=True)
    device = torch.cuda.get_device_name()
    summary = {
        "benchmark": "scattered_attention",
        "commit": commit(),
        "device": device,
        "torch": torch.__version__,
        "repeats": REPEATS,
        "share": SHARE,
        "rows": rows,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
