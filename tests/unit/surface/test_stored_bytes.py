"""What older builds stored is found and read: golden vectors of everything that is written to disk.

A change here loses stores and indexes: bump the format's version and read both. Chunk keys, spaces and
anchors have theirs in `tests/unit/core/test_spaces.py`, SQLite's tables in `snapshots/databases.json`.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import blake3
import lmdb
import pytest
import torch

from kintsugi.core.evidence import Deviation, Tally
from kintsugi.core.layout import ChunkManifest, Codec, KVLayout, LayerGroup, Part, PartKind, SideKind
from kintsugi.core.plan import Selection
from kintsugi.core.report import Binding, Cell, Closing, Opening, Report, ReportEntry, ServedBlend
from kintsugi.core.report import ReportPart as QualityPart
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, anchors_of, token_bytes
from kintsugi.fusor.codecs import decode_frame, encode_frame
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.precompute.ledger_chunks import PendingChunk, pack_tokens
from kintsugi.rpc.v1 import catalog_pb2 as pb
from kintsugi.rpc.v1 import store_pb2
from kintsugi.store.protocol import wire
from kintsugi.store.shard.reports import Reports
from kintsugi.store.shard.tiers.home import Home
from kintsugi.store.shard.tiers.lower_tier import Catalog

SPACE = ChunkSpace(ModelFingerprint.of({"weights": "abc"}), "acme")
TOKENS = list(range(40))
KEY = ChunkKey.of(SPACE, TOKENS)
LAYOUT = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=2, dtype="bfloat16")
MANIFEST = ChunkManifest.of(SPACE, KEY, anchors_of(TOKENS), len(TOKENS), LAYOUT, Codec.RAW, [bytes(320)])
RECORD = pb.CatalogRecord(
    manifest=wire.manifest_to_wire(MANIFEST),
    extents=[pb.CatalogExtent(offset=8192, size_bytes=4096)],
    expires_at_s=1.5,
    recompute_ms=2.5,
    charged_bytes=320,
)
BINDING = Binding.of(SPACE.fingerprint, (0,), "raw")
TEXT = "The quick brown fox jumps over the lazy dog again."


def digest(data: bytes | memoryview) -> str:
    return blake3.blake3(bytes(data)).hexdigest()[:32]


def rows_of(folder: Path) -> dict[str, bytes]:
    """Keys, hexadecimal, and values of an LMDB folder."""
    with lmdb.open(str(folder), readonly=True) as environment, environment.begin() as transaction:
        return {bytes(key).hex(): bytes(value) for key, value in transaction.cursor()}


def test_manifest() -> None:
    data = wire.manifest_to_wire(MANIFEST).SerializeToString(deterministic=True)
    assert data.hex() == (
        "08011220c790502b79928a6650accf5079439f452b9e44ceb1990d0093c3e080dae1dac91a20f29341407014"
        "3d6abd438c08d0d2cdc4e3be29d8568cb02e576cc17a0e564c7e22207f2c8f8af05b545511c82df09ba368dc"
        "9dda658f6d4bc88e8b6d2977cd4874792a0461636d6530283a1c0a0862666c6f617431361210080110011a04"
        "080110021a040802100240014a186d2ee672839d503415f5f1d44ad188322d0662e165efa79f52101e876e21"
        "af74efa05db942e18c2a13f6"
    )
    assert wire.manifest_from_wire(store_pb2.Manifest.FromString(data)) == MANIFEST


def test_manifest_of_every_field() -> None:
    groups = [
        LayerGroup(1, 2, (Part(PartKind.KV, 4),)),
        LayerGroup(1, 1, (Part(PartKind.LATENT, 8),)),
    ]
    layout = KVLayout.of_groups(groups, "bfloat16")
    frames = [bytes(40), bytes(640), bytes(640)]
    of = (SPACE, KEY, anchors_of(TOKENS), len(TOKENS), layout, Codec.RAW, frames, (SideKind.SCORES,))
    context = (ChunkKey(bytes(range(32))),)
    made = ChunkManifest.of(*of, asked_at_s=1.5)
    manifest = replace(made, key_id="acme/1", salt=bytes(range(16)), context_keys=context)
    data = wire.manifest_to_wire(manifest).SerializeToString(deterministic=True)
    assert data.hex() == (
        "08011220c790502b79928a6650accf5079439f452b9e44ceb1990d0093c3e080dae1dac91a20f29341407014"
        "3d6abd438c08d0d2cdc4e3be29d8568cb02e576cc17a0e564c7e22207f2c8f8af05b545511c82df09ba368dc"
        "9dda658f6d4bc88e8b6d2977cd4874792a0461636d6530283a220a0862666c6f61743136120a080110021a04"
        "08031004120a080110011a040804100840014a186d2ee672839d503415f5f1d44ad188322d0662e165efa79f"
        "5240ce62b44e257dbdc8114ddfda264d"
        "5aa91e876e21af74efa05db942e18c2a13f61e876e21af74efa05db942e18c2a13f64b33be84d11f6584ed82"
        "700d9ce6e10c5a0408021028620661636d652f316a10000102030405060708090a0b0c0d0e0f710000000000"
        "00f83f7a2000010203"
        "0405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    )
    read = wire.manifest_from_wire(store_pb2.Manifest.FromString(data))
    assert (read, read.asked_at_s) == (manifest, 1.5)


def test_catalog_record(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.apply([(("acme", KEY), RECORD)])
    catalog.close()
    ((name, value),) = rows_of(tmp_path).items()
    assert (name, digest(value)) == (f"{b'acme'.hex()}00{KEY.hex}", "199d86038dbb81e75adf7c5f4b0c9133")


@pytest.mark.parametrize(
    ("codec", "frame"),
    [
        (
            Codec.RAW,
            (
                "40c130c100c1e0c080c040c00000803f8040a0400041104180c06bc02bc015c0abbf80bf0000ab3eab3fd53f"
                "2b40404020c110c1c0c0a0c000c080bf00404040c040e0402041304155c040c000c0d5bf2bbfabbe2b3f803f"
                "0040154055406b40"
            ),
        ),
        (
            Codec.INT8,
            (
                "8383acb0d6de000b2a395466848e849484a3007c657e707d7473f1ede1ccac6cb6d1839ab5c7e7f519224b50"
                "7d7d828e849984c2537c6c7d727d7472e9edf6e1acc1e6fc"
            ),
        ),
        (
            Codec.FP8,
            (
                "fefef9f9f1ef00627175797bfefdfefcfefa007e7b7e7c7e7271f7f3e5d1b171bdd7fefbf8f5ebe26b6f7879"
                "7e7efefdfefcfef6797e7c7e7d7e7271eef3ddc591a5cbe2"
            ),
        ),
        (
            Codec.INT8_SINKS,
            (
                "3e457c7d657e707d7472e1e5d6f140c130c100c1e0c080c040c00000803f80c06bc02bc015c0abbf80bf0000"
                "ab3e4b507d7d6c7d727d7472e9ede6fc20c110c1c0c0a0c000c080bf0040404055c040c000c0d5bf2bbfabbe"
                "2b3f803f"
            ),
        ),
        (
            Codec.FP8_SINKS,
            (
                "76777e7e7b7e7c7e7270e5eaddf740c130c100c1e0c080c040c00000803f80c06bc02bc015c0abbf80bf0000"
                "ab3e78797e7e7c7e7d7e7271eef3cbe220c110c1c0c0a0c000c080bf0040404055c040c000c0d5bf2bbfabbe"
                "2b3f803f"
            ),
        ),
    ],
)
def test_frame(codec: Codec, frame: str) -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=2, dtype="bfloat16")
    key = torch.arange(-12, 12).reshape(6, 2, 2).to(torch.bfloat16)
    encoded = encode_frame(key, key / 3, codec)
    assert encoded.hex() == frame
    loaded, _ = decode_frame(memoryview(bytes.fromhex(frame)), layout, codec, 6)
    torch.testing.assert_close(loaded, key, atol=0.5, rtol=1 / 16)


def test_report() -> None:
    cell, selection = Cell("discovered", 2), Selection(0.15)
    tally = Tally.of(Deviation(0.02, 0.125), 0.25, [100, 200], wrong=1)
    part = QualityPart(
        "writer",
        "kintsugi 1",
        "2026-01-02T03:04:05+00:00",
        (ReportEntry(cell, "source", 3, 1, selection, tally),),
        (Closing("wrong", "2026-01-01T00:00:00+00:00", "source"),),
        (Opening(cell, "", selection, "2026-01-02T00:00:00+00:00"),),
        (ServedBlend("source", (0.25, 0.0, 0.0), (0.125, 0.02, 0.02)),),
        7,
        ("earlier",),
    )
    report = Report(BINDING, "2026-01-02T03:04:05.000+00:00", (part,))
    assert digest(report.to_bytes()) == "ddd5d716dbea97f4947b3b62b0ac80ae"
    assert BINDING.report_name == "quality/raw/03f79bf01f1b022ca63c907c5e471678/1"


def test_report_in_a_store(tmp_path: Path) -> None:
    reports = Reports(tmp_path)
    reports.put(SPACE.fingerprint, "calibration/raw", b"{}")
    reports.close()
    rows = {name: value.hex() for name, value in rows_of(tmp_path).items()}
    assert rows == {
        f"{SPACE.fingerprint.hex}{b'calibration/raw'.hex()}": "dc7048f8f8747f561349cde127705c167b7d"
    }


def test_identity_of_a_shard(tmp_path: Path) -> None:
    Home(tmp_path, "9f0c").close()
    assert json.loads((tmp_path / "kintsugi.json").read_text()) == {"format_version": 1, "shard_id": "9f0c"}


def test_known_chunk(tmp_path: Path) -> None:
    known = KnownChunks(tmp_path)
    known.remember("acme", KEY, TOKENS, TEXT)
    known.close()
    with closing(sqlite3.connect(tmp_path / "chunks.sqlite")) as database:
        ((namespace, key, tokens, text),) = database.execute("SELECT namespace, key, tokens, text FROM chunk")
    assert (namespace, key) == ("acme", KEY.digest)
    assert tokens == bytes.fromhex("86e5cc5682551229") + token_bytes(TOKENS)
    assert text == bytes.fromhex("a6840e139f66581b3200000015ca29a70e96df5c46a3db1f34584342a0bb80dd305b89d9")


def test_tokens_in_the_ledger() -> None:
    stored = bytes.fromhex("780163640002460686ff4000000a1503ff")
    assert PendingChunk(KEY, stored, 3).token_ids == [1, 256, 2**32 - 1]
    assert PendingChunk(KEY, pack_tokens(bytes.fromhex("0100000000010000ffffffff")), 3).token_ids == [
        1,
        256,
        2**32 - 1,
    ]
