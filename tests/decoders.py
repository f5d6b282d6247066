"""Everything that decodes bytes which a peer or a disk made, and what each may do with bytes that are wrong.

A decoder here takes any bytes and returns, or fails. It fails where the code under test raises anything but
what it promises, or accepts what it must not. hypothesis drives them in `tests/unit`, a coverage-guided
fuzzer in `scripts/fuzz.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import xxhash
from google.protobuf.message import DecodeError

from kintsugi.core.documents import next_date, seal_document, supersedes
from kintsugi.core.errors import Corrupted, InvalidField, KintsugiError, Unavailable, VersionMismatch
from kintsugi.core.layout import HeadRange
from kintsugi.core.report import Report
from kintsugi.rpc.v1 import catalog_pb2, directory_pb2
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.directory import map_from_wire
from kintsugi.store.client.received import Received
from kintsugi.store.protocol import wire
from kintsugi.store.shard import life
from kintsugi.store.shard.entry import ChunkEntry
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.extents import Strides, stride_of
from kintsugi.store.shard.tiers.home import Home
from kintsugi.store.shard.tiers.lower_tier import (
    _CHECKSUM_BYTES,
    _decode_catalog_record,
    _encode_catalog_record,
    catalog_key,
)
from kintsugi.store.shard.tiers.ram_tier import ChunkPut, PutOptions, RamTier
from tests.contracts.store_contract import make_chunk, make_mixed_chunk, make_report
from tests.fakes.reports import open_report
from tests.file_decoders import FILE_DECODERS, FILE_SEEDS
from tests.front_decoders import FRONT_DECODERS, FRONT_SEEDS

MANIFEST, FRAMES = make_chunk(range(40))
REPORT = make_report("2026-01-01T00:00:00+00:00")
EVERY_HEAD = HeadRange(0, MANIFEST.layout.num_kv_heads)


def put_message(data: bytes) -> None:
    """A message of a put: parsed, or `InvalidField`; its payload is what follows the header."""
    try:
        request, payload = wire.parse_payload(data, pb.PutChunkKVRequest)
    except InvalidField:
        return
    assert bytes(payload) == data[len(data) - len(payload) :]
    if request.HasField("header"):
        _refused_or_sound(request.header.manifest)


def layers_message(data: bytes) -> None:
    """A message of a stream, read as a client does: frames that match their digests, losses, or an error."""
    try:
        response, payload = wire.parse_payload(data, pb.StreamLayersResponse)
        received = Received("fuzz", [MANIFEST], EVERY_HEAD)
        position = 0
        for header in response.frames:
            item = received.verify_frame(header, payload[position : position + header.size_bytes])
            position += header.size_bytes
            frame = getattr(item, "data", None)
            assert frame is None or bytes(frame) == FRAMES[header.layer]
    except (InvalidField, Unavailable):
        return


def manifest(data: bytes) -> None:
    """A manifest of any build: one that fits every limit, or an error of ours."""
    try:
        message = pb.Manifest.FromString(data)
    except DecodeError:
        return
    _refused_or_sound(message)


def _refused_or_sound(message: pb.Manifest) -> None:
    try:
        found = wire.manifest_from_wire(message)
    except (InvalidField, VersionMismatch):
        assert wire.readable_manifest(message) is None
        return
    assert found.frame_bytes <= wire.FRAME_BYTES_MAX
    assert wire.manifest_from_wire(wire.manifest_to_wire(found)) == found


def catalog_value(data: bytes) -> None:
    """A catalog's value under a wrong checksum is nothing; under a right one, frames inside the slab."""
    key = catalog_key(("acme", MANIFEST.key))
    body = data[_CHECKSUM_BYTES:]
    checksum = xxhash.xxh3_128_digest(key + body)
    assert _decode_catalog_record(key, data) is None or data[:_CHECKSUM_BYTES] == checksum
    record = _decode_catalog_record(key, checksum + body)
    if record is None:
        return
    tier = _disk_tier()
    try:
        entry = tier._entry_of(record)
    except VersionMismatch:
        return
    if entry is None:
        return
    (residence,) = entry.copies
    assert len(residence.offsets) == entry.manifest.num_frames
    assert residence.size_bytes >= entry.manifest.chunk_bytes
    assert all(offset + size <= tier.capacity_bytes for offset, size in residence.places())
    assert not tier._occupy([entry])


@cache
def _disk_tier() -> DiskTier:
    folder = Path(tempfile.mkdtemp(prefix="kintsugi-decoders-"))
    return DiskTier("ssd0", Home(folder / "tier"), 1 << 20)


