"""Frames and tensors: head-major bytes, round trips, slices of heads, views and copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kintsugi.core.errors import Corrupted, InvalidField
from kintsugi.core.layout import (
    ELEMENT_BYTES,
    INT4_KEY_TOKENS,
    INT4_VALUE_CHANNELS,
    Codec,
    HeadRange,
    KVLayout,
    LayerGroup,
    Part,
    PartKind,
)
from kintsugi.fusor.codecs import (
    DTYPES,
    as_frame,
    decode_frame,
    encode,
    encode_frame,
)
from kintsugi.fusor.scales import EXPONENT_MAX, decode_scales, encode_scales

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 4), st.sampled_from([1, 2, 8, 16]))


def kv(shape: tuple[int, int, int], dtype: str = "float32", seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(shape, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    return key, value


def layout_of(shape: tuple[int, int, int], dtype: str = "float32") -> KVLayout:
    return KVLayout.uniform(1, shape[1], shape[2], dtype)


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


LATENT = KVLayout.of_groups(
    [LayerGroup(2, 1, (Part(PartKind.LATENT, 8), Part(PartKind.ROTARY, 2)))], "float32"
)


def test_a_latent_s_frame_is_the_latent_and_then_the_rotary_key() -> None:
    (rotary, _), (latent, _) = kv((3, 1, 2)), kv((3, 1, 8), seed=1)
    frame = as_frame(encode(rotary, latent, Codec.RAW, LATENT.groups[0].parts))
    assert frame.nbytes == LATENT.frame_bytes(Codec.RAW, 3, 1)
    flat = np.frombuffer(frame, dtype=np.float32)
    assert np.array_equal(flat[:24].reshape(3, 8), latent[:, 0].numpy())
    assert np.array_equal(flat[24:].reshape(3, 2), rotary[:, 0].numpy())
    key, value = decode_frame(frame, LATENT, Codec.RAW, 3, slice(1, 3), layer=1)
    assert torch.equal(key, rotary[1:])
    assert torch.equal(value, latent[1:])


def recurrent(width: int, gates: int) -> KVLayout:
    parts = (Part(PartKind.INPUT, width), *((Part(PartKind.GATE, gates),) if gates else ()))
    return KVLayout.of_groups([LayerGroup(2, 1, parts)], "bfloat16")


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.INT4])
@pytest.mark.parametrize("gates", [0, 6])
def test_inputs_are_scaled_per_channel_and_gates_are_exact(codec: Codec, gates: int) -> None:
    layout, count = recurrent(32, gates), 9
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 1, 32, generator=generator) * torch.logspace(-1, 1, 32)
    key, value = inputs.bfloat16(), torch.randn(count, 1, gates, generator=generator).bfloat16()
    frame = as_frame(encode(key, value, codec, layout.groups[0].parts))
    assert frame.nbytes == layout.frame_bytes(codec, count)
    rows = slice(2, 8)
    got_key, got_value = decode_frame(frame, layout, codec, count, rows)
    assert torch.equal(got_value, value[rows])
    largest = key.float().abs().amax(0)
    error = (got_key.float() - key[rows].float()).abs()
    bound = 0.0 if codec is Codec.RAW else 1 / 12 if "FP8" in codec.name else 1 / 100
    assert bool((error <= bound * largest).all())


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.RAW])
def test_latents_are_not_quantised(codec: Codec) -> None:
    (rotary, _), (latent, _) = kv((3, 1, 2)), kv((3, 1, 8), seed=1)
    with pytest.raises(InvalidField, match="encodes other tensors"):
        encode(rotary, latent, codec, LATENT.groups[0].parts)


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


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("shape", [(4, 2, 8), (4, 1, 8), (1, 2, 8), (1, 1, 2)])
def test_tensors_are_the_callers_own(codec: Codec, shape: tuple[int, int, int]) -> None:
    """A store may reuse a frame's bytes; one head, or one token, makes a view look contiguous already."""
    key, value = kv(shape)
    data = bytearray(encode_frame(key, value, codec))
    got = decode_frame(memoryview(data), layout_of(shape), codec, shape[0])
    read_only = decode_frame(memoryview(bytes(data)), layout_of(shape), codec, shape[0])
    before = [tensor.clone() for tensor in got]
    data[:] = bytes(len(data))
    for tensor, same, other in zip(got, before, read_only, strict=True):
        assert torch.equal(tensor, same)
        assert torch.equal(tensor, other)
        assert tensor.is_contiguous()
        assert tensor.shape == shape


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_bytes_anywhere_in_a_buffer(offset: int, codec: Codec) -> None:
    """A store's arena owes no alignment."""
    key, value = kv((7, 2, 8))
    frame = bytes(encode_frame(key, value, codec))
    data = memoryview(bytearray(bytes(offset) + frame + b"behind"))[offset : offset + len(frame)]
    got = decode_frame(data, layout_of((7, 2, 8)), codec, 7)
    for tensor, expected in zip(
        got, decode_frame(memoryview(frame), layout_of((7, 2, 8)), codec, 7), strict=True
    ):
        assert torch.equal(tensor, expected)


