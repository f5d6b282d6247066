"""The codec `int4`: K and V in 4 bits, for links and disks that are slower than the computation.

An element is ``scale * (number + zero)`` with a number from 0 to 15. Each `INT4_GROUP` elements share a
scale and a zero point: tokens of a channel of K, whose mean differs from channel to channel before RoPE;
channels of a token of V (Liu et al., "KIVI", 2024; Hooper et al., "KVQuant", 2024). The first tokens of a
chunk, the sinks, stay in the engine's own dtype. A frame of 512 tokens and heads of 128 takes 0.27 of its
bytes.

A head is a sequence of bytes: K `[tokens, width / 2]`, V likewise; K's parameters, scales and then zeros,
`[groups of tokens, width]` each; V's, `[tokens, groups of channels]` each; two exponents; the sinks. A byte
holds channel c in its lower half and channel c + width / 2 in its upper one, so that halves decode without
interleaving. A scale is stored as in `fusor.scales`; a zero point is a signed byte.

The error of an element is at most half a scale, besides the rounding of the engine's own dtype. A scale is
the range of its group ÷ 15, or more if the group is so far from 0 that the zero point needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kintsugi.core.layout import EXPONENTS_BYTES, INT4_GROUP, LayerGroup
from kintsugi.fusor.scales import decode_scales, encode_scales

LARGEST = 15
"""The largest stored number."""
ZERO_MIN, ZERO_MAX = -127, 112
"""Range of a zero point: numbers and zero points add in a signed byte."""


class Packed(NamedTuple):
    """The byte ranges of the heads of a frame, uint8 `[heads, …]`, in frame order."""

    key: Tensor
    value: Tensor
    key_parameters: Tensor
    value_parameters: Tensor
    exponents: Tensor
    """`[heads, 2]`: the shared exponents of K's and of V's scales."""
    sinks: Tensor

    @staticmethod
    def of(flat: Tensor, group: LayerGroup, num_tokens: int) -> Packed:
        """Split `flat` `[heads, head_bytes]` into views. ``num_tokens``: without the sinks."""
        sizes = (*group.int4_bytes(num_tokens), EXPONENTS_BYTES)
        return Packed(*torch.split(flat, [*sizes, flat.shape[1] - sum(sizes)], dim=1))


def quantize(key: Tensor, value: Tensor, packed: Packed) -> None:
    """Write K and V, `[tokens, heads, width]` without the sinks, into a frame's parts. Seven passes in
    fp32."""
    for which, tensor, axis, numbers, parameters in (
        (0, key, 1, packed.key, packed.key_parameters),
        (1, value, 2, packed.value, packed.value_parameters),
    ):
        wide = tensor.transpose(0, 1).float()
        low, high = _extremes(wide, axis)
        steps = torch.maximum((high - low) / LARGEST, torch.maximum(low / ZERO_MIN, low / ZERO_MAX))
        exponent, codes = encode_scales(steps.flatten(1))
        packed.exponents[:, which].copy_(exponent)
        scales = decode_scales(exponent, codes).float().view(steps.shape)
        # If all elements are zero, the scale may be zero, too, and the quotient is NaN.
        zeros = (low / scales).nan_to_num(0.0).round_().clamp_(ZERO_MIN, ZERO_MAX)
        scaled = (wide / _spread(scales, axis, wide)).nan_to_num_(0.0).round_()
        narrow = (scaled - _spread(zeros, axis, wide)).clamp_(0, LARGEST).to(torch.uint8)
        lower, upper = narrow.chunk(2, dim=2)
        numbers.copy_((lower | upper << 4).flatten(1))
        signed = zeros.to(torch.int8).view(torch.uint8).flatten(1)
        parameters.copy_(torch.cat([codes.to(torch.uint8), signed], 1))


def _extremes(wide: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return the least and the largest element of each group along ``axis`` of `[heads, tokens, width]`."""
    missing = -wide.shape[axis] % INT4_GROUP
    width, tokens = (missing, 0) if axis == 2 else (0, missing)
    full = pad(wide, (0, width, 0, tokens), mode="replicate")
    shape = [*full.shape[:axis], -1, INT4_GROUP, *full.shape[axis + 1 :]]
    low, high = full.view(shape).aminmax(dim=axis + 1)
    return low, high


