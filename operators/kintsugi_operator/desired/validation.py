"""Whether a spec can work. What CEL cannot say is said here, with what to change."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_network

from kintsugi.core.errors import InvalidField
from kintsugi.core.spaces import check_namespace
from kintsugi_operator.api.environment import Variable, problem_of
from kintsugi_operator.api.types import (
    BlendServiceSpec,
    CorpusPrecomputeSpec,
    Egress,
    Engines,
    Gateway,
    camel,
)
from kintsugi_operator.desired.schedule import Schedule
from kintsugi_operator.objects.deployed import service_config, store_config
from kintsugi_operator.objects.jobs import BOUND
from kintsugi_operator.objects.pods import quantity

RESERVED_PORTS = {
    6379: "Ray's GCS",
    7400: "shards",
    7480: "metrics of shards",
    7410: "the store's directory",
    7580: "metrics of engines",
    8080: "Ray's metrics",
    8265: "Ray's dashboard",
    10001: "Ray's client server",
    52365: "Ray's agent",
}
WORKER_PORTS = range(10002, 20000)
"""Of which Ray's processes take whichever is free."""


def check_service(spec: BlendServiceSpec, name: str, namespace: str) -> None:
    """Raise `InvalidField` for a spec that no cluster could run."""
    engines = spec.engines
    _check_engines(engines)
    _check_gateway(spec.gateway)
    if not (spec.store.tls_secret or spec.network.policies or spec.store.insecure):
        raise InvalidField(
            "spec.store.tlsSecret",
            "is mandatory without network.policies: name a Secret, or set store.insecure",
        )
    if len({tier.name for tier in spec.store.tiers}) != len(spec.store.tiers):
        raise InvalidField("spec.store.tiers", "must have different names")
    for part, variables in (
        ("engines", engines.env),
        ("store", spec.store.env),
        ("gateway", spec.gateway.env),
    ):
        _check_environment(variables, f"spec.{part}.env")
    _check_egress(spec.network.egress)
    if spec.tls.require_client and not spec.tls.secret:
        raise InvalidField("spec.tls.secret", "is needed for requireClient: it holds ca.crt")
    try:
        store_config(spec)
        service_config(spec, name, namespace)
    except InvalidField as error:
        raise InvalidField(f"spec.{'.'.join(map(camel, error.field.split('.')))}", error.problem) from None


def _check_engines(engines: Engines) -> None:
    if engines.replicas.min > engines.replicas.max:
        raise InvalidField("spec.engines.replicas.min", "must not exceed max")
    if quantity(engines.shared_memory) >= quantity(engines.memory):
        raise InvalidField("spec.engines.sharedMemory", "counts towards memory: make it smaller than that")
    ranks = engines.vllm.get("tensor_parallel_size", 1)
    if engines.gpus and isinstance(ranks, int) and ranks > engines.gpus:
        raise InvalidField(
            "spec.engines.vllm.tensor_parallel_size",
            f"{ranks} needs as many GPUs, and an engine's pod has {engines.gpus}: set engines.gpus",
        )


def _check_gateway(gateway: Gateway) -> None:
    if not (gateway.tokens_secret or gateway.insecure):
        raise InvalidField(
            "spec.gateway.tokensSecret",
            "is mandatory: name a Secret with hashed tokens, or set gateway.insecure to serve anybody",
        )
    for field, port in (("grpcPort", gateway.grpc_port), ("httpPort", gateway.http_port)):
        taken = RESERVED_PORTS.get(port, "Ray's workers" if port in WORKER_PORTS else "")
        if taken:
            raise InvalidField(f"spec.gateway.{field}", f"{port} is taken by {taken}")
    if gateway.grpc_port == gateway.http_port:
        raise InvalidField("spec.gateway.httpPort", "must differ from grpcPort")


def _check_environment(variables: Sequence[Variable], where: str) -> None:
    if problem := problem_of(variables):
        raise InvalidField(f"{where}.{problem[0]}", problem[1])


def _check_egress(egress: Sequence[Egress]) -> None:
    for index, one in enumerate(egress):
        where = f"spec.network.egress.{index}"
        if not one.ports:
            raise InvalidField(f"{where}.ports", "are mandatory: name those of TCP that may be called")
        if one.namespace and one.cidr:
            raise InvalidField(f"{where}.cidr", "name a namespace or a cidr, not both")
        try:
            ip_network(one.cidr or "0.0.0.0/0")
        except ValueError as error:
            raise InvalidField(f"{where}.cidr", f"{error}; write a network, such as 10.0.0.0/8") from None


def check_corpus(spec: CorpusPrecomputeSpec) -> None:
    """Raise `InvalidField` for a spec that no job could do."""
    try:
        check_namespace(spec.namespace)
    except InvalidField as error:
        raise InvalidField("spec.namespace", error.problem) from None
    for name in sorted({*BOUND, "dtype", "kv_transfer_config", "model"} & set(spec.workers.vllm)):
        raise InvalidField(f"spec.workers.vllm.{name}", "follows from the service: set it there")
    if spec.overlap >= spec.tokens_max:
        raise InvalidField("spec.overlap", f"{spec.overlap} must be less than tokensMax, {spec.tokens_max}")
    if spec.schedule:
        Schedule.parse(spec.schedule)