def check_frames(data: bytes) -> None:
    """A put's payload: in the arena only if it is the frames that the manifest announced."""
    ram = RamTier(1 << 20)
    residence = ram.allocate(MANIFEST)
    assert residence is not None
    life.acquire(residence)
    put = ChunkPut(ChunkEntry(MANIFEST), residence, ram, "ram", PutOptions())
    size = MANIFEST.frame_bytes
    cut = data[0] * 256 % (size + 1) if data else 0
    blob = b"".join(FRAMES)
    payload = blob[:cut] + data[1:] + blob[cut + len(data[1:]) :] if data else b""
    try:
        put.write(data[-1] % 4 if data else 0, memoryview(payload))
    except (InvalidField, Corrupted):
        assert not put.complete
    else:
        assert payload == b"".join(FRAMES[: len(payload) // size])
    finally:
        life.condemn(residence)
        life.release(residence)
        ram.arena.close()


def shard_map(data: bytes) -> None:
    """A map of shards: sound, or `InvalidField`."""
    try:
        found = map_from_wire(directory_pb2.ShardMap.FromString(data))
    except (DecodeError, InvalidField):
        return
    assert len(found.owners(MANIFEST.key)) <= found.replicas


def keys(data: bytes) -> None:
    """A list of keys cut anywhere: all of 32 bytes, or an error of ours."""
    size = data[0] if data else 0
    parts = [data[start : start + size] for start in range(1, len(data), size or 1)] if size else [data]
    try:
        found = wire.keys_from_wire(parts)
    except KintsugiError:
        return
    assert all(len(key.digest) == wire.DIGEST_BYTES for key in found)


def report(data: bytes) -> None:
    """A report under a wrong digest and under a right one: read or refused, and a later one supersedes it."""
    documents = [data]
    with contextlib.suppress(ValueError, RecursionError):
        values = json.loads(data)
        if isinstance(values, dict):
            values.pop("digest", None)
            documents.append(seal_document(values))
    now = datetime(2026, 1, 2, tzinfo=UTC)
    for document in documents:
        with contextlib.suppress(Corrupted, VersionMismatch):
            Report.from_bytes(document)
        later = dataclasses.replace(REPORT, created=next_date(now, document))
        assert supersedes(later.to_bytes(), document)


DECODERS: dict[str, Callable[[bytes], None]] = {
    decoder.__name__: decoder
    for decoder in (
        put_message,
        layers_message,
        manifest,
        catalog_value,
        check_frames,
        shard_map,
        keys,
        report,
        *FRONT_DECODERS,
        *FILE_DECODERS,
    )
}


def seeds(name: str) -> list[bytes]:
    """Well-formed input of a decoder, for a fuzzer to start from."""
    message = wire.manifest_to_wire(MANIFEST)
    header = pb.PutChunkKVRequest(header=pb.PutHeader(manifest=message, recompute_ms=1.0))
    frames = [pb.FrameHeader(chunk=0, layer=layer, size_bytes=len(FRAMES[0])) for layer in range(3)]
    lost = pb.FrameHeader(chunk=0, layer=1, lost_reason="absent")
    record = catalog_pb2.CatalogRecord(
        manifest=message,
        extents=[catalog_pb2.CatalogExtent(offset=0, size_bytes=3 * stride_of(MANIFEST.frame_bytes))],
        charged_bytes=MANIFEST.chunk_bytes,
    )
    manifest, _ = make_mixed_chunk(range(40))
    mixed = catalog_pb2.CatalogRecord(
        manifest=wire.manifest_to_wire(manifest),
        extents=[catalog_pb2.CatalogExtent(offset=0, size_bytes=Strides.of(manifest.frame_runs).size_bytes)],
        charged_bytes=manifest.chunk_bytes,
    )
    shards = directory_pb2.ShardMap(
        version=1, replicas=1, shards=[directory_pb2.ShardAddress(shard_id="a", address="b:1")], shares=[0.5]
    )
    found = {
        "put_message": [
            header.SerializeToString(),
            wire.with_payload(pb.PutChunkKVRequest(first_layer=1).SerializeToString(), [b"payload"]),
        ],
        "layers_message": [
            wire.with_payload(pb.StreamLayersResponse(frames=frames[:1]).SerializeToString(), FRAMES[:1]),
            pb.StreamLayersResponse(frames=[lost, *frames]).SerializeToString(),
        ],
        "manifest": [message.SerializeToString(), mixed.manifest.SerializeToString()],
        "catalog_value": [
            _encode_catalog_record(catalog_key(("acme", MANIFEST.key)), each) for each in (record, mixed)
        ],
        "shard_map": [shards.SerializeToString()],
        "keys": [bytes([32]) + bytes(64)],
        "report": [REPORT.to_bytes(), open_report().to_bytes()],
    }
    return found.get(name) or FRONT_SEEDS.get(name) or FILE_SEEDS.get(name, [b"\0"])
