"""The spec of a BlendService.

Settings that are the same on one machine and on Kubernetes come from `core.deploy`. This module narrows their
bounds (`NARROWED`) and adds the settings that only Kubernetes has. A field's docstring is its description in
the CRD unless the field has a `description`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from kintsugi.core.deploy import (
    BUCKET_RULE,
    EngineExpert,
    EngineSpec,
    GatewayExpert,
    GatewaySettings,
    ModelExpert,
    ModelSpec,
    StoreSettings,
)
from kintsugi.core.layout import Codec
from kintsugi.core.namespaces import NamespaceLimits, NamespacePrivacy, PrivacyExpert
from kintsugi.core.settings import Rule, before, setting, this
from kintsugi_operator.api.manifest import ManifestSettings
from kintsugi_operator.api.patterns import (
    CIDR,
    IMAGE,
    LABEL,
    MODEL,
    NAME,
    OPTIONAL_IMAGE,
    OPTIONAL_LABEL,
    OPTIONAL_NAME,
    QUANTITY,
    REDIS,
    RELEASE,
    RESOURCE,
    TIER,
)
from kintsugi_operator.api.pod_template import HeadSize, PodTemplate
from kintsugi_operator.api.vllm_arguments import VLLM_ARGUMENTS

SHARDS_MAX = 256
RAY_VERSION = "2.60.0"
PORT = {"minimum": 1, "maximum": 65535}
ROLES = ("engines", "corpora", "store", "gateway", "heads")
"""Roles of the pods that a spec may customise."""


@dataclass(frozen=True)
class ModelExpertSpec(ModelExpert, ManifestSettings):
    """Form of prompts, and the text that chunks are prefilled after."""

    NARROWED: ClassVar = {
        "context": {
            "maxLength": 1024,
            "description": "Natural text between the system prompt and the chunks, which are prefilled after "
            "it: none, bundled (the first two passages that ship with Kintsugi), corpus (as bundled, but "
            "jobs take similar passages of the chunk's own corpus), or the path of a text file in the image "
            "or the claim. Except for corpus, it is the same for every tenant.",
        },
    }


@dataclass(frozen=True)
class Model(ModelSpec, ManifestSettings):
    """The model. Any change makes a new revision: the old engines serve until the new ones are ready."""

    NARROWED: ClassVar = {
        "path": {
            "maxLength": 1024,
            "pattern": MODEL,
            "description": "Folder of the checkpoint within the image or the claim, or a hub name, "
            "org/model, that each pod downloads.",
        },
        "name": {"maxLength": 255},
        "system_prompt": {"maxLength": 65536},
        "codec": {"enum": [codec.name.lower() for codec in Codec]},
    }

    volume_claim: str = setting("", pattern=OPTIONAL_NAME, maxLength=253)
    """Name of a PersistentVolumeClaim with checkpoints, mounted read-only at /models."""
    token_secret: str = setting("", pattern=OPTIONAL_NAME, maxLength=253)
    """Name of a Secret whose key `token` is the access token for downloading the model."""
    expert: ModelExpertSpec = field(default_factory=ModelExpertSpec)


@dataclass(frozen=True)
class EnginesExpert(EngineExpert, ManifestSettings):
    """Rarely needed settings of engines. Their defaults fit the evidence, the hardware and the model."""

    NARROWED: ClassVar = {"selector": {"maxLength": 64}}

    gpu_resource: str = setting("nvidia.com/gpu", pattern=RESOURCE, maxLength=253)
    """Name of the extended resource that counts GPUs in Kubernetes."""
    shared_memory: str = setting("2Gi", pattern=QUANTITY, maxLength=32)
    """Size of /dev/shm, which holds Ray's objects. It counts towards `memory`."""
    scratch: str = setting("20Gi", pattern=QUANTITY, maxLength=32)
    """Disk of each pod for downloads and compilation caches."""


@dataclass(frozen=True)
class Engines(EngineSpec, ManifestSettings):
    """Engines: vLLM with the Kintsugi plugin, one pod each."""

    NARROWED: ClassVar = {
        "replicas": {
            "maximum": 1024,
            "description": "Number of engines; if `replicasMax` is set, the minimum number. The `scale` "
            "subresource reads and writes it.",
        },
        "replicas_max": {"maximum": 1024},
        # Only the operator rejects other keys: a CRD cannot restrict the keys of a map with values of any
        # type.
        "vllm": {"keys": VLLM_ARGUMENTS},
    }

    cpus: float = setting(4.0, minimum=0.1, maximum=1024)
    """CPU cores of each pod."""
    memory: str = setting("16Gi", pattern=QUANTITY, maxLength=32, after="cpus")
    """Memory of each pod."""
    gpus: int = setting(0, minimum=0, maximum=16)
    """GPUs of each pod; 0: vLLM runs on the CPU."""
    expert: EnginesExpert = field(default_factory=EnginesExpert)


