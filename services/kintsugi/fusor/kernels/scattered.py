"""The Triton kernel of `fusor.attention.attend_scattered`.

A program handles one kv head and a tile of T consecutive queries. Its rows are T tokens × the G query
heads that share the kv head, so each K/V tile is loaded once for all of them. It walks the kv
positions from its first query's window to its last query's position and keeps a running softmax
(FlashAttention-2's recurrence, in base 2) per row; the mask compares positions strictly.

If there are too few tiles to fill the GPU (few kv heads under tensor parallelism, or few queries), the walk
over the kv positions is split: S programs walk a part each, and a second kernel merges their running
softmaxes (FlashDecoding). With S = 1 there is no second kernel.

Rejected: Triton's autotuner, which would stall the first request of every shape.

Triton resolves every annotation inside a kernel, so only compile-time arguments carry one.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
NO_LOGIT: tl.constexpr = tl.constexpr(-1e30)
"""Replaces minus infinity in the running maximum, where a real one would turn a masked row into NaN."""


@dataclass(frozen=True)
class Tile:
    """How much work one program does."""

    tokens: int
    """T, the queries that share each load."""
    rows: int
    """Rows of the matrix product, a power of two >= max(16, T · G)."""
    columns: int
    """KV positions per step, a power of two >= 16."""
    warps: int
    stages: int

    @staticmethod
    def choose_tile(num_tokens: int, group: int, row_bytes: int) -> Tile:
        """Up to 128 rows; fewer if there are few queries, or if rows are too wide for the registers."""
        wide = row_bytes > 256
        rows_max = max(64 if wide else 128, triton.next_power_of_2(group))
        rows = max(16, min(rows_max, triton.next_power_of_2(num_tokens * group)))
        return Tile(
            tokens=rows // group,
            rows=rows,
            columns=32 if wide else 64,
            warps=8 if rows >= 128 else 4,
            stages=2,
        )


PROGRAMS_PER_MULTIPROCESSOR = 2
"""Number of programs that a multiprocessor runs at a time; with fewer programs, some multiprocessors are
idle."""

SPLITS_MAX = 16
STEPS_PER_SPLIT = 4
"""Minimum number of steps per program: merging costs about one step."""


def choose_splits(programs: int, context: int, columns: int, multiprocessors: int) -> int:
    """Return the number of parts, a power of two, into which each of `programs` walks over `context`
    positions is split."""
    splits = 1
    while (
        splits < SPLITS_MAX
        and programs * splits < PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
        and context >= 2 * splits * STEPS_PER_SPLIT * columns
    ):
        splits *= 2
    return splits


def variant_sizes(group: int, row_bytes: int, context_max: int) -> list[tuple[int, int]]:
    """Return pairs: a number of queries and a number of kv positions. One call per pair compiles every
    variant that calls over at most `context_max` positions can need: each tile with each number of splits."""
    smallest: dict[Tile, int] = {}
    num_tokens = 1
    while True:
        tile = Tile.choose_tile(num_tokens, group, row_bytes)
        smallest.setdefault(tile, num_tokens)
        if num_tokens > tile.tokens:  # with more queries there are more tiles of this size
            break
        num_tokens *= 2
    sizes = [(num_tokens, num_tokens) for num_tokens in smallest.values()]
    splits = 2
    while splits <= SPLITS_MAX:
        contexts = ((count, splits * STEPS_PER_SPLIT * tile.columns) for tile, count in smallest.items())
        sizes += [(count, context) for count, context in contexts if context <= context_max]
        splits *= 2
    return sizes


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """1 on the CPU, where Triton's interpreter runs one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def triton_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Tensor:
    """Compute `fusor.attention.attend_scattered` for checked arguments. Memory, if the walk is split: fp32
    `[splits, n, q_heads, head_dim + 2]`."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    tile = tile or Tile.choose_tile(num_tokens, group, head_dim * query.element_size())
    tiles, context = triton.cdiv(num_tokens, tile.tokens), block_table.shape[0] * key_cache.shape[1]
    if splits is None:
        splits = choose_splits(tiles * num_kv_heads, context, tile.columns, _multiprocessors(query.device))
    output = query.new_empty(query.shape)
    parts, softmax = output[None], output
    if splits > 1:
        parts = query.new_empty((splits, *query.shape), dtype=torch.float32)
        softmax = query.new_empty((splits, num_tokens, num_heads, 2), dtype=torch.float32)
    _attend[(tiles, num_kv_heads, splits)](
        query,
        key_cache,
        value_cache,
        parts,
        softmax,
        block_table.contiguous(),
        positions.contiguous(),
        positions if sinks is None else sinks.contiguous(),
        num_tokens,
        scale,
        softcap or 0.0,
        *query.stride()[:-1],
        *key_cache.stride()[:-1],
        *value_cache.stride()[:-1],
        *parts.stride()[:-1],
        WINDOW=sliding_window or 0,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        GROUP=group,
        BLOCK_SIZE=key_cache.shape[1],
        HEAD_DIM=head_dim,
        DIM=triton.next_power_of_2(head_dim),
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        SPLITS=splits,
        DOT_TYPE=_dot_type(query.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        _merge[(num_tokens, num_heads)](
            parts,
            softmax,
            output,
            *parts.stride()[:-1],
            *output.stride()[:-1],
            HEAD_DIM=head_dim,
            DIM=triton.next_power_of_2(head_dim),
            SPLITS=splits,
        )
    return output


def _dot_type(dtype: torch.dtype) -> Any:
    """The element type of both matrix products: the query's own.

    Triton's interpreter multiplies bf16 as if its bits were integers, so it gets float32 instead.
    """
    if triton.knobs.runtime.interpret and dtype is torch.bfloat16:
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


@triton.jit(do_not_specialize=["num_tokens"])
def _attend(
    query,
    key_cache,
    value_cache,
    output,
    softmax,
    block_table,
    positions,
    sinks,
    num_tokens,
    scale,
    softcap,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    output_split_stride,
    output_token_stride,
    output_head_stride,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    """Grid: (tiles of TOKENS queries, kv heads, SPLITS). With several splits, `output` takes the parts' sums,
    not yet divided, and `softmax` `[splits, tokens, heads, 2]` their running maxima and totals."""
    # Late tiles walk farthest: start them first, so that the short ones fill the end of the launch.
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
    last_token = tl.minimum(first_token + TOKENS, num_tokens) - 1
    kv_head, split = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token, head, row_is_live = _rows(first_token, last_token, kv_head, GROUP, TOKENS, ROWS)
    row_position = tl.where(row_is_live, tl.load(positions + token), -1)
    query += token * query_token_stride + head * query_head_stride
    q = _load(query, row_is_live, HEAD_DIM, DIM).to(DOT_TYPE)
    accumulator = tl.zeros([ROWS, DIM], dtype=tl.float32)
    maximum, total = _start(sinks, head, split, ROWS, HAS_SINKS)

    start = 0
    if WINDOW > 0:
        start = tl.maximum(tl.load(positions + first_token) - WINDOW + 1, 0)
    stop = tl.load(positions + last_token) + 1
    start, stop = _part(start, stop, split, COLUMNS, SPLITS)
    for first_column in range(start, stop, COLUMNS):
        column = first_column + tl.arange(0, COLUMNS)
        visible, column_is_live = _visible(column, row_position, stop, WINDOW)
        block = tl.load(block_table + column // BLOCK_SIZE, mask=column_is_live, other=0).to(tl.int64)
        slot = column % BLOCK_SIZE
        key = key_cache + block * key_block_stride + slot * key_slot_stride + kv_head * key_head_stride
        value = (
            value_cache + block * value_block_stride + slot * value_slot_stride + kv_head * value_head_stride
        )
        k = _load(key, column_is_live, HEAD_DIM, DIM).to(DOT_TYPE)
        v = _load(value, column_is_live, HEAD_DIM, DIM).to(DOT_TYPE)
        logits = _logits(q, k, visible, scale, softcap, HAS_SOFTCAP)
        accumulator, maximum, total = _accumulate(accumulator, maximum, total, logits, v)

    if SPLITS > 1:
        entry = ((split * num_tokens + token) * (tl.num_programs(1) * GROUP) + head) * 2
        tl.store(softmax + entry, maximum, mask=row_is_live)
        tl.store(softmax + entry + 1, total, mask=row_is_live)
    else:
        accumulator *= (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    output += split * output_split_stride + token * output_token_stride + head * output_head_stride
    _store(output, accumulator, row_is_live, HEAD_DIM, DIM)


@triton.jit
def _rows(first_token, last_token, kv_head, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """Return each row's token and query head, and whether the row is computed."""
    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    is_live = (row < TOKENS * GROUP) & (token <= last_token)
    return tl.minimum(token, last_token).to(tl.int64), kv_head * GROUP + row % GROUP, is_live


