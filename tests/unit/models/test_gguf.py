"""Values of each encoding, against the format's definition, one value at a time."""

from __future__ import annotations

import numpy as np
import pytest

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
        with pytest.raises(ValueError, match="GGUF"):
            parse_gguf(wrong)
