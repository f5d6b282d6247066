"""The whole service on a real Ray, engines behind Serve's handle; and what is killed comes back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest

from kintsugi.core.deploy import (
    ENGINE_DEPLOYMENT,
    ENGINE_METRICS_PORT,
    GATEWAY_DEPLOYMENT,
    METRICS_PORTS,
    SHARD_DEPLOYMENT,
    SHARD_METRICS_PORT,
)
from kintsugi.core.errors import KintsugiError, Unavailable
from kintsugi.sdk.client import Client
from kintsugi.sdk.types import Sampling
from kintsugi.serving.directory import ACTOR_NAME, LEASE_S, RAY_NAMESPACE
from kintsugi.serving.ray_backend import RayBackend
from kintsugi.store.client.directory import GrpcDirectory, ShardMap
from tests.contracts.backend_contract import BackendContract, Engines
from tests.integration.serving.conftest import START_TIMEOUT_S, Deployed, eventually
from tests.ports import find_exposed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

Result = TypeVar("Result")
GREEDY = Sampling(max_tokens=4, temperature=0.0)
TEXTS = [
    "The tide comes in twice a day in most harbours of the coast.",
    "Salt was once worth its weight in gold.",
]


class RayEngines(Engines):
    vocabulary = 1000
    long_answer_tokens = 8000

    def __init__(self, deployed: Deployed, loop: asyncio.Runner) -> None:
        self._loop = loop
        self._handle = deployed.handle()
        self.backend = RayBackend(self._handle)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._loop.run(coroutine)

    async def idle(self) -> bool:
        return bool((await self._handle.stats.remote()).running == 0)

    async def closed(self) -> RayBackend:
        backend = RayBackend(self._handle)
        await backend.close()
        return backend


@pytest.fixture(scope="module")
def ray_engines(deployed: Deployed, loop: asyncio.Runner) -> RayEngines:
    return RayEngines(deployed, loop)


class TestRayBackend(BackendContract):
    @pytest.fixture
    def engines(self, ray_engines: RayEngines) -> RayEngines:
        return ray_engines


def test_the_sdk_stores_chunks_and_they_are_hit(deployed: Deployed) -> None:
    with Client(deployed.grpc, namespace="sdk") as client:
        assert all(put.new for put in client.put_chunks(TEXTS, wait=True))
        assert not any(put.new for put in client.put_chunks(TEXTS, wait=True))
        answer = client.generate(TEXTS, "When does the tide come in?", sampling=GREEDY)
    assert answer.accounting["chunks_hit"] == 2, answer.accounting
    assert answer.accounting["outcome"] == "blended"


def test_a_prompt_whose_chunks_lie_on_both_shards_is_blended(deployed: Deployed) -> None:
    """A layer comes from one shard after the other, so not in the order of the prompt's chunks."""
    texts = [f"Harbour {number} has a lighthouse that was built of grey stone." for number in range(8)]
    with Client(deployed.grpc, namespace="both") as client:
        assert all(put.new for put in client.put_chunks(texts, wait=True))
        answer = client.generate(texts, "Which harbour has a lighthouse?", sampling=GREEDY)
    assert answer.accounting["chunks_hit"] == 8, answer.accounting
    assert answer.accounting["outcome"] == "blended"


def test_http_answers_and_says_how_it_is(deployed: Deployed) -> None:
    with httpx.Client(base_url=deployed.http, timeout=60) as http:
        assert http.get("/readyz").json()["blending"] == "on"
        body = {"model": "tiny-llama", "prompt": "The tide", "max_tokens": 2}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 2
        metrics = http.get("/metrics").text
    assert "kintsugi_gateway_active_requests" in metrics
    assert "kintsugi_gateway_requests" in metrics


@pytest.mark.parametrize("deployment", [SHARD_DEPLOYMENT, ENGINE_DEPLOYMENT])
def test_shards_and_engines_answer_readiness_probes(deployed: Deployed, deployment: str) -> None:
    first = SHARD_METRICS_PORT if deployment == SHARD_DEPLOYMENT else ENGINE_METRICS_PORT
    for process in deployed.process_ids(deployment).values():
        ports = {
            one.laddr.port
            for one in psutil.Process(process).net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr.port in range(first, first + METRICS_PORTS)
        }
        assert len(ports) == 1
        answer = httpx.get(f"http://127.0.0.1:{ports.pop()}/readyz")
        assert (answer.status_code, answer.text) == (200, "ready\n")


def shard_map(deployed: Deployed) -> ShardMap:
    directory = GrpcDirectory(deployed.store_url.removeprefix("shards://"))
    try:
        return directory.current()
    finally:
        directory.close()


def killed(deployed: Deployed, deployment: str) -> dict[str, int]:
    """Kill a replica as a crash would; the processes of the deployment before that."""
    before = deployed.process_ids(deployment)
    os.kill(next(iter(before.values())), signal.SIGKILL)
    return before


def came_back(deployed: Deployed, deployment: str, before: dict[str, int]) -> bool:
    gone = next(iter(before.values()))

    def is_back() -> bool:
        now = deployed.process_ids(deployment)
        return len(now) == len(before) and gone not in now.values() and deployed.ready()

    return eventually(is_back)


def others(deployed: Deployed, deployment: str) -> dict[str, int]:
    """Processes of the other deployments: none of them may change."""
    every = (SHARD_DEPLOYMENT, ENGINE_DEPLOYMENT, GATEWAY_DEPLOYMENT)
    return {
        name: process
        for other in every
        if other != deployment
        for name, process in deployed.process_ids(other).items()
    }


