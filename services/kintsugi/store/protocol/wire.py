"""The store's wire format: protobuf messages to and from core's types, and messages that end in a payload.

Cost of a payload message: the sender joins a header of about ten bytes per frame and views of the frames,
with one copy that gRPC needs anyway. The receiver parses only the header and takes a view of the rest.
protobuf would copy every frame once more on either side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kintsugi.core.errors import InvalidField, VersionMismatch
from kintsugi.core.layout import (
    FORMAT,
    LAYERS_MAX,
    ChunkManifest,
    Codec,
    KVLayout,
    LayerGroup,
    Part,
    PartKind,
    SideFrame,
)
from kintsugi.core.spaces import ChunkKey, ModelFingerprint
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.protocol.interface import Anchored, ShardUse, TierUse

Header = TypeVar("Header", bound=Message)
Kind = TypeVar("Kind", PartKind, Codec)

PROTOCOL_VERSION = 1
PROTOCOL_METADATA = "kintsugi-protocol"

SERVICE = "kintsugi.rpc.v1.ChunkStore"

MESSAGE_BYTES_TARGET = 2 << 20
"""Small frames are sent together up to this size. From 1 to 8 MiB the cost is the same; 256 KiB doubles the
CPU time."""
FRAME_BYTES_MAX = 64 << 20
"""A frame is sent in one message, which both sides hold in memory."""
DIGESTS_BYTES_MAX = 1 << 20
"""Maximum size of the digests of one manifest, which a shard keeps in memory: 128 layers of 512 heads."""
MESSAGE_BYTES_MAX = FRAME_BYTES_MAX + (1 << 20)

KEYS_MAX = 4096
"""Maximum number of keys per call."""
ANCHORS_MAX = 1 << 17
"""Maximum number of anchors per call. A call contains all anchors of a prompt, because two of them find a
chunk."""
LIST_MAX = 10_000
RESPONSE_BYTES_MAX = 32 << 20
"""Maximum size of the manifests in one response. A page of a listing ends there, and a larger lookup is
refused."""
LOOKUP_KEYS_BATCH = 256
"""Keys per lookup of this client: a manifest of a large model has 128 KiB."""

DIGEST_BYTES = 32
_PART_KINDS = {kind: pb.PartKind.Value(f"PART_KIND_{kind.name}") for kind in PartKind}
ENTRY_BYTES = 4096
"""Bytes counted for a chunk's entry. With few digests, 3.5 KB in memory and 1.1 KB in a catalog were
measured."""
FIELD_BYTES = 192
"""Bytes counted for each anchor, side frame or context key."""
GROUP_BYTES = 1024
"""Bytes counted for each group of layers, as if no other chunk had the layout."""
_GROUP_BYTES_MAX = 64
_FIELD_BYTES_MAX = 34
"""Maximum size on the wire of an anchor, a side frame's size or a context key."""
_PAYLOAD_TAG = 15 << 3 | 2
_BYTES_WIRE_TYPE, _VARINT_WIRE_TYPE = 2, 0

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)
PING_S, PONG_S = 30.0, 10.0
PING_OPTIONS = (
    ("grpc.keepalive_time_ms", int(PING_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(PONG_S * 1000)),
    # Without it, gRPC waits 60 s for the answer, whatever the keepalive's timeout is.
    ("grpc.http2.ping_timeout_ms", int(PONG_S * 1000)),
)
"""A peer with running calls is disconnected if it does not answer a ping."""
RECONNECT_S_MAX = 5.0
"""Longest wait between two attempts to connect. With gRPC's default of 120 s, calls would fail long after the
server has returned."""
CLIENT_IDLE_S = 20.0
"""Time without a call after which a client closes its connection. It is shorter than the server's
(`grpc_server.IDLE_S`), because gRPC's client prints a line if the server closes the connection."""
CONNECTION_OPTIONS = (
    ("grpc.max_reconnect_backoff_ms", int(RECONNECT_S_MAX * 1000)),
    ("grpc.client_idle_timeout_ms", int(CLIENT_IDLE_S * 1000)),
)
CLIENT_OPTIONS = (
    *CHANNEL_OPTIONS,
    *CONNECTION_OPTIONS,
    # A client buffers a few messages, so that a shard need not wait until the client has verified the
    # previous message. A shard does not, because it would need this memory for every client that puts.
    ("grpc.http2.lookahead_bytes", 4 * MESSAGE_BYTES_TARGET),
    # Otherwise a client would wait forever for a directory whose host has disappeared.
    *PING_OPTIONS,
    ("grpc.http2.max_pings_without_data", 0),
)


def manifest_to_wire(manifest: ChunkManifest) -> pb.Manifest:
    layout = manifest.layout
    return pb.Manifest(
        format_version=FORMAT,
        key=manifest.key.digest,
        space_digest=manifest.space_digest,
        fingerprint=manifest.fingerprint.digest,
        namespace=manifest.namespace,
        num_tokens=manifest.num_tokens,
        layout=pb.Layout(dtype=layout.dtype, groups=map(_group_to_wire, layout.groups)),
        codec=int(manifest.codec),
        anchors=manifest.anchors,
        digests=manifest.digests,
        side_frames=[pb.SideFrame(kind=kind, size_bytes=size) for kind, size in manifest.side_frames],
        key_id=manifest.key_id,
        salt=manifest.salt,
        context_keys=[key.digest for key in manifest.context_keys],
        asked_at_s=manifest.asked_at_s,
    )


def manifest_bytes(manifest: ChunkManifest) -> int:
    """Return the approximate size of a manifest on the wire, without the hundred bytes that every manifest
    has."""
    fields = len(manifest.anchors) + len(manifest.side_frames) + len(manifest.context_keys)
    return len(manifest.digests) + _GROUP_BYTES_MAX * len(manifest.layout.groups) + _FIELD_BYTES_MAX * fields


def memory_bytes(manifest: ChunkManifest) -> int:
    """Return an upper bound of the memory that a shard uses for a chunk apart from its frames. A record in a
    catalog takes no more than this on disk."""
    fields = len(manifest.anchors) + len(manifest.context_keys) + len(manifest.side_frames)
    return (
        ENTRY_BYTES
        + len(manifest.digests) * 17 // 16
        + FIELD_BYTES * fields
        + GROUP_BYTES * len(manifest.layout.groups)
    )


def anchored_to_wire(chunks: Anchored) -> pb.Anchored:
    keys = [key.digest for key in chunks.keys]
    return pb.Anchored(first=chunks.first, last=chunks.last, num_tokens=chunks.num_tokens, keys=keys)


def anchored_from_wire(chunks: pb.Anchored) -> Anchored:
    """Raises `InvalidField` for a malformed key."""
    return Anchored(chunks.first, chunks.last, chunks.num_tokens, tuple(map(ChunkKey, chunks.keys)))


def _group_to_wire(group: LayerGroup) -> pb.LayerGroup:
    parts = [pb.Part(kind=_PART_KINDS[part.kind], width=part.width) for part in group.parts]
    return pb.LayerGroup(layers=group.layers, heads=group.heads, parts=parts)


def manifest_from_wire(wire: pb.Manifest) -> ChunkManifest:
    """Raises `VersionMismatch` for a format of another build, `InvalidField` for anything malformed."""
    if wire.format_version != FORMAT:
        raise VersionMismatch(
            f"manifest.format_version: {wire.format_version} is not {FORMAT}, the one that this build reads"
        )
    for name in ("space_digest", "fingerprint"):
        size = len(getattr(wire, name))
        if size != DIGEST_BYTES:
            raise InvalidField(f"manifest.{name}", f"has {size} bytes; a digest has {DIGEST_BYTES}")
    manifest = ChunkManifest(
        key=ChunkKey(wire.key),
        space_digest=wire.space_digest,
        fingerprint=ModelFingerprint(wire.fingerprint),
        namespace=wire.namespace,
        num_tokens=wire.num_tokens,
        layout=_layout(wire.layout.SerializeToString()),
        codec=_member(Codec, "manifest.codec", wire.codec),
        anchors=tuple(wire.anchors),
        digests=wire.digests,
        key_id=wire.key_id,
        salt=wire.salt,
        side_frames=tuple(SideFrame(frame.kind, frame.size_bytes) for frame in wire.side_frames),
        context_keys=tuple(map(ChunkKey, wire.context_keys)),
        asked_at_s=wire.asked_at_s,
    )
    if len(manifest.digests) > DIGESTS_BYTES_MAX:
        raise InvalidField(
            "manifest.digests", f"has {len(manifest.digests)} bytes; at most {DIGESTS_BYTES_MAX} are carried"
        )
    if manifest.frame_bytes > FRAME_BYTES_MAX:
        raise InvalidField(
            "manifest.num_tokens",
            f"{manifest.num_tokens} tokens make frames of {manifest.frame_bytes} bytes; "
            f"at most {FRAME_BYTES_MAX} are carried, so make chunks shorter",
        )
    return manifest


@lru_cache(maxsize=256)
def _layout(serialized: bytes) -> KVLayout:
    """Parse a layout. The result is cached, because a catalog of 100,000 chunks has only a few layouts.
    Raises `InvalidField`."""
    layout = pb.Layout.FromString(serialized)
    if len(layout.groups) > LAYERS_MAX:
        raise InvalidField(
            "layout.groups", f"{len(layout.groups)} groups; at most {LAYERS_MAX} layers are stored"
        )
    groups = [LayerGroup(group.layers, group.heads, _parts(group)) for group in layout.groups]
    return KVLayout(tuple(groups), layout.dtype)


def _parts(group: pb.LayerGroup) -> tuple[Part, ...]:
    return tuple(Part(_member(PartKind, "layout.groups", part.kind), part.width) for part in group.parts)


def _member(kind: type[Kind], field: str, value: int) -> Kind:
    """Return an enum's member. Raises `InvalidField` for an unknown value."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(f"{one.value} ({one.name.lower()})" for one in kind)
        raise InvalidField(field, f"{value} is unknown; this build knows {known}") from None


def readable_manifest(wire: pb.Manifest) -> ChunkManifest | None:
    """Return the manifest, or None, which is a miss, if a build wrote it that this one cannot read."""
    try:
        return manifest_from_wire(wire)
    except (VersionMismatch, InvalidField):
        return None


def shard_use(address: str, stats: pb.StatsResponse) -> ShardUse:
    """Return the usage of a shard that answered."""
    names = [one.name for one in fields(TierUse)]
    tiers = tuple(TierUse(*(getattr(tier, name) for name in names)) for tier in stats.tiers)
    counts = (stats.chunks, stats.hits, stats.misses, stats.quarantined)
    return ShardUse(address, True, stats.draining, *counts, tiers)


def keys_from_wire(keys: Sequence[bytes]) -> list[ChunkKey]:
    """Return the keys in a message. Raises `InvalidField` for too many keys or a key of the wrong length."""
    if len(keys) > KEYS_MAX:
        raise InvalidField("keys", f"{len(keys)} keys; at most {KEYS_MAX} are answered per call")
    return [ChunkKey(key) for key in keys]


def with_payload(header: bytes, payload: Sequence[memoryview | bytes]) -> bytes:
    """Return a serialised message that ends with the joined parts of `payload`. Cost: one copy of the
    parts."""
    size = sum(len(part) for part in payload)
    return b"".join((header, bytes((_PAYLOAD_TAG,)), _varint(size), *payload))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def split_payload(message: bytes) -> tuple[bytes, memoryview]:
    """Return the header of a message that may end with a payload, and a view of the payload, which may be
    empty.

    Cost: a loop over the header's top-level fields. Raises `InvalidField` for bytes that are not a message.
    """
    view = memoryview(message)
    position = 0
    while position < len(view):
        start = position
        tag, position = _read_varint(view, position)
        if tag & 7 == _VARINT_WIRE_TYPE:
            _, position = _read_varint(view, position)
            continue
        if tag & 7 != _BYTES_WIRE_TYPE:
            raise InvalidField("message", f"wire type {tag & 7} at byte {start} is not one of this service's")
        size, position = _read_varint(view, position)
        if position + size > len(view):
            raise InvalidField("message", f"is cut: byte {start} announces {size} bytes")
        if tag == _PAYLOAD_TAG:
            if position + size != len(view):
                raise InvalidField("message", "the payload must be its last field")
            return message[:start], view[position:]
        position += size
    return message, view[:0]


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if position >= len(view):
            break
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise InvalidField("message", f"has a malformed number at byte {position}")


def parse_payload(message: bytes, kind: type[Header]) -> tuple[Header, memoryview]:
    """Parse the header of a message that ends with a payload, and return a view of the payload. Raises
    `InvalidField`."""
    header, payload = split_payload(message)
    try:
        return kind.FromString(header), payload
    except DecodeError as error:
        raise InvalidField("message", f"is not a {kind.__name__} ({error})") from None
