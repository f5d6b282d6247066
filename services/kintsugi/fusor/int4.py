"""The codec `int4`: K and V in 4 bits, for links and disks that are slower than the computation.

An element of K is ``scale * (number + zero)`` with a number from 0 to 15; `INT4_KEY_TOKENS` tokens of a
channel share a scale and a zero point, because before RoPE the mean differs from channel to channel (Liu et
al., "KIVI", 2024; Hooper et al., "KVQuant", 2024). An element of V is ``scale * number`` with a number from
-7 to 7; `INT4_VALUE_CHANNELS` channels of a token share a scale. K decides which tokens are attended to, so
it gets more bits for scales: on the reference model, 4 bits for V cost no accuracy, and 4 bits for K cost
three times as much in groups of 64 tokens as in groups of 32. K of a chunk's first tokens, the sinks, stays
in the engine's own dtype. A frame of 512 tokens and heads of 128 takes 0.27 of the bytes of a raw frame.

A head is a sequence of bytes: K without its sinks, `[tokens, width / 2]`; V `[tokens, width / 2]`; K's scales
and then its zero points, `[groups of tokens, width]` each; V's scales `[tokens, groups of channels]`; two
exponents; K's sinks. A byte holds channel c in its lower half and channel c + width / 2 in its upper one, so
that halves decode without interleaving. A scale is stored as in `fusor.scales`; a zero point is a signed
byte.

The error of an element is at most half a scale, besides the rounding of the engine's own dtype. A scale of K
is its group's range ÷ 15, or larger if the group is so far from 0 that the zero point would not fit in
a byte; a scale of V is its group's largest magnitude ÷ 7.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kintsugi.core.layout import EXPONENTS_BYTES, INT4_KEY_TOKENS, INT4_VALUE_CHANNELS, LayerGroup
from kintsugi.fusor.scales import decode_scales, encode_scales, multiply

LARGEST = 15
"""The largest stored number."""
ZERO_MIN, ZERO_MAX = -127, 112
"""Range of a zero point: numbers and zero points add in a signed byte."""
VALUE_MAX = 7
VALUE_ZERO = -8
"""Offset that is added to each stored number of V."""


class Packed(NamedTuple):
    """The byte ranges of the heads of a frame, uint8 `[heads, …]`, in frame order."""

    key: Tensor
    value: Tensor
    key_parameters: Tensor
    value_scales: Tensor
    exponents: Tensor
    """`[heads, 2]`: the shared exponents of K's and of V's scales."""
    sinks: Tensor

    @staticmethod
    def of(flat: Tensor, group: LayerGroup, num_tokens: int, sinks: int) -> Packed:
        """Split `flat` `[heads, head_bytes]` into views."""
        sizes = (*group.int4_bytes(num_tokens, sinks), EXPONENTS_BYTES)
        return Packed(*torch.split(flat, [*sizes, flat.shape[1] - sum(sizes)], dim=1))


def quantize(key: Tensor, value: Tensor, packed: Packed, sinks: int) -> None:
    """Write K and V, `[tokens, heads, width]`, into a frame's parts. Six passes in fp32."""
    packed.sinks.copy_(key[:sinks].transpose(0, 1).flatten(1).contiguous().view(torch.uint8))
    if sinks < len(key):
        _quantize_key(key[sinks:].transpose(0, 1).float(), packed)
    wide = value.transpose(0, 1).float()
    largest = _cut(wide, 2, INT4_VALUE_CHANNELS).abs().amax(3)
    exponent, codes = encode_scales(largest.flatten(1) / VALUE_MAX)
    packed.exponents[:, 1].copy_(exponent)
    packed.value_scales.copy_(codes)
    scales = decode_scales(exponent, codes).float().view(largest.shape)
    # If all elements are zero, the scale may be zero, too, and the quotient is NaN.
    scaled = (wide / _spread(scales, 2, INT4_VALUE_CHANNELS, wide)).nan_to_num_(0.0).round_()
    packed.value.copy_(_join_halves(scaled - VALUE_ZERO))


def _quantize_key(wide: Tensor, packed: Packed) -> None:
    low, high = _cut(wide, 1, INT4_KEY_TOKENS).aminmax(dim=2)
    steps = torch.maximum((high - low) / LARGEST, torch.maximum(low / ZERO_MIN, low / ZERO_MAX))
    exponent, codes = encode_scales(steps.flatten(1))
    packed.exponents[:, 0].copy_(exponent)
    scales = decode_scales(exponent, codes).float().view(steps.shape)
    zeros = (low / scales).nan_to_num(0.0).round_().clamp_(ZERO_MIN, ZERO_MAX)
    scaled = (wide / _spread(scales, 1, INT4_KEY_TOKENS, wide)).nan_to_num_(0.0).round_()
    packed.key.copy_(_join_halves(scaled - _spread(zeros, 1, INT4_KEY_TOKENS, wide)))
    signed = zeros.to(torch.int8).view(torch.uint8).flatten(1)
    packed.key_parameters.copy_(torch.cat([codes.to(torch.uint8), signed], 1))


