"""Scattered tokens attend through a kernel that lets them share their reads of the context.

The backend's own kernels would take one pseudo-request per run of tokens and read the context once for
each. A kernel of ours, one for GPUs and one for CPUs with AVX-512, stands in for the layer's attention
implementation for the length of one call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kintsugi.core.errors import SelfTestFailed
from kintsugi.engine.worker.attention.kv import kv_of
from kintsugi.engine.worker.attention.packed import packed_kernel
from kintsugi.fusor.attention import attend_scattered, kernel_reads
from kintsugi.fusor.kernels.packed import PackedKernel
from kintsugi.models.layers import LayerKind

BACKENDS = frozenset({"FLASH_ATTN", "TRITON_ATTN"})
"""Backends whose cache is `[blocks, kv_heads, block_size, 2 · head_dim]`, K before V in each row."""

RUNS_MIN = 16
"""On a GPU, fewer runs than this read the context so few times that the backend's own kernel is as good."""

RUNS_MIN_PACKED = 4
"""The same on a CPU, where the backend's own kernel takes a third more CPU time even for runs of 100 tokens
(with AMX). Fewer runs are what is computed anyway (prefix, a gap, question): they are left to the backend,
so that a prompt of which nothing is recomputed is answered as the backend answers it, to the bit."""


@dataclass(frozen=True)
class ScatteredRows:
    """Rows of one sequence that the kernel serves."""

    places: Tensor
    """int32 `[n]`, ascending, on the device."""
    block_table: Tensor
    """int32 `[blocks]` of the sequence, on the device."""


def runs_min(device: torch.device) -> int:
    """Number of runs from which on a kernel of ours serves a batch."""
    return RUNS_MIN_PACKED if device.type == "cpu" else RUNS_MIN


def kernel_serves(attention: Any, device: torch.device) -> bool:
    """Whether a kernel of ours can read this layer's cache on this device."""
    if not _attends_to_all(attention):
        return False
    if device.type == "cpu":
        return packed_kernel(attention) is not None
    if device.type != "cuda" or attention.attn_backend.get_name() not in BACKENDS:
        return False
    if attention.kv_cache_dtype != "auto":
        # Backends with an fp8 cache quantise the query as well, with scales of their own.
        return False
    return kernel_reads(attention.kv_cache_torch_dtype, torch.cuda.get_device_capability(device))


def _attends_to_all(attention: Any) -> bool:
    """Whether the layer attends by position alone to heads of one width, in a window or not."""
    if kv_of(attention).kind is not LayerKind.ATTENTION:
        return False
    has_slopes = getattr(attention.impl, "alibi_slopes", None) is not None
    has_local_chunks = getattr(attention, "attention_chunk_size", None) is not None
    return attention.head_size_v == attention.head_size and not has_slopes and not has_local_chunks


@contextlib.contextmanager
def replace_attention_impl(attention: Any, rows: ScatteredRows) -> Iterator[None]:
    """Put the kernel in the place of `attention.impl`."""
    impl = attention.impl
    packed = packed_kernel(attention)
    if packed is None:
        attention.impl = _KernelImpl(impl, attention, rows)
    else:
        attention.impl = _PackedImpl(impl, attention, rows, packed)
    try:
        yield
    finally:
        attention.impl = impl


def run_variants(attention: Any, dtype: torch.dtype, context_max: int) -> None:
    """Run every variant of the GPU's kernel that this layer can need over at most `context_max` positions, so
    that none is compiled, or found not to fit the device, while requests wait. Queries of `dtype` are zeros,
    and K and V whatever lies in block 0.

    Raises `SelfTestFailed` naming the first variant that does not run.
    """
    from kintsugi.fusor.kernels.scattered import variant_sizes

    heads, width, cache = attention.num_heads, attention.head_size, attention.kv_cache
    block_size, device = cache.shape[2], cache.device
    for num_tokens, context in variant_sizes(
        heads // attention.num_kv_heads, width * dtype.itemsize, context_max
    ):
        query = torch.zeros(num_tokens, heads, width, dtype=dtype, device=device)
        rows = ScatteredRows(
            torch.arange(context - num_tokens, context, dtype=torch.int32, device=device),
            torch.zeros(-(-context // block_size), dtype=torch.int32, device=device),
        )
        try:
            with replace_attention_impl(attention, rows):
                attention.impl.forward(
                    attention, query, query, query, cache, None, output=torch.empty_like(query)
                )
        except torch.OutOfMemoryError:
            raise
        except Exception as defect:
            problem = " ".join(f"{type(defect).__name__}: {defect}".split())
            raise SelfTestFailed(
                f"the kernel for scattered tokens does not run on this GPU ({num_tokens} queries of {heads} "
                f"heads of {width} over {context} positions): {problem}; update Triton, or report this"
            ) from defect


class _KernelImpl:
    """Computes attention with the kernel and leaves everything else to the real implementation."""

    def __init__(self, impl: Any, attention: Any, rows: ScatteredRows) -> None:
        self._impl = impl
        self._attention = attention
        self._rows = rows

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
        """As `vllm.v1.attention.backend.AttentionImpl.forward`; K and V are in the cache already."""
        by_token = kv_cache.transpose(1, 2)
        head_size = self._attention.head_size
        key_cache, value_cache = by_token[..., :head_size], by_token[..., head_size:]
        attended = attend_scattered(
            query,
            key_cache,
            value_cache,
            self._rows.block_table,
            self._rows.places,
            scale=self._impl.scale,
            sliding_window=self._attention.sliding_window,
            softcap=getattr(self._impl, "logits_soft_cap", None) or None,
            sinks=getattr(self._impl, "sinks", None),
        )
        output.copy_(attended.view_as(output))
        return output


class _PackedImpl(_KernelImpl):
    """The same on a CPU, whose backend orders its cache for the processor."""

    def __init__(self, impl: Any, attention: Any, rows: ScatteredRows, kernel: PackedKernel) -> None:
        super().__init__(impl, attention, rows)
        self._kernel = kernel

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
        rows = self._rows
        attended = output.view(query.shape)
        self._kernel.attend(query, kv_cache, rows.block_table, rows.places, attended, self._impl.scale)
        return output
