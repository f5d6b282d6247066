"""An erased chunk leaves no byte in a shard: not in RAM, not on disk, not in a catalog, whatever was evicted,
restarted, read or put meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kintsugi.core.errors import DeadlineExceeded, NotFound, Unavailable
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.calls import put_messages
from kintsugi.store.client.directory import ShardAddress, ShardMap
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.client.sharded import ShardedStore
from kintsugi.store.protocol import tls, wire
from kintsugi.store.protocol.interface import ChunkStore, Erasure, LayerFrame
from kintsugi.store.protocol.wire import CLIENT_OPTIONS
from kintsugi.store.shard import shard as shard_module
from kintsugi.store.shard.erasure import Scope
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers import disk_tier as slab_module
from tests.contracts.store_contract import make_chunk, read_all
from tests.fakes.fixed_directory import FixedDirectory

MIB = 1 << 20
DURABLE = GrpcOptions(ack="durable")
SAMPLE_BYTES = 32

Chunk = tuple[ChunkManifest, list[bytes]]


def spec(folder: Path, ssds: int = 1) -> ShardSpec:
    disks = tuple(SsdSpec(folder / f"disk{i}", 6 * MIB) for i in range(ssds))
    return ShardSpec(2 * MIB, folder / "data", disks)


@contextmanager
def serving(shard: Shard) -> Iterator[GrpcStore]:
    with ShardServer(shard, "127.0.0.1:0") as server, closing(GrpcStore(server.address, DURABLE)) as store:
        yield store


def chunks(count: int, start: int = 0) -> list[Chunk]:
    """Chunks of some hundred KiB, whose frames are no multiple of a block."""
    return [make_chunk(range(1000 * i, 1000 * i + 300 + 3 * i)) for i in range(start, start + count)]


def put_all(store: ChunkStore, some: Sequence[Chunk]) -> None:
    for manifest, frames in some:
        store.put(manifest, frames)


def find_residue(shard: Shard, folder: Path, some: Sequence[Chunk]) -> list[str]:
    """Places that hold bytes of the chunks: of their frames, or digests of these."""
    samples = [
        sample
        for manifest, frames in some
        for sample in (
            *(
                frame[at : at + SAMPLE_BYTES]
                for frame in frames
                for at in (0, len(frame) // 2, -SAMPLE_BYTES)
            ),
            manifest.digests[:SAMPLE_BYTES],
        )
    ]
    samples = [sample for sample in samples if len(sample) == SAMPLE_BYTES] + [
        frame[-SAMPLE_BYTES:] for _, frames in some for frame in frames
    ]
    places = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    places["arena"] = bytes(shard.ram.arena.frames)
    return [name for name, data in places.items() if any(sample in data for sample in samples)]


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    shard = open_shard(spec(tmp_path))
    yield shard
    shard.close()


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_left_of_what_is_erased_and_the_rest_is_whole(tmp_path: Path, seed: int) -> None:
    """RAM holds a few of the chunks and both SSD tiers the rest: some were evicted from every tier."""
    shard = open_shard(spec(tmp_path, ssds=2))
    some = chunks(40)
    random.Random(seed).shuffle(some)
    with closing(shard), serving(shard) as store:
        put_all(store, some)
        erased, kept = some[::2], some[1::2]
        assert find_residue(shard, tmp_path, erased)
        places = store.erase("acme", [manifest.key for manifest, _ in erased], time.time())
        assert find_residue(shard, tmp_path, erased) == []
        assert {place.place.split("/")[1] for place in places} == {"ram", "ssd0", "ssd1"}
        found = store.lookup("acme", [manifest.key for manifest, _ in some])
        for (manifest, frames), held in zip(some, found, strict=True):
            if held is not None:
                assert manifest in [one for one, _ in kept]
                assert [data for _, _, data in read_all(store, [manifest.key])] == [
                    frame[: len(frame)] for frame in frames
                ]
        assert any(found), "nothing was kept, so nothing was tested"
        put_all(store, erased)
        assert store.lookup("acme", [erased[-1][0].key])[0] is not None


def test_what_was_evicted_before_a_restart_is_erased_too(tmp_path: Path) -> None:
    some = chunks(20)
    with closing(open_shard(spec(tmp_path))) as shard, serving(shard) as store:
        put_all(store, some)
        store.delete("acme", [manifest.key for manifest, _ in some])
        assert str(tmp_path / "disk0/kintsugi-tier/slab") in find_residue(shard, tmp_path, some)
    with closing(open_shard(spec(tmp_path))) as shard, serving(shard) as store:
        store.erase("acme", [some[0][0].key], time.time())
        assert find_residue(shard, tmp_path, some) == []


def test_what_was_erased_meanwhile_does_not_come_back_with_a_disk(tmp_path: Path) -> None:
    some = chunks(10)
    erased, kept = some[::2], some[1::2]
    with closing(open_shard(spec(tmp_path))) as shard, serving(shard) as store:
        put_all(store, some)
    elsewhere = replace(spec(tmp_path), ssds=(SsdSpec(tmp_path / "other", 6 * MIB),))
    with closing(open_shard(elsewhere)) as shard, serving(shard) as store:
        store.erase("acme", [manifest.key for manifest, _ in erased], time.time())
        assert find_residue(shard, tmp_path, erased), "the folder that is away holds them"
    with closing(open_shard(spec(tmp_path))) as shard, serving(shard) as store:
        assert find_residue(shard, tmp_path, erased) == []
        held = store.lookup("acme", [manifest.key for manifest, _ in some])
        assert [one is not None for one in held] == [bool(i % 2) for i in range(10)]
        assert [data for _, _, data in read_all(store, [kept[0][0].key])] == kept[0][1]
        put_all(store, erased)
    with closing(open_shard(spec(tmp_path))) as shard, serving(shard) as store:
        held = store.lookup("acme", [manifest.key for manifest, _ in some])
        assert all(held), "what was put after the erasure stays"


def test_nothing_is_left_behind_the_frames_of_a_later_chunk(shard: Shard, tmp_path: Path) -> None:
    """A frame of 4 KiB, then one of 2 KiB at its place, which leaves the other half to be written to disk."""
    (mine, frames), (later, others) = make_chunk(range(16)), make_chunk(range(100, 108))
    with serving(shard) as store:
        store.put(mine, frames)
        store.delete("acme", [mine.key])
        store.put(later, others)
        store.erase("acme", [mine.key], time.time())
        assert find_residue(shard, tmp_path, [(mine, frames)]) == []
        assert [data for _, _, data in read_all(store, [later.key])] == others


def test_what_is_left_outlives_the_process(tmp_path: Path) -> None:
    some = chunks(10)
    with closing(open_shard(spec(tmp_path))) as shard, serving(shard) as store:
        put_all(store, some)
        store.erase("acme", [manifest.key for manifest, _ in some[::2]], time.time())
        store.put(*some[0])
    with closing(open_shard(spec(tmp_path))) as shard, serving(shard) as store:
        held = store.lookup("acme", [manifest.key for manifest, _ in some])
        assert [one is not None for one in held] == [True] + [bool(i % 2) for i in range(1, 10)]
        assert [data for _, _, data in read_all(store, [some[1][0].key])] == some[1][1]
        assert shard.erasures.newest == 5


def test_a_namespace_is_erased_whole_and_no_other(shard: Shard, tmp_path: Path) -> None:
    (mine, frames), (theirs, other) = make_chunk(range(300)), make_chunk(range(300), seed=1)
    theirs = ChunkManifest(**{**vars(theirs), "namespace": "other"})
    with serving(shard) as store:
        put_all(store, [(mine, frames), (theirs, other)])
        (ram, ssd) = store.erase("acme", None, time.time())
        assert (ram.items, ssd.items) == (1, 1)
        assert find_residue(shard, tmp_path, [(mine, frames)]) == []
        assert store.lookup("other", [theirs.key]) == [theirs]
        assert store.erase("acme", None, time.time())[0].items == 0, "it can be repeated"


@pytest.mark.parametrize("keys", [True, False])
def test_a_put_under_way_does_not_bring_an_erased_chunk_back(
    shard: Shard, tmp_path: Path, keys: bool
) -> None:
    manifest, frames = make_chunk(range(300))
    put = shard.begin_put(manifest)
    assert put is not None
    for layer, frame in enumerate(frames):
        put.write(layer, memoryview(frame))
    scope = Scope.of("acme", [manifest.key]) if keys else Scope("acme")
    erasing = threading.Thread(target=shard.erase, args=(scope, 0.0))
    erasing.start()
    while not put.is_erased:
        time.sleep(0.001)
    assert erasing.is_alive(), "it waits for the put"
    with pytest.raises(NotFound, match="save it again"):
        shard.commit(put)
    erasing.join(30)
    assert shard.lookup("acme", [manifest.key]) == [None]
    assert find_residue(shard, tmp_path, [(manifest, frames)]) == []


def test_an_erasure_waits_for_readers(shard: Shard, tmp_path: Path) -> None:
    manifest, frames = make_chunk(range(300))
    with serving(shard) as store:
        store.put(manifest, frames)
        reading = shard.open("acme", [manifest.key], range(3), manifest_heads(manifest))
        with pytest.raises(DeadlineExceeded, match="erase them again"):
            shard.erase(Scope("acme"), 0.0, timeout_s=0.1)
        assert store.lookup("acme", [manifest.key]) == [None], "nobody finds it meanwhile"
        with pytest.raises(NotFound):
            store.put(replace(manifest, asked_at_s=time.time() - 5.0), frames)
        shard.table.close(reading)
        shard.erase(Scope("acme"), 0.0)
        assert find_residue(shard, tmp_path, [(manifest, frames)]) == []


@pytest.mark.parametrize("same_host", [True, False])
def test_readers_and_writers_who_stall_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_host: bool
) -> None:
    """Readers take one frame of 25 MB, and no more."""
    # gRPC may widen its window until the other two frames fit: then all was sent, and nothing is to be cut.
    monkeypatch.setattr(tls, "CLIENT_OPTIONS", (*CLIENT_OPTIONS, ("grpc.http2.bdp_probe", 0)))
    (held, frames), (half, other) = make_chunk(range(100_000)), make_chunk(range(1, 10_000))
    monkeypatch.setattr(shard_module, "ERASE_GRACE_S", 0.1)
    spec = ShardSpec(128 * MIB)
    began, go_on = threading.Event(), threading.Event()

    def stalled() -> Iterator[bytes]:
        messages = put_messages(
            pb.PutHeader(manifest=wire.manifest_to_wire(half)), half, [memoryview(frame) for frame in other]
        )
        yield next(messages)
        yield next(messages)
        began.set()
        assert go_on.wait(60)

    with (
        closing(open_shard(spec)) as shard,
        ShardServer(shard, "127.0.0.1:0") as server,
        closing(GrpcStore(server.address, GrpcOptions(same_host=same_host))) as store,
        ThreadPoolExecutor(1) as thread,
    ):
        store.put(held, frames)
        streams = [store.stream("acme", [held.key], range(3), manifest_heads(held), 60.0) for _ in range(2)]
        for stream in streams:
            assert isinstance(next(stream), LayerFrame)
        held_bytes = shard.table.used_bytes()
        putting = thread.submit(store._calls.put, stalled(), 60.0)
        try:
            assert began.wait(30)
            # What was sent may be on its way still, and a put that begins after the erasure is not cut.
            while shard.table.used_bytes() == held_bytes and not putting.done():
                time.sleep(0.001)
            shard.erase(Scope("acme"), 0.0, timeout_s=20.0)
            with pytest.raises(NotFound, match="were erased"):
                putting.result(20.0)
        finally:
            go_on.set()
        for stream in streams:
            with pytest.raises((NotFound, DeadlineExceeded), match=r"(erased|ended) while"):
                list(stream)
        assert shard.table.used_bytes() == 0
        assert store.put(held, frames), "the shard serves on"


def test_what_is_put_and_read_after_an_erasure_began_is_not_cut_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An erasure waits for a reader that stalls, while its chunk is put again, and another is read."""
    held, (other, _) = make_chunk(range(1000)), make_chunk(range(1001))
    monkeypatch.setattr(shard_module, "ERASE_GRACE_S", 0.0)
    with (
        closing(open_shard(ShardSpec(16 * MIB))) as shard,
        ShardServer(shard, "127.0.0.1:0") as server,
        closing(GrpcStore(server.address)) as store,
        ThreadPoolExecutor(2) as threads,
    ):
        store.put(*held)
        stalled = store.stream("acme", [held[0].key], range(3), manifest_heads(held[0]), 60.0)
        assert isinstance(next(stalled), LayerFrame)
        forgotten, began, go_on = threading.Event(), threading.Event(), threading.Event()
        cut = shard.holders.cut

        def cut_late(scope: Scope) -> None:
            forgotten.set()
            assert began.wait(30)
            cut(scope)

        def put_slowly() -> Iterator[bytes]:
            messages = put_messages(
                pb.PutHeader(manifest=wire.manifest_to_wire(held[0])),
                held[0],
                [memoryview(frame) for frame in held[1]],
            )
            yield next(messages)
            assert go_on.wait(30)
            yield from messages

        monkeypatch.setattr(shard.holders, "cut", cut_late)
        erasing = threads.submit(shard.erase, Scope("acme"), 0.0, 30.0)
        try:
            assert forgotten.wait(30)
            assert store.put(other, make_chunk(range(1001))[1])
            later = store.stream("acme", [other.key], range(3), manifest_heads(other), 60.0)
            assert isinstance(next(later), LayerFrame)
            putting = threads.submit(store._calls.put, put_slowly(), 60.0)
            while not shard.table._puts:
                time.sleep(0.001)
            began.set()
            erasing.result(30)
        finally:
            began.set()
            go_on.set()
        assert putting.result(30).inserted
        assert len(list(later)) == 2
        with pytest.raises((NotFound, DeadlineExceeded), match=r"(erased|ended) while"):
            list(stalled)