@dataclass(frozen=True)
class Tier(ManifestSettings):
    """An SSD tier of each shard, on its own volume."""

    RULES = (
        Rule(
            this.name != "data", "data is the name of every shard's own volume: choose another name", "name"
        ),
    )

    name: str = setting(maxLength=20, pattern=TIER)
    """Name of the tier, which becomes part of its volumes' names."""
    gib: float = setting(minimum=1, maximum=1048576)
    """Size of the tier in each shard, in GiB. A volume that exists may grow, but not shrink."""
    storage_class: str = setting("", pattern=OPTIONAL_NAME, maxLength=253)
    """Storage class of the tier's volumes; empty: the cluster's default."""


@dataclass(frozen=True)
class Volumes(ManifestSettings):
    """Volumes for the data and tiers of shards."""

    RULES = (Rule(this.kind == before.kind, "the kind of volumes cannot be changed: create a new service"),)

    kind: str = setting("Persistent", enum=["Persistent", "Ephemeral"])
    """`Persistent`: claims that outlive pods and upgrades. `Ephemeral`: volumes that are deleted with their
    pod."""
    retain: bool = True
    """Keep persistent volumes when the service is deleted."""
    data_gib: float = setting(1.0, minimum=0.1, maximum=1024)
    """Size in GiB of each shard's data volume, which holds its identity and the reports on blending. A volume
    that exists may grow, but not shrink."""
    storage_class: str = setting("", pattern=OPTIONAL_NAME, maxLength=253)
    """Storage class of the data volumes; empty: the cluster's default."""


@dataclass(frozen=True)
class StoreExpertSpec(ManifestSettings):
    """Rarely needed settings of the store."""

    volumes: Volumes = field(default_factory=Volumes)
    bucket_port: int = setting(443, minimum=1, maximum=65535)
    """TCP port of the bucket's endpoint. Network policies allow shards to call this port at any address."""
    tls_name: str = setting("kintsugi-store", pattern=NAME, maxLength=253)
    """DNS name in tls.crt. All shards present the same certificate."""
    audit: bool = False
    """Make each shard write an audit log to the folder audit on its data volume, which then needs 1.1 GiB
    more (`volumes.dataGib`). Shards restart one at a time when this changes."""


@dataclass(frozen=True)
class Store(StoreSettings, ManifestSettings):
    """The chunk KV-cache store."""

    RULES = (*StoreSettings.RULES, BUCKET_RULE)
    NARROWED: ClassVar = {
        "bucket_gib": {"minimum": 1, "maximum": 1048576},
        "shards": {"maximum": SHARDS_MAX},
        "replication": {"maximum": 8},
        "ram_gib": {"minimum": 0.1, "maximum": 65536},
    }

    cpus: float = setting(1.0, minimum=0.1, maximum=1024)
    """CPU cores of each shard."""
    tiers: tuple[Tier, ...] = setting((), maxItems=8, mapKey="name", after="ram_gib")
    """SSD tiers of each shard below RAM, the fastest first."""
    image: str = setting("", pattern=OPTIONAL_IMAGE, maxLength=512)
    """Image of shards; empty: the service's image at the time when the store was created. When it changes,
    shards restart one at a time, unless `expert.rayVersion` has changed since the store was created."""
    tls_secret: str = setting("", pattern=OPTIONAL_NAME, maxLength=253)
    """Name of a Secret with ca.crt, tls.crt and tls.key for mutual TLS between shards and their clients;
    empty: plaintext."""
    keys_secret: str = setting("", pattern=OPTIONAL_NAME, maxLength=253)
    """Name of a Secret whose key `keys.json` is a key file for encrypted namespaces (see `kintsugi keys`).
    Engines, gateways and jobs mount it, shards do not; empty: no namespace is encrypted."""
    tokens_secret: str = setting("", pattern=OPTIONAL_NAME, maxLength=253)
    """Name of a Secret with the permissions of clients on shards. Its key `tokens.yaml` holds hashed tokens
    with their namespaces and verbs, as JSON; `token` is the token of engines and gateways, `corpus-token` the
    token of CorpusPrecomputes. Empty: every client may do everything."""
    insecure: bool = False
    """Allow a store with neither TLS nor NetworkPolicies: every pod in the cluster may read it."""
    expert: StoreExpertSpec = field(default_factory=StoreExpertSpec)


