"""What a bucket, or who shares it, must not be able to do to a shard."""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kintsugi.core.errors import Unavailable
from kintsugi.core.layout import HeadRange
from kintsugi.store.shard.entry import Residence
from kintsugi.store.shard.erasure import Scope
from kintsugi.store.shard.opening import open_shard
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers import object_tier
from kintsugi.store.shard.tiers.object_tier import ChunkUpload
from tests.contracts.store_contract import make_chunk
from tests.fakes.s3_server import BUCKET, S3Server
from tests.integration.store import test_bucket
from tests.integration.store.test_bucket import (
    ELSEWHERE,
    HANGS,
    A,
    B,
    demote,
    drop_from_ram,
    faults,
    put,
    spec,
    tier_of,
    wait_until,
)

started, deadline_s, s3, shard = (
    test_bucket.started,
    test_bucket.deadline_s,
    test_bucket.s3,
    test_bucket.shard,
)


def evict_from_disk(shard: Shard) -> None:
    """As `demote`, but what is in RAM stays there, and nobody waits for the uploads."""
    (disk,) = shard.disks
    for done in shard.flush_writers():
        done.result(10.0)
    shard._writers[0]._writer.demote(shard.table.evict_from_disk(disk, disk.capacity_bytes))


def keep_versions(s3: S3Server, status: str) -> None:
    s3.client.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": status})


def test_an_erasure_fails_once_versions_are_turned_on(shard: Shard, s3: S3Server) -> None:
    keep_versions(s3, "Enabled")
    try:
        with pytest.raises(Unavailable, match="keeps versions of deleted objects"):
            shard.erase(Scope("acme"), 0.0)
        assert shard.erasures.newest == 1, "later puts of the chunks are refused all the same"
        wait_until(lambda: "keeps versions" in shard.tier_failures().get("bucket", ""))
        assert shard.failure is None
    finally:
        keep_versions(s3, "Suspended")
    wait_until(lambda: not shard.tier_failures())


def test_uploads_end_once_versions_are_turned_on(shard: Shard, s3: S3Server) -> None:
    keep_versions(s3, "Enabled")
    try:
        put(shard, A)
        demote(shard)
        assert tier_of(shard, A) == ""
        assert shard.bucket is not None
        assert not shard.bucket.is_in_reach
        assert faults(shard) == {"failed": 1}
    finally:
        keep_versions(s3, "Suspended")


def test_an_erasure_deletes_more_objects_than_may_wait(
    shard: Shard, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_tier, "DEAD_MAX", 2)
    for number in range(15):
        s3.replace(f"kintsugi/{shard.shard_id}/{number}", b"left behind")
    shard.erase(Scope("acme"), 0.0)
    assert s3.names() == []


def test_a_listing_of_the_same_object_again_and_again_ends(
    shard: Shard, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(shard, A)
    demote(shard)
    bucket = shard.bucket
    assert bucket is not None
    (name,) = bucket._uses_of_name
    monkeypatch.setattr(object_tier, "STRANGERS_MAX", 1000)

    def list_names() -> Any:
        for _ in range(2000):
            yield name
        pytest.fail("it is listed without end")

    monkeypatch.setattr(bucket.bucket, "list_names", list_names)
    with pytest.raises(Unavailable, match="lists more objects than were stored"):
        shard.erase(Scope("other"), 0.0)
    assert tier_of(shard, A) == "bucket"


@HANGS
def test_ram_keeps_a_chunk_until_its_upload_has_ended(s3: S3Server, tmp_path: Path) -> None:
    with closing(open_shard(spec(tmp_path, ram_mib=2))) as shard:
        put(shard, A)
        s3.hang()
        evict_from_disk(shard)
        bucket = shard.bucket
        assert bucket is not None
        assert bucket.staged_bytes
        for start in range(10_000, 20_000, 1000):
            put(shard, make_chunk(range(start, start + 400)))
        wait_until(lambda: not bucket.staged_bytes)
        assert faults(shard)["failed"] == 1
        assert tier_of(shard, A) in ("ram", "ssd0"), "without a bucket it would have been written back"
        shard.table.check()
        s3.resume()


@HANGS
def test_a_durable_put_of_a_pinned_chunk_in_a_bucket_that_is_away(shard: Shard, s3: S3Server) -> None:
    put(shard, A)
    demote(shard)
    shard.pin("acme", [A[0].key], 60.0)
    assert shard.bucket is not None
    s3.hang()
    shard.bucket.give_up("as if it had failed")
    with pytest.raises(Unavailable, match="in a bucket that does not answer"):
        shard.table.make_durable(("acme", A[0].key))
    s3.resume()


def test_no_memory_for_an_upload_costs_the_chunk_alone(
    shard: Shard, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(shard, A)
    drop_from_ram(shard)

    def refuse(*_: object) -> None:
        raise OSError("Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        evict_from_disk(shard)
    assert tier_of(shard, A) == ""
    assert faults(shard) == {"refused": 1}
    assert shard.bucket is not None
    assert shard.bucket.used_bytes == shard.bucket.staged_bytes == 0
    shard.erase(Scope("acme"), 0.0, timeout_s=5.0)  # nobody holds its bytes any more


def test_no_upload_is_kept_in_memory_once_it_has_ended(shard: Shard) -> None:
    for chunk in (A, B):
        put(shard, chunk)
    demote(shard)

    def uploads() -> list[ChunkUpload]:
        gc.collect()
        return [one for one in gc.get_objects() if isinstance(one, ChunkUpload)]

    wait_until(lambda: not uploads())


@HANGS
def test_closing_does_not_wait_for_what_is_to_be_read_from_the_bucket(s3: S3Server, tmp_path: Path) -> None:
    chunks = [make_chunk(range(start, start + 400)) for start in range(50_000, 66_000, 1000)]
    shard = open_shard(spec(tmp_path, ram_mib=32))
    for chunk in chunks:
        put(shard, chunk)
    demote(shard)
    assert shard.bucket is not None
    read = shard.bucket.read
    begun: list[int] = []

    def read_slowly(residence: Residence, first: int, frames: Sequence[memoryview]) -> None:
        begun.append(first)
        time.sleep(0.2)
        read(residence, first, frames)

    shard.bucket.read = read_slowly  # type: ignore[method-assign]
    reading = shard.open("acme", [manifest.key for manifest, _ in chunks], range(3), HeadRange(0, 4))
    wait_until(lambda: bool(begun))
    shard.table.close(reading)
    shard.close()
    assert len(begun) <= 8, "what was begun ends, the rest is lost"


def test_what_was_erased_meanwhile_does_not_come_back_with_the_bucket(s3: S3Server, tmp_path: Path) -> None:
    with closing(open_shard(spec(tmp_path))) as shard:
        put(shard, A)
        demote(shard)
    with closing(open_shard(replace(spec(tmp_path), bucket=ELSEWHERE))) as shard:
        shard.erase(Scope("acme"), 0.0)
    with closing(open_shard(spec(tmp_path))) as shard:
        assert tier_of(shard, A) == ""
        wait_until(lambda: not s3.names())
        put(shard, A)
        demote(shard)
        shard.erase(Scope("acme"), 0.0)
        put(shard, A)
        demote(shard)
    with closing(open_shard(spec(tmp_path))) as shard:
        assert tier_of(shard, A) == "bucket", "it was put after the erasure"
