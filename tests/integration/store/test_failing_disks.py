"""A disk that fails: what cannot be known to be on it is never acknowledged, and everybody can see it."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from kintsugi.core.errors import Unavailable
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.shard.opening import open_shard
from kintsugi.store.shard.server import ServerOptions, ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import PutOptions
from tests.integration.store.test_disk_tiers import many, put, spec


class PageCache:
    """The kernel's view of one file: a sync that fails reports the lost pages once, then forgets them."""

    def __init__(self, shard: Shard, monkeypatch: pytest.MonkeyPatch, disk: int = 0) -> None:
        self._slab = shard.disks[disk].slab
        self._fails = False
        self._before_sync: Callable[[], None] = lambda: None
        self.lost: set[int] = set()
        """Offsets of writes that will never reach the disk."""
        self._dirty: set[int] = set()
        self._write, self._fdatasync = self._slab.write, os.fdatasync
        monkeypatch.setattr(self._slab, "write", self._note)
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def fail_once(self, before: Callable[[], None] = lambda: None) -> None:
        """Have the next sync call `before`, then fail."""
        self._fails, self._before_sync = True, before

    def _note(self, offset: int, views: list[memoryview]) -> None:
        self._write(offset, views)
        self._dirty.add(offset)
        self.lost.discard(offset)

    def _sync(self, fd: int) -> None:
        if fd == self._slab._fd and self._fails:
            self._fails = False
            self._before_sync()
            self.lost |= self._dirty
            self._dirty.clear()
            raise OSError(errno.EIO, "Input/output error")
        self._fdatasync(fd)

    def holds(self, shard: Shard) -> bool:
        """Whether the disk has every chunk that the catalog names."""
        return not any(
            extent.offset in self.lost
            for entry in shard.table.entries()
            if entry.disk is not None and entry.disk.tier is self._tier(shard)
            for extent in entry.disk.extents
        )

    def _tier(self, shard: Shard) -> object:
        return next(disk for disk in shard.disks if disk.slab is self._slab)


def begin(shard: Shard, chunk: int) -> Future[None]:
    """Put a chunk; done once it is on disk."""
    manifest, frames = many(chunk + 1, tokens=40)[chunk]
    begun = shard.begin_put(manifest, PutOptions(durable=True), wait_s=10.0)
    assert begun is not None
    for layer, frame in enumerate(frames):
        begun.write(layer, memoryview(frame))
    durable = shard.commit(begun).durable
    assert durable is not None
    return durable


def test_a_failed_sync_takes_the_next_batch_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next batch is written while the one before is synced: its pages may be those that were lost."""
    with closing(open_shard(spec(tmp_path))) as shard:
        cache = PageCache(shard, monkeypatch)
        syncing, written = threading.Event(), threading.Event()
        write = shard.disks[0].write

        def write_and_tell(*arguments: object) -> None:
            write(*arguments)  # type: ignore[arg-type]
            if syncing.is_set():
                written.set()

        def wait_for_the_next_batch() -> None:
            syncing.set()
            assert written.wait(10.0)

        monkeypatch.setattr(shard.disks[0], "write", write_and_tell)
        cache.fail_once(before=wait_for_the_next_batch)
        first = begin(shard, 0)
        assert syncing.wait(10.0)
        second = begin(shard, 1)
        with pytest.raises(Unavailable, match="in RAM alone"):
            first.result(10.0)
        with pytest.raises(Unavailable, match="an earlier sync failed"):
            second.result(10.0)
        assert cache.holds(shard)
        begin(shard, 2).result(10.0)
        assert cache.holds(shard)
        assert shard.disks[0].failure == ""


def test_a_failed_sync_of_a_demotion_is_seen_by_the_tiers_own_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the tier above syncs the tier below, too: the kernel tells only one of them. What the
    tier below does not take stays above, and the put that needed the room is not acknowledged."""
    with closing(open_shard(spec(tmp_path, ssd_mib=(3, 16)))) as shard:
        slab = shard.disks[1].slab
        cache = PageCache(shard, monkeypatch, disk=1)
        since = slab.syncs_failed
        cache.fail_once()
        acknowledged, refused = [], 0
        for manifest, frames in many(16):  # the first tier fills up and demotes
            try:
                put(shard, manifest, frames)
                acknowledged.append(manifest.key)
            except Unavailable:
                refused += 1
        assert refused == 1
        assert all(entry and entry.disk for entry in shard.lookup("acme", acknowledged))
        assert slab.syncs_failed == since + 1
        with pytest.raises(OSError, match="an earlier sync failed"):
            slab.sync(since)
        assert cache.holds(shard)


def test_a_drain_counts_what_the_disk_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, frames = many(1)[0]
    with closing(open_shard(spec(tmp_path))) as shard:
        monkeypatch.setattr(shard.disks[0].slab, "sync", _refuse)
        put(shard, manifest, frames, durable=False)
        assert shard.drain(10.0) == manifest.chunk_bytes


def health_of(server: ShardServer, service: str) -> Any:
    with grpc.insecure_channel(server.address) as channel:
        return HealthStub(channel).Check(HealthCheckRequest(service=service)).status


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_failing_tier_shows_in_health_stats_and_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    def fail(offset: int, views: list[memoryview]) -> None:
        raise OSError(errno.EIO, "Input/output error")

    options = ServerOptions(metrics_listen="127.0.0.1:0", scrub_bytes_per_s=0)
    with (
        closing(open_shard(spec(tmp_path))) as shard,
        ShardServer(shard, "127.0.0.1:0", options) as server,
        closing(GrpcStore(server.address)) as store,
    ):
        (disk,) = shard.disks
        begin(shard, 0).result(10.0)
        (chunk,) = shard.table.entries()

        def use_disk(new: int) -> None:
            with suppress(Unavailable):
                begin(shard, new).result(10.0)
            with suppress(OSError):
                assert chunk.disk is not None
                disk.read(chunk.disk, 0, [memoryview(mmap.mmap(-1, chunk.disk.strides.each[0]))])

        def shown() -> tuple[Any, bool, bool, bool]:
            (tier,) = [tier for tier in store.counters().tiers if tier.name == "ssd0"]
            with urllib.request.urlopen(f"http://{server.metrics_address}/readyz") as answer:
                ready = answer.read().decode()
            with urllib.request.urlopen(f"http://{server.metrics_address}/metrics") as answer:
                metrics = answer.read().decode()
            return (
                health_of(server, "kintsugi.rpc.v1.ChunkStore/ssd0"),
                "Input/output error" in tier.failure,
                "ssd0 fails: " in ready and "Input/output error" in ready,
                'kintsugi_store_tier_failing{tier="ssd0"} 1.0' in metrics,
            )

        with monkeypatch.context() as patch:
            patch.setattr(disk.slab, direction, fail)
            use_disk(1)
            until(lambda: shown()[0] == HealthCheckResponse.NOT_SERVING)
            assert shown() == (HealthCheckResponse.NOT_SERVING, True, True, True)
            assert health_of(server, "") == HealthCheckResponse.SERVING, "RAM is served"
        use_disk(2)
        until(lambda: shown()[0] == HealthCheckResponse.SERVING)
        assert shown() == (HealthCheckResponse.SERVING, False, False, False)


def _refuse(since: int) -> None:
    raise OSError(errno.EIO, "Input/output error")