@dataclass(frozen=True)
class GatewaysExpert(GatewayExpert, ManifestSettings):
    """Rarely needed settings of gateways."""

    require_client_certificate: bool = False
    """Require clients to present a certificate that ca.crt in the Secret of `tlsSecret` has signed."""
    service_annotations: Mapping[str, str] = setting(dict, maxProperties=32, items={"maxLength": 4096})
    """Annotations of the Services NAME-grpc and NAME-http, such as those of a cloud's load balancer."""
    audit: bool = False
    """Make each gateway write an audit log to /data/audit, which is deleted with its pod."""


@dataclass(frozen=True)
class Gateways(GatewaySettings, ManifestSettings):
    """The gateway: gRPC and HTTP front end."""

    NARROWED: ClassVar = {
        "replicas": {"maximum": 64},
        "grpc_port": {"minimum": 1024},
        "http_port": {"minimum": 1024},
    }
    RULES = (
        Rule(this.grpc_port != this.http_port, "grpcPort and httpPort must differ", "http_port"),
        Rule(
            ~this.expert.require_client_certificate | (this.tls_secret != ""),
            "tlsSecret is needed for requireClientCertificate: it holds ca.crt",
            "tls_secret",
        ),
    )

    cpus: float = setting(1.0, minimum=0.1, maximum=64, after="replicas")
    """CPU cores of each gateway's pod."""
    memory: str = setting("2Gi", pattern=QUANTITY, maxLength=32, after="cpus")
    """Memory of each gateway's pod."""
    service_type: str = setting(
        "ClusterIP", enum=["ClusterIP", "NodePort", "LoadBalancer"], after="http_port"
    )
    """Type of the gateway's Services: ClusterIP, NodePort or LoadBalancer."""
    tokens_secret: str = setting("", pattern=OPTIONAL_NAME, maxLength=253, after="service_type")
    """Name of a Secret whose key `tokens.yaml` holds hashed bearer tokens and their namespaces, as JSON."""
    tls_secret: str = setting("", pattern=OPTIONAL_NAME, maxLength=253, after="tokens_secret")
    """Name of a Secret with tls.crt and tls.key; empty: plaintext."""
    insecure: bool = setting(False, after="tls_secret")
    """Serve without tokens: every client that reaches the gateway may use every namespace."""
    expert: GatewaysExpert = field(default_factory=GatewaysExpert)


@dataclass(frozen=True)
class Redis(ManifestSettings):
    """An external Redis in which Ray's heads store their state, so that shards and engines survive the loss
    of a head."""

    RULES = (
        Rule(
            (this.username == "") | (this.password_secret != ""),
            "a username needs passwordSecret",
            "password_secret",
        ),
    )

    address: str = setting("", pattern=REDIS, maxLength=255)
    """`host:port`, or a URL with the scheme redis or rediss (TLS). Empty: no Redis."""
    username: str = setting("", maxLength=128)
    """Empty: Redis' default user."""
    password_secret: str = setting("", pattern=OPTIONAL_NAME, maxLength=253)
    """A Secret whose key `password` is Redis' password; empty: none."""


@dataclass(frozen=True)
class Egress(ManifestSettings):
    """A destination that engines, gateways and jobs may call."""

    RULES = (
        Rule((this.namespace == "") | (this.cidr == ""), "name a namespace or a cidr, not both", "cidr"),
    )

    ports: tuple[int, ...] = setting(minItems=1, maxItems=32, items=PORT)
    """TCP ports."""
    namespace: str = setting("", pattern=OPTIONAL_LABEL, maxLength=63)
    """Kubernetes namespace whose pods may be called; without this and `cidr`: any address."""
    cidr: str = setting("", pattern=CIDR, maxLength=43)
    """Address range that may be called, such as 10.0.0.0/8."""


@dataclass(frozen=True)
class Network(ManifestSettings):
    """NetworkPolicies, which deny all traffic of the service's pods except what these fields allow."""

    policies: bool = True
    """Create NetworkPolicies."""
    client_namespaces: tuple[str, ...] = setting((), maxItems=64, items={"pattern": LABEL, "maxLength": 63})
    """Kubernetes namespaces whose pods may call the gateway; empty: every client that reaches it."""
    monitoring_namespace: str = setting("", pattern=OPTIONAL_NAME, maxLength=63)
    """Kubernetes namespace whose pods may read metrics; empty: none."""
    downloads: bool = True
    """Allow engines and jobs connections to port 443 anywhere, to download models and corpora."""