def _cut(wide: Tensor, axis: int, size: int) -> Tensor:
    """Cut ``axis`` of `[heads, tokens, width]` into groups, `[…, groups, size, …]`. Copies of the
    last element fill the last group."""
    missing = -wide.shape[axis] % size
    tokens, width = (missing, 0) if axis == 1 else (0, missing)
    full = pad(wide, (0, width, 0, tokens), mode="replicate") if missing else wide
    return full.reshape(*full.shape[:axis], -1, size, *full.shape[axis + 1 :])


def _spread(groups: Tensor, axis: int, size: int, like: Tensor) -> Tensor:
    """Repeat each group's value for its elements along ``axis``."""
    return groups.repeat_interleave(size, axis).narrow(axis, 0, like.shape[axis])


def _join_halves(numbers: Tensor) -> Tensor:
    """Put two numbers into a byte: uint8 `[heads, tokens * width / 2]`."""
    lower, upper = numbers.clamp_(0, LARGEST).to(torch.uint8).chunk(2, dim=2)
    return (lower | upper << 4).flatten(1)


def dequantize(packed: Packed, sinks: int, first: int, key: Tensor, value: Tensor) -> None:
    """Write the elements of tokens from ``first`` on into `key` and `value`, `[rows, heads, width]`: as
    many tokens as these have rows. Each element is rounded once.

    Cost: three passes over bytes, and those of `scales.multiply`.
    """
    heads, (rows, _, width) = len(packed.key), key.shape
    exact = packed.sinks.clone(memory_format=torch.contiguous_format).view(key.dtype)
    own = exact.view(heads, sinks, width)[:, first : first + rows].transpose(0, 1)
    key[: len(own)] = own
    if len(own) < rows:
        _dequantize_key(packed, max(first - sinks, 0), key[len(own) :].transpose(0, 1))
    if rows:
        _dequantize_value(packed, first, value.transpose(0, 1))


def _dequantize_key(packed: Packed, first: int, key: Tensor) -> None:
    heads, rows, width = key.shape
    codes, signed = packed.key_parameters.chunk(2, dim=1)
    scales = decode_scales(packed.exponents[:, 0], codes).view(heads, -1, 1, width)
    zeros = signed.contiguous().view(torch.int8).view(heads, -1, 1, width)
    total = _split_halves(packed.key.view(heads, -1, width // 2)[:, first : first + rows])
    for start, stop, size in _runs(first, first + rows, INT4_KEY_TOKENS):
        groups = slice(start // INT4_KEY_TOKENS, -(-stop // INT4_KEY_TOKENS))
        some, shape = slice(start - first, stop - first), (heads, -1, size, width)
        numbers = total[:, some].view(shape).add_(zeros[:, groups])
        multiply(numbers, scales[:, groups], key[:, some].view(shape))


def _dequantize_value(packed: Packed, first: int, value: Tensor) -> None:
    heads, rows, width = value.shape
    scales = decode_scales(packed.exponents[:, 1], packed.value_scales)
    scales = scales.view(heads, scales.shape[1] // -(-width // INT4_VALUE_CHANNELS), -1, 1)
    total = _split_halves(packed.value.view(heads, -1, width // 2)[:, first : first + rows]).add_(VALUE_ZERO)
    for start, stop, size in _runs(0, width, INT4_VALUE_CHANNELS):
        groups = slice(start // INT4_VALUE_CHANNELS, -(-stop // INT4_VALUE_CHANNELS))
        shape = (heads, rows, -1, size)
        numbers, out = (every[..., start:stop].view(shape) for every in (total, value))
        multiply(numbers, scales[:, first : first + rows, groups], out)


def _runs(first: int, end: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Cut a range into a run of whole groups of ``size``, and the parts of groups before and after it. Yields
    each run's start and end, and how many elements of a group it has."""
    inner = min(end, -(-first // size) * size)
    outer = end // size * size
    for start, stop in ((first, inner), (inner, outer), (max(inner, outer), end)):
        if start < stop:
            yield start, stop, min(size, stop - start)


def _split_halves(numbers: Tensor) -> Tensor:
    """Decode bytes `[heads, tokens, width / 2]` to int8 `[heads, tokens, width]`."""
    total = torch.empty(*numbers.shape[:2], 2 * numbers.shape[2], dtype=torch.int8, device=numbers.device)
    lower, upper = total.view(torch.uint8).chunk(2, dim=2)
    torch.bitwise_and(numbers, LARGEST, out=lower)
    torch.bitwise_right_shift(numbers, 4, out=upper)
    return total
