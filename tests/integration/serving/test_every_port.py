"""Attacks that every port refuses before it knows its caller: bombs, malformed messages, repeated headers."""

from __future__ import annotations

import gzip
import http.client
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kintsugi.core.exchange import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH
from kintsugi.gateway.access import add_grant, new_token
from kintsugi.gateway.console.routes import API_PATH
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.openai_server import HttpServer
from kintsugi.gateway.requests import RESIDENCY_PATH
from kintsugi.rpc.v1 import store_pb2
from kintsugi.serving.directory import MESSAGE_BYTES_MAX
from kintsugi.store.client.directory import ShardMap
from kintsugi.store.protocol.access import TokenFile
from kintsugi.store.shard.server import ServerOptions, ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.audit_lines import read_audit
from tests.fakes.directory_server import serving_directory
from tests.fakes.fixed_directory import FixedDirectory
from tests.integration.serving.gateways import Setup, running

BOMB = gzip.compress(bytes(8 << 20), 9)
DEADLINE_S = 20.0
HEALTH = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
CALLS = [rpc.name for rpc in store_pb2.DESCRIPTOR.services_by_name["ChunkStore"].methods]
METHODS = {
    "shard": [f"/kintsugi.rpc.v1.ChunkStore/{name}" for name in CALLS if name != "PutChunkKV"],
    "gateway": [f"/kintsugi.rpc.v1.Kintsugi/{name}" for name in ("PutChunk", "ListChunks", "Generate")],
    "directory": ["/kintsugi.rpc.v1.ShardDirectory/WatchShardMap"],
}
POSTS = (CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH, RESIDENCY_PATH, f"{API_PATH}/compare")


@dataclass
class Ports:
    """Addresses of the servers by name, and the callers' tokens."""

    addresses: dict[str, str]
    tokens: dict[str, str]
    audit_dir: Path

    def channel(self, server: str) -> grpc.Channel:
        options = (("grpc.use_local_subchannel_pool", 1),)
        return grpc.insecure_channel(self.addresses[server], options=options)

    def post(self, path: str, body: bytes, headers: list[tuple[str, str]]) -> tuple[int, str]:
        """Send a request over HTTP, and return the status and the body of the answer."""
        host, port = self.addresses["http"].rsplit(":", 1)
        connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)
        connection.putrequest("POST", path)
        for name, value in [*headers, ("content-length", str(len(body)))]:
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        found = answer.status, answer.read().decode()
        connection.close()
        return found


@contextmanager
def serving(folder: Path) -> Iterator[Ports]:
    """Every server of a service, with two callers."""
    path, tokens = folder / "tokens.json", {}
    for name in ("alice", "bob"):
        tokens[name], grant = new_token(name, (name,))
        add_grant(path, grant)
    with ExitStack() as stack:
        audit_dir = folder / "audit"
        options = ServerOptions(tokens_file=path, audit_dir=audit_dir)
        shard = stack.enter_context(ShardServer(Shard(RamTier(1 << 20)), "127.0.0.1:0", options))
        gateway = stack.enter_context(running(Setup(gateway={"access": TokenFile(path)})))
        front = HttpServer(HttpFront(gateway.gateway).app, "127.0.0.1", 0)
        gateway.run(front.start())
        stack.callback(lambda: gateway.run(front.stop(0.0)))
        directory = stack.enter_context(serving_directory(FixedDirectory(ShardMap(1))))
        addresses = {"shard": shard.address, "gateway": gateway.address, "directory": directory}
        yield Ports({**addresses, "http": front.address}, tokens, audit_dir)


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    with serving(tmp_path_factory.mktemp("ports")) as ports:
        yield ports


