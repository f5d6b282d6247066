"""Folders that earlier versions wrote: this version finds every chunk in them, byte for byte."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kintsugi.core.layout import FORMATS, ChunkManifest, HeadRange
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
    make,
    shard_spec,
    unpack,
)

ARCHIVES = sorted(RECORDED.glob("format-*.tar.gz"))


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
        return {"shard_id": shard.shard_id, "report": report.decode(), "chunks": chunks}


def _chunks(shard: Shard, store: GrpcStore, namespace: str) -> list[dict[str, Any]]:
    """In the order of the recipe: its `n`th chunk was used `n` times."""
    found = []
    for entry in sorted(shard.page(namespace, 100, None), key=lambda entry: entry.uses):
        manifest, uses = entry.manifest, entry.uses
        heads = HeadRange(0, manifest.layout.num_kv_heads)
        if manifest.is_encrypted:  # which no client without its key is given
            frames = _stored_frames(shard, manifest)
        else:
            items = read_all(store, [manifest.key], heads, manifest.layers, namespace)
            frames = [data for _, _, data in items if data is not None]
        found.append(contents(manifest, frames, uses, entry.recompute_ms, entry.expires_at_s))
    return found


def _stored_frames(shard: Shard, manifest: ChunkManifest) -> list[bytes]:
    shard.lookup(manifest.namespace, [manifest.key])  # a use, as a client's would be
    opened = shard.table.open_copies((manifest.namespace, manifest.key))
    assert opened is not None
    held = opened[1].chunks[0]
    assert held is not None
    frames = [bytes(held.frame(layer) if held.in_ram else held.read(layer)) for layer in manifest.layers]
    shard.close_reading(opened[1])
    return frames


def recorded(version: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RECORDED / f"format-{version}.json").read_text())
    return document


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_a_folder_of_an_earlier_version_opens_with_every_chunk(archive: Path, tmp_path: Path) -> None:
    unpack(archive, tmp_path)
    expected = json.loads(archive.with_name(archive.name.replace(".tar.gz", ".json")).read_text())
    assert held(tmp_path) == expected
    again = held(tmp_path)  # its chunks have been used meanwhile
    assert [chunk["frames_blake3"] for chunk in again["chunks"]] == [
        chunk["frames_blake3"] for chunk in expected["chunks"]
    ]


@pytest.mark.parametrize("version", FORMATS)
def test_every_format_is_recorded(version: int, tmp_path: Path) -> None:
    """And the recipe still makes what was recorded, the same records for the same chunks."""
    assert RECORDED / f"format-{version}.tar.gz" in ARCHIVES
    unpack(RECORDED / f"format-{version}.tar.gz", tmp_path / "recorded")
    made = make(tmp_path / "made", version)
    assert made == recorded(version)
    assert records(tmp_path / "made") == records(tmp_path / "recorded")
    assert held(tmp_path / "made") == made


def records(folder: Path) -> dict[bytes, bytes]:
    """What the catalog of a folder holds."""
    with (
        lmdb.open(str(folder / "disk/kintsugi-tier/catalog"), readonly=True, lock=False) as catalog,
        catalog.begin() as transaction,
    ):
        return dict(transaction.cursor())
