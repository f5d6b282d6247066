"""The catalog: what it reads back, and what it makes of bytes that it did not write."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kintsugi.core.spaces import ChunkKey
from kintsugi.rpc.v1 import catalog_pb2 as pb
from kintsugi.store.protocol import wire
from kintsugi.store.shard.tiers.lower_tier import (
    Catalog,
    _decode_catalog_record,
    _encode_catalog_record,
    catalog_key,
)
from tests.contracts.store_contract import make_chunk

MANIFEST, _ = make_chunk(range(40))
KEY = catalog_key(("acme", MANIFEST.key))
RECORD = pb.CatalogRecord(
    manifest=wire.manifest_to_wire(MANIFEST), extents=[pb.CatalogExtent(offset=0, size_bytes=3 * 12288)]
)


def test_records_survive_and_are_forgotten(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog")
    catalog.apply([(("acme", MANIFEST.key), RECORD)])
    assert list(catalog.records()) == [(KEY, RECORD)]
    catalog.close()
    catalog = Catalog(tmp_path / "catalog")
    assert list(catalog.records()) == [(KEY, RECORD)]
    catalog.apply((), [KEY, b"absent"])
    assert list(catalog.records()) == []
    catalog.close()


def test_the_map_grows_before_it_is_full(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog")
    record = pb.CatalogRecord(manifest=wire.manifest_to_wire(MANIFEST))
    record.manifest.digests = bytes(1 << 20)
    for batch in range(10):
        keys = [ChunkKey((100 * batch + i).to_bytes(32, "big")) for i in range(10)]
        catalog.apply([(("acme", key), record) for key in keys])
    assert sum(1 for _ in catalog.records()) == 100
    catalog.close()


@given(st.integers(0, 8 * len(_encode_catalog_record(KEY, RECORD)) - 1))
def test_any_flipped_bit_is_found(bit: int) -> None:
    value = bytearray(_encode_catalog_record(KEY, RECORD))
    value[bit // 8] ^= 1 << bit % 8
    assert _decode_catalog_record(KEY, bytes(value)) is None


def test_a_record_under_anothers_key_is_none() -> None:
    other = catalog_key(("rival", MANIFEST.key))
    assert _decode_catalog_record(KEY, _encode_catalog_record(KEY, RECORD)) == RECORD
    assert _decode_catalog_record(other, _encode_catalog_record(KEY, RECORD)) is None
    assert _decode_catalog_record(other, _encode_catalog_record(other, RECORD)) is None


def test_a_lifetime_changes_and_nothing_else(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog")
    address = ("acme", MANIFEST.key)
    absent = ("acme", ChunkKey(bytes(32)))
    catalog.apply([(address, RECORD)])
    catalog.extend([(address, 7.0), (absent, 8.0)])
    changed = pb.CatalogRecord()
    changed.CopyFrom(RECORD)
    changed.expires_at_s = 7.0
    assert list(catalog.records()) == [(KEY, changed)]
    catalog.close()
