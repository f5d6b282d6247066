"""Objects of engines and gateways: a RayService per revision, and Services that select the active one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kintsugi.core.deploy import ENGINE_METRICS_PORT
from kintsugi.core.sizing import CPU_KV_CACHE_GIB, GIB
from kintsugi_operator.api.blend_service import BlendServiceSpec
from kintsugi_operator.api.manifest import non_default_manifest
from kintsugi_operator.api.status import Endpoints
from kintsugi_operator.objects.base import (
    RAY_API_VERSION,
    Owner,
    fault_tolerance,
    make_object,
    ray_cluster,
    ray_service_body,
    serve_yaml,
    worker_group,
)
from kintsugi_operator.objects.deployed import (
    DATA,
    DIRECTORY_PORT,
    ENGINE_RESOURCE,
    GATEWAY_RESOURCE,
    EngineRevision,
    client_secrets,
    head_template,
    pod_basics,
    service_config,
    store_url,
)
from kintsugi_operator.objects.names import join_name, labels, ray_named, selector
from kintsugi_operator.objects.pods import (
    MODELS,
    READY_PATH,
    SCRATCH,
    TLS,
    TOKENS,
    Environment,
    Manifest,
    Pod,
    Volume,
    claim_volume,
    process_health,
    scratch,
    secret,
    spread,
    template,
)

PART = "service"
REVISION_KEY = "revision.json"


def revision_objects(spec: BlendServiceSpec, owner: Owner, revision: EngineRevision) -> list[Manifest]:
    """The RayService of a revision, and the ConfigMap with its fields. Raises `InvalidField`.

    The ConfigMap outlives a change of the spec, because the revision's engines continue unchanged.
    """
    spec = revision.within(spec)
    tags = labels(owner.name, part=PART, revision=revision.name)
    cluster = ray_cluster(
        head_template(
            spec,
            owner.name,
            tags,
            service_account=join_name(owner.name, "head"),
            has_autoscaler=True,
        ),
        [_engines(spec, owner, revision), _gateways(spec, owner, revision)],
        spec.expert.ray_version,
        autoscaled=True,
    )
    cluster |= fault_tolerance(spec.expert.redis)
    config = service_config(spec, owner.name, owner.namespace)
    service = ray_service_body(config, "NewCluster", cluster)
    name = ray_named(owner.name, revision.name)
    config_map = {
        "immutable": True,
        "data": {
            REVISION_KEY: serve_yaml(non_default_manifest(revision)),
            "system-prompt.txt": revision.model.system_prompt or "",
        },
    }
    return [
        make_object(owner, "ConfigMap", revision_map_name(owner.name, revision.name), tags, config_map),
        make_object(owner, "RayService", name, tags, service, RAY_API_VERSION),
    ]


def revision_map_name(name: str, revision: str) -> str:
    """Name of a revision's ConfigMap."""
    return join_name(name, "revision", revision)


def account_objects(owner: Owner) -> list[Manifest]:
    """ServiceAccounts: one whose token heads with an autoscaler mount, and one without for all other pods."""
    bodies: dict[str, Manifest] = {"head": {}, "service": {"automountServiceAccountToken": False}}
    return [
        make_object(owner, "ServiceAccount", join_name(owner.name, part), labels(owner.name), body)
        for part, body in bodies.items()
    ]


def service_objects(spec: BlendServiceSpec, owner: Owner, active: str) -> list[Manifest]:
    """Services: gRPC and HTTP of the active revision's gateways, and the store's directory."""
    gateways = selector(owner.name, part=PART, role="gateway", revision=active)
    public = spec.gateway.service_type
    grpc = {"name": "grpc", "port": spec.gateway.grpc_port, "targetPort": "grpc", "appProtocol": "grpc"}
    http = {"name": "http", "port": spec.gateway.http_port, "targetPort": "http", "appProtocol": "http"}
    directory = {"name": "directory", "port": DIRECTORY_PORT, "targetPort": "directory"}
    heads = selector(owner.name, part="store", role="head")
    return [
        _service(owner, "grpc", public, gateways, grpc, spec.gateway.expert.service_annotations),
        _service(owner, "http", public, gateways, http, spec.gateway.expert.service_annotations),
        _service(owner, "directory", "ClusterIP", heads, directory),
    ]


def endpoints(spec: BlendServiceSpec, name: str, namespace: str) -> Endpoints:
    """Addresses for clients within the cluster."""
    scheme = "https" if spec.gateway.tls_secret else "http"
    return Endpoints(
        grpc=f"{join_name(name, 'grpc')}.{namespace}.svc:{spec.gateway.grpc_port}",
        http=f"{scheme}://{join_name(name, 'http')}.{namespace}.svc:{spec.gateway.http_port}",
        directory=store_url(spec, name, namespace),
    )


