"""Clients that lie, die, dawdle or come in crowds: bounded memory, clear errors, others unharmed."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import grpc
import pytest

from kintsugi.core.errors import InvalidField, ResourceExhausted
from kintsugi.core.layout import HeadRange
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.grpc_status import ERROR_METADATA
from kintsugi.store.shard import service as service_module
from kintsugi.store.shard.server import ServerOptions, ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.contracts.store_contract import make_chunk, read_all

CONNECTIONS = 1000
CONNECTION_KIB_MAX = 256


@pytest.fixture
def server() -> Iterator[ShardServer]:
    options = ServerOptions(share_arena=False)
    with ShardServer(Shard(RamTier(64 << 20)), "127.0.0.1:0", options) as server:
        yield server


@pytest.fixture
def channel(server: ShardServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address, options=wire.CHANNEL_OPTIONS) as channel:
        yield channel


def put_raw(channel: grpc.Channel, messages: list[bytes]) -> grpc.RpcError:
    """What a put of these very bytes fails with."""
    call = channel.stream_unary(f"/{wire.SERVICE}/PutChunkKV")
    with pytest.raises(grpc.RpcError) as failure:
        call(iter(messages), timeout=10.0)
    return failure.value


def header(**changes: object) -> bytes:
    manifest = wire.manifest_to_wire(make_chunk(range(40))[0])
    for name, value in changes.items():
        setattr(manifest, name, value)
    return pb.PutChunkKVRequest(header=pb.PutHeader(manifest=manifest)).SerializeToString()


def frames_message(first_layer: int, payload: bytes, commit: bool = False) -> bytes:
    request = pb.PutChunkKVRequest(first_layer=first_layer, commit=commit)
    return wire.with_payload(request.SerializeToString(), [payload])


FRAMES = make_chunk(range(40))[1]


@pytest.mark.parametrize(
    ("messages", "code", "problem"),
    [
        ([], "INVALID_ARGUMENT", "commit"),
        ([b"\xff\xff\xff"], "INVALID_ARGUMENT", "message"),
        ([frames_message(0, FRAMES[0])], "INVALID_ARGUMENT", "header"),
        ([header()], "INVALID_ARGUMENT", "commit"),
        ([header(), frames_message(1, FRAMES[1])], "INVALID_ARGUMENT", "layer 0 comes next"),
        ([header(), frames_message(0, FRAMES[0][:-1])], "INVALID_ARGUMENT", "ends after"),
        (
            [header(), frames_message(0, b"".join(FRAMES) + FRAMES[0])],
            "INVALID_ARGUMENT",
            "the last layer is 2",
        ),
        ([header(), frames_message(0, FRAMES[0], commit=True)], "INVALID_ARGUMENT", "last layer"),
        ([header(), frames_message(0, FRAMES[1])], "DATA_LOSS", "digest"),
        ([header(codec=99)], "INVALID_ARGUMENT", "codec"),
        ([header(format_version=9)], "INVALID_ARGUMENT", "format_version"),
        ([header(num_tokens=200_000)], "RESOURCE_EXHAUSTED", "67108864"),
        ([header(key=b"short")], "INVALID_ARGUMENT", "32"),
        ([header(namespace="")], "INVALID_ARGUMENT", "namespace"),
        ([header(num_tokens=1 << 31)], "INVALID_ARGUMENT", "num_tokens"),
    ],
)
def test_a_put_that_lies_is_refused_and_leaves_nothing(
    server: ShardServer, channel: grpc.Channel, messages: list[bytes], code: str, problem: str
) -> None:
    failure = put_raw(channel, messages)
    assert failure.code().name == code
    assert problem in failure.details()
    assert server.shard.ram.allocator.used_bytes == 0


def test_an_unknown_protocol_is_refused_by_name(channel: grpc.Channel) -> None:
    call = channel.unary_unary(f"/{wire.SERVICE}/Stats", pb.StatsRequest.SerializeToString)
    with pytest.raises(grpc.RpcError) as failure:
        call(pb.StatsRequest(), metadata=((wire.PROTOCOL_METADATA, "99"),), timeout=5.0)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(failure.value.trailing_metadata())[ERROR_METADATA] == "VersionMismatch"


def test_too_many_keys_are_refused(channel: grpc.Channel) -> None:
    call = channel.unary_unary(f"/{wire.SERVICE}/Lookup", pb.LookupRequest.SerializeToString)
    request = pb.LookupRequest(namespace="acme", keys=[bytes(32)] * (wire.KEYS_MAX + 1))
    with pytest.raises(grpc.RpcError, match="at most 4096"):
        call(request, timeout=5.0)


def test_a_lookup_of_too_many_manifests_is_refused(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, frames = make_chunk(range(40))
    with closing(GrpcStore(server.address)) as store:
        store.put(manifest, frames)
        monkeypatch.setattr(wire, "RESPONSE_BYTES_MAX", 4 * wire.manifest_bytes(manifest))
        assert store.lookup("acme", [manifest.key] * 4) == [manifest] * 4
        with pytest.raises(ResourceExhausted, match="fewer keys"):
            store.lookup("acme", [manifest.key] * 5)


def test_many_anchors_are_looked_up_beside_the_loop(server: ShardServer) -> None:
    manifest, frames = make_chunk(range(40))
    with closing(GrpcStore(server.address)) as store:
        store.put(manifest, frames)
        anchors = [*range(wire.KEYS_MAX), *manifest.anchors]
        (found,) = store.lookup_anchors("acme", manifest.space_digest, anchors)
        assert found.keys == (manifest.key,)


def test_a_client_that_dies_in_a_put_gives_its_room_back(server: ShardServer, channel: grpc.Channel) -> None:
    def messages() -> Iterator[bytes]:
        yield header()
        yield frames_message(0, FRAMES[0])
        time.sleep(0.5)

    call = channel.stream_unary(f"/{wire.SERVICE}/PutChunkKV").future(messages())
    deadline_s = time.monotonic() + 5
    while not server.shard.ram.allocator.used_bytes:
        assert time.monotonic() < deadline_s
    call.cancel()
    while server.shard.ram.allocator.used_bytes:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_reader_that_dawdles_harms_nobody(server: ShardServer) -> None:
    slow, quick = (GrpcStore(server.address, GrpcOptions(same_host=False)) for _ in range(2))
    manifest, frames = make_chunk(range(20_000))  # frames of 5 MiB, more than a connection buffers
    small, small_frames = make_chunk(range(40))
    quick.put(manifest, frames)
    quick.put(small, small_frames)
    stream = slow.stream("acme", [manifest.key], range(3), HeadRange(0, 4), deadline_s=30.0)
    assert bytes(next(stream).data) == frames[0]  # type: ignore[union-attr]
    for _ in range(20):
        assert quick.lookup("acme", [small.key]) == [small]
        assert read_all(quick, [small.key])[0] == (0, 0, small_frames[0])
    quick.delete("acme", [manifest.key])
    assert [bytes(item.data) for item in stream] == frames[1:]  # type: ignore[union-attr]
    slow.close()
    quick.close()


def test_slow_readers_may_hold_only_so_much(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, frames = make_chunk(range(20_000))
    small, small_frames = make_chunk(range(40))
    slow, quick = (GrpcStore(server.address, GrpcOptions(same_host=False)) for _ in range(2))
    quick.put(manifest, frames)
    quick.put(small, small_frames)
    monkeypatch.setattr(service_module, "STREAM_BYTES_MAX", 3 * len(frames[0]))
    everything = ("acme", [manifest.key], range(3), HeadRange(0, 4), 30.0)
    streams = [slow.stream(*everything) for _ in range(2)]
    with ExitStack() as stack:
        for stream in streams:
            stack.callback(stream.close)  # type: ignore[attr-defined]
        assert bytes(next(streams[0]).data) == frames[0]  # type: ignore[union-attr]
        with pytest.raises(ResourceExhausted, match="try again"):
            list(streams[1])
        assert read_all(quick, [small.key])[0] == (0, 0, small_frames[0])
        assert quick.lookup("acme", [small.key]) == [small]
    deadline_s = time.monotonic() + 10
    while True:  # the shard hears of the end a moment later
        try:
            assert read_all(quick, [manifest.key])[2] == (0, 2, frames[2])
            break
        except ResourceExhausted:
            assert time.monotonic() < deadline_s
    slow.close()
    quick.close()


def test_a_client_that_dies_with_pins_lets_go_when_its_lease_ends(server: ShardServer) -> None:
    store, other = GrpcStore(server.address), GrpcStore(server.address)
    manifest, frames = make_chunk(range(40))
    store.put(manifest, frames)
    assert store.pin("acme", [manifest.key], lease_s=1.5).chunks == 1
    store.close()
    (entry,) = server.shard.lookup("acme", [manifest.key])
    assert entry is not None
    assert entry.pins == 1
    deadline_s = time.monotonic() + 10
    while entry.pins:
        assert other.lookup("acme", [manifest.key]) == [manifest]
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    other.close()


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What opens an HTTP/2 connection, with empty settings."""


def test_a_thousand_connections_leave_room_for_one_more(server: ShardServer) -> None:
    host, _, port = server.address.rpartition(":")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    crowd = [socket.create_connection((host, int(port))) for _ in range(CONNECTIONS)]
    try:
        for connection in crowd:
            connection.sendall(_PREFACE)
        for connection in crowd:
            connection.settimeout(30.0)
            assert connection.recv(9)[3] == 4  # the shard's own settings: the connection stands
        store = GrpcStore(server.address)
        manifest, frames = make_chunk(range(40))
        assert store.put(manifest, frames)
        assert store.lookup("acme", [manifest.key]) == [manifest]
        store.close()
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown_kib < CONNECTION_KIB_MAX * CONNECTIONS
    finally:
        for connection in crowd:
            connection.close()


def test_a_foreign_namespace_looks_like_an_absent_one(server: ShardServer) -> None:
    store = GrpcStore(server.address)
    manifest, frames = make_chunk(range(40))
    store.put(manifest, frames)
    before = server.shard.table.counters.misses
    assert store.lookup("rival", [manifest.key]) == [None]
    assert server.shard.table.counters.misses == before + 1
    with pytest.raises(InvalidField, match="namespace"):
        store.lookup("../acme", [manifest.key])
    store.close()
