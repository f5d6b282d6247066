"""What is scraped: every Prometheus family with its type and labels, by the process that exports it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

from prometheus_client import CollectorRegistry

from kintsugi.gateway.fill import FillConfig
from kintsugi.gateway.gateway import Gateway
from kintsugi.quality.shadow import ShadowCounts
from kintsugi.store.client.ram import RamStore
from kintsugi.store.shard.eviction.reuse import Counters
from kintsugi.store.shard.metrics import ShardMetrics
from kintsugi_operator.controller.pulse import Pulse

REPOSITORY = Path(__file__).parents[3]

_ENGINE = """
import json, sys
from types import ModuleType, SimpleNamespace
import prometheus_client as prometheus

class Base:
    def __init__(self, *_):
        pass

parts = "vllm.distributed.kv_transfer.kv_connector.v1.metrics".split(".")
for depth in range(len(parts)):
    sys.modules[".".join(parts[: depth + 1])] = ModuleType(parts[depth])
metrics = sys.modules[".".join(parts)]
metrics.KVConnectorPromMetrics = metrics.KVConnectorStats = Base

from kintsugi.engine.scheduler.metrics import BlendPromMetrics

found = {}

def declare(kind):
    def metric(name, _text, labelnames=(), **_):
        found[name] = [kind, *labelnames]
    return metric

kinds = {getattr(prometheus, name): declare(name.lower()) for name in ("Counter", "Gauge", "Histogram")}
BlendPromMetrics(None, kinds, [], {})
print(json.dumps(found))
"""
"""Importing vLLM takes ten seconds, and all that is needed of it is two base classes."""


def surface() -> dict[str, dict[str, str]]:
    """`{process: {family: type{label, ...}}}`. vLLM adds labels of its own to those of an engine."""
    return {
        "shard": _shard(),
        "gateway": asyncio.run(_gateway()),
        "engine": {**_engine(), **_families(_registry_of(ShadowCounts()))},
        "operator": {name: _shown(kind) for name, kind in re.findall(r"# TYPE (\S+) (\S+)", Pulse().text())},
    }


def _registry_of(collector: Any) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def _families(registry: CollectorRegistry) -> dict[str, str]:
    """Families without samples count too; only the declaring object knows their labels."""
    found = {}
    for collector in list(registry._collector_to_names):
        declared = [collector] if hasattr(collector, "_labelnames") else list(collector.collect())
        for family in declared:
            name, kind = getattr(family, "name", None), getattr(family, "type", None)
            found[name or family._name] = _shown(kind or family._type, *family._labelnames)
    return dict(sorted(found.items()))


def _shard() -> dict[str, str]:
    shard = MagicMock(table=MagicMock(counters=Counters(), queues=[]), tiers=[], failure=None)
    return _families(ShardMetrics(shard, {}).registry)


async def _gateway() -> dict[str, str]:
    """gRPC and HTTP front ends share a registry."""
    store = RamStore()
    gateway = Gateway(Mock(), store, lambda text: list(text.encode()), fill=FillConfig())
    try:
        return _families(gateway.metrics.registry)
    finally:
        await gateway.close()


def _engine() -> dict[str, str]:
    """Families that the connector declares over vLLM's channel."""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{_ENGINE}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    return {name: _shown(*declared) for name, declared in sorted(json.loads(said.stdout).items())}


def _shown(kind: str, *labels: str) -> str:
    return f"{kind}{{{', '.join(labels)}}}"