@triton.jit
def _load(rows, is_live, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Load `[rows, DIM]` from pointers to contiguous rows of HEAD_DIM elements; 0 for other elements."""
    dim = tl.arange(0, DIM)
    return tl.load(rows[:, None] + dim[None, :], is_live[:, None] & (dim < HEAD_DIM)[None, :], 0.0)


@triton.jit
def _store(rows, values, is_live, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Store `[rows, DIM]` as `_load` loads it."""
    dim = tl.arange(0, DIM)
    mask = is_live[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(rows[:, None] + dim[None, :], values.to(rows.dtype.element_ty), mask)


@triton.jit
def _visible(column, row_position, stop, WINDOW: tl.constexpr):
    """Return which pairs `[ROWS, COLUMNS]` the mask admits, and which columns may be read."""
    visible = column[None, :] <= row_position[:, None]
    column_is_live = column < stop
    if WINDOW > 0:
        visible = visible & (column[None, :] > row_position[:, None] - WINDOW)
        # The engine may have freed blocks between the windows of scattered queries.
        column_is_live = tl.max(visible.to(tl.int32), axis=0) > 0
    return visible, column_is_live


@triton.jit
def _logits(q, k, visible, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return fp32 `[ROWS, COLUMNS]` logits in base 2; minus infinity for masked pairs."""
    product = tl.dot(q, tl.trans(k), input_precision="ieee")
    if HAS_SOFTCAP:
        # tanh(x) as 1 - 2 / (1 + e^2x): saturates without overflow, and the interpreter has no libdevice.
        capped = 1.0 - 2.0 / (1.0 + tl.exp(product * (2.0 * scale / softcap)))
        logits = capped * (softcap * LOG2_E)
    else:
        logits = product * (scale * LOG2_E)
    return tl.where(visible, logits, float("-inf"))


@triton.jit
def _accumulate(accumulator, maximum, total, logits, v):
    """Add a tile's values to the running softmax, weighted by its logits."""
    new_maximum = tl.maximum(maximum, tl.max(logits, axis=1))
    weights = tl.exp2(logits - new_maximum[:, None])
    decay = tl.exp2(maximum - new_maximum)
    product = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return accumulator * decay[:, None] + product, new_maximum, total * decay + tl.sum(weights, axis=1)


@triton.jit
def _start(sinks, head, split, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Return the running maximum (base 2) and total before any key: empty, or the sink's logit in split 0."""
    if HAS_SINKS:
        sink = tl.where(split == 0, tl.load(sinks + head).to(tl.float32) * LOG2_E, float("-inf"))
        maximum = tl.maximum(sink, NO_LOGIT)
        total = tl.exp2(sink - maximum)
    else:
        maximum = tl.full([ROWS], NO_LOGIT, dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
    return maximum, total


@triton.jit
def _part(start, stop, split, COLUMNS: tl.constexpr, SPLITS: tl.constexpr):
    """Return the part of the walk from `start` to `stop` that a split takes, in whole steps."""
    if SPLITS > 1:
        width = tl.cdiv(tl.cdiv(stop - start, COLUMNS), SPLITS) * COLUMNS
        start += split.to(tl.int32) * width
        stop = tl.minimum(stop, start + width)
    return start, stop


@triton.jit
def _merge(
    parts,
    softmax,
    output,
    part_split_stride,
    part_token_stride,
    part_head_stride,
    output_token_stride,
    output_head_stride,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge the parts of one query and head. Grid: (queries, query heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    split, dim = tl.arange(0, SPLITS).to(tl.int64), tl.arange(0, DIM)
    entry = softmax + ((split * tl.num_programs(0) + token) * tl.num_programs(1) + head) * 2
    maximum = tl.load(entry)
    share = tl.exp2(maximum - tl.max(maximum, axis=0))
    total = tl.sum(tl.load(entry + 1) * share, axis=0)
    offset = split * part_split_stride + token * part_token_stride + head * part_head_stride
    part = _load(parts + offset, split >= 0, HEAD_DIM, DIM)
    result = tl.sum(part * share[:, None], axis=0) * (1.0 / tl.where(total > 0.0, total, 1.0))
    output_offset = token * output_token_stride + head * output_head_stride
    tl.store(output + output_offset + dim, result.to(output.dtype.element_ty), mask=dim < HEAD_DIM)
