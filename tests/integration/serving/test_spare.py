"""A spare engine: it takes over at once, and nobody notices when it is the one that is killed."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from kintsugi.core.deploy import ENGINE_DEPLOYMENT, ENGINE_METRICS_PORT, METRICS_PORTS
from kintsugi.sdk.client import Client
from kintsugi.sdk.types import Sampling
from kintsugi.serving.deployment import Service
from tests.integration.serving.conftest import START_TIMEOUT_S, Deployed, eventually

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]

TEXTS = ["The tide comes in twice a day in most harbours of the coast."]
GREEDY = Sampling(max_tokens=4, temperature=0.0)
DEFAULT_PORT = ENGINE_METRICS_PORT


@pytest.fixture(scope="module")
def serving(deployed: Deployed) -> int:
    """The process of the only engine, before it gets a spare."""
    (process,) = deployed.process_ids(ENGINE_DEPLOYMENT).values()
    return process


@pytest.fixture(scope="module")
def spared(deployed: Deployed, serving: int) -> Iterator[Deployed]:
    """The service with a spare engine."""
    spec = deployed.service.spec
    expert = dataclasses.replace(spec.engines.expert, spares=1)
    service = Service(dataclasses.replace(spec, engines=dataclasses.replace(spec.engines, expert=expert)))
    service.deploy()
    spared = dataclasses.replace(deployed, service=service)
    try:
        assert eventually(lambda: len(engines(spared)) == 2 and spared.ready(), START_TIMEOUT_S)
        yield spared
    finally:
        deployed.service.deploy()
        assert eventually(lambda: len(engines(deployed)) == 1 and deployed.ready(), START_TIMEOUT_S)


def engines(deployed: Deployed) -> set[int]:
    return set(deployed.process_ids(ENGINE_DEPLOYMENT).values())


def answers_of(process: int) -> float:
    """How many requests the engine of a replica has answered."""
    ports = range(DEFAULT_PORT, DEFAULT_PORT + METRICS_PORTS)
    (port,) = {
        one.laddr.port
        for one in psutil.Process(process).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port in ports
    }
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))


def test_a_spare_restarts_nothing_and_is_replaced_when_it_is_killed(spared: Deployed, serving: int) -> None:
    (spare,) = engines(spared) - {serving}
    os.kill(spare, signal.SIGKILL)
    with Client(spared.grpc, namespace="spare") as client:
        client.put_chunks(TEXTS, wait=True)

        def is_replaced() -> bool:
            assert client.generate(TEXTS, "Tide?", sampling=GREEDY).text
            return len(engines(spared) - {spare}) == 2 and spared.ready()

        assert eventually(is_replaced, START_TIMEOUT_S)
    assert serving in engines(spared)


def test_a_spare_answers_while_a_killed_engine_is_started_again(spared: Deployed, serving: int) -> None:
    (spare,) = engines(spared) - {serving}
    before = answers_of(spare)
    os.kill(serving, signal.SIGKILL)
    with Client(spared.grpc, namespace="spare") as client:
        assert client.generate(TEXTS, "Tide?", sampling=GREEDY).text
        assert answers_of(spare) > before
        assert eventually(lambda: len(engines(spared)) == 2 and spared.ready(), START_TIMEOUT_S)
        assert client.generate(TEXTS, "Tide?", sampling=GREEDY).text
    assert spare in engines(spared)