def _spread(groups: Tensor, axis: int, like: Tensor) -> Tensor:
    """Repeat each group's value for its elements along ``axis``."""
    return groups.repeat_interleave(INT4_GROUP, axis).narrow(axis, 0, like.shape[axis])


def dequantize(packed: Packed, first: int, key: Tensor, value: Tensor) -> None:
    """Write the elements of tokens from ``first`` on (without the sinks) into `key` and `value`, `[rows,
    heads, width]`, which say how many. Each element is rounded once.

    Three passes over bytes and two over the engine's dtype.
    """
    heads, (rows, _, width) = len(packed.key), key.shape
    if not rows:
        return
    tokens = packed.key.shape[1] // (width // 2)
    numbers = packed.key.view(heads, tokens, -1), packed.value.view(heads, tokens, -1)
    scales, zeros = _parameters(packed.key_parameters, packed.exponents[:, 0], (heads, -1, width))
    value_scales, value_zeros = _parameters(
        packed.value_parameters, packed.exponents[:, 1], (heads, tokens, -1)
    )
    outputs = key.transpose(0, 1), value.transpose(0, 1)
    for start, stop in _runs(first, first + rows):
        each, group = min(INT4_GROUP, stop - start), slice(start // INT4_GROUP, -(-stop // INT4_GROUP))
        some, own = slice(start, stop), slice(start - first, stop - first)
        _unpack(
            numbers[0][:, some].view(heads, -1, each, width // 2),
            scales[:, group].unsqueeze(2),
            zeros[:, group].unsqueeze(2),
            outputs[0][:, own].view(heads, -1, each, width),
        )
        _unpack(numbers[1][:, some], value_scales[:, some], value_zeros[:, some], outputs[1][:, own])


def _runs(first: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut tokens into a run of whole groups, and the parts of groups before and after it."""
    inner, outer = min(end, -(-first // INT4_GROUP) * INT4_GROUP), end // INT4_GROUP * INT4_GROUP
    for start, stop in ((first, inner), (inner, outer), (max(inner, outer), end)):
        if start < stop:
            yield start, stop


def _parameters(stored: Tensor, exponent: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Decode scales, bfloat16, and zero points, int8."""
    codes, zeros = stored.chunk(2, dim=1)
    return decode_scales(exponent, codes).view(shape), zeros.contiguous().view(torch.int8).view(shape)


def _unpack(numbers: Tensor, scales: Tensor, zeros: Tensor, out: Tensor) -> None:
    """Decode bytes `[…, width / 2]` into `out` `[…, width]`. Parameters have a channel or a group of channels
    in their last dimension."""
    width, channels = out.shape[-1], scales.shape[-1]
    total = torch.empty(out.shape, dtype=torch.int8, device=out.device)
    lower, upper = total.view(torch.uint8).chunk(2, dim=-1)
    torch.bitwise_and(numbers, LARGEST, out=lower)
    torch.bitwise_right_shift(numbers, 4, out=upper)
    pieces = [(slice(None), slice(None))]
    if channels not in (1, width):
        starts = range(0, width, INT4_GROUP)
        pieces = [(slice(start, start + INT4_GROUP), slice(n, n + 1)) for n, start in enumerate(starts)]
    for some, own in pieces:
        total[..., some].add_(zeros[..., own])
    # Both are exact in bfloat16, so products are rounded once.
    exact = total.to(torch.bfloat16 if out.dtype == torch.bfloat16 else torch.float32)
    for some, own in pieces:
        torch.mul(exact[..., some], scales[..., own].to(exact.dtype), out=out[..., some])
