"""Reads a GGUF file: metadata, and tensors dequantised to float32.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; blocks: ggml's `ggml-common.h`. Only the
encodings that the reference model uses. A malformed file is `Corrupted`, and no count or length in it is
believed beyond the bytes that are there. Rejected: reading it with `transformers`, which needs accelerate for
that, and whose tokenizer then does not split digits from what precedes them as this model's does.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kintsugi.core.errors import Corrupted

Float32s = NDArray[np.float32]

MAGIC = b"GGUF"
VERSION = 3
_ALIGNMENT_BYTES = 32
DIMENSIONS_MAX = 4
"""ggml's limit."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

BLOCK = 32
"""Values per block, in both block encodings."""
_Q4_1 = np.dtype([("scale", "<f2"), ("least", "<f2"), ("nibbles", "u1", BLOCK // 2)])
_Q8_0 = np.dtype([("scale", "<f2"), ("steps", "i1", BLOCK)])


def _dequantise_q4_1(blocks: NDArray[np.void]) -> Float32s:
    """The low nibbles are a block's first half, the high ones its second."""
    nibbles = blocks["nibbles"]
    steps = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.float32)
    values: Float32s = steps * blocks["scale"][:, None].astype(np.float32)
    values += blocks["least"][:, None].astype(np.float32)
    return values


def _dequantise_q8_0(blocks: NDArray[np.void]) -> Float32s:
    values: Float32s = blocks["steps"] * blocks["scale"][:, None].astype(np.float32)
    return values


@dataclass(frozen=True)
class _Encoding:
    values: int
    """Values per item."""
    item: np.dtype[Any]
    decode: Callable[[NDArray[Any]], Float32s]


_ENCODINGS = {
    0: _Encoding(1, np.dtype("<f4"), lambda items: items),
    3: _Encoding(BLOCK, _Q4_1, _dequantise_q4_1),
    8: _Encoding(BLOCK, _Q8_0, _dequantise_q8_0),
}
"""By ggml's type ids: F32, Q4_1, Q8_0."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor, still encoded."""

    shape: tuple[int, ...]
    """Slowest dimension first, as in torch."""
    encoding: int
    data: memoryview
    """Its items, and nothing else."""

    def to_float32(self) -> Float32s:
        """Decode the values, in `shape`."""
        encoding = _ENCODINGS[self.encoding]
        items = np.frombuffer(self.data, encoding.item)
        return encoding.decode(items).reshape(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """A parsed file."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    """In the order of the file."""


def parse_gguf(content: bytes) -> GgufFile:
    """Parse a whole file. Tensors keep views of `content`. Raises `Corrupted`."""
    reader = _Reader(content)
    magic, version, tensor_count, metadata_count = reader.unpack("4sIQQ")
    if (magic, version) != (MAGIC, VERSION):
        raise Corrupted(f"this is not a file of GGUF version {VERSION}; name another")
    metadata = {}
    for _ in range(metadata_count):
        key = reader.string()
        metadata[key] = reader.value(reader.integer("I"))
    entries = [(reader.string(), reader.shape(), *reader.unpack("IQ")) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _ALIGNMENT_BYTES)
    if not isinstance(alignment, int) or alignment <= 0:
        raise _corrupted(f"aligns its tensors to {alignment!r}")
    data = memoryview(content)[-(-reader.position // alignment) * alignment :]
    tensors = {name: _find_tensor(data, shape, *place) for name, shape, *place in entries}
    return GgufFile(metadata, tensors)


def _find_tensor(data: memoryview, shape: tuple[int, ...], encoding: int, offset: int) -> GgufTensor:
    known = _ENCODINGS.get(encoding)
    if known is None:
        raise _corrupted(f"has a tensor in encoding {encoding}; {sorted(_ENCODINGS)} are read")
    items, rest = divmod(math.prod(shape), known.values)
    size = items * known.item.itemsize
    if rest or not size or offset + size > len(data):
        raise _corrupted(f"has no {size} bytes at {offset} for a tensor of shape {shape}")
    return GgufTensor(shape, encoding, data[offset : offset + size])


def _corrupted(problem: str) -> Corrupted:
    return Corrupted(f"the GGUF file {problem}; download it again")


class _Reader:
    """Takes little-endian values from the front of a buffer. Every method raises `Corrupted`."""

    def __init__(self, content: bytes) -> None:
        self.position = 0
        self._content = content

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))

    def integer(self, code: str) -> int:
        value: int = self.unpack(code)[0]
        return value

    def _take(self, size: int) -> bytes:
        start = self.position
        if size > len(self._content) - start:
            raise _corrupted(f"ends before {size} bytes at {start}")
        self.position += size
        return self._content[start : self.position]

    def string(self) -> str:
        try:
            return str(self._take(self.integer("Q")), "utf-8")
        except UnicodeDecodeError:
            raise _corrupted("holds a text that is not UTF-8") from None

    def shape(self) -> tuple[int, ...]:
        """A tensor's dimensions, which the file has in reverse order."""
        count = self.integer("I")
        if count > DIMENSIONS_MAX:
            raise _corrupted(f"has a tensor of {count} dimensions")
        return tuple(reversed(self.unpack(f"{count}Q")))

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.unpack("IQ")
            if element == _STRING:
                return [self.string() for _ in range(count)]
            form = struct.Struct(f"<{self._code_of(element)}")
            return [value for (value,) in form.iter_unpack(self._take(form.size * count))]
        return self.unpack(self._code_of(kind))[0]

    def _code_of(self, kind: int) -> str:
        """An array of arrays is not read: the reference model has none."""
        if kind not in _SCALARS:
            raise _corrupted(f"has a value of type {kind}")
        return _SCALARS[kind]
