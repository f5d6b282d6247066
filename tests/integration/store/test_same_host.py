"""Reading from the memory of a shard on the same host."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kintsugi.core.errors import DeadlineExceeded, Unavailable
from kintsugi.core.layout import HeadRange
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.received import ArenaMap, FrameLease
from kintsugi.store.client.registry import open_store
from kintsugi.store.protocol.interface import ChunkLost, ChunkStore, LayerFrame
from kintsugi.store.shard import service as service_module
from kintsugi.store.shard.local import ArenaDoor
from kintsugi.store.shard.server import ServerOptions, ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import LEASES_MAX, RamTier
from tests.contracts.store_contract import StoreContract, make_chunk, read_all


@pytest.fixture
def server() -> Iterator[ShardServer]:
    with ShardServer(Shard(RamTier(8 << 20)), "127.0.0.1:0") as server:
        yield server


@pytest.fixture
def store(server: ShardServer) -> Iterator[ChunkStore]:
    store = open_store(f"grpc://{server.address}")
    yield store
    store.close()


def all_leases_are_free(server: ShardServer) -> None:
    """Or will be: a call that ends is heard of a little later."""
    deadline_s = time.monotonic() + 10
    while len(server.shard.ram.arena._free_leases) < LEASES_MAX:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


class TestSameHostStore(StoreContract):
    pass


def test_the_path_in_use_is_named(store: ChunkStore) -> None:
    manifest, frames = make_chunk(range(40))
    store.put(manifest, frames)
    assert store.stats().transport == "grpc"
    read_all(store, [manifest.key])
    assert store.stats().transport == "shared-memory"


def test_a_shard_that_does_not_share_is_read_over_grpc() -> None:
    options = ServerOptions(share_arena=False)
    with ShardServer(Shard(RamTier(8 << 20)), "127.0.0.1:0", options) as server:
        store = GrpcStore(server.address)
        manifest, frames = make_chunk(range(40))
        store.put(manifest, frames)
        assert read_all(store, [manifest.key]) == [(0, layer, frames[layer]) for layer in range(3)]
        assert store.stats().transport == "grpc"
        store.close()


def test_damage_in_the_arena_is_lost_and_quarantined(server: ShardServer, store: ChunkStore) -> None:
    manifest, frames = make_chunk(range(40))
    store.put(manifest, frames)
    held = server.shard.open("acme", [manifest.key], range(3), HeadRange(0, 4)).chunks[0]
    assert held is not None
    held.frame(1)[5] ^= 1
    items = list(store.stream("acme", [manifest.key], range(3), HeadRange(0, 4), deadline_s=5.0))
    assert [type(item) for item in items] == [LayerFrame, ChunkLost]
    assert server.shard.table.counters.quarantined == 1


def test_bytes_read_after_the_lease_are_refused(
    server: ShardServer, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "LEASE_S_MAX", 0.1)
    manifest, frames = make_chunk(range(40))
    store.put(manifest, frames)
    stream = store.stream("acme", [manifest.key], range(3), HeadRange(0, 4), deadline_s=5.0)
    next(stream)
    all_leases_are_free(server)
    with pytest.raises(DeadlineExceeded, match="lease"):
        list(stream)
    assert store.delete("acme", [manifest.key]) == 1
    assert server.shard.ram.allocator.used_bytes == 0


def test_a_reader_that_leaves_gives_its_lease_back(server: ShardServer, store: GrpcStore) -> None:
    manifest, frames = make_chunk(range(40))
    store.put(manifest, frames)
    for _ in range(LEASES_MAX + 100):
        stream = store.stream("acme", [manifest.key], range(3), HeadRange(0, 4), deadline_s=5.0)
        next(stream)
        stream.close()
    all_leases_are_free(server)
    read = store.call("Stats", pb.StatsRequest(), pb.StatsResponse).bytes_read
    assert read["grpc"] == 0, "who finds no lease reads over gRPC, and nobody would notice"


def test_a_restarted_shard_is_attached_anew() -> None:
    manifest, frames = make_chunk(range(40))
    with ShardServer(Shard(RamTier(8 << 20)), "127.0.0.1:0") as server:
        address = server.address
        store = GrpcStore(address)
        store.put(manifest, frames)
        read_all(store, [manifest.key])
    with ShardServer(Shard(RamTier(8 << 20)), address):
        other, other_frames = make_chunk(range(50))
        for attempt in range(50):
            try:
                store.put(other, other_frames)
                break
            except Unavailable:  # the channel has not seen yet that the shard is back
                if attempt == 49:
                    raise
        assert read_all(store, [other.key]) == [(0, layer, other_frames[layer]) for layer in range(3)]
        assert store.stats().transport == "shared-memory"
        store.close()


def test_a_token_opens_the_door_once() -> None:
    ram = RamTier(1 << 20)
    door = ArenaDoor(ram.arena)
    try:
        opened = pb.OpenArenaResponse(
            socket_path=str(door.path), token=door.issue(), arena_bytes=ram.arena.file_bytes
        )
        ArenaMap(opened)
        for token in (opened.token, b"\0" * 32, b"short"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.connect(str(door.path))
                peer.sendall(token)
                peer.shutdown(socket.SHUT_WR)
                assert peer.recv(1) == b""
        with pytest.raises(OSError):
            ArenaMap(opened)
    finally:
        door.close()


@pytest.mark.parametrize("beyond", ["frame", "generation"])
def test_what_would_lie_outside_the_arena_is_not_read(beyond: str) -> None:
    ram = RamTier(1 << 20)
    door = ArenaDoor(ram.arena)
    end = ram.arena.file_bytes
    try:
        opened = pb.OpenArenaResponse(socket_path=str(door.path), token=door.issue(), arena_bytes=end)
        first = pb.LeaseLayersResponse(generation_offset=end - 4 if beyond == "generation" else 0)
        lease = FrameLease(ArenaMap(opened), first)
    finally:
        door.close()
    manifest, frames = make_chunk(range(40))
    size = len(frames[0])
    frame = pb.FrameDescriptor(offset=end - 4 if beyond == "frame" else 0, size_bytes=size)
    assert not lease.copy(frame, memoryview(bytearray(size)), manifest, HeadRange(0, 4))


def test_the_door_outlives_a_shortage_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    ram = RamTier(1 << 20)
    door = ArenaDoor(ram.arena)
    accept, refused = socket.socket.accept, [OSError(errno.EMFILE, "too many")]

    def scarce(listener: socket.socket) -> tuple[socket.socket, Any]:
        if refused:
            raise refused.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    try:
        for _ in range(3):  # the first is accepted by the call that waits already
            ArenaMap(
                pb.OpenArenaResponse(
                    socket_path=str(door.path), token=door.issue(), arena_bytes=ram.arena.file_bytes
                )
            )
        assert not refused
    finally:
        door.close()


def test_the_arena_cannot_be_mapped_for_writing() -> None:
    import mmap
    import os

    arena = RamTier(1 << 20).arena
    fd = arena.read_only_fd()
    try:
        with pytest.raises(OSError):
            mmap.mmap(fd, arena.file_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError):
            mmap.mmap(arena.fd, arena.file_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
