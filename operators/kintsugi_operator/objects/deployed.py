"""Converts a `BlendService` to the `ServiceSpec` of its processes and to Serve's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kintsugi.core.deploy import (
    SERVICE_APP,
    STORE_APP,
    EngineSpec,
    GatewaySpec,
    ModelSpec,
    Placement,
    Scale,
    ServiceSpec,
    StoreSpec,
    TierSpec,
    directory_url,
    serve_config,
)
from kintsugi.core.namespaces.limits import NamespaceLimits
from kintsugi.core.namespaces.privacy import NamespacePrivacy
from kintsugi.core.settings import convert_settings
from kintsugi_operator.api.blend_service import BlendServiceSpec, Model, OpenAI
from kintsugi_operator.api.common import Image
from kintsugi_operator.api.manifest import ManifestSettings, non_default_manifest
from kintsugi_operator.objects.names import LABEL_NAME, digest, join_name, selector
from kintsugi_operator.objects.pods import (
    STORE_KEYS,
    STORE_TLS,
    STORE_TOKEN,
    STORE_TOKENS,
    TLS,
    TOKENS,
    Manifest,
    Volume,
    affinity,
    avoid,
    secret,
    secret_key,
)

DIRECTORY_PORT = 7410
SHARD_PORT = 7400
SHARD_METRICS_PORT = 7480
ENGINE_METRICS_PORT = 7580
DATA = "/data"
AUDIT = f"{DATA}/audit"
TIERS = "/tiers"
SHARD_RESOURCE = "kintsugi_shard"
ENGINE_RESOURCE = "kintsugi_engine"
GATEWAY_RESOURCE = "kintsugi_gateway"
ANY_HOST = "0.0.0.0"
TOKENS_KEY = "tokens.yaml"
CLIENT_KEY = "token"
CORPUS_KEY = "corpus-token"
"""Keys of the Secret in `store.tokensSecret`."""


@dataclass(frozen=True)
class EngineRevision(ManifestSettings):
    """Everything that changes the answers of engines. A new revision is calibrated and warmed beside the old
    one."""

    model: Model
    image: Image
    ray_version: str
    connector: Mapping[str, Any] = field(default_factory=dict)
    vllm: Mapping[str, Any] = field(default_factory=dict)
    openai: OpenAI = field(default_factory=OpenAI)

    @staticmethod
    def of(spec: BlendServiceSpec) -> EngineRevision:
        """The revision that a spec asks for."""
        engines = spec.engines
        return EngineRevision(
            spec.model, spec.image, spec.ray_version, engines.connector, engines.vllm, engines.openai
        )

    @property
    def name(self) -> str:
        """Digest of the fields: equal fields are the same revision."""
        return digest(non_default_manifest(self))

    def within(self, spec: BlendServiceSpec) -> BlendServiceSpec:
        """The spec with the fields of this revision in place of its own."""
        engines = replace(spec.engines, connector=self.connector, vllm=self.vllm, openai=self.openai)
        return replace(
            spec, model=self.model, image=self.image, ray_version=self.ray_version, engines=engines
        )


def service_spec(spec: BlendServiceSpec) -> ServiceSpec:
    """The settings of all processes. Raises `InvalidField`."""
    engines, gateway, tls = spec.engines, spec.gateway, spec.tls
    vllm = dict(engines.vllm)
    if engines.gpus > 1:
        vllm.setdefault("tensor_parallel_size", engines.gpus)
    return ServiceSpec(
        model=convert_settings(ModelSpec, spec.model),
        engines=convert_settings(
            EngineSpec,
            engines,
            replicas=convert_settings(Scale, engines.scale),
            gpus=float(engines.gpus),
            # A separate job calibrates.
            calibrate=False,
            metrics_port=ENGINE_METRICS_PORT,
            vllm=vllm,
        ),
        store=store_spec(spec),
        gateway=convert_settings(
            GatewaySpec,
            gateway,
            host=ANY_HOST,
            tokens_file=f"{TOKENS}/tokens.yaml" if gateway.tokens_secret else "",
            tls_cert=f"{TLS}/tls.crt" if tls.secret else "",
            tls_key=f"{TLS}/tls.key" if tls.secret else "",
            tls_client_ca=f"{TLS}/ca.crt" if tls.secret and tls.require_client else "",
            # The CRD requires tokens or `gateway.insecure`; TLS may also be terminated before the gateway.
            insecure=not tls.secret or gateway.insecure,
            data_dir=DATA,
            audit_dir=AUDIT if gateway.audit else "",
        ),
        limits=_limits(spec),
        privacy={name: convert_settings(NamespacePrivacy, one) for name, one in spec.privacy.items()},
    )


def _limits(spec: BlendServiceSpec) -> dict[str, NamespaceLimits]:
    return {name: convert_settings(NamespaceLimits, one) for name, one in spec.limits.items()}


def store_spec(spec: BlendServiceSpec) -> StoreSpec:
    """The settings of shards. They depend on `spec.store` alone."""
    store = spec.store
    files = {"tls_ca": "ca.crt", "tls_cert": "tls.crt", "tls_key": "tls.key"} if store.tls_secret else {}
    return convert_settings(
        StoreSpec,
        store,
        tiers=tuple(TierSpec(f"{TIERS}/{tier.name}", tier.gib) for tier in store.tiers),
        data_dir=DATA,
        host=ANY_HOST,
        directory_port=DIRECTORY_PORT,
        port=SHARD_PORT,
        metrics_port=SHARD_METRICS_PORT,
        # Without TLS, network policies protect the port; without these, the spec must permit it.
        insecure=not store.tls_secret,
        # Engines run in other pods, without shared memory.
        share_arena=False,
        tls_name=store.tls_name if store.tls_secret else "",
        keys_file=f"{STORE_KEYS}/keys.json" if store.keys_secret else "",
        tokens_file=f"{STORE_TOKENS}/{TOKENS_KEY}" if store.tokens_secret else "",
        token_file=f"{STORE_TOKEN}/{CLIENT_KEY}" if store.tokens_secret else "",
        audit_dir=AUDIT if store.audit else "",
        **{name: f"{STORE_TLS}/{file}" for name, file in files.items()},
    )


def store_tls_volumes(spec: BlendServiceSpec) -> list[Volume]:
    """The store's certificates, for shards and clients; none without TLS."""
    return [secret("store-tls", STORE_TLS, spec.store.tls_secret)] if spec.store.tls_secret else []