LOSSY = [codec for codec in Codec if codec is not Codec.RAW]
BYTES = [codec for codec in LOSSY if codec is not Codec.INT4]
"""Codecs of one byte per element."""
LARGEST = {Codec.INT8: 127, Codec.INT8_SINKS: 127, Codec.FP8: 448, Codec.FP8_SINKS: 448}
MANTISSA_STEP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23}
TINY = {"bfloat16": 2.0**-126, "float16": 2.0**-24, "float32": 2.0**-126}


def error_allowed(wide: Tensor, over: int, codec: Codec, dtype: str) -> Tensor:
    """The bound that the modules state, for fp32 `wide` `[tokens, heads, head_dim]` that share a scale along
    dimension `over`, and an exponent along the other that is no head."""
    if codec is Codec.INT4:
        return error_allowed_of_int4(wide, over, dtype)
    largest = wide.abs().amax(over, keepdim=True)
    of_head = largest.amax(2 - over, keepdim=True)
    scale = torch.maximum(largest, of_head * 2.0**-7) / LARGEST[codec] * (1 + 2.0**-5) + 1e-38
    if codec in (Codec.INT8, Codec.INT8_SINKS):
        coarse = (scale / 2).expand_as(wide)
    else:
        coarse = torch.maximum(wide.abs() / 16, (scale * 2.0**-10).expand_as(wide))
    return coarse + (wide.abs() + coarse) * MANTISSA_STEP[dtype] + TINY[dtype]


def error_allowed_of_int4(wide: Tensor, over: int, dtype: str) -> Tensor:
    bounds, size = torch.empty_like(wide), INT4_VALUE_CHANNELS if over else INT4_KEY_TOKENS
    for group, bound in zip(wide.split(size, over), bounds.split(size, over), strict=True):
        high, low = group.amax(over, keepdim=True), group.amin(over, keepdim=True)
        steps = [(high - low) / 15, low / -127, low / 112] if over == 0 else [high / 7, low / -7]
        bound.copy_(torch.stack(steps).amax(0).expand_as(group))
    of_head = bounds.amax((0, 2), keepdim=True)
    coarse = torch.maximum(bounds, of_head * 2.0**-7) * (1 + 2.0**-5) / 2 + 1e-38
    return coarse * (1 + 1e-5) + (wide.abs() + coarse) * MANTISSA_STEP[dtype] + TINY[dtype]


def is_stored(codec: Codec, shape: tuple[int, int, int]) -> bool:
    return layout_of(shape).holds(codec)


@settings(deadline=None, max_examples=200)
@given(
    codec=st.sampled_from(LOSSY),
    shape=SHAPES,
    dtype=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 999),
    magnitude=st.integers(-12, 12),
    data=st.data(),
)
def test_errors_stay_within_what_is_promised(
    codec: Codec, shape: tuple[int, int, int], dtype: str, seed: int, magnitude: int, data: st.DataObject
) -> None:
    assume(is_stored(codec, shape))
    key, value = kv(shape, dtype, seed)
    factor = 2.0 ** min(magnitude, 8)
    # Channels and tokens of very different size, and some that are all zero.
    key = key * factor * torch.logspace(-3, 1, shape[2])
    value = value * factor * torch.logspace(-3, 1, shape[0])[:, None, None]
    key[..., 0] *= data.draw(st.sampled_from([0.0, 1.0]))
    key, value = (tensor.to(DTYPES[dtype]) for tensor in (key, value))
    layout = layout_of(shape, dtype)
    frame = encode_frame(key, value, codec)
    assert len(frame) == layout.frame_bytes(codec, shape[0])
    got_key, got_value = decode_frame(frame, layout, codec, shape[0])
    sinks = codec.sinks_of(shape[0])
    assert torch.equal(got_key[:sinks], key[:sinks])
    for got, tensor, over in ((got_key, key, 0), (got_value, value, 2)):
        exact = 0 if codec is Codec.INT4 and over else sinks
        assert torch.equal(got[:exact], tensor[:exact])
        wide = tensor[exact:].float()
        assert got.dtype == tensor.dtype
        if wide.numel():
            error = (got[exact:].float() - wide).abs()
            assert bool((error <= error_allowed(wide, over, codec, dtype)).all())


