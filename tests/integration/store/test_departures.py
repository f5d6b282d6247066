"""Clients that leave while the shard waits for a disk or for room, and what others then find."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.protocol import wire
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.server import ServerOptions, ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.contracts.store_contract import make_chunk
from tests.waiting import wait_until

MIB = 1 << 20
WAIT_S = 10.0
OPTIONS = ServerOptions(share_arena=False, metrics_listen="127.0.0.1:0")


class GatedDisk:
    """Holds up every sync and commit of a shard's only SSD tier."""

    def __init__(self, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        (disk,) = shard.disks
        monkeypatch.setattr(disk.slab, "sync", self._gated(disk.slab.sync))
        monkeypatch.setattr(disk.catalog, "apply", self._gated(disk.catalog.apply))

    def _gated(self, call: Callable[..., None]) -> Callable[..., None]:
        def gated(*args: object) -> None:
            self.reached.set()
            assert self.opened.wait(WAIT_S)
            call(*args)

        return gated


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    with closing(open_shard(ShardSpec(2 * MIB, tmp_path, (SsdSpec(tmp_path / "disk", 16 * MIB),)))) as shard:
        yield shard


@pytest.fixture
def server(shard: Shard) -> Iterator[ShardServer]:
    with ShardServer(shard, "127.0.0.1:0", OPTIONS) as server:
        yield server


@pytest.fixture
def channel(server: ShardServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


eventually = partial(wait_until, within_s=WAIT_S)


def ended(server: ShardServer, calls: int) -> Callable[[], bool]:
    """Whether the handlers of so many puts and deletions have ended."""

    def have_ended() -> bool:
        with urlopen(f"http://{server.metrics_address}/metrics") as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        counts = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "kintsugi_store_rpc_seconds_count"
            and sample.labels["rpc"] in ("put_chunk_kv", "delete")
        ]
        return sum(counts) >= calls

    return have_ended


def durable_put(manifest: ChunkManifest, frames: list[bytes]) -> Iterator[bytes]:
    header = pb.PutHeader(manifest=wire.manifest_to_wire(manifest), ack=pb.ACK_DURABLE)
    yield pb.PutChunkKVRequest(header=header).SerializeToString()
    request = pb.PutChunkKVRequest(first_layer=0, commit=True)
    yield wire.with_payload(request.SerializeToString(), [b"".join(frames)])


def test_a_durable_put_whose_client_left_is_still_written(
    shard: Shard, server: ShardServer, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = GatedDisk(shard, monkeypatch)
    manifest, frames = make_chunk(range(40))
    put = channel.stream_unary(f"/{wire.SERVICE}/PutChunkKV").future(durable_put(manifest, frames))
    assert disk.reached.wait(WAIT_S)
    put.cancel()
    eventually(ended(server, 1))
    disk.opened.set()
    eventually(lambda: shard.table.queues[0].queue_bytes == 0)
    (entry,) = shard.lookup("acme", [manifest.key])
    assert entry is not None
    assert entry.disk is not None
    assert entry.ram is not None
    assert entry.ram.readers == 0


def test_a_client_that_leaves_a_deletion_harms_nobody(
    shard: Shard, server: ShardServer, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(GrpcStore(server.address, GrpcOptions(ack="durable"))) as store:
        manifest, frames = make_chunk(range(40))
        store.put(manifest, frames)
        disk = GatedDisk(shard, monkeypatch)
        call = channel.unary_unary(f"/{wire.SERVICE}/Delete", pb.DeleteRequest.SerializeToString)
        delete = call.future(pb.DeleteRequest(namespace="acme", keys=[manifest.key.digest]))
        assert disk.reached.wait(WAIT_S)
        delete.cancel()
        eventually(ended(server, 2))
        disk.opened.set()
        assert store.put(manifest, frames)
        assert shard.failure is None


def test_a_client_that_leaves_while_it_waits_for_room_takes_none() -> None:
    shard = Shard(RamTier(MIB))
    with closing(shard), ShardServer(shard, "127.0.0.1:0", OPTIONS) as server:
        store = GrpcStore(server.address)
        chunks = [make_chunk(range(tokens)) for tokens in (600, 601)]
        keys = [manifest.key for manifest, _ in chunks]
        for manifest, frames in chunks:
            store.put(manifest, frames)
        reading = shard.open("acme", keys, range(3), HeadRange(0, 4))
        header = pb.PutHeader(manifest=wire.manifest_to_wire(make_chunk(range(602))[0]))
        left = threading.Event()

        def messages() -> Iterator[bytes]:
            yield pb.PutChunkKVRequest(header=header).SerializeToString()
            left.wait(WAIT_S)

        waiting = threading.Event()
        begin_put, tries = shard.begin_put, itertools.count(1)

        def watched(*args: object) -> object:
            if next(tries) == 2:  # the first found no room
                waiting.set()
            return begin_put(*args)  # type: ignore[arg-type]

        shard.begin_put = watched  # type: ignore[assignment,method-assign]
        with grpc.insecure_channel(server.address) as channel:
            put = channel.stream_unary(f"/{wire.SERVICE}/PutChunkKV").future(messages())
            assert waiting.wait(WAIT_S)
            put.cancel()
            eventually(ended(server, 3))
            left.set()
            shard.table.close(reading)
            store.delete("acme", keys)
            eventually(lambda: shard.ram.allocator.used_bytes == 0)
        store.close()


def test_a_durable_put_of_a_chunk_that_ram_alone_has_writes_it(shard: Shard, server: ShardServer) -> None:
    manifest, frames = make_chunk(range(40))
    with (
        closing(GrpcStore(server.address)) as careless,
        closing(GrpcStore(server.address, GrpcOptions(ack="durable"))) as careful,
    ):
        assert careless.put(manifest, frames, recompute_ms=1e-6)  # no disk could load it in time
        (entry,) = shard.lookup("acme", [manifest.key])
        assert entry is not None
        assert entry.disk is None
        assert not careful.put(manifest, frames)
        assert entry.disk is not None


def test_a_durable_put_of_a_present_chunk_needs_a_disk_too() -> None:
    shard = Shard(RamTier(MIB))
    manifest, frames = make_chunk(range(40))
    with closing(shard), ShardServer(shard, "127.0.0.1:0", OPTIONS) as server:
        with closing(GrpcStore(server.address)) as store:
            store.put(manifest, frames)
        with (
            closing(GrpcStore(server.address, GrpcOptions(ack="durable"))) as store,
            pytest.raises(InvalidField, match="SSD tier"),
        ):
            store.put(manifest, frames)
