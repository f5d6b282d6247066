"""The deployment `EngineReplica`: one vLLM engine per replica, called through Serve's handles."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from kintsugi.core.deploy import METRICS_PORTS, EngineSpec, ModelSpec
from kintsugi.core.errors import KintsugiError, Unavailable
from kintsugi.core.exchange import EngineDelta, EngineInfo, EngineRequest, OpenAICall, OpenAIHead, SaveOutcome
from kintsugi.core.report import Binding
from kintsugi.core.schema import load
from kintsugi.core.tokens import TokenIds
from kintsugi.engine.asynchronous import AsyncEngine, AsyncSpec
from kintsugi.engine.load import LoadStats
from kintsugi.gateway.addresses import format_address, free_port
from kintsugi.gateway.local_backend import LocalBackend
from kintsugi.gateway.logs import write_json_lines
from kintsugi.serving.calibration import publish_shipped
from kintsugi.serving.directory import reachable
from kintsugi.serving.shadowing import make_shadowing

log = logging.getLogger(__name__)


def async_spec(model: ModelSpec, engines: EngineSpec, store_url: str) -> AsyncSpec:
    """The engine that a configuration asks for. Reads the tokenizer where there is a system prompt."""
    connector: dict[str, Any] = {"codec": model.codec, **engines.connector}
    if engines.allow_uncalibrated:
        connector["allow_uncalibrated"] = True
    arguments: dict[str, Any] = {"dtype": model.dtype, **engines.vllm}
    if model.max_model_len is not None:
        arguments["max_model_len"] = model.max_model_len
    if engines.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(engines.kv_cache_gib * (1 << 30))
    return AsyncSpec(
        model.path,
        name_of(model),
        store_url,
        prefix_token_ids=None if model.system_prompt is None else _tokens_of(model),
        extra_config=connector,
        vllm_args=arguments,
        openai=engines.openai,
    )


def name_of(model: ModelSpec) -> str:
    """What clients call it."""
    return model.name or Path(model.path).name or model.path


def _tokens_of(model: ModelSpec) -> tuple[int, ...]:
    """The system prompt as it begins a prompt, BOS included where the tokenizer writes one."""
    from transformers import AutoTokenizer

    return tuple(AutoTokenizer.from_pretrained(model.path)(model.system_prompt).input_ids)


def end_with_core() -> None:
    """A replica whose vLLM core was killed ends at once: with nothing to do it would be every router's first
    choice until Serve's health checks have failed three times. Serve restarts a process that is gone at once,
    and routers drop it at the first request that it does not take."""
    log.error("vLLM's core ended, so this replica ends; Serve starts another")
    os._exit(1)


class EngineReplica:
    """One replica. `serving.ray_backend` calls it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model: Mapping[str, Any], engines: Mapping[str, Any], store_url: str, host: str
    ) -> None:
        import ray

        write_json_lines()
        spec, served = load(EngineSpec, engines, "engines"), load(ModelSpec, model, "model")
        url = reachable(store_url)

        def prepare(binding: Binding) -> None:
            try:
                publish_shipped(served, url, binding)
            except KintsugiError:
                log.exception("the calibration report beside %s was not published", served.path)

        engine = await AsyncEngine.start(async_spec(served, spec, url), prepare)
        engine.when_ended(end_with_core)
        self._engine: AsyncEngine | None = engine
        self._backend = LocalBackend(engine)
        self._shadowing = make_shadowing(spec, engine, REGISTRY)
        self._host = ray.util.get_node_ip_address()
        if spec.metrics_port:
            port = free_port(host, spec.metrics_port, METRICS_PORTS)
            engine.serve_metrics(host, port)
            log.info("metrics are on %s", format_address(host, port))

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        async with aclosing(self._backend.generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def save(
        self,
        request_id: str,
        namespace: str,
        chunks: Sequence[TokenIds],
        priority: int = 0,
        tier: str = "auto",
    ) -> list[SaveOutcome]:
        return await self._backend.save(request_id, namespace, chunks, priority, tier)

    async def openai(self, call: OpenAICall) -> AsyncGenerator[OpenAIHead | bytes, None]:
        async with aclosing(self._backend.openai(call)) as pieces:
            async for piece in pieces:
                yield piece

    async def info(self) -> EngineInfo:
        return await self._backend.info()

    async def stats(self) -> LoadStats:
        if self._engine is None:
            raise Unavailable("the engine has ended")
        return self._engine.stats()

    async def check_health(self) -> None:
        if self._engine is not None:
            self._engine.check_health()

    async def record_routing_stats(self) -> dict[str, Any]:
        """What `serving.engine_router` reads."""
        if self._engine is None:
            return {}
        fingerprint = self._engine.binding.model.hex
        return {**asdict(self._engine.stats()), "host": self._host, "fingerprint": fingerprint}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `serving.autoscaling.EnginePolicy` reads."""
        if self._engine is None:
            return {}
        stats = self._engine.stats()
        return {
            "waiting_tokens": float(stats.waiting_tokens),
            "tokens_per_s": stats.tokens_per_s,
            "busy_share": stats.busy_share,
        }

    async def __del__(self) -> None:
        """Serve awaits it, once no request is left."""
        engine, self._engine = getattr(self, "_engine", None), None
        if engine is not None:
            if self._shadowing is not None:
                await self._shadowing.close()
            await engine.stop()
