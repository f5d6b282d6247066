"""A Ray that was started here, as other users and other machines see it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import grpc
import pytest

pytest.importorskip("ray", reason="install the extra `precompute`")

import ray

from tests.ports import find_exposed

NODES = "/ray.rpc.NodeInfoGcsService/CheckAlive"
RAYS_PROCESSES = 5
"""GCS, raylet, two agents and the monitor; this process and workers besides."""


@ray.remote(num_cpus=0)
class Worker:
    def is_there(self) -> bool:
        return True


def test_all_ports_are_on_loopback(running_ray: None) -> None:
    worker = Worker.remote()
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
