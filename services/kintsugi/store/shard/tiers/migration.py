"""Makes the folder of an SSD tier readable for the version before format 3. No shard may have it open.

Only the catalog changes: a prior frame is left out of its chunk's extents, and what format 2 cannot hold is
forgotten. Memory: every record that changes, as when a shard opens the folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import lmdb

from kintsugi.core.errors import Corrupted, InvalidField, NotFound, VersionMismatch
from kintsugi.core.layout import PLAIN_FORMAT, ChunkManifest
from kintsugi.rpc.v1 import catalog_pb2 as pb
from kintsugi.store.protocol import wire
from kintsugi.store.shard.entry import Address
from kintsugi.store.shard.tiers.catalog import Catalog, check_format
from kintsugi.store.shard.tiers.extents import Extent, Strides
from kintsugi.store.shard.tiers.home import TIER_FOLDER, Home
from kintsugi.store.shard.tiers.records import extents_of_record, extents_to_record

_Item = TypeVar("_Item")

_BATCH = 1024
"""Records changed in one transaction. A crash between two leaves a folder that can be migrated again."""


@dataclass(frozen=True)
class Migration:
    """What becomes of a folder's chunks."""

    kept: int
    """Chunks that are in format 2 already."""
    without_priors: int
    """Chunks that lose their prior frame alone."""
    dropped: int
    dropped_bytes: int
    """Bytes of the chunks that format 2 cannot hold."""


def migrate_to_plain(folder: Path, dry_run: bool = False) -> Migration:
    """Leave only chunks of format 2 in the tier below `folder`. `dry_run`: change nothing.

    Raises `NotFound` where there is no tier, `Unavailable` while a shard has it open, `VersionMismatch` for
    chunks that this version does not read, `Corrupted` for a catalog that cannot be read.
    """
    path = folder / TIER_FOLDER
    if not (path / "catalog").is_dir():
        raise NotFound(f"{folder} holds no SSD tier; name a folder as `kintsugi store serve --ssd` does")
    with closing(Home(path)):
        try:
            check_format(path / "catalog")
            with closing(Catalog(path / "catalog")) as catalog:
                return _migrate(catalog, dry_run)
        except lmdb.Error as error:
            raise Corrupted(
                f"{path}: its catalog cannot be read ({error}); empty it: its chunks are computed again"
            ) from error


def _migrate(catalog: Catalog, dry_run: bool) -> Migration:
    kept = dropped_bytes = 0
    puts: list[tuple[Address, pb.CatalogRecord]] = []
    deletes: list[bytes] = []
    for key, record in catalog.records():
        if record is None:  # damaged: a shard drops and counts it
            continue
        if record.manifest.format_version == PLAIN_FORMAT:
            kept += 1
            continue
        manifest = _manifest_of(record)
        plain = plain_record(record, manifest)
        if plain is None:
            deletes.append(key)
            dropped_bytes += manifest.chunk_bytes
        else:
            puts.append(((manifest.namespace, manifest.key), plain))
    if not dry_run:
        for keys in _in_batches(deletes):
            catalog.apply((), keys)
        for records in _in_batches(puts):
            catalog.apply(records)
    return Migration(kept, len(puts), len(deletes), dropped_bytes)


def _in_batches(items: list[_Item]) -> Iterator[list[_Item]]:
    return (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))


def _manifest_of(record: pb.CatalogRecord) -> ChunkManifest:
    try:
        return wire.manifest_from_wire(record.manifest)
    except InvalidField as error:
        raise VersionMismatch(
            f"a chunk is of a later version ({error}); nothing was changed: use the version that wrote it"
        ) from error


def plain_record(record: pb.CatalogRecord, manifest: ChunkManifest) -> pb.CatalogRecord | None:
    """The record in format 2, which names the layers where they are; None where format 2 cannot hold them."""
    plain = manifest.as_plain()
    strides = Strides.of(manifest.frame_runs)
    extents = extents_of_record(record, strides)
    if plain is None or extents is None:
        return None
    if manifest.priors:
        prior_bytes = strides.each[0]
        (offset, size), *others = extents
        first = [Extent(offset + prior_bytes, size - prior_bytes)] if size > prior_bytes else []
        extents = (*first, *others)
    message = wire.manifest_to_wire(plain)
    stride, named = extents_to_record(message, extents, Strides.of(plain.frame_runs))
    return pb.CatalogRecord(
        manifest=message,
        stride=stride,
        extents=named,
        expires_at_s=record.expires_at_s,
        recompute_ms=record.recompute_ms,
    )