def shard_secrets(spec: BlendServiceSpec) -> list[Volume]:
    """Secrets of a shard: certificates, its clients' tokens, and its own token for other shards."""
    name = spec.store.tokens_secret
    tokens = [secret_key("store-tokens", STORE_TOKENS, name, TOKENS_KEY, TOKENS_KEY)] if name else []
    return [*store_tls_volumes(spec), *tokens, *_own_token(spec, CLIENT_KEY)]


def client_secrets(spec: BlendServiceSpec, key: str = CLIENT_KEY) -> list[Volume]:
    """Secrets of a client of the store: certificates, its own token, which is ``key`` of the Secret with
    tokens, and the keys of encrypted namespaces."""
    keys = spec.store.keys_secret
    mounted = [secret("store-keys", STORE_KEYS, keys)] if keys else []
    return [*store_tls_volumes(spec), *_own_token(spec, key), *mounted]


def _own_token(spec: BlendServiceSpec, key: str) -> list[Volume]:
    name = spec.store.tokens_secret
    return [secret_key("store-token", STORE_TOKEN, name, key, CLIENT_KEY)] if name else []


def spread_heads(service: str) -> Manifest:
    """Affinity that prefers different nodes for a service's heads: a lost node then stops one Ray cluster
    only."""
    return affinity(away=avoid(selector(service, role="head")))


def pod_basics(
    spec: BlendServiceSpec, service: str, labels: Mapping[str, str], account: str = "service"
) -> dict[str, Any]:
    """Arguments of `Pod` that all pods with the service's image share."""
    return {
        "labels": {key: value for key, value in labels.items() if key != LABEL_NAME},
        "image": spec.image.reference,
        "pull_policy": str(spec.image.pull_policy),
        "pull_secrets": spec.image_pull_secrets,
        "service_account": join_name(service, account),
    }


def store_url(spec: BlendServiceSpec, name: str, namespace: str) -> str:
    """The store's URL for engines and jobs."""
    return directory_url(store_spec(spec), host=f"{join_name(name, 'directory')}.{namespace}.svc")


def store_config(spec: BlendServiceSpec) -> Manifest:
    """Serve's configuration of the shards, independent of model, engines and gateway. Raises
    `InvalidField`."""
    alone = ServiceSpec(ModelSpec("none"), store=store_spec(spec), limits=_limits(spec))
    return serve_config(alone, Placement(shard={SHARD_RESOURCE: 1}), [STORE_APP])


def service_config(spec: BlendServiceSpec, name: str, namespace: str) -> Manifest:
    """Serve's configuration of engines and gateway. Raises `InvalidField`."""
    placement = Placement(
        engine={ENGINE_RESOURCE: 1},
        gateway={GATEWAY_RESOURCE: 1},
        store_url=store_url(spec, name, namespace),
    )
    return serve_config(service_spec(spec), placement, [SERVICE_APP])
