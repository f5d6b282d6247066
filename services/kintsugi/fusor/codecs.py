"""Encode tensors as frames and decode frames to tensors. `core.layout` defines the sizes.

Quantised codecs scale symmetrically. K is scaled by its largest magnitude per head and channel over the
chunk's tokens (before RoPE a channel's magnitude is stable from token to token; after RoPE it is not), V by
the largest magnitude per head and token. Besides the rounding of the engine's own dtype, the error of an
element is at most

- ``int8``: half a scale, where the scale is the maximum ÷ 127;
- ``fp8``: 1/16 of the element, or 2⁻¹⁰ of its scale if that is more, where the scale is the maximum ÷ 448.

A scale takes one byte (`fusor.scales`). `fusor.int4` describes the codec `int4`.

Cost on one CPU core, for 16-bit KV: encoding takes four passes in fp32; decoding three (`fp8`: five). On a
GPU, decoding takes one pass (`fp8`: two) that reads one byte per element and writes two. Both run on the
tensor's device: the engine's when saving; the loader's thread decodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kintsugi.core.errors import Corrupted
from kintsugi.core.layout import EXPONENTS_BYTES, SCALE_BYTES, Codec, KVLayout, LayerGroup, Part, PartKind
from kintsugi.fusor import int4
from kintsugi.fusor.scales import EXPONENT_MAX, decode_scales, encode_scales, multiply

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

EVERY_ROW = slice(None)


@dataclass(frozen=True)
class _Elements:
    """The dtype of quantised elements and the largest value that they take."""

    dtype: torch.dtype
    largest: float


ELEMENTS = {
    Codec.INT8: _Elements(torch.int8, 127.0),
    Codec.INT8_SINKS: _Elements(torch.int8, 127.0),
    Codec.FP8: _Elements(torch.float8_e4m3fn, 448.0),
    Codec.FP8_SINKS: _Elements(torch.float8_e4m3fn, 448.0),
}


@dataclass(frozen=True)
class Encoding:
    """How one layer of a chunk is encoded."""

    group: LayerGroup
    dtype: str
    codec: Codec
    num_tokens: int

    @staticmethod
    def of(layout: KVLayout, layer: int | None, codec: Codec, num_tokens: int) -> Encoding:
        """Return the encoding of a layer. `layer` may be None for a uniform layout."""
        return Encoding(layout.group_of(layer), layout.dtype, codec, num_tokens)

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a head's K and V per token; for latent attention, of the rotary key and the latent; for
        a recurrent layer, of its input and its gates, which may be 0."""
        first, second = self.frame_widths
        return (second, first) if self.is_latent else (first, second)

    @property
    def frame_widths(self) -> tuple[int, int]:
        """Elements of a head's two parts per token, in frame order."""
        first, *rest = (part.width for part in self.group.parts)
        return first, sum(rest)

    @property
    def is_latent(self) -> bool:
        """Whether a head consists of a latent, in place of V, and a rotary key, in place of K. The latent
        comes first in the frame."""
        return self.group.parts[0].kind is PartKind.LATENT

    @property
    def head_bytes(self) -> int:
        return self.group.head_bytes(self.codec, self.num_tokens, self.dtype)

    @property
    def sinks(self) -> int:
        """Leading tokens that are not quantised."""
        return self.codec.sinks_of(self.num_tokens)

    def without_gates(self) -> Encoding:
        """Return the encoding of a head of a recurrent layer without its gates."""
        return replace(self, group=replace(self.group, parts=self.group.parts[:1]))


def encode_frame(key: Tensor, value: Tensor, codec: Codec) -> memoryview:
    """Encode as `encode` does, into the host's memory."""
    return as_frame(encode(key, value, codec).cpu())


def encode(key: Tensor, value: Tensor, codec: Codec, parts: tuple[Part, ...] = ()) -> Tensor:
    """Encode one layer's K (before RoPE) and V, each `[tokens, kv_heads, width]`, as a head-major frame on
    their device. `parts`: what they are in the frame, as in `LayerGroup`; empty: K and V. Raises
    `InvalidField` for a codec that does not encode the parts."""
    parts = parts or (Part(PartKind.K, key.shape[2]), Part(PartKind.V, value.shape[2]))
    encoding = Encoding(LayerGroup(1, key.shape[1], parts), NAMES[key.dtype], codec, len(key))
    if codec is Codec.RAW:
        ordered = (value, key) if encoding.is_latent else (key, value)
        return _head_major(*ordered)
    if not encoding.group.gates:
        return _quantize(key, value, encoding)
    quantised = _quantize(key, value[..., :0], encoding.without_gates())
    return torch.cat((quantised, _head_major(value).view(torch.uint8)), 1)


