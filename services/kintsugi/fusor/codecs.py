"""Frames to tensors and back. `core.layout` knows the sizes; this knows the elements.

Quantised codecs scale symmetrically: K by its largest magnitude per head and channel, over the chunk's
tokens (before RoPE a channel keeps its size from token to token; after it, it would not), V by that of
each head and token. Every element's error is then at most

- ``int8``: half a scale, a scale being its maximum ÷ 127;
- ``fp8``: 1/16 of the element, or 2⁻¹⁰ of its scale where that is more, a scale being its maximum ÷ 448;

and the rounding of the engine's own type. A scale that is no finite number, or negative, is damage, or
KV that was not finite when it was saved: it is refused, never used.

Cost, on one CPU core, counted in bytes of 16-bit KV: encoding is four passes in fp32; decoding one pass
that reads one byte an element and writes two, for `fp8` two. Both happen where the tensor is: on the
engine's device when saving, on the loader's thread when loading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kintsugi.core.errors import Corrupted
from kintsugi.core.layout import SCALE_BYTES, Codec, KVLayout

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

EVERY_ROW = slice(None)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Elements:
    """What a quantised element is."""

    dtype: torch.dtype
    largest: float


ELEMENTS = {
    Codec.INT8: _Elements(torch.int8, 127.0),
    Codec.INT8_SINKS: _Elements(torch.int8, 127.0),
    Codec.FP8: _Elements(torch.float8_e4m3fn, 448.0),
    Codec.FP8_SINKS: _Elements(torch.float8_e4m3fn, 448.0),
}


def encode_frame(key: Tensor, value: Tensor, codec: Codec) -> memoryview:
    """One layer's K (before RoPE) and V, each `[tokens, kv_heads, head_dim]`, as a head-major frame."""
    if codec is Codec.RAW:
        frame = torch.stack((key, value)).permute(2, 0, 1, 3).contiguous().cpu()
    else:
        frame = _quantised(key, value, codec).cpu()
    raw: Any = frame.view(torch.uint8).numpy()
    return memoryview(raw).cast("B")


def decode_frame(
    data: memoryview,
    layout: KVLayout,
    codec: Codec,
    num_tokens: int,
    rows: slice = EVERY_ROW,
    device: torch.device = CPU,
) -> tuple[Tensor, Tensor]:
    """K (before RoPE) and V `[rows, heads, head_dim]` on `device`, of the bytes of some heads of a frame.

    Contiguous, and the caller's own: `data` may be written over afterwards. Raises `Corrupted` for scales
    that cannot be.
    """
    heads = len(data) // layout.head_bytes(codec, num_tokens)
    flat = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8).view(heads, -1)
    if device.type != "cpu":
        # Bytes cross before they are decoded: half as many, and the device decodes faster.
        flat = flat.pin_memory().to(device, non_blocking=True)
    if codec is not Codec.RAW:
        return _dequantised(flat, layout, codec, num_tokens, rows)
    typed = flat.view(DTYPES[layout.dtype]).view(heads, 2, num_tokens, layout.head_dim)
    key, value = typed[:, 0, rows].transpose(0, 1), typed[:, 1, rows].transpose(0, 1)
    # (`contiguous` would not always copy: a view of one head, or of one token, is contiguous as it is.)
    token_major = torch.contiguous_format
    return key.clone(memory_format=token_major), value.clone(memory_format=token_major)


@dataclass(frozen=True)
class _Parts:
    """Bytes of each head of a quantised frame, uint8 `[heads, …]`, in their order there."""

    key: Tensor
    value: Tensor
    key_scale: Tensor
    value_scale: Tensor
    sinks: Tensor

    @staticmethod
    def of(flat: Tensor, layout: KVLayout, codec: Codec, num_tokens: int) -> _Parts:
        """Views of `flat` `[heads, head_bytes]`."""
        sinks = codec.sinks_of(num_tokens)
        small, head_dim = num_tokens - sinks, layout.head_dim
        elements = small * head_dim
        sizes = (elements, elements, SCALE_BYTES * head_dim, SCALE_BYTES * small)
        return _Parts(*torch.split(flat, [*sizes, flat.shape[1] - sum(sizes)], dim=1))


