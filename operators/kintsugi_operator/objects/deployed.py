"""From a `BlendService` to the `ServiceSpec` that runs within it, and its Serve configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kintsugi.core.deploy import (
    SERVICE_APP,
    STORE_APP,
    EngineSpec,
    GatewaySpec,
    ModelSpec,
    OpenAISpec,
    Placement,
    Scale,
    ServiceSpec,
    StoreSpec,
    TierSpec,
    directory_url,
    serve_config,
)
from kintsugi.core.schema import STRICT
from kintsugi_operator.api.types import BlendServiceSpec, Engines, Image, Model, OpenAI, non_default_values
from kintsugi_operator.objects.names import digest, join_name
from kintsugi_operator.objects.pods import STORE_TLS, TLS, TOKENS, Manifest

DIRECTORY_PORT = 7410
SHARD_PORT = 7400
SHARD_METRICS_PORT = 7480
ENGINE_METRICS_PORT = 7580
DATA = "/data"
TIERS = "/tiers"
SHARD_RESOURCE = "kintsugi_shard"
ENGINE_RESOURCE = "kintsugi_engine"
GATEWAY_RESOURCE = "kintsugi_gateway"
ANY_HOST = "0.0.0.0"


@dataclass(frozen=True)
class Revision:
    """What makes engines answer differently: another one is calibrated and warmed beside the old."""

    __pydantic_config__ = STRICT

    model: Model
    image: Image
    ray_version: str
    connector: dict[str, Any] = field(default_factory=dict)
    vllm: dict[str, Any] = field(default_factory=dict)
    openai: OpenAI = field(default_factory=OpenAI)

    @staticmethod
    def of(spec: BlendServiceSpec) -> Revision:
        """The one that a spec asks for."""
        engines = spec.engines
        return Revision(
            spec.model,
            spec.image,
            spec.ray_version,
            dict(engines.connector),
            dict(engines.vllm),
            engines.openai,
        )

    @property
    def name(self) -> str:
        """Digest: the same inputs are the same revision."""
        return digest(non_default_values(self))

    def within(self, spec: BlendServiceSpec) -> BlendServiceSpec:
        """The spec as it would be had this revision been asked for; everything else is as it is now."""
        engines: Engines = replace(spec.engines, connector=self.connector, vllm=self.vllm, openai=self.openai)
        return replace(
            spec, model=self.model, image=self.image, ray_version=self.ray_version, engines=engines
        )


def service_spec(spec: BlendServiceSpec) -> ServiceSpec:
    """What the parts of the service are told. Raises `InvalidField`."""
    model, engines, gateway, tls = spec.model, spec.engines, spec.gateway, spec.tls
    vllm = dict(engines.vllm)
    if engines.gpus > 1:
        vllm.setdefault("tensor_parallel_size", engines.gpus)
    return ServiceSpec(
        model=ModelSpec(
            path=model.path,
            name=model.name,
            dtype=model.dtype,
            max_model_len=model.max_model_len,
            system_prompt=model.system_prompt,
            codec=model.codec,
        ),
        engines=EngineSpec(
            replicas=Scale(engines.replicas.min, engines.replicas.max),
            cpus=engines.cpus,
            gpus=float(engines.gpus),
            kv_cache_gib=engines.kv_cache_gib,
            allow_uncalibrated=engines.allow_uncalibrated,
            # A job of its own calibrates, so that engines do nothing but serve.
            calibrate=False,
            shadow_share=engines.shadow_share,
            metrics_port=ENGINE_METRICS_PORT,
            connector=dict(engines.connector),
            vllm=vllm,
            openai=OpenAISpec(
                engines.openai.chat_template,
                engines.openai.tool_call_parser,
                engines.openai.reasoning_parser,
            ),
        ),
        store=store_spec(spec),
        gateway=GatewaySpec(
            replicas=gateway.replicas,
            host=ANY_HOST,
            grpc_port=gateway.grpc_port,
            http_port=gateway.http_port,
            cpus=gateway.cpus,
            tokens_file=f"{TOKENS}/tokens.yaml" if gateway.tokens_secret else "",
            tls_cert=f"{TLS}/tls.crt" if tls.secret else "",
            tls_key=f"{TLS}/tls.key" if tls.secret else "",
            tls_client_ca=f"{TLS}/ca.crt" if tls.secret and tls.require_client else "",
            # The API asks for tokens or `gateway.insecure`, and says that TLS is the user's to add.
            insecure=not tls.secret or gateway.insecure,
            fill_on_miss=str(gateway.fill_on_miss),
            read_only=gateway.read_only,
            overtaking=gateway.overtaking,
            data_dir=DATA,
        ),
    )


def store_spec(spec: BlendServiceSpec) -> StoreSpec:
    """What shards are told: of `spec.store` alone. Raises `InvalidField`."""
    store = spec.store

    def file(name: str) -> str:
        return f"{STORE_TLS}/{name}" if store.tls_secret else ""

    return StoreSpec(
        shards=store.shards,
        replication=store.replication,
        ramp_s=store.ramp_seconds,
        ram_gib=store.ram_gib,
        tiers=tuple(TierSpec(f"{TIERS}/{tier.name}", tier.gib) for tier in store.tiers),
        data_dir=DATA,
        cpus=store.cpus,
        host=ANY_HOST,
        directory_port=DIRECTORY_PORT,
        port=SHARD_PORT,
        metrics_port=SHARD_METRICS_PORT,
        # Without TLS, network policies keep others away; where there are none, the spec has to say so.
        insecure=not store.tls_secret,
        # Engines are in other pods, which share no memory.
        share_arena=False,
        tls_ca=file("ca.crt"),
        tls_cert=file("tls.crt"),
        tls_key=file("tls.key"),
        tls_name=store.tls_name if store.tls_secret else "",
    )


def store_url(spec: BlendServiceSpec, name: str, namespace: str) -> str:
    """Where engines and jobs find the shards."""
    return directory_url(store_spec(spec), host=f"{join_name(name, 'directory')}.{namespace}.svc")


def store_config(spec: BlendServiceSpec) -> Manifest:
    """Serve's configuration of the shards, whatever model, engines and gateway are. Raises `InvalidField`."""
    apart = ServiceSpec(ModelSpec("none"), store=store_spec(spec))
    return serve_config(apart, Placement(shard={SHARD_RESOURCE: 1}), [STORE_APP])


def service_config(spec: BlendServiceSpec, name: str, namespace: str) -> Manifest:
    """Serve's configuration of engines and gateway. Raises `InvalidField`."""
    placement = Placement(
        engine={ENGINE_RESOURCE: 1},
        gateway={GATEWAY_RESOURCE: 1},
        store_url=store_url(spec, name, namespace),
    )
    return serve_config(service_spec(spec), placement, [SERVICE_APP])
