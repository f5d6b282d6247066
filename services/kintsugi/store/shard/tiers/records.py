"""Catalog records: a chunk with what is kept of it, and where its frames lie, in each format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kintsugi.core.errors import InvalidField, VersionMismatch
from kintsugi.core.layout import PLAIN_FORMAT
from kintsugi.rpc.v1 import catalog_pb2 as pb
from kintsugi.rpc.v1.store_pb2 import Manifest
from kintsugi.store.protocol import wire
from kintsugi.store.shard.entry import ChunkEntry, CopyTier, Residence
from kintsugi.store.shard.tiers.extents import BLOCK_BYTES, Extent, Strides
from kintsugi.store.shard.tiers.uses import Use


def extents_to_record(
    manifest: Manifest, extents: Sequence[Extent], strides: Strides
) -> tuple[int, list[pb.CatalogExtent]]:
    """`stride` and `extents` of a record, as the chunk's format has them."""
    if manifest.format_version != PLAIN_FORMAT:
        return 0, [pb.CatalogExtent(offset=offset, size_bytes=size) for offset, size in extents]
    ((stride, _),) = strides.runs
    return stride, [pb.CatalogExtent(offset=offset, frames=size // stride) for offset, size in extents]


def extents_of_record(record: pb.CatalogRecord, strides: Strides) -> tuple[Extent, ...] | None:
    """Where a record says that a chunk's frames lie; None where frames like these cannot lie so."""
    if record.manifest.format_version != PLAIN_FORMAT:
        extents = tuple(Extent(e.offset, e.size_bytes) for e in record.extents)
    elif record.stride == strides.runs[0].stride:
        extents = tuple(Extent(e.offset, e.frames * record.stride) for e in record.extents)
    else:
        return None
    for offset, size in extents:
        if not size or offset % BLOCK_BYTES:
            return None
    return extents if strides.fill(extents) else None


def record_of(entry: ChunkEntry, residence: Residence) -> pb.CatalogRecord:
    """The record of a chunk whose frames are at `residence`."""
    manifest = wire.manifest_to_wire(entry.manifest)
    stride, extents = extents_to_record(manifest, residence.extents, residence.strides)
    return pb.CatalogRecord(
        manifest=manifest,
        stride=stride,
        extents=extents,
        expires_at_s=entry.expires_at_s,
        recompute_ms=entry.recompute_ms,
    )


def entry_of_record(
    record: pb.CatalogRecord, use: Use, tier: CopyTier, folder: Path
) -> tuple[ChunkEntry, Residence] | None:
    """The chunk of a record, and its copy in the record's tier. None where frames like its cannot lie as it
    says. Raises `VersionMismatch` for one that this version does not understand: its checksum is right, so it
    is as another version wrote it. `folder`: the tier's, for the message."""
    try:
        manifest = wire.manifest_from_wire(record.manifest)
    except InvalidField as error:
        raise VersionMismatch(
            f"{folder} holds a chunk that this version of kintsugi does not know ({error}). "
            "No chunk was deleted: use the version that wrote it, or name another folder"
        ) from error
    strides = Strides.of(manifest.frame_runs)
    extents = extents_of_record(record, strides)
    if extents is None:
        return None
    residence = Residence(tier, (manifest.namespace, manifest.key), extents, strides)
    entry = ChunkEntry(
        manifest,
        record.expires_at_s,
        record.recompute_ms,
        disk=residence,
        uses=use.times,
        used_at_s=use.last_s,
    )
    return entry, residence
