"""How a catalog record says where the frames of a chunk lie, in each format."""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.core.layout import PLAIN_FORMAT
from kintsugi.rpc.v1 import catalog_pb2 as pb
from kintsugi.rpc.v1.store_pb2 import Manifest
from kintsugi.store.shard.tiers.extents import BLOCK_BYTES, Extent, Strides


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
