"""Runs the attention of scattered tokens in a kernel in which they share their reads of the context.

The backend's own kernels need one pseudo-request per run of tokens, and read the context once for each. Our
own kernels, one for GPUs and one for CPUs with AVX-512, replace the layer's attention implementation during
one call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kintsugi.core.errors import SelfTestFailed
from kintsugi.engine.worker.attention.latent import is_latent
from kintsugi.engine.worker.attention.packed import packed_kernel
from kintsugi.fusor.attention import attend_scattered

BACKENDS = frozenset({"FLASH_ATTN", "TRITON_ATTN"})
"""Backends whose cache is `[blocks, kv_heads, block_size, 2 · head_dim]`, K before V in each row."""

COMPILING_THREADS = 8
"""Threads that compile variants of the GPU kernel at start."""

RUNS_MIN = 16
"""Minimum runs for the GPU kernel. For fewer runs the backend's own kernel is as fast."""

RUNS_MIN_PACKED = 4
"""Minimum runs for the CPU kernel. The backend's own kernel takes a third more CPU time even for runs of 100
tokens (with AMX). A blend that recomputes nothing has fewer runs (prefix, a gap, question). The backend
computes these, so that such a prompt gets exactly the backend's answer."""


@dataclass(frozen=True)
class ScatteredRows:
    """Rows of one sequence for the kernel."""

    places: Tensor
    """Places of the rows, ascending, int32 `[n]` on the device."""
    block_table: Tensor
    """The sequence's blocks, int32 `[blocks]` on the device."""


def runs_min(device: torch.device) -> int:
    """Return the minimum number of runs for which our own kernel computes a batch."""
    return RUNS_MIN_PACKED if device.type == "cpu" else RUNS_MIN


def kernel_serves(attention: Any, device: torch.device) -> bool:
    """Return whether our own kernel can read this layer's cache on this device."""
    if not _attends_to_all(attention):
        return False
    if device.type == "cpu":
        return packed_kernel(attention) is not None
    if device.type != "cuda" or attention.attn_backend.get_name() not in BACKENDS:
        return False
    # Backends with an fp8 cache also quantise the query, with separate scales.
    return bool(attention.kv_cache_dtype == "auto")


def _attends_to_all(attention: Any) -> bool:
    """Return whether the layer's mask depends on positions alone, and its K and V have the same width."""
    if is_latent(attention):
        return False
    has_slopes = getattr(attention.impl, "alibi_slopes", None) is not None
    has_local_chunks = getattr(attention, "attention_chunk_size", None) is not None
    return attention.head_size_v == attention.head_size and not has_slopes and not has_local_chunks


@contextlib.contextmanager
def replace_attention_impl(attention: Any, rows: ScatteredRows) -> Iterator[None]:
    """Replace `attention.impl` by the kernel in the block."""
    impl = attention.impl
    attention.impl = _KernelImpl(impl, attention, rows)
    try:
        yield
    finally:
        attention.impl = impl


def run_variants(attention: Any, dtype: torch.dtype, context_max: int) -> None:
    """Run every variant of the GPU kernel that this layer can need over at most ``context_max`` positions, so
    that none is compiled, or fails on the device, while requests wait. Several threads compile, because a
    variant takes a second or two. Queries of ``dtype`` are zeros; K and V are the contents of block 0.

    Raises `SelfTestFailed` with the first variant that does not run.
    """
    from kintsugi.fusor.kernels.scattered import variant_sizes

    group, row_bytes = attention.num_heads // attention.num_kv_heads, attention.head_size * dtype.itemsize
    sizes = variant_sizes(group, row_bytes, context_max)
    device = attention.kv_cache.device
    # A new thread has device 0 as its current one.
    prepare = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    with ThreadPoolExecutor(COMPILING_THREADS, "kintsugi-compile", prepare) as threads:
        runs = [threads.submit(_run_variant, attention, dtype, *size) for size in sizes]
        for run in runs:
            run.result()


@torch.inference_mode()
def _run_variant(attention: Any, dtype: torch.dtype, num_tokens: int, context: int) -> None:
    """Run the kernel over block 0, repeated, on the current thread. Raises `SelfTestFailed`."""
    heads, width, cache = attention.num_heads, attention.head_size, attention.kv_cache
    block_size, device = cache.shape[2], cache.device
    query = torch.zeros(num_tokens, heads, width, dtype=dtype, device=device)
    rows = ScatteredRows(
        torch.arange(context - num_tokens, context, dtype=torch.int32, device=device),
        torch.zeros(-(-context // block_size), dtype=torch.int32, device=device),
    )
    impl, output = _KernelImpl(attention.impl, attention, rows), torch.empty_like(query)
    try:
        impl.forward(attention, query, query, query, cache, None, output=output)
    except torch.OutOfMemoryError:
        raise
    except Exception as defect:
        problem = " ".join(f"{type(defect).__name__}: {defect}".split())
        raise SelfTestFailed(
            f"the kernel for scattered tokens does not run on this GPU ({num_tokens} queries of {heads} "
            f"heads of {width} over {context} positions): {problem}; update Triton, or report this"
        ) from defect


class _KernelImpl:
    """Attention implementation that attends by the kernel, and passes all other attributes to the
    original."""

    def __init__(self, impl: Any, attention: Any, rows: ScatteredRows) -> None:
        self._impl = impl
        self._attention = attention
        self._rows = rows
        self._packed = packed_kernel(attention)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._impl, name)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """As `vllm.v1.attention.backend.AttentionImpl.forward`; K and V are already in the cache."""
        rows, scale = self._rows, self._impl.scale
        if self._packed is not None:
            attended = output.view(query.shape)
            self._packed.attend(query, kv_cache, rows.block_table, rows.places, attended, scale)
            return output
        key_cache, value_cache = kv_cache.transpose(1, 2).chunk(2, -1)
        attended = attend_scattered(
            query,
            key_cache,
            value_cache,
            rows.block_table,
            rows.places,
            scale=scale,
            sliding_window=self._attention.sliding_window,
            softcap=getattr(self._impl, "logits_soft_cap", None) or None,
            sinks=getattr(self._impl, "sinks", None),
        )
        output.copy_(attended.view_as(output))
        return output
