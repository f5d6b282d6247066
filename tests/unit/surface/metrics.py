"""What is scraped: every Prometheus family with its type and labels, by the process that exports it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

from prometheus_client import CollectorRegistry

from kintsugi.core.gate import GateProgress
from kintsugi.gateway.fill import FillConfig
from kintsugi.gateway.gateway import Gateway
from kintsugi.quality.stream import StreamCounts
from kintsugi.serving.learning import LearningMetrics
from kintsugi.store.client.ram import RamStore
from kintsugi.store.shard.eviction.room import Counters
from kintsugi.store.shard.exporter import ShardMetrics
from kintsugi_operator.controller.metrics import OperatorMetrics

_OPEN = GateProgress("open", "", 40, 9, 3, 0.5, 0.001, 0.01, 0.1, 0.2, 0.125)
"""GateProgress with a value for every metric."""

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

from kintsugi.engine.scheduler.stats import BlendPromMetrics

found = {}

def declare(kind):
    def metric(name, text, labelnames=(), **_):
        found[name] = [kind, labelnames, text]
    return metric

kinds = {getattr(prometheus, name): declare(name.lower()) for name in ("Counter", "Gauge", "Histogram")}
BlendPromMetrics(None, kinds, [], {})
print(json.dumps(found))
"""
"""Importing vLLM takes ten seconds, and all that is needed of it is two base classes."""


@dataclass(frozen=True)
class Family:
    """A metric as Prometheus knows it. `text`: what it says of itself."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.kind}{{{', '.join(self.labels)}}}"

    @property
    def exported(self) -> str:
        """Its name on a page of metrics."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def surface() -> dict[str, dict[str, str]]:
    """`{process: {family: type{label, ...}}}`. vLLM adds labels of its own to those of an engine."""
    found = families()
    shown = {process: {name: str(one) for name, one in of.items()} for process, of in found.items()}
    # Recorded from the beginning under the names that are exported, without labels.
    shown["operator"] = {one.exported: f"{one.kind}{{}}" for one in found["operator"].values()}
    return shown


def families() -> dict[str, dict[str, Family]]:
    """Every family by process and name."""
    metrics = OperatorMetrics()
    return {
        "shard": _shard(),
        "gateway": asyncio.run(_gateway()),
        "engine": {**_engine(), **_families(_registry_of(LearningMetrics(StreamCounts(), lambda: _OPEN)))},
        "operator": _families(metrics.registry),
    }


def _registry_of(*collectors: Any) -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry


def _families(registry: CollectorRegistry) -> dict[str, Family]:
    """Families without samples count too; only the declaring object knows their labels."""
    found = {}
    for collector in list(registry._collector_to_names):
        declared: list[Any] = [collector] if hasattr(collector, "_labelnames") else list(collector.collect())
        for family in declared:
            name, kind = getattr(family, "name", None), getattr(family, "type", None)
            text = getattr(family, "documentation", None) or family._documentation
            name, labels = name or family._name, tuple(family._labelnames)
            found[name] = Family(name, kind or family._type, labels, text)
    return dict(sorted(found.items()))


def _shard() -> dict[str, Family]:
    shard = MagicMock(table=MagicMock(counters=Counters(), queues=[]), tiers=[], failure=None)
    return _families(ShardMetrics(shard, {}).registry)


async def _gateway() -> dict[str, Family]:
    """gRPC and HTTP front ends share a registry."""
    store = RamStore()
    gateway = Gateway(Mock(), store, lambda text: list(text.encode()), fill=FillConfig())
    try:
        return _families(gateway.metrics.registry)
    finally:
        await gateway.close()


def _engine() -> dict[str, Family]:
    """Families that the connector declares over vLLM's channel."""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{_ENGINE}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    declared = sorted(json.loads(said.stdout).items())
    return {name: Family(name, kind, tuple(labels), text) for name, (kind, labels, text) in declared}
