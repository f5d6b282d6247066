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
    GatewaySpecExpert,
    ModelSpec,
    Placement,
    ServiceSpec,
    StoreExpert,
    StoreSpec,
    TierSpec,
    directory_url,
    serve_config,
)
from kintsugi.core.namespaces import NamespaceLimits, NamespacePrivacy
from kintsugi.core.settings import convert_settings
from kintsugi_operator.api.blend_service import BlendServiceSpec, EnginesExpert, Model
from kintsugi_operator.api.manifest import ManifestSettings, non_default_manifest
from kintsugi_operator.objects.names import LABEL_NAME, LABEL_ROLE, digest, join_name, selector
from kintsugi_operator.objects.pods import (
    STORE_KEYS,
    STORE_TLS,
    STORE_TOKEN,
    STORE_TOKENS,
    TLS,
    TOKENS,
    Manifest,
    Pod,
    Volume,
    secret,
    spread,
    template,
)

DIRECTORY_PORT = 7410
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
    """The settings that change the answers of engines. A new revision starts and is warmed while the old one
    serves."""

    model: Model
    image: str
    ray_version: str
    vllm: Mapping[str, Any] = field(default_factory=dict)
    expert: EnginesExpert = field(default_factory=EnginesExpert)

    @staticmethod
    def of(spec: BlendServiceSpec) -> EngineRevision:
        """Return the revision that a spec requests."""
        expert = _with_pods_of(spec.engines.expert, EnginesExpert())
        return EngineRevision(spec.model, spec.image, spec.expert.ray_version, spec.engines.vllm, expert)

    @property
    def name(self) -> str:
        """Digest of the fields: equal fields are the same revision."""
        return digest(non_default_manifest(self))

    def within(self, spec: BlendServiceSpec) -> BlendServiceSpec:
        """Return the spec with the settings of this revision; everything else is unchanged."""
        engines = replace(
            spec.engines, vllm=self.vllm, expert=_with_pods_of(self.expert, spec.engines.expert)
        )
        expert = replace(spec.expert, ray_version=self.ray_version)
        return replace(spec, model=self.model, image=self.image, engines=engines, expert=expert)


def _with_pods_of(expert: EnginesExpert, other: EnginesExpert) -> EnginesExpert:
    """Return `expert` with the pod settings of `other`. Pod settings change no answers."""
    of_pods = ("gpu_resource", "shared_memory", "scratch")
    return replace(expert, **{name: getattr(other, name) for name in of_pods})


def service_spec(spec: BlendServiceSpec) -> ServiceSpec:
    """The settings of the service's parts. Raises `InvalidField`."""
    engines, gateway = spec.engines, spec.gateway
    vllm = dict(engines.vllm)
    if engines.gpus > 1:
        vllm.setdefault("tensor_parallel_size", engines.gpus)
    return ServiceSpec(
        model=convert_settings(ModelSpec, spec.model),
        engines=convert_settings(EngineSpec, engines, gpus=float(engines.gpus), vllm=vllm),
        store=store_spec(spec),
        gateway=convert_settings(
            GatewaySpec,
            gateway,
            host=ANY_HOST,
            tokens_file=f"{TOKENS}/tokens.yaml" if gateway.tokens_secret else "",
            tls_cert=f"{TLS}/tls.crt" if gateway.tls_secret else "",
            tls_key=f"{TLS}/tls.key" if gateway.tls_secret else "",
            # The API requires tokens or `gateway.insecure`, and says that adding TLS is up to the user.
            insecure=not gateway.tls_secret or gateway.insecure,
            expert=convert_settings(
                GatewaySpecExpert,
                gateway.expert,
                tls_client_ca=f"{TLS}/ca.crt" if gateway.expert.require_client_certificate else "",
                data_dir=DATA,
                audit_dir=AUDIT if gateway.expert.audit else "",
            ),
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
        **{name: f"{STORE_TLS}/{file}" for name, file in files.items()},
        expert=StoreExpert(
            host=ANY_HOST,
            directory_port=DIRECTORY_PORT,
            # Without TLS, network policies protect the store; without these, the spec must set
            # `store.insecure`.
            insecure=not store.tls_secret,
            tls_name=store.expert.tls_name if store.tls_secret else "",
            keys_file=f"{STORE_KEYS}/keys.json" if store.keys_secret else "",
            tokens_file=f"{STORE_TOKENS}/{TOKENS_KEY}" if store.tokens_secret else "",
            token_file=f"{STORE_TOKEN}/{CLIENT_KEY}" if store.tokens_secret else "",
            audit_dir=AUDIT if store.expert.audit else "",
        ),
    )


def store_tls_volumes(spec: BlendServiceSpec) -> list[Volume]:
    """The store's certificates, for shards and clients; none without TLS."""
    return [secret("store-tls", STORE_TLS, spec.store.tls_secret)] if spec.store.tls_secret else []


def shard_secrets(spec: BlendServiceSpec) -> list[Volume]:
    """Secrets of a shard: certificates, its clients' tokens, and its own token for other shards."""
    name = spec.store.tokens_secret
    tokens = [secret("store-tokens", STORE_TOKENS, name, {TOKENS_KEY: TOKENS_KEY})] if name else []
    return [*store_tls_volumes(spec), *tokens, *_own_token(spec, CLIENT_KEY)]


def client_secrets(spec: BlendServiceSpec, key: str = CLIENT_KEY) -> list[Volume]:
    """Secrets of a client of the store: certificates, the keys of encrypted namespaces, and its own token,
    which is under ``key`` in the Secret with tokens."""
    keys = spec.store.keys_secret
    mounted = [secret("store-keys", STORE_KEYS, keys)] if keys else []
    return [*store_tls_volumes(spec), *_own_token(spec, key), *mounted]


def _own_token(spec: BlendServiceSpec, key: str) -> list[Volume]:
    name = spec.store.tokens_secret
    return [secret("store-token", STORE_TOKEN, name, {key: CLIENT_KEY})] if name else []


def pod_basics(spec: BlendServiceSpec, service: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of `Pod` that all pods with the service's image share."""
    return {
        "labels": {key: value for key, value in labels.items() if key != LABEL_NAME},
        "image": spec.image,
        "pull_secrets": spec.image_pull_secrets,
        "service_account": join_name(service, "service"),
    }


def head_template(spec: BlendServiceSpec, service: str, labels: Mapping[str, str], **others: Any) -> Manifest:
    """The pod template of a Ray cluster's head. `others`: further arguments of `Pod`. It prefers another node
    than the service's other heads: a lost node then stops only one Ray cluster."""
    head = {
        **pod_basics(spec, service, {**labels, LABEL_ROLE: "head"}),
        "cpus": spec.expert.heads.cpus,
        "memory": spec.expert.heads.memory,
        "volumes": store_tls_volumes(spec),
        "affinity": spread(selector(service, role="head")),
        "more": spec.pod_template("heads"),
        "is_head": True,
    }
    return template(Pod(**{**head, **others}))


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