def bearer(token: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {token}")


@pytest.mark.parametrize("server", METHODS)
@pytest.mark.parametrize("caller", ["alice", None])
def test_compressed_messages_are_refused(ports: Ports, server: str, caller: str | None) -> None:
    metadata = (bearer(ports.tokens[caller]),) if caller else ()
    with ports.channel(server) as channel:
        for method in (*METHODS[server], *HEALTH, REFLECT):
            call = channel.unary_unary(method)
            with pytest.raises(grpc.RpcError) as refusal:
                call(bytes(1 << 20), metadata=metadata, timeout=DEADLINE_S, compression=grpc.Compression.Gzip)
            assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED, method
            assert "disabled" in refusal.value.details()


@pytest.mark.parametrize("path", POSTS)
def test_compressed_bodies_are_refused(ports: Ports, path: str) -> None:
    for coding in ("gzip", "GZIP", "deflate", "br", "identity, gzip"):
        headers = [bearer(ports.tokens["alice"]), ("content-type", "application/json")]
        status, text = ports.post(path, BOMB, [*headers, ("content-encoding", coding)])
        assert status == 415, text
        assert "content-encoding" in text


@pytest.mark.parametrize("server", ["shard", "gateway"])
def test_a_stranger_is_refused_before_its_message_is_read(ports: Ports, server: str) -> None:
    with ports.channel(server) as channel:
        for method in (*METHODS[server], HEALTH[1], REFLECT):
            call = channel.stream_stream(method)(iter(()), timeout=DEADLINE_S)
            assert call.code() is grpc.StatusCode.UNAUTHENTICATED, method


@pytest.mark.parametrize("server", ["shard", "gateway"])
def test_malformed_messages_are_invalid(ports: Ports, server: str) -> None:
    metadata = (bearer(ports.tokens["alice"]),)
    with ports.channel(server) as channel:
        for method in (*METHODS[server], HEALTH[1], REFLECT):
            with pytest.raises(grpc.RpcError) as refusal:
                list(channel.stream_stream(method)(iter([b"\xff\xff\xff"]), metadata=metadata, timeout=20.0))
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method


def test_a_malformed_message_is_audited(ports: Ports) -> None:
    method = "/kintsugi.rpc.v1.ChunkStore/Verify"
    with ports.channel("shard") as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary(method)(b"\xff\xff", metadata=(bearer(ports.tokens["bob"]),))
    told = [(line["caller"], line["method"], line["result"]) for line in read_audit(ports.audit_dir)]
    assert ("bob", "verify", "INVALID_ARGUMENT") in told


@pytest.mark.parametrize("server", ["shard", "gateway"])
@pytest.mark.parametrize("order", [("alice", "bob"), ("bob", "alice")])
def test_repeated_tokens_are_refused_over_grpc(ports: Ports, server: str, order: tuple[str, str]) -> None:
    metadata = tuple(bearer(ports.tokens[name]) for name in order)
    with ports.channel(server) as channel:
        for method in (*METHODS[server], *HEALTH, REFLECT):
            call = channel.stream_stream(method)(iter(()), metadata=metadata, timeout=DEADLINE_S)
            assert call.code() is grpc.StatusCode.INVALID_ARGUMENT, method
            assert "authorization" in call.details()


@pytest.mark.parametrize("name", ["authorization", "x-kintsugi-namespace", "x-tenant-id", "x-session-id"])
@pytest.mark.parametrize("path", [*POSTS, "/v1/models"])
def test_repeated_headers_are_refused_over_http(ports: Ports, path: str, name: str) -> None:
    twice = [bearer(ports.tokens["alice"]), bearer(ports.tokens["bob"])]
    if name != "authorization":
        twice = [twice[0], (name, "alice"), (name.title(), "bob")]
    status, text = ports.post(path, b"{}", [*twice, ("content-type", "application/json")])
    assert status in (400, 405), text
    if status == 400:
        assert f"{name}: is repeated" in text


def test_a_message_beyond_the_limit_is_refused(ports: Ports) -> None:
    metadata = (bearer(ports.tokens["alice"]),)
    with ports.channel("directory") as channel:
        calls = channel.stream_stream(HEALTH[1])(iter([bytes(MESSAGE_BYTES_MAX + 1)]), metadata=metadata)
        with pytest.raises(grpc.RpcError) as refusal:
            list(calls)
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
