"""Runs two real engines behind a Serve handle, with conversations that grow turn by turn."""

from __future__ import annotations

import asyncio
import random
import tempfile
from contextlib import aclosing

from kintsugi.core.deploy import (
    ENGINE_DEPLOYMENT,
    SERVICE_APP,
    EngineSpec,
    GatewaySpec,
    ModelSpec,
    ServiceSpec,
    StoreExpert,
    StoreSpec,
)
from kintsugi.core.exchange import EngineRequest, Usage
from kintsugi.core.request import KintsugiParams, Op
from kintsugi.core.spaces import TokenIds
from kintsugi.gateway.addresses import free_port
from kintsugi.serving.deployment import Service, start_ray
from kintsugi.serving.ray_backend import RayBackend
from tests.fakes.random_models.factory import make_checkpoint_once

ROUTERS = ("ours", "two_choices")
START_TIMEOUT_S = 400.0
TURN_TOKENS = 384


def cached_share(router: str, conversations: int, turns: int) -> float:
    """Cached share of all prompt tokens after each conversation's first turn, with one of `ROUTERS`."""
    import ray
    from ray import serve

    with tempfile.TemporaryDirectory() as folder:
        spec = ServiceSpec(
            ModelSpec(str(make_checkpoint_once("tiny-llama")), "tiny"),
            EngineSpec(replicas=2, quality="off", vllm={"kv_cache_memory_bytes": 1 << 29}),
            StoreSpec(
                ram_gib=0.1,
                data_dir=folder,
                expert=StoreExpert(directory_port=free_port("127.0.0.1", 29410, 64)),
            ),
            GatewaySpec(grpc_port=0, http_port=0),
        )
        start_ray(spec)
        service = Service(spec)
        engine = service.config["applications"][1]["deployments"][0]
        if router == "two_choices":
            del engine["request_router_config"]  # Serve's own
        try:
            service.deploy()
            service.wait(START_TIMEOUT_S, lambda progress: None)
            backend = RayBackend(serve.get_deployment_handle(ENGINE_DEPLOYMENT, SERVICE_APP))
            return asyncio.run(_asked(backend, conversations, turns))
        finally:
            service.stop()
            ray.shutdown()


async def _asked(backend: RayBackend, conversations: int, turns: int) -> float:
    """All conversations side by side, each turn after the one before."""
    usages = await asyncio.gather(*(_conversation(backend, number, turns) for number in range(conversations)))
    later = [usage for conversation in usages for usage in conversation[1:]]
    return sum(usage.cached_tokens for usage in later) / sum(usage.prompt_tokens for usage in later)


async def _conversation(backend: RayBackend, number: int, turns: int) -> list[Usage]:
    draw = random.Random(number)
    params = KintsugiParams("routing", op=Op.OFF)
    prompt: list[int] = []
    usages = []
    for turn in range(turns):
        prompt += [draw.randrange(20, 1000) for _ in range(TURN_TOKENS)]
        sampling = {"max_tokens": 2, "temperature": 0.0}
        request = EngineRequest(f"{number}-{turn}", TokenIds.of(prompt), params, sampling)
        async with aclosing(backend.generate(request)) as deltas:
            async for delta in deltas:
                prompt += delta.token_ids
                if delta.usage is not None:
                    usages.append(delta.usage)
        await asyncio.sleep(draw.uniform(0.1, 0.5))
    return usages
