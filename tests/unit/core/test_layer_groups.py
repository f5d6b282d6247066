"""Layouts whose layers differ, side frames, and what a manifest refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import (
    ANCHORS_MAX,
    CONTEXT_KEYS_MAX,
    DIGEST_BYTES,
    SIDE_FRAMES_MAX,
    SIDE_KIND_MAX,
    ChunkManifest,
    Codec,
    HeadRange,
    KVLayout,
    LayerGroup,
    Part,
    PartKind,
    SideFrame,
    SideKind,
    check_frames,
)
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint

SPACE = ChunkSpace(ModelFingerprint.of({"weights": "groups"}), "acme")
TOKENS = 5


def k_and_v(layers: int, heads: int, key: int, value: int | None = None) -> LayerGroup:
    return LayerGroup(layers, heads, (Part(PartKind.K, key), Part(PartKind.V, value or key)))


def mla(layers: int) -> LayerGroup:
    return LayerGroup(layers, 1, (Part(PartKind.LATENT, 512), Part(PartKind.ROTARY, 64)))


MIXED = KVLayout.of_groups(
    [k_and_v(2, 8, 16, 8), LayerGroup(1, 2, (Part(PartKind.KV, 32),)), k_and_v(1, 8, 16, 8)], "bfloat16"
)
"""Windows of small heads, and a layer whose K is its V."""


def frames_of(layout: KVLayout, num_side_frames: int = 0) -> list[bytes]:
    sizes = [TOKENS + place for place in range(num_side_frames)]
    sizes += [layout.frame_bytes(Codec.RAW, TOKENS, layer) for layer in range(layout.num_layers)]
    return [bytes((index * 31 + i) % 251 for i in range(size)) for index, size in enumerate(sizes)]


def manifest_of(layout: KVLayout, side_kinds: tuple[int, ...] = ()) -> ChunkManifest:
    key = ChunkKey.of(SPACE, range(TOKENS))
    frames = frames_of(layout, len(side_kinds))
    return ChunkManifest.of(SPACE, key, (), TOKENS, layout, Codec.RAW, frames, side_kinds)


class TestGroups:
    def test_a_latent_and_its_rotary_key_are_576_elements_a_token(self) -> None:
        layout = KVLayout.of_groups([mla(60)], "bfloat16")
        assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (60, 1, 512)
        assert layout.head_bytes(Codec.RAW, 1, 0) == layout.frame_bytes(Codec.RAW, 1, 59) == 576 * 2
        assert layout.chunk_bytes(Codec.RAW, 1) == 60 * 576 * 2
        assert layout.digests_bytes == 60 * DIGEST_BYTES

    def test_each_layer_has_its_own_size(self) -> None:
        sizes = [MIXED.frame_bytes(Codec.RAW, 1, layer) for layer in range(MIXED.num_layers)]
        assert sizes == [8 * 24 * 2, 8 * 24 * 2, 2 * 32 * 2, 8 * 24 * 2]
        assert MIXED.frame_runs(Codec.RAW, 1) == ((384, 2), (128, 1), (384, 1))
        assert MIXED.chunk_bytes(Codec.RAW, 1) == sum(sizes)
        assert MIXED.digests_bytes == (8 + 8 + 2 + 8) * DIGEST_BYTES

    def test_quantised_parts_may_differ_in_width(self) -> None:
        layout = KVLayout.of_groups([k_and_v(2, 4, 192, 128)], "bfloat16")
        assert layout.head_bytes(Codec.INT8, 100, 0) == 100 * (192 + 128) + 2 + 192 + 100
        sinks = 4 * (192 + 128) * 2
        assert layout.head_bytes(Codec.INT8_SINKS, 100, 0) == 96 * (192 + 128) + 2 + 192 + 96 + sinks

    @given(
        codec=st.sampled_from(list(Codec)),
        layers=st.integers(1, 4),
        heads=st.sampled_from([1, 2, 8]),
        head_dim=st.sampled_from([8, 64, 128]),
        tokens=st.integers(1, 600),
    )
    def test_one_group_of_k_and_v_is_the_uniform_layout(
        self, codec: Codec, layers: int, heads: int, head_dim: int, tokens: int
    ) -> None:
        plain = KVLayout.uniform(layers, heads, head_dim, "bfloat16")
        parts = [k_and_v(1, heads, head_dim) for _ in range(layers)]
        assert KVLayout.of_groups(parts, "bfloat16") == plain
        assert plain.groups == (k_and_v(layers, heads, head_dim),)
        assert plain.frame_runs(codec, tokens) == ((plain.frame_bytes(codec, tokens), layers),)

    def test_neighbours_of_one_shape_are_joined(self) -> None:
        one = KVLayout.of_groups([mla(1), mla(2), k_and_v(1, 1, 8), mla(1)], "bfloat16")
        assert one.groups == (mla(3), k_and_v(1, 1, 8), mla(1))

    def test_a_layer_must_be_named_where_layers_differ(self) -> None:
        with pytest.raises(AssertionError, match="name one"):
            MIXED.head_bytes(Codec.RAW, 1)

    def test_codecs_encode_no_latents(self) -> None:
        layout = KVLayout.of_groups([mla(2)], "bfloat16")
        with pytest.raises(InvalidField, match="codec: int8 encodes other tensors; use raw for this model"):
            layout.chunk_bytes(Codec.INT8, 10)

    def test_an_input_takes_a_byte_per_element_and_a_gate_two(self) -> None:
        delta_net = LayerGroup(36, 1, (Part(PartKind.INPUT, 8192), Part(PartKind.GATE, 64)))
        convolution = LayerGroup(1, 1, (Part(PartKind.INPUT, 2048),))
        assert delta_net.head_bytes(Codec.RAW, 100, "bfloat16") == 100 * 2 * 8256
        assert delta_net.head_bytes(Codec.INT8, 100, "bfloat16") == 100 * (8192 + 2 * 64) + 2 + 8192
        assert delta_net.head_bytes(Codec.INT8_SINKS, 3, "bfloat16") == 3 * 2 * 8256 + 2 + 8192
        assert convolution.head_bytes(Codec.INT8, 100, "bfloat16") == 100 * 2048 + 2 + 2048
        assert KVLayout.of_groups([delta_net, k_and_v(12, 2, 256)], "bfloat16").holds(Codec.INT8)
        assert not KVLayout.of_groups([delta_net], "bfloat16").holds(Codec.INT4)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: KVLayout.of_groups([], "bfloat16"),
            lambda: LayerGroup(0, 1, (Part(PartKind.KV, 8),)),
            lambda: LayerGroup(1, 1025, (Part(PartKind.KV, 8),)),
            lambda: LayerGroup(1, 1, (Part(PartKind.KV, 65537),)),
            lambda: LayerGroup(1, 1, ()),
            lambda: LayerGroup(1, 1, (Part(PartKind.V, 8), Part(PartKind.K, 8))),
            lambda: LayerGroup(1, 1, (Part(PartKind.K, 8), Part(PartKind.K, 8))),
            lambda: KVLayout.of_groups([k_and_v(1, 8, 8), k_and_v(1, 3, 8)], "bfloat16"),
            lambda: KVLayout((mla(1), mla(1)), "bfloat16"),  # not joined
            lambda: KVLayout.of_groups([mla(1024), k_and_v(1, 1, 8)], "bfloat16"),
        ],
    )
    def test_impossible_groups_are_refused(self, make: Any) -> None:
        with pytest.raises(InvalidField) as raised:
            make()
        assert raised.value.field == "layout.groups"


class TestRanks:
    @given(
        own=st.sampled_from([1, 2, 4, 8, 16]),
        most=st.sampled_from([1, 2, 4, 8, 16]),
        world_size=st.sampled_from([1, 2, 4, 8, 16, 32]),
        data=st.data(),
    )
    def test_a_rank_reads_its_own_heads_of_every_layer(
        self, own: int, most: int, world_size: int, data: st.DataObject
    ) -> None:
        most = max(most, own)
        rank = data.draw(st.integers(0, world_size - 1))
        layout = KVLayout.of_groups([k_and_v(1, most, 8, 16), k_and_v(1, own, 24)], "bfloat16")
        asked = HeadRange.of_rank(layout.num_kv_heads, rank, world_size)
        assert layout.heads_of(0, asked) == asked
        assert layout.heads_of(1, asked) == HeadRange.of_rank(own, rank, world_size)

    def test_byte_ranges_and_digests_follow(self) -> None:
        manifest = manifest_of(MIXED, (SideKind.SCORES,))
        frames = frames_of(MIXED, 1)
        for world_size in (1, 2, 4, 8, 16):
            for rank in range(world_size):
                heads = HeadRange.of_rank(8, rank, world_size)
                for layer, frame in zip(manifest.layers, frames, strict=True):
                    start, stop = manifest.head_range_bytes(heads, layer)
                    assert manifest.frame_is_intact(layer, heads, memoryview(frame)[start:stop])
                    damaged = bytearray(frame[start:stop])
                    damaged[len(damaged) // 2] ^= 1
                    assert not manifest.frame_is_intact(layer, heads, memoryview(damaged))


class TestSideFrames:
    def test_they_come_before_the_layers_in_descending_kinds(self) -> None:
        manifest = manifest_of(KVLayout.uniform(2, 1, 8, "bfloat16"), (9, SideKind.PATCH))
        assert list(manifest.layers) == [-9, -1, 0, 1]
        assert [manifest.place_of(layer) for layer in manifest.layers] == [0, 1, 2, 3]
        assert [manifest.frame_bytes_of(layer) for layer in (-9, -1)] == [TOKENS, TOKENS + 1]
        assert manifest.frame_runs == ((TOKENS, 1), (TOKENS + 1, 1), (2 * 8 * 2 * TOKENS, 2))
        assert manifest.chunk_bytes == 2 * TOKENS + 1 + 2 * 2 * 8 * 2 * TOKENS
        assert manifest.num_frames == 4

    def test_most_chunks_have_none(self) -> None:
        manifest = manifest_of(KVLayout.uniform(2, 1, 8, "bfloat16"))
        assert list(manifest.layers) == [0, 1]
        with pytest.raises(AssertionError):
            manifest.head_digests(-1, HeadRange(0, 1))

    def test_frames_are_counted_with_them(self) -> None:
        manifest = manifest_of(MIXED, (SideKind.SCORES,))
        sizes = [len(frame) for frame in frames_of(MIXED, 1)]
        check_frames(manifest, sizes)
        with pytest.raises(InvalidField, match="4 frames for a layout of 4 layers and 1 side frames"):
            check_frames(manifest, sizes[1:])
        with pytest.raises(InvalidField, match=r"frames\[3\]: has 641 bytes; the manifest needs 640"):
            check_frames(manifest, [*sizes[:3], 641, sizes[4]])


class TestManifest:
    def test_digests_are_numbered_through_the_chunk(self) -> None:
        """The nonces of an encrypted chunk are these numbers."""
        manifest = manifest_of(MIXED, (SideKind.SCORES,))
        firsts = [manifest.head_digests(layer, HeadRange(0, 8)).first for layer in manifest.layers]
        assert firsts == [0, 1, 9, 17, 19]
        assert manifest.head_digests(2, HeadRange(4, 8)).first == 18

    def test_an_encrypted_chunk_is_checked_by_length(self) -> None:
        """Its digests are tags, which only the holder of the key can check."""
        manifest = dataclasses.replace(
            manifest_of(MIXED), key_id="acme/1", salt=bytes(16), digests=bytes(26 * 16)
        )
        frame = memoryview(frames_of(MIXED)[0])
        assert manifest.frame_is_intact(0, HeadRange(0, 8), frame)
        assert not manifest.frame_is_intact(0, HeadRange(0, 8), frame[1:])

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"salt": bytes(16)}, "manifest.salt"),
            ({"key_id": "k"}, "manifest.salt"),
            ({"key_id": "k", "salt": bytes(15)}, "manifest.salt"),
            ({"key_id": "no spaces", "salt": bytes(16)}, "manifest.key_id"),
            ({"side_frames": (SideFrame(1, 5), SideFrame(1, 5))}, "manifest.side_frames"),
            ({"side_frames": (SideFrame(1, 5), SideFrame(2, 5))}, "manifest.side_frames"),
            ({"side_frames": (SideFrame(0, 5),)}, "manifest.side_frames"),
            ({"side_frames": (SideFrame(SIDE_KIND_MAX + 1, 5),)}, "manifest.side_frames"),
            ({"side_frames": (SideFrame(1, 0),)}, "manifest.side_frames"),
            (
                {"side_frames": tuple(SideFrame(kind, 5) for kind in range(SIDE_FRAMES_MAX + 1, 0, -1))},
                "manifest.side_frames",
            ),
            ({"side_frames": (SideFrame(1, 5),)}, "manifest.digests"),
            ({"anchors": tuple(range(ANCHORS_MAX + 1))}, "manifest.anchors"),
            ({"anchors": (5, 5)}, "manifest.anchors"),
            ({"asked_at_s": -1.0}, "manifest.asked_at_s"),
            ({"asked_at_s": float("inf")}, "manifest.asked_at_s"),
            ({"asked_at_s": float("nan")}, "manifest.asked_at_s"),
            ({"context_keys": (ChunkKey(bytes(32)),) * 2}, "manifest.context_keys"),
            (
                {"context_keys": tuple(ChunkKey(bytes([n]) * 32) for n in range(CONTEXT_KEYS_MAX + 1))},
                "manifest.context_keys",
            ),
            ({"codec": Codec.INT8}, "codec"),
        ],
    )
    def test_an_impossible_manifest_is_refused(self, change: dict[str, Any], field: str) -> None:
        with pytest.raises(InvalidField) as raised:
            dataclasses.replace(manifest_of(MIXED), **change)
        assert raised.value.field == field

    def test_a_prepared_chunk_names_its_context(self) -> None:
        space = dataclasses.replace(SPACE, prefix_token_ids=(1,), context_token_ids=(2, 3))
        layout = KVLayout.uniform(2, 1, 8, "bfloat16")
        of = (ChunkKey.of(space, range(TOKENS)), (), TOKENS, layout, Codec.RAW, frames_of(layout))
        assert ChunkManifest.of(space, *of).context_keys == (ChunkKey.of(space.plain, (2, 3)),)
        assert ChunkManifest.of(space.plain, *of).context_keys == ()


def test_part_ids_never_change() -> None:
    assert {kind.name: kind.value for kind in PartKind} == {
        "K": 1,
        "V": 2,
        "KV": 3,
        "LATENT": 4,
        "ROTARY": 5,
        "INPUT": 6,
        "GATE": 7,
    }


def test_ids_of_side_frames_never_change() -> None:
    assert {kind.name: kind.value for kind in SideKind} == {"PATCH": 1, "SCORES": 2}
