"""The deployment `EngineReplica`: one vLLM engine per replica, called through Serve's handles."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from logging.handlers import MemoryHandler
from typing import Any

from prometheus_client import REGISTRY

from kintsugi.core.deploy import (
    ENGINE_METRICS_PORT,
    METRICS_PORTS,
    EngineSpec,
    ModelSpec,
)
from kintsugi.core.errors import KintsugiError
from kintsugi.core.exchange import EngineInfo
from kintsugi.core.report import Binding
from kintsugi.core.schema import load
from kintsugi.engine.asynchronous import AsyncEngine, AsyncSpec, launch
from kintsugi.engine.prefetch import FileKeeper, files_in_use
from kintsugi.gateway.addresses import format_address, free_port
from kintsugi.gateway.logs import write_json_lines
from kintsugi.serving.directory import reachable
from kintsugi.serving.learning import Learning, make_learning, publish_shipped
from kintsugi.serving.replica_ports import keep_replica_on_loopback

log = logging.getLogger(__name__)

STORE_PATIENCE_S = 30.0
"""Seconds that an engine with a calibration report waits at start for a store that does not answer."""


def end_with_core() -> None:
    """End this replica at once after its vLLM core was killed. Without its core the replica seems idle, and
    every router would prefer it until three of Serve's health checks have failed. Serve replaces a dead
    process at once, and routers drop it at the first failed request."""
    log.error("vLLM's core ended, so this replica ends; Serve starts another")
    os._exit(1)


@contextmanager
def collector_off() -> Iterator[None]:
    """Turn the garbage collector off inside the block. Afterwards it ignores the objects created there.

    Importing vLLM makes hardly any garbage, but collection takes a quarter of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


@contextmanager
def serve_log_kept() -> Iterator[None]:
    """Keep Serve's log file open inside the block: when vLLM configures logging, Python closes all handlers.

    Without the file, the replica's later lines are lost, and a restarted controller, which asks each replica
    for the name of its file, replaces the replica.
    """
    handlers = logging.getLogger("ray.serve").handlers
    targets = {one: one.target for one in handlers if isinstance(one, MemoryHandler)}
    try:
        yield
    finally:
        for handler, target in targets.items():
            handler.setTarget(target)


class EngineReplica(AsyncEngine):
    """A replica: an engine that Serve starts and closes, and that `serving.ray_backend` calls."""

    _learning: Learning | None = None
    _keeper: FileKeeper | None = None

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model: Mapping[str, Any], engines: Mapping[str, Any], store_url: str, host: str
    ) -> None:
        import ray

        write_json_lines()
        keep_replica_on_loopback()
        config, served = load(EngineSpec, engines, "engines"), load(ModelSpec, model, "model")
        url = reachable(store_url)

        def prepare(binding: Binding) -> None:
            try:
                publish_shipped(served, url, binding, STORE_PATIENCE_S)
            except KintsugiError:
                log.exception("the report beside %s was not published", served.path)

        spec = AsyncSpec.of(served, config, url)
        with collector_off(), serve_log_kept():
            super().__init__(spec, await launch(spec, prepare))
            await self.warm_up()
        self.when_ended(end_with_core)
        self._keeper = FileKeeper(files_in_use(spec.model))
        self._learning = make_learning(self, REGISTRY)
        self._host = ray.util.get_node_ip_address()
        port = free_port(host, ENGINE_METRICS_PORT, METRICS_PORTS)
        self.serve_metrics(host, port)
        log.info("metrics are on %s", format_address(host, port))

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the report that `serving.engine_router` reads."""
        if self.client is None:
            return {}
        return {
            **asdict(self.stats()),
            "host": self._host,
            "fingerprint": self.binding.model.hex,
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the figures that `serving.autoscaling.EnginePolicy` reads."""
        if self.client is None:
            return {}
        stats = self.stats()
        return {
            "waiting_tokens": float(stats.waiting_tokens),
            "tokens_per_s": stats.tokens_per_s,
            "busy_share": stats.busy_share,
        }

    async def info(self, namespace: str = "") -> EngineInfo:
        info = await super().info(namespace)
        return info if self._learning is None else self._learning.describe(info)

    async def close(self) -> None:
        if self._learning is not None:
            await self._learning.close()
        if self._keeper is not None:
            self._keeper.close()
        await super().close()

    async def __del__(self) -> None:
        """Close the engine. Serve awaits this when no request is left."""
        await self.close()
