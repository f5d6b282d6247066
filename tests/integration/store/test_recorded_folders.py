"""The folder that the first version wrote: this version finds every chunk in it, byte for byte."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb

from kintsugi.core.layout import FORMAT, ChunkManifest, HeadRange
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.shard.opening import open_shard
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from tests.contracts.store_contract import read_all
from tests.integration.store.recorded_folder import (
    FINGERPRINT,
    RECORDED,
    REPORT_NAME,
    contents,
    in_order,
    make,
    shard_spec,
    unpack,
)

ARCHIVE = RECORDED / f"format-{FORMAT}.tar.gz"


def held(folder: Path) -> dict[str, Any]:
    """What a shard finds in its folder, every chunk read as a client reads it."""
    with (
        closing(open_shard(shard_spec(folder))) as shard,
        ShardServer(shard, "127.0.0.1:0") as server,
        closing(GrpcStore(server.address)) as store,
    ):
        chunks = [chunk for space in ("acme", "rival/team") for chunk in _chunks(shard, store, space)]
        assert len(chunks) == len(shard)
        assert shard.table.counters.quarantined == 0
        report = shard.reports.get(FINGERPRINT, REPORT_NAME)
        assert report is not None
        return {"shard_id": shard.shard_id, "report": report.decode(), "chunks": in_order(chunks)}


def _chunks(shard: Shard, store: GrpcStore, namespace: str) -> list[dict[str, Any]]:
    found = []
    for entry in shard.page(namespace, 100, None):
        manifest = entry.manifest
        heads = HeadRange(0, manifest.layout.num_kv_heads)
        if manifest.is_encrypted:  # which no client without its key is given
            frames = _stored_frames(shard, manifest)
        else:
            every_frame = range(manifest.layers[0], manifest.layout.num_layers)
            items = read_all(store, [manifest.key], heads, every_frame, namespace)
            frames = [data for _, _, data in items if data is not None]
        found.append(contents(manifest, frames, entry.recompute_ms, entry.expires_at_s))
    return found


def _stored_frames(shard: Shard, manifest: ChunkManifest) -> list[bytes]:
    opened = shard.table.open_copies((manifest.namespace, manifest.key))
    assert opened is not None
    held = opened[1].chunks[0]
    assert held is not None
    frames = [bytes(held.frame(layer) if held.in_ram else held.read(layer)) for layer in manifest.layers]
    shard.table.close(opened[1])
    return frames


def test_the_recorded_folder_opens_with_every_chunk(tmp_path: Path) -> None:
    unpack(ARCHIVE, tmp_path)
    expected = json.loads((RECORDED / f"format-{FORMAT}.json").read_text())
    assert held(tmp_path) == expected
    again = held(tmp_path)  # its chunks have been used meanwhile
    assert [chunk["frames_blake3"] for chunk in again["chunks"]] == [
        chunk["frames_blake3"] for chunk in expected["chunks"]
    ]


def test_the_recipe_still_makes_what_was_recorded(tmp_path: Path) -> None:
    """The same records for the same chunks."""
    unpack(ARCHIVE, tmp_path / "recorded")
    made = make(tmp_path / "made")
    assert made == json.loads((RECORDED / f"format-{FORMAT}.json").read_text())
    assert records(tmp_path / "made") == records(tmp_path / "recorded")
    assert held(tmp_path / "made") == made


def records(folder: Path) -> dict[bytes, bytes]:
    """What the catalog of a folder holds."""
    with (
        lmdb.open(str(folder / "disk/kintsugi-tier/catalog"), readonly=True, lock=False) as catalog,
        catalog.begin() as transaction,
    ):
        return dict(transaction.cursor())
