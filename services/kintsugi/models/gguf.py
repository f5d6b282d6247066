"""Reads a GGUF file: metadata, and tensors dequantised to float32.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; blocks: ggml's `ggml-common.h`. Only the
encodings that the reference model uses. Meant for files whose digest was checked: a malformed one raises
whatever parsing it raises. Rejected: reading it with `transformers`, which needs accelerate for that, and
whose tokenizer then does not split digits from what precedes them as this model's does.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32s = NDArray[np.float32]

MAGIC = b"GGUF"
VERSION = 3
_ALIGNMENT_BYTES = 32
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

    def to_float32(self) -> Float32s:
        """Decode the values, in `shape`."""
        encoding = _ENCODINGS[self.encoding]
        items = np.frombuffer(self.data, encoding.item, math.prod(self.shape) // encoding.values)
        return encoding.decode(items).reshape(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """A parsed file."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    """In the order of the file."""


def parse_gguf(content: bytes) -> GgufFile:
    """Parse a whole file. Tensors keep views of `content`."""
    reader = _Reader(content)
    magic, version, tensor_count, metadata_count = reader.unpack("4sIQQ")
    if (magic, version) != (MAGIC, VERSION):
        raise ValueError(f"not GGUF version {VERSION}")
    metadata = {}
    for _ in range(metadata_count):
        key = reader.string()
        metadata[key] = reader.value(*reader.unpack("I"))
    entries = []
    for _ in range(tensor_count):
        name = reader.string()
        dimensions = reader.unpack(f"{reader.unpack('I')[0]}Q")
        encoding, offset = reader.unpack("IQ")
        entries.append((name, tuple(reversed(dimensions)), encoding, offset))
    alignment = metadata.get("general.alignment", _ALIGNMENT_BYTES)
    data = memoryview(content)[math.ceil(reader.position / alignment) * alignment :]
    tensors = {name: GgufTensor(shape, encoding, data[offset:]) for name, shape, encoding, offset in entries}
    return GgufFile(metadata, tensors)


class _Reader:
    """Takes little-endian values from the front of a buffer."""

    def __init__(self, content: bytes) -> None:
        self.position = 0
        self._content = content

    def unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._content, self.position)
        self.position += struct.calcsize(f"<{form}")
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        (text,) = self.unpack(f"{length}s")
        return str(text, "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.unpack("IQ")
            if element in _SCALARS:
                return list(self.unpack(f"{count}{_SCALARS[element]}"))
            return [self.value(element) for _ in range(count)]
        return self.unpack(_SCALARS[kind])[0]