def test_a_filesystem_without_zeroing_is_written_over(
    shard: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_module, "_fallocate", lambda *_: False)
    some = chunks(20)
    with serving(shard) as store:
        put_all(store, some)
        store.erase("acme", None, time.time())
    assert find_residue(shard, tmp_path, some) == []


def test_a_disk_that_fails_leaves_no_receipt(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, frames = make_chunk(range(300))
    with serving(shard) as store:
        store.put(manifest, frames)

        def fail(offset: int, size: int) -> None:
            raise OSError(5, "made to fail")

        monkeypatch.setattr(shard.disks[0].slab, "wipe", fail)
        with pytest.raises(Exception, match="erase again"):
            store.erase("acme", None, time.time())
        monkeypatch.undo()
        before = shard.disks[0].allocator.free_bytes
        assert before == shard.disks[0].capacity_bytes, "the space came back unwiped"
        store.erase("acme", None, time.time())
        assert not shard.disks[0].allocator.take_leftovers(0, shard.disks[0].capacity_bytes)


def test_zeros_that_may_not_have_reached_the_disk_are_written_again(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes pages that it could not write for written: the next sync says nothing about them."""
    manifest, frames = make_chunk(range(300))
    slab = shard.disks[0].slab
    wiped: list[tuple[int, int]] = []
    wipe = slab.wipe

    def note(offset: int, size: int) -> None:
        wiped.append((offset, size))
        wipe(offset, size)

    def fail(since: int) -> None:
        raise OSError(5, "made to fail")

    with serving(shard) as store:
        store.put(manifest, frames)
        monkeypatch.setattr(slab, "wipe", note)
        with monkeypatch.context() as broken:
            broken.setattr(slab, "sync", fail)
            with pytest.raises(Unavailable, match="erase again"):
                store.erase("acme", None, time.time())
        first, wiped[:] = list(wiped), []
        assert first
        store.erase("acme", None, time.time())
        assert sum(size for _, size in wiped) >= sum(size for _, size in first)


def test_chunks_are_stored_and_kept_while_free_space_is_wiped(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart all free space of a slab counts as written."""
    disk = shard.disks[0]
    (kept, kept_frames), (manifest, frames), (erased, erased_frames) = chunks(3)
    began, go_on = threading.Event(), threading.Event()
    wipe = disk.slab.wipe

    def wait(offset: int, size: int) -> None:
        began.set()
        assert go_on.wait(10)
        wipe(offset, size)

    with serving(shard) as store:
        put_all(store, [(kept, kept_frames), (erased, erased_frames)])
        disk.allocator.note_unwiped(0, disk.capacity_bytes)
        monkeypatch.setattr(disk.slab, "wipe", wait)
        erasing = threading.Thread(target=store.erase, args=("acme", [erased.key], time.time()))
        erasing.start()
        try:
            assert began.wait(10)
            assert store.put(manifest, frames)
        finally:
            go_on.set()
            erasing.join(10)
        for one in (kept, manifest):
            entry = shard.table.get(("acme", one.key))
            assert entry is not None
            assert entry.disk is not None
        assert disk.evictions == 0


def test_a_shard_closes_its_files_after_the_wipe_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = open_shard(spec(tmp_path))
    slab = shard.disks[0].slab
    shard.disks[0].allocator.note_unwiped(0, slab.capacity_bytes)
    began, go_on = threading.Event(), threading.Event()
    wipe, close, order = slab.wipe, slab.close, []

    def wait(offset: int, size: int) -> None:
        began.set()
        assert go_on.wait(10)
        wipe(offset, size)
        order.append("wiped")

    def note() -> None:
        order.append("closed")
        close()

    monkeypatch.setattr(slab, "wipe", wait)
    monkeypatch.setattr(slab, "close", note)
    wiping = threading.Thread(target=shard.erase, args=(Scope("acme"), 0.0))
    wiping.start()
    assert began.wait(10)
    closing_down = threading.Thread(target=shard.close)
    closing_down.start()
    closing_down.join(0.2)
    go_on.set()
    for thread in (wiping, closing_down):
        thread.join(10)
    assert set(order[:-1]) == {"wiped"}
    assert order[-1] == "closed"


def test_an_erasure_of_a_closed_shard_fails_at_once(tmp_path: Path) -> None:
    shard = open_shard(spec(tmp_path))
    shard.close()
    began_s = time.monotonic()
    with pytest.raises(Unavailable, match="could not be recorded"):
        shard.erase(Scope("acme"), 0.0, timeout_s=5.0)
    assert time.monotonic() - began_s < 4.0


def test_a_wipe_waits_for_space_that_another_thread_is_about_to_free(
    shard: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, frames = make_chunk(range(300))
    disk = shard.disks[0]
    apply = disk.catalog.apply
    began, go_on = threading.Event(), threading.Event()

    def wait(*changes: Any) -> None:
        began.set()
        assert go_on.wait(10)
        apply(*changes)

    with serving(shard) as store:
        store.put(manifest, frames)
        monkeypatch.setattr(disk.catalog, "apply", wait)
        shard.table.remove(Scope("acme"))
        burying = threading.Thread(target=disk.bury)
        burying.start()
        assert began.wait(10)
        wiping = threading.Thread(target=disk.wipe)
        wiping.start()
        wiping.join(0.2)
        go_on.set()
        for thread in (burying, wiping):
            thread.join(10)
        assert str(disk.slab.path) not in find_residue(shard, tmp_path, [(manifest, frames)])


def test_caches_follow_every_shard(tmp_path: Path) -> None:
    manifest, _ = make_chunk(range(300))
    shards = [open_shard(spec(tmp_path / name)) for name in "ab"]
    with (
        closing(shards[0]),
        closing(shards[1]),
        ShardServer(shards[0], "127.0.0.1:0") as first,
        ShardServer(shards[1], "127.0.0.1:0") as second,
    ):
        addresses = [
            ShardAddress(shard.shard_id, server.address)
            for shard, server in zip(shards, (first, second), strict=True)
        ]
        directory = FixedDirectory(ShardMap(1, tuple(addresses)))
        with closing(ShardedStore(directory)) as store:
            cursor = store.erasures("").cursor
            places = store.erase("acme", [manifest.key], 5.0)
            assert len(places) == 2, "every shard is named"
            page = store.erasures(cursor)
            assert page.erasures == [Erasure("acme", manifest.key, 5.0)], "once, whichever shard says it"
            assert store.erasures(page.cursor).erasures == []
            directory.shards = ShardMap(2, (addresses[0],))
            store.erase("acme", None, 6.0)
            page = store.erasures(page.cursor)
            assert page.erasures == [Erasure("acme", None, 6.0)]
            directory.shards = ShardMap(3, tuple(addresses))
            assert store.erasures(page.cursor).erasures == []


def manifest_heads(manifest: ChunkManifest) -> HeadRange:
    return HeadRange(0, manifest.layout.num_kv_heads)
