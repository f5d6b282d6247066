"""Checks of specs beyond the bounds and rules that their types state. Errors say what to change."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_network

from kintsugi.core.errors import InvalidField
from kintsugi_operator.api.blend_service import BlendServiceSpec, Egress, Engines, Gateways
from kintsugi_operator.api.corpus_precompute import CorpusPrecomputeSpec
from kintsugi_operator.api.manifest import check_manifest
from kintsugi_operator.desired.pod_template import check_keys, check_pod_template
from kintsugi_operator.desired.schedule import check_schedule
from kintsugi_operator.objects.deployed import (
    DIRECTORY_PORT,
    ENGINE_METRICS_PORT,
    SHARD_METRICS_PORT,
    SHARD_PORT,
)
from kintsugi_operator.objects.jobs import BOUND
from kintsugi_operator.objects.pods import AGENT_PORT, DASHBOARD_PORT, GCS_PORT, METRICS_PORT, quantity

RESERVED_PORTS = {
    GCS_PORT: "Ray's GCS",
    SHARD_PORT: "shards",
    SHARD_METRICS_PORT: "metrics of shards",
    DIRECTORY_PORT: "the store's directory",
    ENGINE_METRICS_PORT: "metrics of engines",
    METRICS_PORT: "Ray's metrics",
    DASHBOARD_PORT: "Ray's dashboard",
    10001: "Ray's client server",
    AGENT_PORT: "Ray's agent",
}
WORKER_PORTS = range(10002, 20000)
"""Ray's processes take whichever of these is free."""


def check_service(spec: BlendServiceSpec) -> None:
    """Raise `InvalidField` for a spec that no cluster could run."""
    check_manifest(spec)
    _check_engines(spec.engines)
    _check_gateway(spec.gateway)
    _check_egress(spec.network.egress)
    for part in ("engines", "store", "gateway", "heads"):
        check_pod_template(getattr(spec, part).pod_template, f"spec.{part}.podTemplate")
    if spec.tls.require_client and not spec.tls.secret:
        raise InvalidField("spec.tls.secret", "is needed for requireClient: it holds ca.crt")


def check_corpus(spec: CorpusPrecomputeSpec) -> None:
    """Raise `InvalidField` for a spec that no job could do."""
    check_manifest(spec)
    for name in sorted({*BOUND, "dtype", "kv_transfer_config", "model"} & set(spec.workers.vllm)):
        raise InvalidField(f"spec.workers.vllm.{name}", "follows from the service: set it there")
    check_pod_template(spec.workers.pod_template, "spec.workers.podTemplate")
    if spec.schedule:
        check_schedule(spec.schedule)


def _check_engines(engines: Engines) -> None:
    if quantity(engines.shared_memory) >= quantity(engines.memory):
        raise InvalidField("spec.engines.sharedMemory", "counts towards memory: make it smaller than that")
    ranks = engines.vllm.get("tensor_parallel_size", 1)
    if engines.gpus and isinstance(ranks, int) and ranks > engines.gpus:
        raise InvalidField(
            "spec.engines.vllm.tensor_parallel_size",
            f"{ranks} needs as many GPUs, and an engine's pod has {engines.gpus}: set engines.gpus",
        )


def _check_gateway(gateway: Gateways) -> None:
    check_keys(gateway.service_annotations, "spec.gateway.serviceAnnotations")
    for field, port in (("grpcPort", gateway.grpc_port), ("httpPort", gateway.http_port)):
        taken = RESERVED_PORTS.get(port, "Ray's workers" if port in WORKER_PORTS else "")
        if taken:
            raise InvalidField(f"spec.gateway.{field}", f"{port} is taken by {taken}")


def _check_egress(egress: Sequence[Egress]) -> None:
    for index, one in enumerate(egress):
        try:
            ip_network(one.cidr or "0.0.0.0/0")
        except ValueError as error:
            where = f"spec.network.egress.{index}.cidr"
            raise InvalidField(where, f"{error}; write a network, such as 10.0.0.0/8") from None
