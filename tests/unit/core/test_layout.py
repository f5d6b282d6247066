"""Sizes, tensor-parallel head ranges, and digests that catch every flipped bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import (
    DIGEST_BYTES,
    TOKENS_MAX,
    ChunkManifest,
    Codec,
    HeadRange,
    KVLayout,
    check_frames,
    codec_named,
    digests_of,
)
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint

SMALL = KVLayout.uniform(num_layers=2, num_kv_heads=4, head_dim=8, dtype="bfloat16")
SPACE = ChunkSpace(ModelFingerprint.of({"weights": "layout"}), "acme")
TOKENS = 5


def manifest_of(frames: list[bytes]) -> ChunkManifest:
    head_bytes = SMALL.head_bytes(Codec.RAW, TOKENS)
    return ChunkManifest(
        key=ChunkKey.of(SPACE, range(TOKENS)),
        space_digest=SPACE.digest,
        fingerprint=SPACE.fingerprint,
        namespace=SPACE.namespace,
        num_tokens=TOKENS,
        layout=SMALL,
        codec=Codec.RAW,
        anchors=(),
        digests=b"".join(digests_of(frame, head_bytes) for frame in frames),
    )


def frames_of_bytes() -> list[bytes]:
    size = SMALL.frame_bytes(Codec.RAW, TOKENS)
    return [bytes((layer * 31 + i) % 251 for i in range(size)) for layer in range(SMALL.num_layers)]


class TestSizes:
    def test_mistral_7b_takes_128_kib_per_token(self) -> None:
        layout = KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
        assert layout.head_bytes(Codec.RAW, 1) == 512
        assert layout.frame_bytes(Codec.RAW, 1) == 4096
        assert layout.chunk_bytes(Codec.RAW, 1) == 128 << 10
        assert layout.chunk_bytes(Codec.RAW, 512) == 64 << 20
        assert layout.digests_bytes == 32 * 8 * DIGEST_BYTES

    @pytest.mark.parametrize("codec", [Codec.INT8, Codec.FP8])
    def test_eight_bits_take_half_and_their_scales(self, codec: Codec) -> None:
        layout = KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
        assert layout.head_bytes(codec, 512) == 2 * 512 * 128 + 2 + 128 + 512
        assert layout.head_bytes(codec, 1) == 2 * 128 + 2 + 128 + 1

    def test_sinks_stay_as_they_are(self) -> None:
        assert SMALL.head_bytes(Codec.INT8_SINKS, 10) == 2 * 6 * 8 + 2 * 4 * 8 * 2 + 2 + 8 + 6
        for tokens in (1, 4):
            everything = SMALL.head_bytes(Codec.RAW, tokens) + 2 + 8
            assert SMALL.head_bytes(Codec.FP8_SINKS, tokens) == everything

    @given(
        codec=st.sampled_from([Codec.INT8, Codec.FP8]),
        head_dim=st.sampled_from([32, 64, 96, 128, 256]),
        tokens=st.integers(12, 8192),
    )
    def test_quantised_chunks_are_a_little_over_half(self, codec: Codec, head_dim: int, tokens: int) -> None:
        layout = KVLayout.uniform(4, 2, head_dim, "bfloat16")
        assert 0.5 < layout.chunk_bytes(codec, tokens) / layout.chunk_bytes(Codec.RAW, tokens) <= 0.53

    @given(
        codec=st.sampled_from([Codec.INT8_SINKS, Codec.FP8_SINKS]),
        head_dim=st.sampled_from([32, 64, 96, 128, 256]),
        tokens=st.integers(104, 8192),
    )
    def test_sinks_weigh_in_short_chunks(self, codec: Codec, head_dim: int, tokens: int) -> None:
        layout = KVLayout.uniform(4, 2, head_dim, "bfloat16")
        assert 0.5 < layout.chunk_bytes(codec, tokens) / layout.chunk_bytes(Codec.RAW, tokens) <= 0.53

    def test_fp32_takes_twice_as_much(self) -> None:
        wide = dataclasses.replace(SMALL, dtype="float32")
        assert wide.frame_bytes(Codec.RAW, 7) == 2 * SMALL.frame_bytes(Codec.RAW, 7)

    @pytest.mark.parametrize(
        ("field", "value", "named"),
        [
            ("num_layers", 0, "groups"),
            ("num_layers", 1025, "groups"),
            ("num_kv_heads", -1, "groups"),
            ("num_kv_heads", 1025, "groups"),
            ("head_dim", 0, "groups"),
            ("head_dim", (1 << 16) + 1, "groups"),
            ("dtype", "int8", "dtype"),
        ],
    )
    def test_an_impossible_layout_is_refused(self, field: str, value: Any, named: str) -> None:
        shape: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "dtype": "bfloat16"}
        with pytest.raises(InvalidField) as raised:
            KVLayout.uniform(**shape | {field: value})
        assert raised.value.field == f"layout.{named}"


class TestHeadRange:
    @given(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 32]), st.sampled_from([1, 2, 4, 8]))
    def test_ranks_that_divide_the_heads_tile_them(self, per_rank: int, world_size: int) -> None:
        num_kv_heads = per_rank * world_size
        heads = [HeadRange.of_rank(num_kv_heads, rank, world_size) for rank in range(world_size)]
        covered = [head for r in heads for head in range(r.start, r.stop)]
        assert covered == list(range(num_kv_heads))
        assert {len(r) for r in heads} == {per_rank}

    @given(st.sampled_from([1, 2, 3, 4]), st.sampled_from([2, 4, 8]))
    def test_ranks_that_outnumber_the_heads_share_them(self, num_kv_heads: int, copies: int) -> None:
        world_size = num_kv_heads * copies
        heads = [HeadRange.of_rank(num_kv_heads, rank, world_size) for rank in range(world_size)]
        assert [r.start for r in heads] == [rank // copies for rank in range(world_size)]
        assert {len(r) for r in heads} == {1}

    @pytest.mark.parametrize(("heads", "rank", "world"), [(8, 8, 8), (8, -1, 8), (6, 0, 4), (4, 0, 6)])
    def test_a_split_that_loses_heads_is_our_mistake(self, heads: int, rank: int, world: int) -> None:
        with pytest.raises(AssertionError):
            HeadRange.of_rank(heads, rank, world)


class TestDigests:
    def test_intact_frames_pass_for_every_range(self) -> None:
        frames = frames_of_bytes()
        manifest = manifest_of(frames)
        for layer, frame in enumerate(frames):
            for start in range(4):
                for stop in range(start + 1, 5):
                    first, last = manifest.head_range_bytes(HeadRange(start, stop))
                    part = memoryview(frame)[first:last]
                    assert manifest.frame_is_intact(layer, HeadRange(start, stop), part)

    @given(st.data())
    def test_every_flipped_bit_is_caught(self, data: st.DataObject) -> None:
        frames = frames_of_bytes()
        manifest = manifest_of(frames)
        layer = data.draw(st.integers(0, SMALL.num_layers - 1), label="layer")
        bit = data.draw(st.integers(0, 8 * len(frames[layer]) - 1), label="bit")
        damaged = bytearray(frames[layer])
        damaged[bit // 8] ^= 1 << bit % 8
        hit = bit // 8 // SMALL.head_bytes(Codec.RAW, TOKENS)
        assert not manifest.frame_is_intact(layer, HeadRange(0, 4), memoryview(damaged))
        for head in range(4):
            first, last = manifest.head_range_bytes(HeadRange(head, head + 1))
            part = memoryview(damaged)[first:last]
            assert manifest.frame_is_intact(layer, HeadRange(head, head + 1), part) == (head != hit)

    def test_a_frame_elsewhere_is_not_intact(self) -> None:
        frames = frames_of_bytes()
        manifest = manifest_of(frames)
        every = HeadRange(0, 4)
        assert not manifest.frame_is_intact(1, every, memoryview(frames[0]))
        assert not manifest.frame_is_intact(0, every, memoryview(frames[0])[:-1])
        assert not manifest.frame_is_intact(0, every, memoryview(b""))
        assert not manifest.frame_is_intact(0, HeadRange(0, 2), memoryview(frames[0]))

    def test_views_of_wider_elements_are_measured_in_bytes(self) -> None:
        frames = frames_of_bytes()
        view = memoryview(frames[0]).cast("H")
        assert manifest_of(frames).frame_is_intact(0, HeadRange(0, 4), view)

    @pytest.mark.parametrize(("layer", "heads"), [(2, HeadRange(0, 4)), (0, HeadRange(3, 5))])
    def test_asking_outside_the_layout_is_our_mistake(self, layer: int, heads: HeadRange) -> None:
        with pytest.raises(AssertionError):
            manifest_of(frames_of_bytes()).frame_is_intact(layer, heads, memoryview(b""))


class TestManifest:
    def test_sizes_follow_the_layout(self) -> None:
        manifest = manifest_of(frames_of_bytes())
        assert manifest.frame_bytes == 4 * 2 * TOKENS * 8 * 2
        assert manifest.chunk_bytes == 2 * manifest.frame_bytes

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"num_tokens": 0}, "manifest.num_tokens"),
            ({"num_tokens": TOKENS_MAX + 1}, "manifest.num_tokens"),
            ({"digests": bytes(7)}, "manifest.digests"),
            ({"namespace": ""}, "namespace"),
        ],
    )
    def test_an_impossible_manifest_is_refused(self, change: dict[str, Any], field: str) -> None:
        with pytest.raises(InvalidField) as raised:
            dataclasses.replace(manifest_of(frames_of_bytes()), **change)
        assert raised.value.field == field

    def test_frames_are_counted_and_measured(self) -> None:
        manifest = manifest_of(frames_of_bytes())
        size = manifest.frame_bytes
        check_frames(manifest, [size, size])
        with pytest.raises(InvalidField, match="frames: 1 frames for a layout of 2"):
            check_frames(manifest, [size])
        with pytest.raises(InvalidField) as raised:
            check_frames(manifest, [size, size + 1])
        assert raised.value.field == "frames[1]"


def test_codec_ids_never_change() -> None:
    assert {codec.name: codec.value for codec in Codec} == {
        "RAW": 1,
        "INT8": 2,
        "FP8": 3,
        "INT8_SINKS": 4,
        "FP8_SINKS": 5,
        "INT4": 6,
    }


def test_codecs_have_names() -> None:
    assert [codec_named(codec.name.lower()) for codec in Codec] == list(Codec)
    with pytest.raises(InvalidField, match="codec: 'int2' is not one of raw, int8, fp8"):
        codec_named("int2")