def _head_major(*parts: Tensor) -> Tensor:
    """Return `[heads, elements]` from parts `[tokens, heads, width]`."""
    return torch.cat([part.transpose(0, 1).flatten(1) for part in parts], 1).contiguous()


def as_frame(encoded: Tensor) -> memoryview:
    """Return the bytes of a frame on the host."""
    raw: Any = encoded.view(torch.uint8).numpy()
    return memoryview(raw).cast("B")


def decode_frame(
    data: memoryview,
    layout: KVLayout,
    codec: Codec,
    num_tokens: int,
    rows: slice = EVERY_ROW,
    layer: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode the bytes of some heads of a frame: K (before RoPE) and V `[rows, heads, width]`. `layer` may be
    None for a uniform layout.

    The results are contiguous and share no memory with `data`, which may be overwritten afterwards. Raises
    `Corrupted` for impossible scales.
    """
    encoding = Encoding.of(layout, layer, codec, num_tokens)
    frame = as_bytes(data).view(len(data) // encoding.head_bytes, -1)
    check_scales(frame, encoding)
    first, end, _ = rows.indices(num_tokens)
    key, value = (
        torch.empty(end - first, len(frame), width, dtype=DTYPES[layout.dtype]) for width in encoding.widths
    )
    decode_into(frame, encoding, rows, key, value)
    return key, value


def as_bytes(data: memoryview) -> Tensor:
    """Return uint8 `[bytes]` over the same memory, or over a copy if it is read-only."""
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)


def check_scales(frame: Tensor, encoding: Encoding) -> None:
    """Raise `Corrupted` for scales that finite KV cannot have. `frame`: uint8 `[heads, head_bytes]` on the
    host, so that no device is waited for."""
    if encoding.codec is Codec.RAW:
        return
    frame, encoding, _ = _split_gates(frame, encoding)
    if bool((_split_frame(frame, encoding).exponents > EXPONENT_MAX).any()):
        raise Corrupted("a frame has scales that finite KV cannot have; put the chunk again")


def _split_gates(frame: Tensor, encoding: Encoding) -> tuple[Tensor, Encoding, Tensor]:
    """Split the gates of a recurrent layer, `[heads, tokens, width]`, from a quantised frame. Returns the
    rest with its encoding, and the gates."""
    width, count = encoding.group.gates, encoding.num_tokens
    if not width:
        return frame, encoding, frame.new_empty(len(frame), count, 0)
    dtype = DTYPES[encoding.dtype]
    first = frame.shape[1] - width * count * dtype.itemsize
    gates = _view_as_dtype(frame[:, first:], dtype).view(len(frame), count, width)
    return frame[:, :first], encoding.without_gates(), gates


def _split_frame(frame: Tensor, encoding: Encoding) -> _Parts | int4.Packed:
    """Split a quantised frame, uint8 `[heads, head_bytes]`, into its parts."""
    if encoding.codec is Codec.INT4:
        return int4.Packed.of(frame, encoding.group, encoding.num_tokens, encoding.sinks)
    return _Parts.of(frame, encoding)


@torch.inference_mode()  # saves one or two microseconds in each of about seventy calls
def decode_into(frame: Tensor, encoding: Encoding, rows: slice, key: Tensor, value: Tensor) -> None:
    """Decode a frame whose scales were checked, uint8 `[heads, head_bytes]`, into `key` (before RoPE) and
    `value`, `[rows, heads, width]`, on the same device."""
    if encoding.codec is not Codec.RAW:
        frame, rest, gates = _split_gates(frame, encoding)
        if encoding.group.gates:
            value.copy_(gates[:, rows].transpose(0, 1))
            value = value[..., :0]
        _dequantize(frame, rest, rows, (key, value))
        return
    typed = frame.view(DTYPES[encoding.dtype])
    if encoding.is_latent:
        key, value = value, key
    for part, out in zip(_split(typed, encoding, encoding.num_tokens), (key, value), strict=True):
        out.copy_(part[:, rows].transpose(0, 1))


def _split(flat: Tensor, encoding: Encoding, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Split a row of elements per head into views of the head's two parts `[heads, num_tokens, width]`, in
    frame order."""
    widths = encoding.frame_widths
    sizes = [num_tokens * width for width in widths]
    first, second = (
        part.view(len(part), num_tokens, width)
        for part, width in zip(torch.split(flat, sizes, dim=1), widths, strict=True)
    )
    return first, second


@dataclass(frozen=True)
class _Parts:
    """The byte ranges of each head of a quantised frame, uint8 `[heads, …]`, in frame order."""

    key: Tensor
    value: Tensor
    exponents: Tensor
    """`[heads, 2]`: the shared exponents of K's and of V's scales."""
    key_scale: Tensor
    value_scale: Tensor
    sinks: Tensor

    @staticmethod
    def of(flat: Tensor, encoding: Encoding) -> _Parts:
        """Split `flat` `[heads, head_bytes]` into views."""
        small = encoding.num_tokens - encoding.sinks
        elements = [small * width for width in encoding.widths]
        scales = SCALE_BYTES * encoding.widths[0], SCALE_BYTES * (small if encoding.widths[1] else 0)
        sizes = (*elements, EXPONENTS_BYTES, *scales)
        return _Parts(*torch.split(flat, [*sizes, flat.shape[1] - sum(sizes)], dim=1))


def _quantize(key: Tensor, value: Tensor, encoding: Encoding) -> Tensor:
    """Encode K and V as uint8 `[heads, head_bytes]`; V may be empty."""
    num_tokens, heads, _ = key.shape
    flat = torch.zeros(heads, encoding.head_bytes, dtype=torch.uint8, device=key.device)
    packed, sinks = _split_frame(flat, encoding), encoding.sinks
    if isinstance(packed, int4.Packed):
        int4.quantize(key, value, packed, sinks)
        return flat
    if sinks < num_tokens:
        _quantize_bytes(key[sinks:], value[sinks:], packed, ELEMENTS[encoding.codec])
    packed.sinks.copy_(_head_major(key[:sinks], value[:sinks]).view(torch.uint8))
    return flat


def _quantize_bytes(key: Tensor, value: Tensor, parts: _Parts, elements: _Elements) -> None:
    for which, tensor, over, quantised, scales in (
        (0, key, 1, parts.key, parts.key_scale),
        (1, value, 2, parts.value, parts.value_scale),
    ):
        if not tensor.shape[2]:
            continue
        wide = tensor.transpose(0, 1).float()
        exponent, codes = encode_scales(wide.abs().amax(over) / elements.largest)
        parts.exponents[:, which].copy_(exponent)
        scales.copy_(codes)
        # If all elements are zero, the scale may be zero, too, and the quotient is NaN.
        scaled = (wide / decode_scales(exponent, codes).float().unsqueeze(over)).nan_to_num_(0.0)
        scaled = scaled.round_() if elements.dtype == torch.int8 else scaled
        quantised.copy_(scaled.to(elements.dtype).view(torch.uint8).flatten(1))


def _dequantize(flat: Tensor, encoding: Encoding, rows: slice, outputs: tuple[Tensor, Tensor]) -> None:
    packed, sinks = _split_frame(flat, encoding), encoding.sinks
    first, end, _ = rows.indices(encoding.num_tokens)
    if isinstance(packed, int4.Packed):
        int4.dequantize(packed, sinks, first, *outputs)
        return
    num_exact = max(min(end, sinks) - first, 0)
    exact = _split(_view_as_dtype(packed.sinks, DTYPES[encoding.dtype]), encoding, sinks)
    for own, out in zip(exact, outputs, strict=True):
        out[:num_exact] = own[:, first : first + num_exact].transpose(0, 1)
    some = slice(max(first - sinks, 0), max(end - sinks, 0))
    _dequantize_bytes(packed, encoding, some, *(out[num_exact:] for out in outputs))


def _dequantize_bytes(parts: _Parts, encoding: Encoding, rows: slice, key: Tensor, value: Tensor) -> None:
    key_scale = decode_scales(parts.exponents[:, 0], parts.key_scale)[:, None]
    value_scale = decode_scales(parts.exponents[:, 1], parts.value_scale)[:, rows, None]
    for quantised, scale, out in ((parts.key, key_scale, key), (parts.value, value_scale, value)):
        width = out.shape[2]
        if not width:
            continue
        narrow = quantised.view(ELEMENTS[encoding.codec].dtype).view(len(quantised), -1, width)[:, rows]
        multiply(narrow, scale, out.transpose(0, 1))


def _view_as_dtype(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret bytes as `[heads, elements]`, copied first so that they are aligned for any dtype."""
    own = part.clone(memory_format=torch.contiguous_format)
    return own.flatten().view(dtype).view(len(part), part.shape[1] // dtype.itemsize)
