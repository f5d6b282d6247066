"""A service on Ray with a real engine, shared by the tests of this folder."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="install the extra `serving`")

from kintsugi.core.deploy import (
    ENGINE_DEPLOYMENT,
    SERVICE_APP,
    EngineExpert,
    EngineSpec,
    GatewaySpec,
    GatewaySpecExpert,
    ModelSpec,
    ServiceSpec,
    StoreExpert,
    StoreSpec,
    directory_url,
)
from kintsugi.gateway.addresses import free_port
from kintsugi.serving.deployment import Service
from tests.fakes.random_models.factory import make_checkpoint_once

MODEL = "tiny-llama"
START_TIMEOUT_S = 240.0
WAIT_S = 120.0


def eventually(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    """Whether it comes true in time."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.1)
    return False


@dataclass
class Deployed:
    """The service, and what tests look at."""

    service: Service
    grpc: str
    http: str
    store_url: str

    def handle(self) -> Any:
        """Serve's handle for the engines."""
        from ray import serve

        return serve.get_deployment_handle(ENGINE_DEPLOYMENT, SERVICE_APP)

    def process_ids(self, deployment: str) -> dict[str, int]:
        """Process ids of the replicas that Ray knows, by actor name."""
        import ray

        found: dict[str, int] = {}
        for actor in ray.util.list_named_actors(all_namespaces=True):
            name = actor["name"]
            if not name.startswith("SERVE_REPLICA::") or f"#{deployment}#" not in name:
                continue
            try:
                handle = ray.get_actor(name, namespace=actor["namespace"])
                found[name] = ray.get(handle.__ray_call__.remote(lambda self: os.getpid()), timeout=10)
            except (ValueError, ray.exceptions.RayError):
                continue  # It is gone, or about to be.
        return found

    def ready(self) -> bool:
        """Whether Serve says that all run."""
        progress = self.service.progress()
        return len(progress) == 3 and all(one.is_ready for one in progress)


@pytest.fixture(scope="session")
def deployed(running_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("service")
    spec = ServiceSpec(
        ModelSpec(str(make_checkpoint_once(MODEL)), MODEL),
        EngineSpec(
            quality="off",
            vllm={"kv_cache_memory_bytes": 1 << 28},
            expert=EngineExpert(loading_controller=False, load_deadline_ms=60_000),
        ),
        StoreSpec(
            shards=2,
            ram_gib=0.25,
            data_dir=str(folder / "shards"),
            expert=StoreExpert(directory_port=free_port("127.0.0.1", 27410, 64)),
        ),
        GatewaySpec(
            grpc_port=free_port("127.0.0.1", 27500, 64),
            http_port=free_port("127.0.0.1", 27600, 64),
            expert=GatewaySpecExpert(data_dir=str(folder / "gateway")),
        ),
    )
    service = Service(spec)
    service.deploy()
    try:
        service.wait(START_TIMEOUT_S, lambda progress: None)
        addresses = service.addresses()
        yield Deployed(service, addresses["grpc"], f"http://{addresses['http']}", directory_url(spec.store))
    finally:
        service.stop()


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.Runner]:
    """One event loop: a handle's answers belong to the loop that they were asked for in."""
    with asyncio.Runner() as runner:
        yield runner


def shard_folders(service: Service) -> list[Path]:
    return sorted(Path(service.spec.store.data_dir).iterdir())