def test_a_request_is_in_the_logs_that_ray_keeps(deployed: Deployed) -> None:
    """Serve has put a log of its own in place of a replica's standard error."""
    import ray

    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    with Client(deployed.grpc, namespace="logged") as client:
        client.tokenize(TEXTS)

    def is_logged() -> bool:
        lines = (line for file in folder.glob("worker-*.err") for line in file.read_text().splitlines())
        return any('"method": "Tokenize", "namespace": "logged", "status": "OK"' in line for line in lines)

    assert eventually(is_logged, 20)


def test_a_killed_shard_comes_back_under_its_name_and_nobody_gets_a_wrong_answer(deployed: Deployed) -> None:
    identities = {shard.shard_id for shard in shard_map(deployed).shards}
    assert len(identities) == 2
    rest = others(deployed, SHARD_DEPLOYMENT)
    with Client(deployed.grpc, namespace="kill-shard") as client:
        expected = client.generate(TEXTS, "Tide?", sampling=GREEDY, ratio=1.0).text
        client.put_chunks(TEXTS, wait=True)
        before = killed(deployed, SHARD_DEPLOYMENT)
        started_s = time.monotonic()
        while time.monotonic() - started_s < 2 * LEASE_S:
            answer = client.generate(TEXTS, "Tide?", sampling=GREEDY, ratio=1.0)
            assert answer.text == expected
        assert came_back(deployed, SHARD_DEPLOYMENT, before)
    assert eventually(lambda: {shard.shard_id for shard in shard_map(deployed).shards} == identities)
    assert others(deployed, SHARD_DEPLOYMENT) == rest


def test_a_killed_gateway_comes_back_on_its_ports(deployed: Deployed) -> None:
    rest = others(deployed, GATEWAY_DEPLOYMENT)
    before = killed(deployed, GATEWAY_DEPLOYMENT)
    assert came_back(deployed, GATEWAY_DEPLOYMENT, before)
    with Client(deployed.grpc, namespace="sdk") as client:
        assert client.generate(TEXTS, "Tide?", sampling=Sampling(max_tokens=2)).text
    assert httpx.get(f"{deployed.http}/readyz", timeout=60).status_code == 200
    assert others(deployed, GATEWAY_DEPLOYMENT) == rest


def test_a_killed_directory_comes_back_at_its_port_and_hears_of_all_shards(deployed: Deployed) -> None:
    import ray

    known = shard_map(deployed).shards
    directory = ray.get_actor(ACTOR_NAME, namespace=RAY_NAMESPACE)
    process = ray.get(directory.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(process, signal.SIGKILL)

    def knows_all() -> bool:
        try:
            return shard_map(deployed).shards == known
        except KintsugiError:
            return False

    assert eventually(knows_all)
    assert ray.get(directory.__ray_call__.remote(lambda self: os.getpid())) != process


def test_a_killed_controller_comes_back_and_replaces_nothing(deployed: Deployed) -> None:
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    before = others(deployed, "")
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    process = ray.get(controller.get_pid.remote())
    os.kill(process, signal.SIGKILL)

    def is_back() -> bool:
        try:
            return ray.get(controller.get_pid.remote(), timeout=5) != process and deployed.ready()
        except (ray.exceptions.RayError, KintsugiError):
            return False

    assert eventually(is_back)
    assert others(deployed, "") == before


def children(process: int) -> list[int]:
    task = Path(f"/proc/{process}/task")
    return [int(child) for thread in task.iterdir() for child in (thread / "children").read_text().split()]


@pytest.mark.parametrize("victim", ["replica", pytest.param("core", marks=pytest.mark.full)])
def test_a_killed_engine_fails_its_own_answers_alone_and_leaves_no_process(
    deployed: Deployed, ray_engines: RayEngines, victim: str
) -> None:
    rest, before = others(deployed, ENGINE_DEPLOYMENT), deployed.process_ids(ENGINE_DEPLOYMENT)
    (process,) = before.values()
    cores = children(process)
    assert cores
    with Client(deployed.grpc, namespace="sdk") as client:
        client.put_chunks(TEXTS, wait=True)  # a shard that was killed has lost what only its RAM held

    async def cut_off() -> None:
        request = ray_engines.request(ray_engines.tokens(12), max_tokens=8000)
        async with aclosing(ray_engines.backend.generate(request)) as deltas:
            await anext(deltas)
            for each in [process] if victim == "replica" else cores:
                os.kill(each, signal.SIGKILL)
            with pytest.raises(Unavailable, match="send the request again"):
                async for _ in deltas:
                    pass

    ray_engines.run(cut_off())
    assert eventually(lambda: not any(Path(f"/proc/{each}").exists() for each in (process, *cores)), 30)
    with Client(deployed.grpc, namespace="sdk") as client:
        answer = client.generate(TEXTS, "Tide?", sampling=GREEDY, timeout_s=START_TIMEOUT_S)
    assert answer.accounting["outcome"] in ("blended", "prefix_hit"), json.dumps(answer.accounting)
    assert came_back(deployed, ENGINE_DEPLOYMENT, before)
    assert others(deployed, ENGINE_DEPLOYMENT) == rest


def test_all_that_a_service_listens_on_is_loopback(deployed: Deployed) -> None:
    exposed, count = find_exposed()
    assert exposed == []
    assert count > len(deployed.service.addresses()), "the scan found the service's sockets"
