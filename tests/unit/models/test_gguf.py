"""Values of each encoding, against the format's definition, one value at a time."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kintsugi.core.errors import Corrupted
from kintsugi.models.gguf import parse_gguf
from tests.fakes.packaged_model import MERGES, TEMPLATE, TOKENS, tiny_gguf, tiny_tensors


def test_every_tensor_has_its_shape_and_values() -> None:
    parsed, expected = parse_gguf(tiny_gguf()).tensors, tiny_tensors()
    assert {tensor.kind for tensor in expected.values()} == {0, 3, 8}
    assert list(parsed) == list(expected)
    for name, tensor in expected.items():
        values = parsed[name].to_float32()
        assert values.dtype == np.float32, name
        np.testing.assert_array_equal(values, tensor.values, err_msg=name)


def test_metadata_of_every_type_is_read() -> None:
    metadata = parse_gguf(tiny_gguf()).metadata
    assert metadata["tokenizer.ggml.tokens"] == list(TOKENS)
    assert metadata["tokenizer.ggml.merges"] == list(MERGES)
    assert metadata["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert metadata["tokenizer.chat_template"] == TEMPLATE
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["llama.rope.freq_base"] == 10_000.0


def test_another_file_or_version_is_refused() -> None:
    content = bytearray(tiny_gguf())
    content[4] = 1
    for wrong in (bytes(content), b"PK\x03\x04" + bytes(100)):
        with pytest.raises(Corrupted, match="GGUF"):
            parse_gguf(wrong)


def test_a_file_that_is_cut_off_is_corrupted() -> None:
    content = tiny_gguf()
    for size in (*range(0, 400, 7), len(content) // 2, len(content) - 64):
        with pytest.raises(Corrupted, match="GGUF"):
            parse_gguf(content[:size])


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(shape: tuple[int, ...], encoding: int = 0, offset: int = 0) -> bytes:
    return text(b"w") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, encoding, offset)


@pytest.mark.parametrize(
    ("metadata", "tensors", "says"),
    [
        ([text(b"k") + struct.pack("<IIQ", 9, 10, 1 << 61)], [], "ends before"),
        ([text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 61)], [], "ends before"),
        ([text(b"k") + struct.pack("<IIQ", 9, 9, 1)], [], "value of type 9"),
        ([text(b"k") + struct.pack("<I", 99)], [], "value of type 99"),
        ([struct.pack("<Q", 1 << 63)], [], "ends before"),
        ([text(b"k") + struct.pack("<I", 8) + text(b"\xff")], [], "not UTF-8"),
        ([text(b"general.alignment") + struct.pack("<II", 4, 0)], [tensor((4,))], "aligns its tensors to 0"),
        ([text(b"general.alignment") + struct.pack("<I", 8) + text(b"x")], [tensor((4,))], "aligns"),
        ([], [tensor((1,) * 5)], "5 dimensions"),
        ([], [tensor((4,), encoding=1)], "encoding 1"),
        ([], [tensor((33,), encoding=3)], "shape"),
        ([], [tensor((0, 1 << 62))], "shape"),
        ([], [tensor((1 << 62, 1 << 62))], "shape"),
        ([], [tensor((4,), offset=1 << 40)], "shape"),
    ],
)
def test_no_count_in_a_file_is_believed(metadata: list[bytes], tensors: list[bytes], says: str) -> None:
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    with pytest.raises(Corrupted, match=says):
        parse_gguf(head + b"".join((*metadata, *tensors)) + bytes(128))