def _service(
    owner: Owner,
    what: str,
    kind: str,
    chosen: Mapping[str, str],
    port: Manifest,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    port = {"protocol": "TCP", **port}
    body = {"spec": {"type": kind, "selector": dict(chosen), "ports": [port]}}
    name, tags = join_name(owner.name, what), labels(owner.name)
    return make_object(owner, "Service", name, tags, body, annotations=annotations)


def _engines(spec: BlendServiceSpec, owner: Owner, revision: EngineRevision) -> Manifest:
    engines = spec.engines
    pod = Pod(
        **_basics(spec, owner, revision, "engine"),
        cpus=engines.cpus,
        memory=engines.memory,
        gpus=engines.gpus,
        gpu_resource=engines.expert.gpu_resource,
        shared_memory=engines.expert.shared_memory,
        env=model_env(spec),
        ports={"engine-metrics": ENGINE_METRICS_PORT},
        volumes=[*model_volumes(spec), *client_secrets(spec)],
        readiness=process_health("engine-metrics"),
        affinity=_spread(owner, revision, "engine"),
        more=spec.pod_template("engines"),
    )
    resources = {ENGINE_RESOURCE: 1}
    return worker_group("engine", template(pod), engines.replicas, resources, engines.cpus, engines.gpus)


def _spread(owner: Owner, revision: EngineRevision, role: str) -> Manifest:
    """Affinity that prefers different nodes for a revision's engines, or its gateways."""
    return spread(selector(owner.name, part=PART, role=role, revision=revision.name))


def _gateways(spec: BlendServiceSpec, owner: Owner, revision: EngineRevision) -> Manifest:
    gateway = spec.gateway
    data = scratch("data", DATA, "4Gi" if gateway.expert.audit else "2Gi")
    volumes = [data, *model_volumes(spec, "5Gi"), *client_secrets(spec)]
    if gateway.tls_secret:
        volumes.append(secret("tls", TLS, gateway.tls_secret))
    if gateway.tokens_secret:
        volumes.append(secret("tokens", TOKENS, gateway.tokens_secret))
    pod = Pod(
        **_basics(spec, owner, revision, "gateway"),
        cpus=gateway.cpus,
        memory=gateway.memory,
        ports={"grpc": gateway.grpc_port, "http": gateway.http_port},
        env=model_env(spec),
        volumes=volumes,
        readiness=_readiness(spec),
        affinity=_spread(owner, revision, "gateway"),
        more=spec.pod_template("gateway"),
    )
    resources = {GATEWAY_RESOURCE: 1}
    return worker_group("gateway", template(pod), gateway.replicas, resources, gateway.cpus)


def _readiness(spec: BlendServiceSpec) -> Manifest:
    """A probe that checks whether the gateway has engines. It cannot present a client certificate: if one is
    required, it only checks that the port is open."""
    if spec.gateway.expert.require_client_certificate:
        return {"tcpSocket": {"port": "http"}}
    scheme = "HTTPS" if spec.gateway.tls_secret else "HTTP"
    return {"httpGet": {"path": READY_PATH, "port": "http", "scheme": scheme}}


def _basics(spec: BlendServiceSpec, owner: Owner, revision: EngineRevision, role: str) -> dict[str, Any]:
    return pod_basics(spec, owner.name, labels(owner.name, part=PART, role=role, revision=revision.name))


def model_env(spec: BlendServiceSpec) -> Environment:
    """Environment of processes that read the model: writable caches, and the token for downloads."""
    env: dict[str, str | Mapping[str, Any]] = {
        "HF_HOME": f"{SCRATCH}/huggingface",
        "VLLM_CACHE_ROOT": f"{SCRATCH}/vllm",
        "TRITON_CACHE_DIR": f"{SCRATCH}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH}/inductor",
    }
    if spec.engines.gpus == 0:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(_kv_cache_gib(spec.engines.vllm))
    if spec.model.token_secret:
        env["HF_TOKEN"] = {"secretKeyRef": {"name": spec.model.token_secret, "key": "token"}}
    return env


def _kv_cache_gib(vllm: Mapping[str, Any]) -> int:
    """Size of a CPU's KV cache in whole GiB."""
    size = vllm.get("kv_cache_memory_bytes")
    return math.ceil(size / GIB) if isinstance(size, int) else CPU_KV_CACHE_GIB


def model_volumes(spec: BlendServiceSpec, size: str = "") -> list[Volume]:
    """Return the model's volumes: scratch space for downloads and caches, and the claim with checkpoints if
    the spec names one. ``size``: of the scratch space; empty: the size of engines' scratch space."""
    volumes = [scratch("scratch", SCRATCH, size or spec.engines.expert.scratch)]
    if spec.model.volume_claim:
        volumes.append(claim_volume("models", MODELS, spec.model.volume_claim, read_only=True))
    return volumes
