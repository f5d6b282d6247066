"""A shard with a bucket below its SSD tier: a real S3 server, and one that forgets, lies or hangs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.namespaces import GIB, NamespaceLimits, NamespaceRules
from kintsugi.core.spaces import ChunkSpace
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.key_file import KeyFile, create_keys
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.protocol import breaker
from kintsugi.store.protocol.interface import Buffer
from kintsugi.store.shard import life, opening
from kintsugi.store.shard.entry import charge_of
from kintsugi.store.shard.erasure import Scope
from kintsugi.store.shard.exporter import ShardMetrics
from kintsugi.store.shard.opening import BucketSpec, ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.server import ServerOptions, ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.bucket import BucketUrl, S3Bucket
from kintsugi.store.shard.tiers.ram_tier import PutOptions
from kintsugi.store.shard.workers import bucket_writer
from kintsugi.store.shard.workers.keeper import Keeper
from tests import waiting
from tests.contracts.store_contract import FINGERPRINT, StoreContract, make_chunk, read_all
from tests.fakes.s3_server import BUCKET, REGION, S3Server

pytest.importorskip("obstore", reason="needs the extra s3: make setup")

MIB = 1 << 20
PATIENCE_S = 20.0
"""Longest wait for a thread, and deadline of calls to a bucket that does not hang."""
DEADLINE_S = 2.0
HANGS = pytest.mark.parametrize("deadline_s", [DEADLINE_S])
ELSEWHERE = BucketSpec(BucketUrl(BUCKET, "elsewhere"), 64 * MIB)
Chunk = tuple[ChunkManifest, list[bytes]]


@pytest.fixture(scope="module")
def started() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def deadline_s() -> float:
    return PATIENCE_S


def reach_bucket(patch: pytest.MonkeyPatch, server: S3Server, deadline_s: float) -> None:
    """Have shards that open from now on find the server's bucket, give its calls the deadline, and try again
    soon."""
    patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    patch.setenv("AWS_REGION", REGION)
    patch.setenv("AWS_ACCESS_KEY_ID", "id")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    patch.setattr(opening, "S3Bucket", partial(S3Bucket, read_s_max=deadline_s, write_s_max=deadline_s))
    patch.setattr(breaker, "OPEN_S", 0.2)
    patch.setattr(bucket_writer, "TURN_S", 0.05)


@pytest.fixture
def s3(started: S3Server, monkeypatch: pytest.MonkeyPatch, deadline_s: float) -> Iterator[S3Server]:
    """An empty bucket, which the environment says how to reach."""
    reach_bucket(monkeypatch, started, deadline_s)
    started.forget()
    yield started
    started.resume()


def spec(folder: Path, bucket_mib: float = 64, ram_mib: float = 8, ssd_mib: float = 16) -> ShardSpec:
    return ShardSpec(
        int(ram_mib * MIB),
        folder / "data",
        (SsdSpec(folder / "disk", int(ssd_mib * MIB)),),
        bucket=BucketSpec(BucketUrl(BUCKET, "kintsugi"), int(bucket_mib * MIB)),
    )


@pytest.fixture
def shard(s3: S3Server, tmp_path: Path) -> Iterator[Shard]:
    shard = open_shard(spec(tmp_path))
    yield shard
    s3.resume()
    shard.close()


def put(shard: Shard, chunk: Chunk, durable: bool = True, **options: Any) -> None:
    manifest, frames = chunk
    begun = shard.begin_put(manifest, PutOptions(durable=durable, **options), wait_s=10.0)
    assert begun is not None
    for layer, frame in zip(manifest.layers, frames, strict=True):
        begun.write(layer, memoryview(frame))
    committed = shard.commit(begun)
    if committed.durable is not None:
        committed.durable.result(10.0)


def demote(shard: Shard) -> None:
    """As if RAM and SSD were full: everything moves to the bucket, as far as that takes it."""
    (disk,) = shard.disks
    assert shard.bucket_writer is not None
    for done in shard.flush_writers():
        done.result(10.0)
    drop_from_ram(shard)
    evictions = shard.table.evict_from_disk(disk, disk.capacity_bytes)
    shard._writers[0]._writer.demote(evictions)
    assert shard.bucket_writer.await_uploads(PATIENCE_S) == 0
    shard.table.check()


def drop_from_ram(shard: Shard) -> None:
    with shard.table._lock:
        for entry in shard.table.entries():
            is_at_rest = entry.writing is None and not entry.is_loading
            if entry.ram is not None and entry.disk is not None and is_at_rest:
                life.drop_copy(entry, entry.ram)


def serve(shard: Shard) -> ShardServer:
    """Nothing scrubs: a chunk that is being verified stays where it is, whatever `demote` asks."""
    return ShardServer(shard, "127.0.0.1:0", ServerOptions(scrub_bytes_per_s=0))


wait_until = partial(waiting.wait_until, within_s=PATIENCE_S)


def tier_of(shard: Shard, chunk: Chunk) -> str:
    (held,) = shard.peek(chunk[0].namespace, [chunk[0].key])
    return "" if held is None else held.tier_name


def frames_of(store: GrpcStore, *chunks: Chunk) -> list[list[bytes] | None]:
    """The frames of each chunk as they are read; None for one that is lost."""
    found: list[list[bytes] | None] = [[] for _ in chunks]
    keys = [manifest.key for manifest, _ in chunks]
    for index, _, frame in read_all(store, keys, namespace=chunks[0][0].namespace):
        so_far = found[index]
        if frame is None:
            found[index] = None
        elif so_far is not None:
            so_far.append(frame)
    return found


def faults(shard: Shard) -> dict[str, float]:
    registry = ShardMetrics(shard, {}).registry
    names = ("missing", "damaged", "failed", "refused")
    values = {
        name: registry.get_sample_value(
            "kintsugi_store_bucket_faults_total", {"tier": "bucket", "fault": name}
        )
        for name in names
    }
    return {name: value for name, value in values.items() if value}


A, B, C = (make_chunk(range(start, start + 400)) for start in (0, 1000, 2000))


class _Demoting(GrpcStore):
    """Has each chunk leave RAM and SSD once it is put."""

    def __init__(self, address: str, shard: Shard) -> None:
        super().__init__(address)
        self._shard = shard

    def put(
        self,
        manifest: ChunkManifest,
        frames: Sequence[Buffer],
        recompute_ms: float = 0.0,
        ttl_s: float = 0.0,
    ) -> bool:
        inserted = super().put(manifest, frames, recompute_ms, ttl_s)
        demote(self._shard)
        return inserted


class TestBucketStore(StoreContract):
    @pytest.fixture
    def store(self, shard: Shard) -> Iterator[GrpcStore]:
        with serve(shard) as server, closing(_Demoting(server.address, shard)) as store:
            yield store


@pytest.fixture
def store(shard: Shard) -> Iterator[GrpcStore]:
    with (
        serve(shard) as server,
        closing(GrpcStore(server.address, GrpcOptions(ack="durable"))) as store,
    ):
        yield store


# Demotion and reading


def test_what_leaves_the_disk_is_read_from_the_bucket(shard: Shard, store: GrpcStore, s3: S3Server) -> None:
    for chunk in (A, B):
        put(shard, chunk)
    demote(shard)
    assert tier_of(shard, A) == tier_of(shard, B) == "bucket"
    (found, _) = store.find("acme", [A[0].key, B[0].key])
    assert found is not None
    assert found.source.tier == "bucket", "the engine measures each source, and decides by that"
    assert len(s3.names()) == 2
    assert frames_of(store, A, B) == [A[1], B[1]]
    assert tier_of(shard, A) == "ram", "it was promoted"
    assert faults(shard) == {}


def test_full_tiers_move_chunks_down_by_themselves(s3: S3Server, tmp_path: Path) -> None:
    chunks = [make_chunk(range(start, start + 400)) for start in range(0, 40_000, 1000)]
    with closing(open_shard(spec(tmp_path, ram_mib=1, ssd_mib=2))) as shard:
        for chunk in chunks:
            put(shard, chunk)
        assert shard.bucket_writer is not None
        assert shard.bucket_writer.await_uploads(PATIENCE_S) == 0
        assert shard.bucket is not None
        assert shard.bucket.chunks > len(chunks) / 2
        assert len(shard) == len(chunks), "none was lost"
        with (
            serve(shard) as server,
            closing(GrpcStore(server.address)) as store,
        ):
            assert [frames_of(store, chunk) for chunk in chunks] == [[frames] for _, frames in chunks]
        shard.table.check()


def test_the_bucket_sees_neither_names_nor_texts(shard: Shard, s3: S3Server, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    create_keys(path, "acme")
    with (
        serve(shard) as server,
        closing(GrpcStore(server.address, GrpcOptions(ack="durable", keys=KeyFile(path)))) as store,
    ):
        space = ChunkSpace(FINGERPRINT, "acme", name_key=store.name_key("acme"))
        manifest, frames = make_chunk(range(400), space)
        assert store.put(manifest, frames)
        demote(shard)
        (name,) = s3.names()
        body = s3.read(name)
        prefix, shard_id, _ = name.split("/")
        assert (prefix, shard_id) == ("kintsugi", shard.shard_id)
        assert "acme" not in name
        assert manifest.key.hex not in name
        assert not any(frame[:64] in body for frame in frames)
        assert frames_of(store, (manifest, frames)) == [frames]
        drop_from_ram(shard)
        s3.replace(name, bytes(len(body)))
        assert frames_of(store, (manifest, frames)) == [None], "its tag tells"
        assert tier_of(shard, (manifest, frames)) == ""
    wait_until(lambda: not s3.names())


@HANGS
def test_a_put_takes_the_place_of_a_chunk_in_a_bucket_that_is_away(
    shard: Shard, store: GrpcStore, s3: S3Server
) -> None:
    put(shard, A, ttl_s=3600.0)
    demote(shard)
    (entry,) = shard.table.entries()
    expires_at_s = entry.expires_at_s
    assert not store.put(*A, ttl_s=600.0)
    assert tier_of(shard, A) == "bucket", "one that is there stays as it is"
    assert shard.bucket is not None
    shard.bucket.give_up("as if it had failed")
    s3.hang()
    assert store.tiers("acme", [A[0].key]) == [None]
    store.put(*A, ttl_s=600.0)
    (entry,) = shard.table.entries()
    assert entry.disk is not None
    assert entry.disk.tier.name == "ssd0"
    assert entry.expires_at_s == expires_at_s, "no lifetime gets shorter"
    s3.resume()
    wait_until(lambda: not s3.names())


def test_a_chunk_that_is_read_often_moves_to_the_disk(shard: Shard, store: GrpcStore) -> None:
    put(shard, A)
    demote(shard)
    for _ in range(4):
        store.lookup("acme", [A[0].key])
    assert frames_of(store, A) == [A[1]]
    wait_until(lambda: shard.bucket is not None and not shard.bucket.chunks)
    drop_from_ram(shard)
    assert tier_of(shard, A) == "ssd0"


def test_a_full_bucket_gives_up_what_was_used_least(s3: S3Server, tmp_path: Path) -> None:
    size = sum(map(len, A[1]))
    with closing(open_shard(spec(tmp_path, bucket_mib=2.5 * size / MIB))) as shard:
        for chunk in (A, B, C):
            put(shard, chunk)
            demote(shard)
        assert [tier_of(shard, chunk) for chunk in (A, B, C)] == ["", "bucket", "bucket"]
        assert shard.bucket is not None
        assert shard.bucket.used_bytes <= shard.bucket.capacity_bytes
        wait_until(lambda: len(s3.names()) == 2)


def test_what_is_computed_sooner_than_loaded_is_not_uploaded(shard: Shard, s3: S3Server) -> None:
    put(shard, A, recompute_ms=0.001)
    put(shard, B, ttl_s=30.0)
    demote(shard)
    assert len(shard) == 0
    assert s3.names() == []


def test_the_limit_of_a_namespace_counts_what_is_in_the_bucket(shard: Shard) -> None:
    limits = NamespaceLimits(ssd_gib=1.5 * charge_of(A[0]) / GIB)
    shard.set_rules(NamespaceRules(limits={"acme": limits}))
    put(shard, A)
    demote(shard)
    (use,) = shard.table.namespace_uses()
    assert (tier_of(shard, A), use.used_bytes["ssd"]) == ("bucket", charge_of(A[0]))
    put(shard, B)
    assert (tier_of(shard, A), tier_of(shard, B)) == ("", "ram")
    (use,) = shard.table.namespace_uses()
    assert use.used_bytes["ssd"] == charge_of(B[0])
    shard.table.check()


# Restarts


def test_a_restart_finds_what_is_in_the_bucket(s3: S3Server, tmp_path: Path) -> None:
    with closing(open_shard(spec(tmp_path))) as shard:
        put(shard, A)
        put(shard, B)
        demote(shard)
        shard.delete("acme", [B[0].key])
        shard_id = shard.shard_id
    stranger = f"kintsugi/{shard_id}/{'0' * 64}"
    other = f"kintsugi/another-shard/{'0' * 64}"
    for name in (stranger, other):
        s3.replace(name, b"left behind")
    with closing(open_shard(spec(tmp_path))) as shard:
        assert [tier_of(shard, chunk) for chunk in (A, B)] == ["bucket", ""]
        with serve(shard) as server, closing(GrpcStore(server.address)) as store:
            assert frames_of(store, A) == [A[1]]
        wait_until(lambda: len(s3.names()) == 2)
        assert other in s3.names(), "a shard deletes below its own prefix alone"
        assert stranger not in s3.names()


def test_another_bucket_has_another_catalog(s3: S3Server, tmp_path: Path) -> None:
    with closing(open_shard(spec(tmp_path))) as shard:
        put(shard, A)
        demote(shard)
    with closing(open_shard(replace(spec(tmp_path), bucket=ELSEWHERE))) as shard:
        assert len(shard) == 0
        assert len(s3.names()) == 1
    with closing(open_shard(spec(tmp_path))) as shard:
        assert tier_of(shard, A) == "bucket"


# A bucket that forgets, lies or hangs


def test_what_the_bucket_has_forgotten_is_a_miss(
    shard: Shard, store: GrpcStore, s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    put(shard, A)
    demote(shard)
    put(shard, B)
    s3.forget()
    assert frames_of(store, A, B) == [None, B[1]]
    assert store.lookup("acme", [A[0].key]) == [None]
    assert faults(shard) == {"missing": 1}
    assert "has forgotten object" in caplog.text
    assert store.put(*A), "it may be stored again"


@pytest.mark.parametrize("lie", ["other", "cut", "longer"])
def test_what_the_bucket_has_changed_is_a_miss(
    shard: Shard, store: GrpcStore, s3: S3Server, caplog: pytest.LogCaptureFixture, lie: str
) -> None:
    put(shard, A)
    demote(shard)
    (name,) = s3.names()
    body = s3.read(name)
    lies = {"other": body[:-9000] + bytes(9000), "cut": body[: len(body) // 2], "longer": bytes(10) + body}
    s3.replace(name, lies[lie])
    assert frames_of(store, A) == [None]
    assert store.lookup("acme", [A[0].key]) == [None]
    assert faults(shard) == {"damaged": 1}
    assert "cannot be read" in caplog.text
    shard.table.check()


@HANGS
def test_a_bucket_that_hangs_delays_only_its_own_chunks(
    shard: Shard, store: GrpcStore, s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    far = [make_chunk(range(start, start + 400)) for start in range(50_000, 54_000, 1000)]
    for chunk in far:
        put(shard, chunk)
    demote(shard)
    put(shard, A)
    drop_from_ram(shard)
    s3.hang()
    began_s = time.monotonic()
    assert frames_of(store, A) == [A[1]], "from the disk"
    assert time.monotonic() - began_s < DEADLINE_S
    for chunk in far:
        assert frames_of(store, chunk) == [None]
    wait_until(lambda: shard.bucket is not None and not shard.bucket.is_in_reach)
    began_s = time.monotonic()
    assert store.lookup("acme", [far[0][0].key]) == [None], "nobody plans with what cannot be read"
    assert frames_of(store, far[0]) == [None]
    put(shard, B)
    demote(shard)
    assert time.monotonic() - began_s < DEADLINE_S, "nobody waits for the bucket any more"
    assert tier_of(shard, B) == "", "as without a bucket"
    assert set(faults(shard)) == {"failed", "refused"}
    assert list(shard.tier_failures()) == ["bucket"]
    assert "hush-hush" not in caplog.text
    assert shard.failure is None
    shard.table.check()
    s3.resume()
    wait_until(lambda: shard.bucket is not None and shard.bucket.is_in_reach and not shard.tier_failures())
    assert frames_of(store, far[0]) == [far[0][1]], "it was not forgotten"


@HANGS
def test_a_deletion_does_not_wait_for_a_bucket_that_hangs(shard: Shard, s3: S3Server) -> None:
    put(shard, A)
    demote(shard)
    s3.hang()
    assert shard.bucket is not None
    shard.bucket.needs_sweep = True
    for keys in ([A[0].key], [B[0].key], [C[0].key]):
        began_s = time.monotonic()
        shard.delete("acme", keys)
        for done in shard.flush_writers():
            done.result(PATIENCE_S)
        assert time.monotonic() - began_s < DEADLINE_S / 2
        assert not [*shard.bucket.catalog.records()]
        shard.bucket.give_up("have it probed")


def test_scrubbing_reads_nothing_from_the_bucket(shard: Shard, s3: S3Server) -> None:
    put(shard, A)
    demote(shard)
    keeper = Keeper(shard, scrub_bytes_per_s=1e9)
    s3.forget()
    keeper.turn()
    assert keeper.scrubbed_chunks == 0
    assert tier_of(shard, A) == "bucket"


@HANGS
def test_uploads_that_hang_take_bounded_memory(s3: S3Server, tmp_path: Path, caplog: Any) -> None:
    with closing(open_shard(spec(tmp_path, ram_mib=4, ssd_mib=4))) as shard:
        bucket = shard.bucket
        assert bucket is not None
        bucket._staging_bytes = 2 * MIB
        s3.hang()
        for start in range(0, 60_000, 1000):
            put(shard, make_chunk(range(start, start + 400)))
            assert bucket.staged_bytes <= 2 * MIB
        assert faults(shard)["refused"] > 0
        wait_until(lambda: not bucket.staged_bytes)
        assert faults(shard)["failed"] > 0
        assert bucket.chunks == 0
        assert "is lost: bucket: " in caplog.text
        shard.table.check()
        s3.resume()


@HANGS
def test_a_shard_opens_beside_a_bucket_that_hangs(s3: S3Server, tmp_path: Path) -> None:
    with closing(open_shard(spec(tmp_path))) as shard:
        put(shard, A)
        demote(shard)
    s3.hang()
    with closing(open_shard(spec(tmp_path))) as shard:
        assert list(shard.tier_failures()) == ["bucket"]
        put(shard, B)
        assert [tier_of(shard, chunk) for chunk in (A, B)] == ["", "ram"]
        s3.resume()
        wait_until(lambda: tier_of(shard, A) == "bucket")


# Deletion, lifetimes and erasure


def test_an_erasure_leaves_no_object(shard: Shard, store: GrpcStore, s3: S3Server) -> None:
    for chunk in (A, B):
        put(shard, chunk)
    demote(shard)
    late = f"kintsugi/{shard.shard_id}/{'f' * 64}"
    s3.replace(late, b"an upload that arrived after it was given up")
    places = {place.place: place.items for place in store.erase("acme", [A[0].key], time.time())}
    assert places[f"shard {shard.shard_id}/bucket"] == 1
    (name,) = s3.names()
    assert name != late
    assert frames_of(store, B) == [B[1]]
    store.erase("acme", None, time.time())
    assert s3.names() == []


@HANGS
def test_an_erasure_says_that_the_bucket_does_not_answer(shard: Shard, s3: S3Server) -> None:
    put(shard, A)
    demote(shard)
    s3.hang()
    with pytest.raises(Unavailable, match=r"bucket: s3://chunks/kintsugi.*erase again when it works"):
        shard.erase(Scope("acme"), 0.0)
    assert tier_of(shard, A) == "", "it is not found any more"
    s3.resume()
    wait_until(lambda: shard.bucket is not None and shard.bucket.is_in_reach)
    shard.erase(Scope("acme"), 0.0)
    assert s3.names() == []


def test_deleted_and_expired_chunks_leave_the_bucket(
    shard: Shard, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(shard, A)
    put(shard, B, ttl_s=3600.0)
    demote(shard)
    assert shard.delete("acme", [A[0].key]) == 1
    wait_until(lambda: len(s3.names()) == 1)
    assert shard.retain("acme", [B[0].key], 7200.0) == [True]
    now_s = time.time()
    monkeypatch.setattr(shard.table, "_wall_clock", lambda: now_s + 5000.0)
    shard.table.expire()
    assert tier_of(shard, B) == "bucket", "it was retained"
    monkeypatch.setattr(shard.table, "_wall_clock", lambda: now_s + 9000.0)
    shard.table.expire()
    assert tier_of(shard, B) == ""
    wait_until(lambda: not s3.names())


def test_a_retained_chunk_stays_over_a_restart(s3: S3Server, tmp_path: Path) -> None:
    with closing(open_shard(spec(tmp_path))) as shard:
        put(shard, A, ttl_s=3600.0)
        demote(shard)
        shard.retain("acme", [A[0].key], math.inf)
    with closing(open_shard(spec(tmp_path))) as shard:
        assert [entry.expires_at_s for entry in shard.table.entries()] == [math.inf]


def test_open_streams_outlive_a_deletion(shard: Shard, s3: S3Server) -> None:
    put(shard, A)
    demote(shard)
    reading = shard.open("acme", [A[0].key], range(3), HeadRange(0, 4))
    (held,) = reading.chunks
    assert held is not None
    shard.delete("acme", [A[0].key])
    wait_until(lambda: not held.residence.unloaded)
    assert [bytes(held.frame(layer)) for layer in range(3)] == A[1]
    shard.table.close(reading)
    wait_until(lambda: not s3.names())


# Configuration


def test_a_bucket_that_keeps_versions_is_refused(s3: S3Server, tmp_path: Path) -> None:
    name = "versioned"
    s3.client.create_bucket(Bucket=name)
    s3.client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    versioned = replace(spec(tmp_path), bucket=BucketSpec(BucketUrl(name), MIB))
    with pytest.raises(InvalidField, match="keeps versions of deleted objects"):
        open_shard(versioned)
    open_shard(spec(tmp_path)).close()


def test_a_bucket_that_does_not_exist_is_named(s3: S3Server, tmp_path: Path) -> None:
    absent = BucketSpec(BucketUrl("no-such-bucket"), MIB)
    with closing(open_shard(replace(spec(tmp_path), bucket=absent))) as shard:
        failure = shard.tier_failures()["bucket"]
        assert all(word in failure for word in ("s3://no-such-bucket", "NoSuchBucket")), failure
        assert "\n" not in failure


def test_verifying_leaves_out_what_only_the_bucket_has(shard: Shard) -> None:
    for chunk in (A, B):
        put(shard, chunk)
    demote(shard)
    shard.prefetch("acme", [A[0].key])
    wait_until(lambda: not any(entry.is_loading for entry in shard.table.entries()))
    assert shard.verify("acme", [A[0].key, B[0].key]) == {A[0].key: True}