@dataclass(frozen=True)
class Limits(NamespaceLimits, ManifestSettings):
    """What a namespace may use. A limit that is not set is not enforced."""


@dataclass(frozen=True)
class NamespacePrivacyExpert(PrivacyExpert, ManifestSettings):
    """Settings that hide which chunks other callers of the same namespace stored."""


@dataclass(frozen=True)
class Privacy(NamespacePrivacy, ManifestSettings):
    """What answers reveal to a caller about chunks that other callers of the same namespace stored."""

    expert: NamespacePrivacyExpert = field(default_factory=NamespacePrivacyExpert)


@dataclass(frozen=True)
class ServiceExpert(ManifestSettings):
    """Rarely needed settings of a service's pods and network."""

    pod_templates: Mapping[str, PodTemplate] = setting(dict, maxProperties=len(ROLES), keys=ROLES)
    """Additions to pods, by role: engines, corpora (unset: the additions of engines), store, gateway, heads.
    When the additions of the store change, shards restart one at a time."""
    heads: HeadSize = field(default_factory=HeadSize)
    """Size of the heads of the store's and of the engines' Ray cluster."""
    redis: Redis = field(default_factory=Redis)
    kuberay_namespace: str = setting("", pattern=OPTIONAL_NAME, maxLength=63)
    """Kubernetes namespace of KubeRay's operator, which deploys through the heads' dashboards; empty: the
    service's own namespace."""
    egress: tuple[Egress, ...] = setting((), maxItems=32)
    """Further destinations that engines, gateways and jobs may call, such as a trace collector or a proxy."""
    api_server_ports: tuple[int, ...] = setting((443, 6443), minItems=1, maxItems=8, items=PORT)
    """TCP ports of the API server's endpoints, which Ray's autoscaler calls (`kubectl get endpointslices
    kubernetes` shows them). Network policies apply to these, not to the port of the Service."""
    dns_namespace: str = setting("kube-system", pattern=OPTIONAL_LABEL, maxLength=63)
    """Kubernetes namespace of the cluster's DNS servers; empty: any, as for a cache on each node."""
    dns_ports: tuple[int, ...] = setting((53,), minItems=1, maxItems=8, items=PORT)
    """UDP and TCP ports on which the pods of the DNS servers listen, such as 5353 in OpenShift."""
    ray_version: str = setting(RAY_VERSION, pattern=RELEASE, maxLength=20)
    """Version of Ray in the images. A store keeps the version that it was created with."""


@dataclass(frozen=True)
class BlendServiceSpec(ManifestSettings):
    """A CacheBlend service: a store, engines, a gateway."""

    # `Gateway` cannot have this rule: Kubernetes checks defaults against rules, and the default gateway
    # violates it.
    RULES = (
        Rule(
            (this.gateway.tokens_secret != "") | this.gateway.insecure,
            "gateway.tokensSecret is mandatory: name a Secret with hashed tokens, or set gateway.insecure "
            "to serve every client",
        ),
        Rule(
            (this.store.tls_secret != "") | this.network.policies | this.store.insecure,
            "without network.policies the store needs store.tlsSecret, or store.insecure to let every pod "
            "in the cluster read it",
        ),
    )

    model: Model
    image: str = setting(pattern=IMAGE, maxLength=512)
    """Image of engines, gateway and jobs, such as registry.example.com/kintsugi/serving-gpu:0.1.0."""
    image_pull_secrets: tuple[str, ...] = setting((), maxItems=16, items={"pattern": NAME, "maxLength": 253})
    """Names of Secrets in this namespace with which nodes pull the images."""
    engines: Engines = field(default_factory=Engines)
    store: Store = field(default_factory=Store)
    gateway: Gateways = field(default_factory=Gateways)
    network: Network = field(default_factory=Network)
    limits: Mapping[str, Limits] = setting(dict, maxProperties=64)
    """What each namespace may use, by pattern: a namespace, a prefix that ends in *, or *.
    At gateways, limits in the Secret of `gateway.tokensSecret` take precedence."""
    privacy: Mapping[str, Privacy] = setting(dict, maxProperties=64)
    """What answers reveal within a namespace, by pattern. Rules in the Secret of `gateway.tokensSecret` take
    precedence."""
    expert: ServiceExpert = field(default_factory=ServiceExpert)

    def pod_template(self, role: str) -> PodTemplate:
        """Return the spec's additions to the pods of a role. Corpora have the additions of engines unless
        they have their own."""
        templates = self.expert.pod_templates
        if role == "corpora" and role not in templates:
            role = "engines"
        return templates.get(role, PodTemplate())
