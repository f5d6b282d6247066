"""A Ray that was started here, as other users and other machines see it."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

pytest.importorskip("ray", reason="install the extra `precompute`")

import ray

from kintsugi.precompute.local_ray import is_on_loopback_alone
from tests.ports import find_exposed

NODES = "/ray.rpc.NodeInfoGcsService/CheckAlive"
RAYS_PROCESSES = 5
"""GCS, raylet, two agents and the monitor; this process and workers besides."""


@ray.remote(num_cpus=0)
class Worker:
    def is_there(self) -> bool:
        return True


def test_all_ports_are_on_loopback(running_ray: None) -> None:
    worker = Worker.remote()  # type: ignore[attr-defined]  # which Ray adds
    assert ray.get(worker.is_there.remote())
    exposed, count = find_exposed()
    assert exposed == []
    assert count > RAYS_PROCESSES, "the scan found Ray's sockets"
    ray.kill(worker)


def test_ray_asks_for_a_token(running_ray: None) -> None:
    with grpc.insecure_channel(ray.get_runtime_context().gcs_address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(NODES, None, None)(b"", timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_others_may_not_enter_rays_folder(running_ray: None) -> None:
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    outer = session.parent.parent
    assert stat.S_IMODE(outer.stat().st_mode) == 0o700
    assert outer.stat().st_uid == os.getuid()


def test_another_process_joins_it_at_its_loopback_address(running_ray: None) -> None:
    address = ray.get_runtime_context().gcs_address
    assert is_on_loopback_alone(address)
    code = (
        "import ray; from kintsugi.precompute.pool import ensure_ray; ensure_ray(1);"
        "print(ray.get_runtime_context().gcs_address)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_ADDRESS": address}
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert said.stdout.split() == [address], said.stderr


def test_a_port_where_nothing_listens_and_other_machines_are_not_on_loopback_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert is_on_loopback_alone(f"127.0.0.1:{port}")
        assert is_on_loopback_alone(f"localhost:{port}")
    assert not is_on_loopback_alone(f"127.0.0.1:{port}")
    assert not any(map(is_on_loopback_alone, ("auto", "10.0.0.9:6379", "127.0.0.1:99999", "127.0.0.1", "")))
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        assert not is_on_loopback_alone(f"127.0.0.1:{everywhere.getsockname()[1]}")
