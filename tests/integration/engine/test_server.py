"""The plugin in vLLM's own OpenAI server, started as its users start it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kintsugi.core.plan import make_trial
from kintsugi.core.report import LADDER
from kintsugi.engine.local import save_prompt, transfer_config
from kintsugi.serving.vllm_server import LearningMiddleware
from kintsugi.store.client.registry import open_store
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.fakes.random_models.factory import make_checkpoint_once
from tests.integration.engine.conftest import (
    NAMESPACE,
    PATIENT,
    PREFIX,
    UNCALIBRATED,
    EngineSlot,
    chunks_of,
    rag,
    random_tokens,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

START_TIMEOUT_S = 180
SAVED_S = 60
UNNAMED = "found"
"""The namespace of requests that name none."""


@pytest.fixture(scope="module")
def shard() -> Iterator[ShardServer]:
    with ShardServer(Shard(RamTier(64 << 20)), "127.0.0.1:0") as server:
        yield server


@contextmanager
def serving(config: dict[str, Any], log: Path, *arguments: str) -> Iterator[httpx.Client]:
    """vLLM's server with the connector's ``config`` and more ``arguments``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--model", str(make_checkpoint_once("tiny-llama")), "--enforce-eager"]
    command += ["--served-model-name", "tiny", "--max-model-len", "4096"]
    command += ["--kv-cache-memory-bytes", "134217728", *arguments]
    command += ["--kv-transfer-config", json.dumps(transfer_config(config))]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            _wait_until_healthy(client, process, log)
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture(scope="module")
def server(
    engine_slot: EngineSlot, shard: ShardServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    engine_slot.close()
    config = {"store": f"grpc://{shard.address}", "discovery_namespace": UNNAMED, **UNCALIBRATED, **PATIENT}
    with serving(config, tmp_path_factory.mktemp("server") / "log") as client:
        yield client


def _wait_until_healthy(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError("the server did not come up:\n" + log.read_text()[-4000:])


def complete(server: httpx.Client, token_ids: list[int], params: dict[str, Any] | None) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": token_ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    if params is not None:
        body["kv_transfer_params"] = params
    response = server.post("/v1/completions", json=body)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def test_save_blend_and_count_over_http(server: httpx.Client) -> None:
    chunks = chunks_of(100, 64, seed=12)
    for chunk in chunks:
        save = save_prompt(PREFIX, chunk, NAMESPACE)
        assert save.params is not None
        saved = complete(server, list(save.token_ids), save.params.to_mapping())
        assert saved["kv_transfer_params"]["kintsugi"]["outcome"] == "saved"
    prompt = rag(*chunks)
    plain = complete(server, prompt.token_ids, None)
    blended = complete(server, prompt.token_ids, prompt.params(1.0).to_mapping())
    accounting = blended["kv_transfer_params"]["kintsugi"]
    assert accounting["outcome"] == "blended", accounting
    assert accounting["tokens_hit"] == 164
    assert blended["choices"][0]["text"] == plain["choices"][0]["text"]

    refused = complete(server, prompt.token_ids, {"kintsugi": {"namespace": NAMESPACE, "ratio": 2}})
    assert refused["kv_transfer_params"]["kintsugi"]["reason"].startswith("InvalidField: kintsugi.ratio")
    assert refused["choices"][0]["text"] == plain["choices"][0]["text"]

    metrics = server.get("/metrics").text
    for line in ('outcome="blended",reason="none"', 'outcome="declined",reason="InvalidField"'):
        assert line in metrics
    assert "kintsugi_blend_tokens_hit_total" in metrics


def count(server: httpx.Client, name: str) -> float:
    """A counter of the server's, over all its labels."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def test_who_names_nothing_hits_what_the_idle_server_saved(server: httpx.Client, shard: ShardServer) -> None:
    """Nobody steps the engine here: without requests, vLLM does as long as segments wait to be saved."""
    body = {"model": "tiny", "prompt": "\n", "add_special_tokens": False}
    (line_break,) = server.post("/tokenize", json=body).json()["tokens"]
    passages = [[*passage, line_break, line_break] for passage in chunks_of(300, 290, 280, seed=31)]
    num_tokens = sum(map(len, passages))

    def ask(*order: int) -> None:
        passed = [token for index in order for token in passages[index]]
        answer = complete(server, [*PREFIX, *passed, *random_tokens(20, seed=order[0])], None)
        assert answer.get("kv_transfer_params") is None, "who names nothing is told nothing"

    ask(0, 1, 2)
    ask(1, 2, 0)
    with closing(open_store(f"grpc://{shard.address}")) as store:
        wait_until(
            lambda: sum(chunk.num_tokens for chunk in store.list(UNNAMED)) == num_tokens,
            "the idle engine did not save the passages",
            within_s=SAVED_S,
            pause_s=0.2,
        )
    before = count(server, "kintsugi_blend_tokens_discovered_total")
    ask(2, 0, 1)  # begins as neither did, so vLLM's prefix cache has none of it
    wait_until(
        lambda: count(server, "kintsugi_blend_tokens_discovered_total") - before == num_tokens,
        "the passages were not hit",
        within_s=SAVED_S,
        pause_s=0.2,
    )


def test_a_server_with_the_middleware_learns(
    engine_slot: EngineSlot, shard: ShardServer, tmp_path: Path
) -> None:
    """Nothing is saved before, and nothing was measured: twins save what they need, in idle time."""
    engine_slot.close()
    middleware = f"{LearningMiddleware.__module__}.{LearningMiddleware.__qualname__}"
    # A tiny model gains nothing by a blend, and the controller would say so.
    config = {"store": f"grpc://{shard.address}", "audits": True, "loading_controller": False, **PATIENT}
    arguments = ("--middleware", middleware, "--scheduling-policy", "priority")
    with serving(config, tmp_path / "log", *arguments) as client:
        for seed in range(3):
            prompt = rag(*chunks_of(100, 64, seed=50 + seed))
            answer = complete(client, prompt.token_ids, prompt.params(ratio=None).to_mapping())
            assert answer["kv_transfer_params"]["kintsugi"]["reason"].startswith("learning")
        wait_until(
            lambda: count(client, "kintsugi_quality_pairs_total") >= 3,
            "what the server answered was not measured",
            within_s=SAVED_S,
            pause_s=0.2,
        )
        trial = prompt.params(ratio=None)
        trial = dataclasses.replace(trial, trial=make_trial(LADDER[0]))
        body = {"model": "tiny", "prompt": prompt.token_ids, "kv_transfer_params": trial.to_mapping()}
        refused = client.post("/v1/completions", json=body)
        assert refused.status_code == 400
        assert "trial: is for the engine itself" in refused.text
        asked: dict[str, Any] = {"namespace": NAMESPACE}
        answer = complete(client, prompt.token_ids, {"kintsugi": {**asked, "ratio": 2}})
        assert answer["kv_transfer_params"]["kintsugi"]["reason"].startswith("InvalidField: kintsugi.ratio")
        body = {"model": "tiny", "prompt": prompt.token_ids, "stop": ["no such text"]}
        stopped = client.post("/v1/completions", json={**body, "kv_transfer_params": {"kintsugi": asked}})
        assert stopped.status_code == 200, "`op` may be left out"
