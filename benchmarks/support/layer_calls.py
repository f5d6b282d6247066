"""Estimates the gain of computing the tokens of several blends in one call of a decoder layer.

Only what works on each token alone could be shared: the projections and the MLP. Every token attends to its
own prompt, so attention could not. The matrices are those of a layer of the 210M model, in bfloat16 on one
thread, in CPU seconds. Rows are the tokens that one blend recomputes in a layer: 600 of 4,000 at r = .15.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch.nn.functional import linear, rms_norm, silu

from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from tests.fakes.random_models.shapes import SHAPES, ModelShape

SHAPE = "llama-210m"
BLENDS = 4
ROWS = (75, 150, 300, 600)
REPETITIONS = 5
LAYERS = 8
"""Number of sets of weights that are used in turn, 200 MB: as in a model, a call does not find its weights in
the CPU's cache."""


def measure(quick: bool) -> list[Figure]:
    """`shared_layer_call_gain_ROWS`: four calls, each for one blend, ÷ one call for all four."""
    shape = SHAPES[SHAPE]
    generator = torch.Generator().manual_seed(0)
    layers = [_Layer(shape, generator) for _ in range(2 if quick else LAYERS)]
    figures = []
    with torch.inference_mode():
        for rows in ROWS:
            tokens = torch.randn(BLENDS * rows, shape.hidden, generator=generator).bfloat16()
            apart, shared = _compare(layers, tokens, 3 if quick else REPETITIONS)
            ratio = statistics.median(a / b for a, b in zip(apart, shared, strict=True))
            detail = (
                f"{statistics.median(apart) * 1e3:.1f} ÷ {statistics.median(shared) * 1e3:.1f} CPU ms, "
                f"a layer without attention, {BLENDS} blends of {rows} tokens"
            )
            say(f"layer calls: {ratio:.3f} ({detail})")
            figures.append(Figure(f"shared_layer_call_gain_{rows}", ratio, "×", detail=detail))
    return figures


class _Layer:
    """The part of a decoder layer that works on each token alone."""

    def __init__(self, shape: ModelShape, generator: torch.Generator) -> None:
        heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

        def weights(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator).mul_(0.02).bfloat16()

        self._qkv = weights(heads + 2 * kv_heads, shape.hidden)
        self._out = weights(shape.hidden, heads)
        self._gate_up = weights(2 * shape.intermediate, shape.hidden)
        self._down = weights(shape.hidden, shape.intermediate)
        self._heads = heads

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        query = linear(rms_norm(tokens, tokens.shape[-1:]), self._qkv)[:, : self._heads]
        tokens = tokens + linear(query, self._out)
        gate, up = linear(rms_norm(tokens, tokens.shape[-1:]), self._gate_up).chunk(2, dim=-1)
        return tokens + linear(silu(gate) * up, self._down)


def _compare(
    layers: Sequence[_Layer], tokens: torch.Tensor, repetitions: int
) -> tuple[list[float], list[float]]:
    """CPU seconds per layer, measured in turns: with one call for each blend's tokens, and with one call for
    all."""
    parts = tokens.chunk(BLENDS)
    apart, shared = [], []
    for repetition in range(repetitions + 1):
        began_s = time.thread_time()
        for layer in layers:
            for part in parts:
                layer(part)
        between_s = time.thread_time()
        for layer in layers:
            layer(tokens)
        ended_s = time.thread_time()
        if repetition:  # the first prepares kernels
            apart.append((between_s - began_s) / len(layers))
            shared.append((ended_s - between_s) / len(layers))
    return apart, shared
