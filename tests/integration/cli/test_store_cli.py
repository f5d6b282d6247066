"""`kintsugi store` as its operator runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from typer.testing import CliRunner

from kintsugi.cli.commands.store import app
from kintsugi.cli.exits import ExitCode
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.protocol import wire
from kintsugi.store.shard.server import ServerOptions, ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.contracts.store_contract import make_chunk

runner = CliRunner()


@pytest.fixture
def server() -> Iterator[ShardServer]:
    with ShardServer(Shard(RamTier(8 << 20)), "127.0.0.1:0") as server:
        yield server


def run(*arguments: str, status: int = 0) -> str:
    result = runner.invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result.output


def test_an_operator_sees_and_removes_chunks(server: ShardServer) -> None:
    store = GrpcStore(server.address)
    manifest, frames = make_chunk(range(40))
    store.put(manifest, frames)
    store.close()
    at = ("--store", f"grpc://{server.address}")
    assert "1 chunks" in run("status", *at)
    assert "1 chunks" in run("status", "--store", f"grpc://{server.address}")
    assert manifest.key.hex in run("ls", "-n", "acme", *at)
    assert "1 chunks deleted" in run("rm", "-n", "acme", manifest.key.hex, *at)
    assert "0 chunks deleted" in run("rm", "-n", "acme", "--all", *at)


def test_everything_has_a_json_form(server: ShardServer, tmp_path: Path) -> None:
    store = GrpcStore(server.address)
    manifest, frames = make_chunk(range(40))
    store.put(manifest, frames)
    store.close()

    def said(*arguments: str, status: int = 0) -> Any:
        result = runner.invoke(app, [*arguments, "--json"])
        assert result.exit_code == status, result.output
        return json.loads(result.stdout)

    at, key = ("--store", f"grpc://{server.address}"), manifest.key.hex
    status = said("status", *at)
    assert (status["chunks"], status["draining"]) == (1, False)
    assert status["tiers"][0] | {"name": "ram", "chunks": 1} == status["tiers"][0]
    (row,) = said("ls", "-n", "acme", *at)["chunks"]
    assert (row["key"], row["bytes"], row["tier"]) == (key, manifest.chunk_bytes, "ram")
    (place,) = said("rm", "-n", "acme", key, "--erase", *at)["places"]
    assert (place["place"], place["items"]) == (f"shard {server.shard.shard_id}/ram", 1)
    assert server.shard.erasures.newest == 1
    assert said("rm", "-n", "acme", "--all", "--erase", *at)["places"][0]["items"] == 0
    assert said("rm", "-n", "acme", key, *at) == {"deleted": 0}
    error = said("status", "--store", "grpc://127.0.0.1:1", status=ExitCode.UNAVAILABLE)["error"]
    assert error["type"] == "Unavailable"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rm", "-n", "acme"), "--all"),
        (("rm", "-n", "acme", "zz"), "hexadecimal"),
        (("status", "--store", "grpc://127.0.0.1:1"), "check that it runs"),
        (("status", "--store", "grpc://"), "host:port"),
        (("ls", "-n", "acme", "--store", "grpc://localhost"), "host:port"),
        (("status", "--store", "ram://here"), "does not name one shard"),
        (("serve", "--ram", "much"), "4GiB"),
        (("serve", "--ssd", "nowhere"), "64GiB"),
        (("serve", "--ssd", "disk:1GiB"), "data-dir"),
        (("serve", "--ram", "1MiB", "--listen", "0.0.0.0:0"), "--insecure"),
        (("serve", "--ram", "1MiB", "--policy", "fifo"), "s3fifo"),
        (("serve", "--ram", "1MiB", "--ack", "durable"), "--ssd"),
        (("serve", "--ram", "1MiB", "--peers", "grpc://127.0.0.1:1"), "shards://"),
        (("serve", "--ram", "1MiB", "--listen", "127.0.0.1"), "host:port"),
        (("serve", "--ram", "1MiB", "--listen", "127.0.0.1:99999"), "65535"),
        (("serve", "--ram", "1MiB", "--listen", "127.0.0.1:0", "--metrics", "nine"), "metrics"),
        (("serve", "--ram", "9" * 400), "addressed"),
        (("serve", "--ssd", "disk:0"), "one block"),
        (("serve", "--bucket", "s3://chunks"), "1TiB"),
        (("serve", "--bucket", "s3://chunks:1GiB"), "--ssd"),
    ],
)
def test_bad_input_is_explained_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    status = ExitCode.UNAVAILABLE if message == "check that it runs" else ExitCode.BAD_INPUT
    output = run(*arguments, status=status)
    assert message in output
    assert "Traceback" not in output


def test_a_listing_goes_on_behind_a_full_response(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [make_chunk(range(start, start + 40)) for start in range(0, 500, 100)]
    with closing(GrpcStore(server.address)) as store:
        for manifest, frames in chunks:
            store.put(manifest, frames)
    monkeypatch.setattr(wire, "RESPONSE_BYTES_MAX", 2 * wire.manifest_bytes(chunks[0][0]))
    at = ("-n", "acme", "--store", f"grpc://{server.address}")
    assert all(manifest.key.hex in run("ls", *at) for manifest, _ in chunks)
    assert len(run("ls", "--limit", "3", *at).splitlines()) == 3


def test_a_served_shard_drains_on_sigterm_and_keeps_everything(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-c", "from kintsugi.cli.commands.store import app; app()", "serve"),
        *("--data-dir", str(tmp_path / "data"), "--ram", "8MiB", "--ssd", f"{tmp_path / 'ssd'}:16MiB"),
        *("--listen", "127.0.0.1:0"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "200"}
    manifest, frames = make_chunk(range(40))
    for attempt in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert process.stdout is not None
            banner = process.stdout.readline()
            store = GrpcStore(banner.split()[-1])
            if attempt == 0:
                assert store.put(manifest, frames)
            assert store.lookup("acme", [manifest.key]) == [manifest]
            store.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.communicate()


def test_health_reflection_and_metrics_answer() -> None:
    options = ServerOptions(metrics_listen="127.0.0.1:0")
    shard = Shard(RamTier(8 << 20))
    with ShardServer(shard, "127.0.0.1:0", options) as server:
        store = GrpcStore(server.address)
        manifest, frames = make_chunk(range(40))
        store.put(manifest, frames)
        store.lookup("acme", [manifest.key])
        with grpc.insecure_channel(server.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(service="kintsugi.rpc.v1.ChunkStore"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            services = ProtoReflectionDescriptorDatabase(channel).get_services()
            assert "kintsugi.rpc.v1.ChunkStore" in services
        with urllib.request.urlopen(f"http://{server.metrics_address}/metrics") as response:
            text = response.read().decode()
        assert "kintsugi_store_hits_total 1.0" in text
        assert 'kintsugi_store_tier_chunks{tier="ram"} 1.0' in text
        assert 'kintsugi_store_rpc_seconds_count{rpc="put_chunk_kv"} 1.0' in text
        store.close()
