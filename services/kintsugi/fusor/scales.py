"""Scales of quantised codecs, one byte each, and how elements are multiplied by them.

A scale's byte has five bits of mantissa, rounded up by at most 1/32 so that no element is clipped, and three
bits of exponent relative to an exponent that all scales of a head's K (or V) share. The shared exponent is
seven octaves below the largest scale's. So every magnitude can be stored; a scale below 1/128 of its head's
largest loses one bit with each further octave. A shared exponent that no finite KV can have means that the
frame is damaged, or that its KV was not finite when it was saved: decoding refuses it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MANTISSA_BITS = 5
"""Mantissa bits in a scale's byte; the other three bits are its exponent."""
OCTAVES_BELOW = 7
"""Distance from the largest scale's exponent down to the shared exponent."""
EXPONENT_MAX = 241
"""Highest valid shared exponent, biased as in fp32: the largest finite number ÷ 127 has the exponent 248."""
_DROPPED_BITS = 23 - MANTISSA_BITS
"""Bits that a scale drops from fp32's mantissa."""


def encode_scales(exact: Tensor) -> tuple[Tensor, Tensor]:
    """Encode fp32 scales `[heads, n]`, at least 0, as shared exponents `[heads]` and one byte each `[heads,
    n]`. They are rounded up."""
    exact = exact.nan_to_num(nan=math.inf, posinf=math.inf)
    # Positive floats sort like their bit patterns, and a carry out of the mantissa raises the exponent.
    bits = (exact.view(torch.int32) + (1 << _DROPPED_BITS) - 1) >> _DROPPED_BITS
    exponent = ((bits.amax(1) >> MANTISSA_BITS) - OCTAVES_BELOW).clamp(0)
    return exponent, (bits - (exponent << MANTISSA_BITS)[:, None]).clamp(0)


def decode_scales(exponent: Tensor, codes: Tensor) -> Tensor:
    """Decode scales exactly, as bfloat16 `[heads, n]`, from shared exponents `[heads]` and one byte each."""
    shared = exponent.to(torch.int16) << MANTISSA_BITS
    return ((codes.to(torch.int16) + shared[:, None]) << 7 - MANTISSA_BITS).view(torch.bfloat16)


def multiply(narrow: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write `narrow` · `scales` into `out`, rounded once: the product of an element of at most eight bits and
    a scale of six is exact in float32. ``narrow``: int8 or float8; ``scales``: bfloat16, broadcastable to
    the shape of `out`.

    A GPU converts while it reads and writes. On a CPU, torch's loops are fast only if all
    tensors have one dtype, so elements are converted first, into four temporary bytes each.
    """
    if out.device.type == "cpu":
        out.copy_(_to_float32(narrow).mul_(scales))
    else:
        wide = narrow if narrow.dtype == torch.int8 else narrow.to(torch.bfloat16)
        torch.mul(wide, scales.float(), out=out)


def _to_float32(narrow: Tensor) -> Tensor:
    if narrow.dtype == torch.int8:
        return narrow.float()
    # On a CPU, torch converts float8 elements one at a time, which takes six times as long.
    values = torch.arange(256, dtype=torch.uint8).view(narrow.dtype).float()
    indices = narrow.view(torch.uint8).int()
    return values.index_select(0, indices.flatten()).view(narrow.shape)
