"""Frames and tensors: head-major bytes, round trips, slices of heads, views and copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kintsugi.core.layout import ELEMENT_BYTES, Codec, HeadRange, KVLayout
from kintsugi.fusor.codecs import DTYPES, decode_frame, encode_frame

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 4), st.sampled_from([1, 2, 8, 16]))


def kv(shape: tuple[int, int, int], dtype: str = "float32", seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(shape, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    return key, value


def layout_of(shape: tuple[int, int, int], dtype: str = "float32") -> KVLayout:
    return KVLayout(1, shape[1], shape[2], dtype)


def test_every_element_type_of_a_layout_has_a_dtype() -> None:
    assert DTYPES.keys() == ELEMENT_BYTES.keys()
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ELEMENT_BYTES


@settings(deadline=None)
@given(shape=SHAPES, dtype=st.sampled_from(sorted(DTYPES)), seed=st.integers(0, 99))
def test_round_trip_is_bit_exact(shape: tuple[int, int, int], dtype: str, seed: int) -> None:
    key, value = kv(shape, dtype, seed)
    frame = encode_frame(key, value, Codec.RAW)
    layout = layout_of(shape, dtype)
    assert frame.nbytes == len(frame) == layout.frame_bytes(Codec.RAW, shape[0])
    got_key, got_value = decode_frame(frame, layout, Codec.RAW, shape[0])
    assert got_key.dtype == DTYPES[dtype]
    assert torch.equal(got_key, key)
    assert torch.equal(got_value, value)


def test_a_frame_is_head_major_k_before_v() -> None:
    key, value = kv((3, 2, 8))
    flat = np.frombuffer(encode_frame(key, value, Codec.RAW), dtype=np.float32).reshape(2, 2, 3, 8)
    for head in range(2):
        assert np.array_equal(flat[head, 0], key[:, head].numpy())
        assert np.array_equal(flat[head, 1], value[:, head].numpy())


@given(shape=SHAPES.filter(lambda shape: shape[1] > 1), data=st.data())
@settings(deadline=None)
def test_some_heads_are_one_range_of_bytes(shape: tuple[int, int, int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, shape[1] - 1))
    heads = HeadRange(start, data.draw(st.integers(start + 1, shape[1])))
    key, value = kv(shape)
    layout = layout_of(shape)
    size = layout.head_bytes(Codec.RAW, shape[0])
    part = encode_frame(key, value, Codec.RAW)[heads.start * size : heads.stop * size]
    got_key, got_value = decode_frame(part, layout, Codec.RAW, shape[0])
    assert torch.equal(got_key, key[:, heads.start : heads.stop])
    assert torch.equal(got_value, value[:, heads.start : heads.stop])


def test_any_strides_can_be_encoded() -> None:
    key, value = kv((6, 2, 8))
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (key, value)]
    expected = bytes(encode_frame(key, value, Codec.RAW))
    assert bytes(encode_frame(strided[0], strided[1], Codec.RAW)) == expected
    wide = torch.cat((key, value), -1)
    assert bytes(encode_frame(wide[..., :8], wide[..., 8:], Codec.RAW)) == expected


def test_a_frame_does_not_follow_the_tensors_it_was_made_of() -> None:
    key, value = kv((1, 1, 8))
    frame = encode_frame(key, value, Codec.RAW)
    before = bytes(frame)
    key.zero_()
    value.zero_()
    assert bytes(frame) == before


@pytest.mark.parametrize("writable", [True, False])
def test_writable_bytes_are_viewed_and_read_only_ones_copied(writable: bool) -> None:
    key, value = kv((4, 2, 8))
    data = bytearray(encode_frame(key, value, Codec.RAW))
    view = memoryview(data) if writable else memoryview(data).toreadonly()
    got, _ = decode_frame(view, layout_of((4, 2, 8)), Codec.RAW, 4)
    data[:] = bytes(len(data))
    assert torch.equal(got, torch.zeros_like(key) if writable else key)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_bytes_anywhere_in_a_buffer(offset: int) -> None:
    """A store's arena owes no alignment."""
    key, value = kv((4, 2, 8))
    frame = bytes(encode_frame(key, value, Codec.RAW))
    data = memoryview(bytearray(bytes(offset) + frame + b"behind"))[offset : offset + len(frame)]
    got_key, got_value = decode_frame(data, layout_of((4, 2, 8)), Codec.RAW, 4)
    assert torch.equal(got_key, key)
    assert torch.equal(got_value, value)
