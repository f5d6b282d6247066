"""What leaves a full disk while RAM holds it: where it is after a drain, a restart and a crash."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from kintsugi.store.shard.opening import open_shard
from kintsugi.store.shard.tiers.ram_tier import PutOptions
from tests.integration.store.test_disk_tiers import many, put, spec


@pytest.mark.parametrize("ssd_mib", [(4, 16), (4,)])
def test_what_leaves_a_disk_for_a_chunk_that_is_drained_does_not_stay_in_ram_alone(
    tmp_path: Path, ssd_mib: tuple[int, ...]
) -> None:
    """A full tier gives up copies of chunks that RAM also holds: a drain moves them on, or counts them as
    evicted where there is no slower tier."""
    chunks = many(16)
    on_disk, in_ram = chunks[:12], chunks[12:]
    settings = spec(tmp_path, ram_mib=8, ssd_mib=ssd_mib)
    with closing(open_shard(settings)) as shard:
        for manifest, frames in on_disk:
            put(shard, manifest, frames)
        for manifest, frames in in_ram:
            begun = shard.begin_put(manifest, PutOptions(recompute_ms=1e-6), wait_s=10.0)
            assert begun is not None
            begun.write(0, memoryview(b"".join(frames)))
            shard.commit(begun)
        before = set(shard.table.entries())
        assert all(entry.ram is not None for entry in before)
        assert shard.drain(10.0) == 0
        assert shard.disks[0].evictions
        kept = set(shard.table.entries())
        assert len(kept) == len(before) if len(ssd_mib) == 2 else 8 <= len(kept) < len(before)
    with closing(open_shard(settings)) as shard:
        assert {entry.address for entry in shard.table.entries()} == {entry.address for entry in kept}


def test_what_a_full_disk_gives_up_moves_down_while_ram_holds_it(tmp_path: Path) -> None:
    """RAM is lost in a crash, and what was acknowledged must not go with it."""
    chunks = many(24)
    with closing(open_shard(spec(tmp_path / "shard", ram_mib=16, ssd_mib=(3, 16)))) as shard:
        for manifest, frames in chunks:
            put(shard, manifest, frames)
        assert shard.disks[0].evictions > 0
        assert shard.ram.evictions == 0
        shutil.copytree(tmp_path / "shard", tmp_path / "crashed")
    with closing(open_shard(spec(tmp_path / "crashed", ssd_mib=(3, 16)))) as shard:
        keys = [manifest.key for manifest, _ in chunks]
        assert shard.verify("acme", keys) == dict.fromkeys(keys, True)