@settings(deadline=None)
@given(codec=st.sampled_from(list(Codec)), shape=SHAPES.filter(lambda shape: shape[1] > 1), data=st.data())
def test_heads_and_rows_are_decoded_alone(
    codec: Codec, shape: tuple[int, int, int], data: st.DataObject
) -> None:
    assume(is_stored(codec, shape))
    start = data.draw(st.integers(0, shape[1] - 1))
    heads = slice(start, data.draw(st.integers(start + 1, shape[1])))
    first = data.draw(st.integers(0, shape[0]))
    rows = slice(first, data.draw(st.integers(first, shape[0])))
    layout = layout_of(shape, "bfloat16")
    frame = encode_frame(*kv(shape, "bfloat16"), codec)
    size = layout.head_bytes(codec, shape[0])
    whole = decode_frame(frame, layout, codec, shape[0])
    part = decode_frame(frame[heads.start * size : heads.stop * size], layout, codec, shape[0], rows)
    for tensor, every in zip(part, whole, strict=True):
        assert torch.equal(tensor, every[rows, heads])


@pytest.mark.parametrize("codec", LOSSY)
def test_zeros_come_back_as_zeros(codec: Codec) -> None:
    zeros = torch.zeros(9, 2, 16, dtype=torch.bfloat16)
    for tensor in decode_frame(
        encode_frame(zeros, zeros, codec), layout_of((9, 2, 16), "bfloat16"), codec, 9
    ):
        assert torch.equal(tensor, zeros)


def exponents_at(codec: Codec, shape: tuple[int, int, int], head: int) -> int:
    """Where a head's shared exponents stand in a frame: K's, then V's."""
    small = shape[0] - codec.sinks_of(shape[0])
    layout = layout_of(shape, "bfloat16")
    before = (
        sum(layout.groups[0].int4_bytes(shape[0], codec.sinks_of(shape[0])))
        if codec is Codec.INT4
        else 2 * small * shape[2]
    )
    return head * layout.head_bytes(codec, shape[0]) + before


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("exponent", [EXPONENT_MAX + 1, 255])
@pytest.mark.parametrize("which", [0, 1])
def test_damaged_scales_are_refused(codec: Codec, exponent: int, which: int) -> None:
    shape = (12, 2, 16)
    layout = layout_of(shape, "bfloat16")
    data = bytearray(encode_frame(*kv(shape, "bfloat16"), codec))
    data[exponents_at(codec, shape, head=1) + which] = exponent
    with pytest.raises(Corrupted, match="put the chunk again"):
        decode_frame(memoryview(data), layout, codec, 12)


