"""Catalog records: a chunk with what is kept of it, and where its frames lie."""

from __future__ import annotations

from pathlib import Path

from kintsugi.core.errors import InvalidField, VersionMismatch
from kintsugi.rpc.v1 import catalog_pb2 as pb
from kintsugi.store.protocol import wire
from kintsugi.store.shard.entry import ChunkEntry, CopyTier, Residence
from kintsugi.store.shard.tiers.extents import BLOCK_BYTES, Extent, Strides
from kintsugi.store.shard.tiers.uses import Use


def extents_of_record(record: pb.CatalogRecord, strides: Strides) -> tuple[Extent, ...] | None:
    """Where a record says that a chunk's frames lie; None where frames like these cannot lie so."""
    extents = tuple(Extent(extent.offset, extent.size_bytes) for extent in record.extents)
    if any(not size or offset % BLOCK_BYTES for offset, size in extents):
        return None
    return extents if strides.fill(extents) else None


def record_of(entry: ChunkEntry, residence: Residence) -> pb.CatalogRecord:
    """The record of a chunk whose frames are at `residence`."""
    return pb.CatalogRecord(
        manifest=wire.manifest_to_wire(entry.manifest),
        extents=[pb.CatalogExtent(offset=offset, size_bytes=size) for offset, size in residence.extents],
        expires_at_s=entry.expires_at_s,
        recompute_ms=entry.recompute_ms,
        charged_bytes=entry.charged_bytes,
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
    if extents is None or record.charged_bytes < manifest.chunk_bytes:
        return None
    residence = Residence(tier, (manifest.namespace, manifest.key), extents, strides)
    entry = ChunkEntry(
        manifest,
        record.expires_at_s,
        record.recompute_ms,
        record.charged_bytes,
        disk=residence,
        uses=use.times,
        used_at_s=use.last_s,
    )
    return entry, residence
