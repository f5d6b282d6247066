"""Going back to the version before format 3."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import blake3
import pytest

from kintsugi.core.errors import Corrupted, NotFound, Unavailable, VersionMismatch
from kintsugi.core.layout import FORMAT, PLAIN_FORMAT
from kintsugi.rpc.v1 import catalog_pb2 as pb
from kintsugi.store.protocol import wire
from kintsugi.store.shard.opening import open_shard
from kintsugi.store.shard.tiers import migration
from kintsugi.store.shard.tiers.migration import Migration, migrate_to_plain, plain_record
from tests.contracts.store_contract import make_chunk
from tests.integration.store.recorded_folder import KEPT, RECORDED, shard_spec, unpack
from tests.integration.store.test_formats import digests_below, rewrite
from tests.integration.store.test_mixed_versions import make_prior_chunk
from tests.integration.store.test_recorded_folders import held

BLOCK = 4096
PLAIN, PRIOR, *OTHERS = KEPT[FORMAT]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A shard's folder with chunks of both formats."""
    unpack(RECORDED / f"format-{FORMAT}.tar.gz", tmp_path)
    return tmp_path


def test_what_format_2_cannot_hold_is_dropped_and_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "_BATCH", 2)
    dropped = sum(recipe.made()[0].chunk_bytes for recipe in OTHERS)
    expected = Migration(kept=1, without_priors=1, dropped=3, dropped_bytes=dropped)
    before = digests_below(folder / "disk")
    assert migrate_to_plain(folder / "disk", dry_run=True) == expected
    assert digests_below(folder / "disk").items() >= {
        (path, digest) for path, digest in before.items() if path.name in ("data.mdb", "slab")
    }
    assert migrate_to_plain(folder / "disk") == expected
    assert migrate_to_plain(folder / "disk") == Migration(2, 0, 0, 0)


def test_the_version_before_finds_what_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate_to_plain(folder / "disk")
    monkeypatch.setattr("kintsugi.store.shard.tiers.catalog.FORMATS", (PLAIN_FORMAT,))
    monkeypatch.setattr("kintsugi.store.protocol.wire.FORMATS", (PLAIN_FORMAT,))
    records: list[pb.CatalogRecord] = []
    rewrite(folder / "disk", records.append)
    for record in records:
        assert record.stride
        assert not any(extent.size_bytes for extent in record.extents)
        assert not record.manifest.priors
    (plain, frames), (prior, prior_frames) = PLAIN.made(), PRIOR.made()
    assert {chunk["key"]: chunk["frames_blake3"] for chunk in held(folder)["chunks"]} == {
        plain.key.hex: [blake3.blake3(frame).hexdigest() for frame in frames],
        prior.key.hex: [blake3.blake3(frame).hexdigest() for frame in prior_frames[1:]],
    }


def test_a_prior_frame_in_an_extent_of_its_own_is_left_out() -> None:
    manifest, _ = make_prior_chunk()
    layers = [pb.CatalogExtent(offset=(5 + 9 * n) * BLOCK, size_bytes=3 * BLOCK) for n in range(3)]
    for extents in (
        [pb.CatalogExtent(offset=BLOCK, size_bytes=BLOCK), *layers],
        [pb.CatalogExtent(offset=4 * BLOCK, size_bytes=4 * BLOCK), *layers[1:]],
    ):
        record = pb.CatalogRecord(
            manifest=wire.manifest_to_wire(manifest), extents=extents, expires_at_s=7.0, recompute_ms=8.0
        )
        plain = plain_record(record, manifest)
        assert plain is not None
        assert plain.stride == 3 * BLOCK
        assert [(extent.offset // BLOCK, extent.frames) for extent in plain.extents] == [
            (5, 1),
            (14, 1),
            (23, 1),
        ]
        assert wire.manifest_from_wire(plain.manifest) == manifest.as_plain() == make_chunk(range(40))[0]
        assert (plain.expires_at_s, plain.recompute_ms) == (7.0, 8.0)


def test_only_the_folder_of_a_stopped_shard_is_migrated(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="holds no SSD tier"):
        migrate_to_plain(tmp_path / "elsewhere")
    with closing(open_shard(shard_spec(folder))), pytest.raises(Unavailable, match="in use"):
        migrate_to_plain(folder / "disk")

    def recode(record: pb.CatalogRecord) -> None:
        record.manifest.codec = 99

    rewrite(folder / "disk", recode)
    with pytest.raises(VersionMismatch, match=r"codec: 99 is unknown.*nothing was changed"):
        migrate_to_plain(folder / "disk")
    catalog = folder / "disk/kintsugi-tier/catalog/data.mdb"
    catalog.write_bytes(b"no catalog" * 1000)
    with pytest.raises(Corrupted, match="cannot be read"):
        migrate_to_plain(folder / "disk")