@pytest.mark.parametrize("codec", BYTES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("largest", [3.3e38, 1e30, 1.0, 1e-30, 1e-40])
def test_every_magnitude_can_be_stored(codec: Codec, dtype: str, largest: float) -> None:
    """The shared exponent reaches as far as the elements do."""
    shape = (9, 2, 16)
    key = (largest * torch.linspace(-1, 1, 9 * 2 * 16).view(shape)).to(DTYPES[dtype])
    value = key.flip(0)
    frame = encode_frame(key, value, codec)
    for got, tensor in zip(decode_frame(frame, layout_of(shape, dtype), codec, 9), (key, value), strict=True):
        assert bool(got.isfinite().all())
        allowed = torch.maximum(tensor.float().abs() / 15, torch.tensor(largest / 200 + TINY[dtype]))
        assert bool(((got.float() - tensor.float()).abs() <= allowed).all())


def test_a_channel_far_below_its_heads_largest_loses_a_bit_an_octave() -> None:
    """Seven octaves cost nothing, of ten three bits are gone; other heads do not notice."""
    key, value = kv((64, 2, 16))
    octaves = torch.tensor([0.0] * 8 + [6.0] * 4 + [10.0] * 4)
    key[:, 0] *= 2.0 ** (10 - octaves)
    got, _ = decode_frame(encode_frame(key, value, Codec.INT8), layout_of((64, 2, 16)), Codec.INT8, 64)
    error = ((got - key).square().mean(0) / key.square().mean(0)).sqrt()
    usual = float(error[1].mean())
    assert float(error[0, :8].mean() / usual) < 1.3
    assert float(error[0, 8:12].mean() / usual) < 1.3
    assert 4 < float(error[0, 12:].mean() / usual) < 16


def test_scales_are_rounded_up_by_little() -> None:
    """So that no element is clipped, and hardly a bit is lost."""
    generator = torch.Generator().manual_seed(3)
    largest = torch.rand(4, 100, generator=generator) + 0.01
    up = decode_scales(*encode_scales(largest)).float() / largest
    assert float(up.min()) + 1e-6 >= 1.0
    assert float(up.max()) <= 1 + 2.0**-5
    assert float(up.mean()) < 1.02


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_kv_that_is_not_finite_is_refused_when_it_is_loaded(codec: Codec, bad: float) -> None:
    shape = (12, 2, 16)
    key, value = kv(shape, "bfloat16")
    value[7, 1, 3] = bad
    frame = encode_frame(key, value, codec)
    with pytest.raises(Corrupted):
        decode_frame(frame, layout_of(shape, "bfloat16"), codec, 12)


def test_a_doubled_scale_is_not_damage_that_can_be_seen() -> None:
    """Digests catch what changes behind the encoder; nothing here can tell a scale from another."""
    shape = (12, 1, 16)
    layout = layout_of(shape, "bfloat16")
    data = bytearray(encode_frame(*kv(shape, "bfloat16"), Codec.INT8))
    once, _ = decode_frame(memoryview(bytes(data)), layout, Codec.INT8, 12)
    data[exponents_at(Codec.INT8, shape, head=0)] += 1
    twice, _ = decode_frame(memoryview(bytes(data)), layout, Codec.INT8, 12)
    assert torch.equal(twice, 2 * once)


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("num_tokens", [1, 3, 9])
def test_values_of_another_width_than_keys(codec: Codec, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    key = torch.randn(num_tokens, 2, 12, generator=generator)
    value = torch.randn(num_tokens, 2, 8, generator=generator)
    wide = LayerGroup(1, 2, (Part(PartKind.K, 12), Part(PartKind.V, 8)))
    plain = LayerGroup(1, 4, (Part(PartKind.K, 8), Part(PartKind.V, 8)))
    layout = KVLayout.of_groups((plain, wide), "float32")
    frame = encode_frame(key, value, codec)
    assert len(frame) == layout.frame_bytes(codec, num_tokens, 1)
    rows = slice(1, num_tokens)
    for chosen in (slice(None), rows):
        got_key, got_value = decode_frame(frame, layout, codec, num_tokens, chosen, layer=1)
        assert got_key.shape == key[chosen].shape
        assert got_value.shape == value[chosen].shape
        assert torch.allclose(got_key, key[chosen], atol=0.5)
        assert torch.allclose(got_value, value[chosen], atol=0.5)
    if codec is Codec.RAW:
        assert torch.equal(got_key, key[rows])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_tokens", [1, 5, 36, 37, 68, 200])
@pytest.mark.parametrize("width", [16, 64, 96, 128, 256])
def test_int4_takes_a_quarter_of_the_bytes_and_any_rows(dtype: str, num_tokens: int, width: int) -> None:
    """Rows may begin and end inside a group of tokens, and heads may have several groups of channels."""
    shape = (num_tokens, 2, width)
    layout, (key, value) = layout_of(shape, dtype), kv(shape, dtype)
    key, value = (tensor + 3 * torch.randn(width).to(tensor.dtype) for tensor in (key, value))
    frame = encode_frame(key, value, Codec.INT4)
    assert len(frame) == layout.frame_bytes(Codec.INT4, num_tokens)
    whole = decode_frame(frame, layout, Codec.INT4, num_tokens)
    for over, got, tensor in zip((0, 2), whole, (key, value), strict=True):
        exact = 0 if over else 4
        wide = tensor[exact:].float()
        if not wide.numel():
            continue
        assert bool(
            ((got[exact:].float() - wide).abs() <= error_allowed(wide, over, Codec.INT4, dtype)).all()
        )
    for rows in (slice(0, 3), slice(3, 5), slice(4, num_tokens), slice(30, 70), slice(67, 150)):
        for got, every in zip(decode_frame(frame, layout, Codec.INT4, num_tokens, rows), whole, strict=True):
            assert torch.equal(got, every[rows])
    if num_tokens == 200 and width == 128 and dtype == "bfloat16":
        assert len(frame) < 0.3 * layout.frame_bytes(Codec.RAW, num_tokens)


def test_int4_stores_no_odd_width() -> None:
    odd = layout_of((9, 2, 15))
    assert not odd.holds(Codec.INT4)
    with pytest.raises(InvalidField, match="two elements a byte"):
        odd.frame_bytes(Codec.INT4, 9)
