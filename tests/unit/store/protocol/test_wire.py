"""Wire decoders: what goes in comes out, and nothing hostile gets further."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.core.errors import InvalidField, KintsugiError, VersionMismatch
from kintsugi.core.layout import (
    ANCHORS_MAX,
    CONTEXT_KEYS_MAX,
    SIDE_FRAMES_MAX,
    ChunkManifest,
    Codec,
    KVLayout,
    LayerGroup,
    Part,
    PartKind,
)
from kintsugi.core.spaces import ChunkKey, ChunkSpace
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.protocol import wire
from tests.contracts.store_contract import (
    FINGERPRINT,
    Chunk,
    make_chunk,
    make_encrypted_chunk,
    make_mixed_chunk,
)


def test_a_manifest_survives_the_wire() -> None:
    for tokens in (range(40), range(5)):
        manifest, _ = make_chunk(tokens)
        assert wire.manifest_from_wire(wire.manifest_to_wire(manifest)) == manifest


@pytest.mark.parametrize("make", [make_mixed_chunk, make_encrypted_chunk])
def test_a_manifest_of_every_shape_survives_the_wire(make: Callable[[range], Chunk]) -> None:
    manifest, _ = make(range(40))
    message = wire.manifest_to_wire(manifest)
    assert message.format_version == 1
    assert wire.manifest_from_wire(pb.Manifest.FromString(message.SerializeToString())) == manifest


def test_no_manifest_is_much_larger_than_is_counted() -> None:
    """Responses are bounded by what is counted."""
    widest = [LayerGroup(1, 1, tuple(Part(kind, width) for kind in PartKind)) for width in (1023, 1024)]
    layout = KVLayout.of_groups(widest * 512, "bfloat16")
    kinds = tuple(range(200, 200 - SIDE_FRAMES_MAX, -1))
    frames = [bytes(16)] * len(kinds)
    frames += [bytes(layout.frame_bytes(Codec.RAW, 1, layer)) for layer in range(1024)]
    anchors = tuple(range(ANCHORS_MAX))
    context_keys = tuple(ChunkKey(bytes([number]) * 32) for number in range(CONTEXT_KEYS_MAX))
    space = ChunkSpace(FINGERPRINT, "n" * 128)
    manifest = ChunkManifest.of(space, ChunkKey.of(space, [1]), anchors, 1, layout, Codec.RAW, frames, kinds)
    manifest = replace(manifest, key_id="k" * 128, salt=bytes(16), context_keys=context_keys)
    for each in (manifest, make_chunk(range(40))[0]):
        counted, size = wire.manifest_bytes(each), wire.manifest_to_wire(each).ByteSize()
        assert counted / 2 < size < counted + 600


def test_groups_that_cannot_be_are_refused() -> None:
    manifest, _ = make_mixed_chunk(range(40))
    unknown, many, none = (wire.manifest_to_wire(manifest) for _ in range(3))
    unknown.layout.groups[0].parts[0].kind = 77  # type: ignore[assignment]
    many.layout.groups.extend([many.layout.groups[0]] * 1024)
    del none.layout.groups[:]
    for message, problem in (
        (unknown, "layout.groups: 77 is unknown"),
        (many, "at most 1024"),
        (none, "at least one"),
    ):
        with pytest.raises(InvalidField, match=problem):
            wire.manifest_from_wire(message)


def test_digests_of_a_model_that_cannot_be_are_refused() -> None:
    message = wire.manifest_to_wire(make_chunk(range(5))[0])
    message.layout.groups[0].layers, message.layout.groups[0].heads = 1024, 65
    message.digests = bytes(1024 * 65 * 16)
    with pytest.raises(InvalidField, match=str(wire.DIGESTS_BYTES_MAX)):
        wire.manifest_from_wire(message)


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(-(2**31), 2**31 - 1), st.booleans())
def test_a_payload_is_appended_and_split_off_again(parts: list[bytes], layer: int, commit: bool) -> None:
    request = pb.PutChunkKVRequest(first_layer=layer, commit=commit)
    message = wire.with_payload(request.SerializeToString(), parts)
    header, payload = wire.parse_payload(message, pb.PutChunkKVRequest)
    assert (header, bytes(payload)) == (request, b"".join(parts))
    assert pb.PutChunkKVRequest.FromString(message).payload == b"".join(parts)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("format_version", 0, VersionMismatch),
        ("format_version", 2, VersionMismatch),
        ("codec", 77, InvalidField),
        ("key", b"short", InvalidField),
        ("namespace", "", InvalidField),
        ("num_tokens", 0, InvalidField),
        ("digests", b"", InvalidField),
        ("fingerprint", b"x", InvalidField),
    ],
)
def test_a_wrong_manifest_says_what_is_wrong(field: str, value: object, error: type[KintsugiError]) -> None:
    manifest = wire.manifest_to_wire(make_chunk(range(40))[0])
    setattr(manifest, field, value)
    with pytest.raises(error, match=field):
        wire.manifest_from_wire(manifest)
    assert wire.readable_manifest(manifest) is None


def test_a_frame_too_large_to_carry_is_refused_before_anything_is_allocated() -> None:
    manifest = wire.manifest_to_wire(make_chunk(range(40))[0])
    manifest.num_tokens = 1 << 20
    for part in manifest.layout.groups[0].parts:
        part.width = 1024
    with pytest.raises(InvalidField, match="shorter"):
        wire.manifest_from_wire(manifest)