def _quantised(key: Tensor, value: Tensor, codec: Codec) -> Tensor:
    """uint8 `[heads, head_bytes]`."""
    num_tokens, heads, head_dim = key.shape
    layout = KVLayout(1, heads, head_dim, NAMES[key.dtype])
    flat = torch.empty(heads, layout.head_bytes(codec, num_tokens), dtype=torch.uint8, device=key.device)
    parts, elements = _Parts.of(flat, layout, codec, num_tokens), ELEMENTS[codec]
    sinks = codec.sinks_of(num_tokens)
    for tensor, over, quantised, scales in (
        (key, 1, parts.key, parts.key_scale),
        (value, 2, parts.value, parts.value_scale),
    ):
        wide = tensor[sinks:].transpose(0, 1).float()
        scale = _scale(
            wide.abs().amax(over, keepdim=True) if wide.numel() else wide.sum(over, True), elements
        )
        # Where everything is zero, so is the scale: the quotient would not be.
        scaled = (wide / scale.float()).nan_to_num_(0.0)
        scaled = scaled.round_() if elements.dtype == torch.int8 else scaled
        quantised.copy_(scaled.to(elements.dtype).view(torch.uint8).flatten(1))
        scales.copy_(scale.flatten(1).view(torch.uint8))
    exact = torch.stack((key[:sinks], value[:sinks])).permute(2, 0, 1, 3).contiguous().flatten(1)
    parts.sinks.copy_(exact.view(torch.uint8))
    return flat


def _scale(largest: Tensor, elements: _Elements) -> Tensor:
    """bfloat16, rounded up: an element divided by it never exceeds what its type can hold."""
    exact = largest / elements.largest
    scale = exact.to(torch.bfloat16)
    above = (scale.view(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(scale.float() < exact, above, scale)


def _dequantised(
    flat: Tensor, layout: KVLayout, codec: Codec, num_tokens: int, rows: slice
) -> tuple[Tensor, Tensor]:
    parts, heads = _Parts.of(flat, layout, codec, num_tokens), len(flat)
    sinks, head_dim = codec.sinks_of(num_tokens), layout.head_dim
    dtype, small = DTYPES[layout.dtype], num_tokens - sinks
    key_scale = _checked(parts.key_scale)[:, None]
    value_scale = _checked(parts.value_scale)[:, :, None]
    exact = _typed(parts.sinks, dtype).view(heads, 2, sinks, head_dim)
    first, end, _ = rows.indices(num_tokens)
    some = slice(max(first - sinks, 0), max(end - sinks, 0))
    results = []
    for which, quantised, scale in (
        (0, parts.key, key_scale),
        (1, parts.value, value_scale[:, some]),
    ):
        narrow = quantised.view(ELEMENTS[codec].dtype).view(heads, small, head_dim)[:, some]
        out = torch.empty(end - first, heads, head_dim, dtype=dtype, device=flat.device)
        num_exact = len(out) - narrow.shape[1]
        out[:num_exact] = exact[:, which, first : first + num_exact].transpose(0, 1)
        _multiply(narrow, scale, out[num_exact:].transpose(0, 1))
        results.append(out)
    return results[0], results[1]


def _multiply(narrow: Tensor, scale: Tensor, out: Tensor) -> None:
    """`out` becomes `narrow` · `scale`, rounded once.

    In bfloat16 elements and scales are exact, so that one pass does. Other types need more of the range
    or of the digits than a product in theirs, or in bfloat16, would keep.
    """
    if out.dtype != torch.bfloat16:
        out.copy_(narrow.float() * scale.float())
    elif narrow.dtype == torch.int8:
        torch.mul(narrow, scale, out=out)
    else:
        torch.mul(narrow.to(torch.bfloat16), scale, out=out)


def _checked(scales: Tensor) -> Tensor:
    """bfloat16 `[heads, …]` from bytes. Raises `Corrupted`."""
    typed = _typed(scales, torch.bfloat16)
    if not bool(((typed >= 0) & typed.isfinite()).all()):
        raise Corrupted("a frame has scales that are negative or no numbers; put the chunk again")
    return typed


def _typed(part: Tensor, dtype: torch.dtype) -> Tensor:
    """`[heads, elements]` out of bytes, copied to where an element of any type may start."""
    own = part.clone(memory_format=torch.contiguous_format)
    return own.flatten().view(dtype).view(len(part), part.shape[1] // dtype.itemsize)
