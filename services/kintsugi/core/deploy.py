"""The parts of a service, and its Ray Serve configuration. Pure: `kintsugi serve` and the operator use it.

There are two Serve applications, so that no change of models or engines restarts a shard: `STORE_APP` with
one deployment of shards, `SERVICE_APP` with engines and gateway.

Serve restarts all replicas of an application if its `args` or an autoscaling policy change, those of a
deployment if its resources or environment change, and none if only counts or a `user_config` change. So
`args` contain no counts, and settings of the gateway alone are in its `user_config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar
from urllib.parse import urlencode

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import codec_named
from kintsugi.core.namespaces import PATTERNS_MAX, NamespaceLimits, NamespacePrivacy, NamespaceRules
from kintsugi.core.request import parse_selector
from kintsugi.core.schema import OFF_IN_YAML, load
from kintsugi.core.settings import (
    Pattern,
    Rule,
    Settings,
    check,
    has_items,
    is_set,
    non_default_fields,
    setting,
    this,
)

STORE_APP = "kintsugi-store"
SERVICE_APP = "kintsugi"
SHARD_DEPLOYMENT = "StoreShard"
ENGINE_DEPLOYMENT = "Engine"
GATEWAY_DEPLOYMENT = "Gateway"

STORE_BUILDER = "kintsugi.serving.apps:store_app"
SERVICE_BUILDER = "kintsugi.serving.apps:service_app"
ENGINE_POLICY = "kintsugi.serving.autoscaling:EnginePolicy"
SHARD_POLICY = "kintsugi.serving.autoscaling:ShardPolicy"
ENGINE_ROUTER = "kintsugi.serving.engine_router.EngineRouter"

SHARD_ARENAS_MAX = 2
"""Maximum number of malloc arenas in a shard. Each keeps the memory of its largest burst of messages."""
SHARD_ENV = {"MALLOC_ARENA_MAX": str(SHARD_ARENAS_MAX)}
"""Ray's worker has threads, and so arenas, before `store.shard.malloc` can bound them."""

RAY_ENVIRONMENT = {
    # The monitor ends Ray's workers when 95 % of the memory of the machine or pod is used, even by other
    # programs. Ending Kintsugi's processes frees little of the memory that others use. Our own use is bounded
    # in bytes (RAM tiers, vLLM's KV cache), and the kernel, which acts at 100 %, is the limit that Kubernetes
    # and users expect.
    "RAY_memory_monitor_refresh_ms": "0",
    # With Ray's value of 1000, the kernel would end Kintsugi's processes before the one that uses the most
    # memory.
    "RAY_worker_oom_score_adjustment": "0",
    # The table of dead actors is read every second (`serving.lost_parts`). Ray's 100,000 would take seconds.
    "RAY_maximum_gcs_destroyed_actor_cached_count": "1000",
    # Ray reports usage to its vendor otherwise.
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Ray's settings, as environment variables of every node, that differ from Ray's defaults wherever Kintsugi
starts Ray (docs/operate/defaults.md)."""
RAY_CLUSTER_ENVIRONMENT = {
    **RAY_ENVIRONMENT,
    # The head counts a node as lost after five failed checks: one that is cut off after 20 s instead of 65 s.
    # Until then, requests wait for its engine. A head that is cut off for longer loses all nodes, which then
    # start again, so the time is not shorter.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
}
"""The same on a cluster of several nodes. On one machine a node cannot be cut off, but can be busy."""

PORT_MAX = 65535
HEALTH_CHECK_PERIOD_S = 2.0
"""Period of health checks. Serve adds its own period until it notices a dead replica."""
HEALTH_CHECK_TIMEOUT_S = 30.0
"""Timeout of a health check; a machine that is busy with a prefill answers late."""
END_MARGIN_S = 15.0
"""Time after the drain before Serve kills a replica: Serve waits two seconds before the drain starts, and
files and ports close after it."""
REQUESTS_MAX = 512
"""Maximum number of requests that run or wait in one engine. Further requests wait in the gateway's handle,
up to `QUEUED_MAX`."""
QUEUED_MAX = 4096
DRAIN_S = 60.0
"""Time limit for a stopping engine or gateway to finish its requests, and for a stopping shard to write back
data that only RAM holds."""
RAMP_S = 60.0
"""Time over which a new, empty shard receives its share of the chunks."""
SHARD_CPUS = 0.5
"""CPU cores that Ray counts for a shard."""
GATEWAY_CPUS = 0.25
"""CPU cores that Ray counts for a gateway."""
METRICS_PORTS = 16
"""Number of ports to try: an engine or shard uses the first free one for its metrics."""
SHARD_PORT = 7400
"""First of `METRICS_PORTS` ports for a shard that listens beyond loopback."""
SHARD_METRICS_PORT = 7480
ENGINE_METRICS_PORT = 7580


@dataclass(frozen=True)
class ModelExpert(Settings):
    """The form of prompts, and the text that chunks are prefilled after."""

    form: str = setting("auto", enum=["auto", "chat", "plain"])
    """How prompts are written: by the chat template, or plain; `auto`: chat where the model has a template.
    Chunks are prefilled after the text that the form writes before them."""
    context: str = setting("none", minLength=1)
    """Natural text between the system prompt and the chunks, which are prefilled after it: `none`, `bundled`
    (the first two passages that ship with Kintsugi), `corpus` (as `bundled`, but precompute jobs take similar
    passages of the chunk's own corpus) or the path of a text file. Except for `corpus`, it is the same for
    every tenant."""


@dataclass(frozen=True)
class ModelSpec(Settings):
    """The model that is served."""

    path: str = setting(minLength=1)
    """Folder of the checkpoint, a hub name such as `org/model`, `smollm2-135m` (the reference model), or
    `bundled`, the tiny model that ships with Kintsugi."""
    name: str = ""
    """Name that clients use; empty: the last part of the path."""
    system_prompt: str | None = None
    """The system prompt that chunks are prefilled after, without the template's marks; unset: the
    template's own, if it has one."""
    codec: str = "raw"
    """Codec of chunk KV in the store: `raw` is lossless, the others use less space."""
    expert: ModelExpert = field(default_factory=ModelExpert)


@dataclass(frozen=True)
class EngineExpert(Settings):
    """Rarely needed settings of engines. Their defaults fit the evidence, the hardware and the model."""

    ratio: float | None = setting(None, minimum=0, maximum=1)
    """Share of a prompt's chunk tokens that a blend recomputes, if `quality` is `off`."""
    selector: str | None = None
    """Selector of the recomputed tokens, if `quality` is `off`. The gate tests one of another distribution in
    place of `query`."""
    check_layer: int | None = setting(None, minimum=1)
    """Layer whose KV deviation selects tokens, if `quality` is `off`."""
    portable: bool = True
    """Also use chunks in prompts with another prefix than the one that they were prefilled after."""
    plain_copies: bool = True
    """With a context: also store each chunk without it, for prompts that begin with the chunk."""
    loading_controller: bool = True
    """Prefill a prompt in full if that is predicted to be faster; if false, blend every prompt that can be
    blended."""
    load_deadline_ms: int | None = setting(None, minimum=1)
    """Longest wait for the store in milliseconds; unset: 500 ms for a lookup, 2000 ms for a layer."""

    @property
    def connector(self) -> dict[str, Any]:
        """The settings by the connector's own names; unset ones are left out."""
        given = {one.name: getattr(self, one.name) for one in fields(EngineExpert)}
        deadline_ms = given.pop("load_deadline_ms")
        given |= {"lookup_deadline_ms": deadline_ms, "layer_deadline_ms": deadline_ms}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class EngineSpec(Settings):
    """A group of equal engines, on one machine and on Kubernetes alike."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ~is_set(this.replicas_max) | (this.replicas <= this.replicas_max),
            "the largest number of engines must not be less than replicas",
            "replicas_max",
        ),
    )

    replicas: int = setting(1, minimum=1)
    """Number of engines; if `replicas_max` is set, the minimum number."""
    replicas_max: int | None = setting(None, minimum=1)
    """Maximum number of engines with autoscaling; unset: always `replicas`."""
    cpus: float = setting(1.0, minimum=0)
    """CPU cores of each engine."""
    gpus: float = setting(0.0, minimum=0)
    """GPUs of each engine; 0: vLLM runs on the CPU."""
    quality: Annotated[str, OFF_IN_YAML] = setting(
        "balanced", enum=["strict", "balanced", "off"], also=[False]
    )
    """How much quality a blend may lose against full prefill. Blending starts automatically as soon as
    measurements on served prompts show a smaller loss. `balanced`: the mean KL is below 0.01 nats (each
    answer counts at most 0.04), and in fewer than 1 answer in 8 the KL exceeds 0.04 or more than a quarter of
    its tokens changed. `strict`: a third of both limits. `off`: no test; answers may be wrong without
    notice."""
    vllm: Mapping[str, Any] = setting(dict, reserved=("model", "kv_transfer_config"))
    """Arguments of `vllm serve` by their own names, such as `max_model_len` or `tool_call_parser`."""
    expert: EngineExpert = field(default_factory=EngineExpert)

    @property
    def most(self) -> int:
        """The maximum number of engines."""
        return self.replicas if self.replicas_max is None else self.replicas_max


@dataclass(frozen=True)
class TierSpec(Settings):
    """An SSD tier of each shard."""

    path: str = setting(minLength=1)
    """A folder on the SSD."""
    gib: float = setting(exclusiveMinimum=0)
    """Size of the tier in GiB."""


BUCKET_URL = Pattern(
    "^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_.-]+)*$", "must be s3://BUCKET or s3://BUCKET/PREFIX"
).or_empty()
BUCKET_RULE = Rule(
    (this.bucket_url == "") | has_items(this.tiers),
    "a bucket stores the chunks that SSD tiers evict: name a tier in tiers",
    "bucket_url",
)


@dataclass(frozen=True)
class StoreSettings(Settings):
    """Settings of the chunk KV-cache store, on one machine and on Kubernetes alike."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(this.replication <= this.shards, "replication must not exceed shards", "replication"),
    )

    shards: int = setting(1, minimum=1)
    """Number of shards."""
    replication: int = setting(1, minimum=1)
    """Number of shards that hold each chunk; at most the number of shards."""
    ram_gib: float = setting(4.0, exclusiveMinimum=0)
    """Size of each shard's RAM tier in GiB."""
    bucket_url: str = setting("", pattern=BUCKET_URL, maxLength=512)
    """S3-compatible bucket for chunks that SSD tiers evict, such as s3://chunks/kintsugi; empty: none. Shards
    read its endpoint, region and credentials from their environment (AWS_ENDPOINT_URL, AWS_REGION …)."""
    bucket_gib: float = setting(100.0, exclusiveMinimum=0)
    """Maximum size of each shard's chunks in the bucket, in GiB."""


@dataclass(frozen=True)
class StoreExpert(Settings):
    """Settings of a store on several hosts, with encryption, or with clients of different permissions."""

    shards_max: int | None = None
    """Maximum number of shards; shards are added when evicted chunks are soon requested again. Unset:
    always `shards`."""
    host: str = "127.0.0.1"
    """Interface that shards and directory listen on. Beyond loopback they need TLS, or `insecure`."""
    directory_port: int = setting(7410, minimum=1, maximum=PORT_MAX)
    """Port of the directory on the head node, which lists the shards to clients."""
    insecure: bool = False
    """Listen beyond loopback without TLS."""
    tls_name: str = ""
    """Host name in the certificates of all shards; empty: each shard's own address."""
    tokens_file: str = ""
    """JSON file of hashed bearer tokens and client certificates, with their permissions on a shard. Empty:
    every client may do everything."""
    token_file: str = ""
    """File with the token that engines and gateways send to shards."""
    keys_file: str = ""
    """File with the keys of encrypted namespaces, for engines and gateways; shards never read it."""
    audit_dir: str = ""
    """Folder of the shards' audit logs; empty: none are written."""


@dataclass(frozen=True)
class StoreSpec(StoreSettings):
    """The chunk KV-cache store."""

    RULES = (*StoreSettings.RULES, BUCKET_RULE)

    tiers: tuple[TierSpec, ...] = ()
    """SSD tiers below RAM, fastest first."""
    data_dir: str = ""
    """Folder for shards' identities and reports; empty: a shard loses both when it ends. Each shard of a
    host uses a subfolder of this folder and of each tier's path."""
    tls_ca: str = ""
    """PEM file of the authority that signed the certificates of shards, engines and gateways."""
    tls_cert: str = ""
    """PEM file of the certificate of shards, engines and gateways."""
    tls_key: str = ""
    """PEM file of that certificate's private key."""
    expert: StoreExpert = field(default_factory=StoreExpert)


@dataclass(frozen=True)
class GatewayExpert(Settings):
    """Rarely needed settings of gateways."""

    fill_on_miss: bool = True
    """After an answer, prefill and store the chunks that the store lacked."""
    engine_places: int | None = setting(None, minimum=1, maximum=65536)
    """Maximum number of requests that each gateway sends to engines at a time. Further requests wait in a
    queue in which namespaces take turns by their weights; unset: no queue."""


@dataclass(frozen=True)
class GatewaySettings(Settings):
    """Settings of the gRPC and HTTP front end, on one machine and on Kubernetes alike."""

    replicas: int = setting(1, minimum=1)
    """Number of gateways."""
    grpc_port: int = setting(7500, minimum=0, maximum=PORT_MAX)
    """Port of the gRPC service."""
    http_port: int = setting(8000, minimum=0, maximum=PORT_MAX)
    """Port of the OpenAI-compatible HTTP service."""
    expert: GatewayExpert = field(default_factory=GatewayExpert)


@dataclass(frozen=True)
class GatewaySpecExpert(GatewayExpert):
    """Rarely needed settings of gateways on one machine."""

    tls_client_ca: str = ""
    """PEM file of the authority that signed clients' certificates; empty: clients need none."""
    audit_dir: str = ""
    """Folder of the gateway's audit log; empty: none is written."""
    data_dir: str = ""
    """Folder for the gateway's cache of chunk texts; empty: the cache is lost when the gateway stops."""
    ledger: str = ""
    """State folder of precompute. Requests may name its corpora, and its documents are found in messages."""


@dataclass(frozen=True)
class GatewaySpec(GatewaySettings):
    """gRPC and HTTP front end."""

    host: str = "127.0.0.1"
    """Interface that the gateway listens on. Beyond loopback it needs TLS and tokens, or `insecure`."""
    tokens_file: str = ""
    """JSON file of hashed bearer tokens and their namespaces."""
    tls_cert: str = ""
    """PEM file of the gateway's certificate."""
    tls_key: str = ""
    """PEM file of that certificate's private key."""
    insecure: bool = False
    """Listen beyond loopback without tokens."""
    expert: GatewaySpecExpert = field(default_factory=GatewaySpecExpert)


@dataclass(frozen=True)
class ServiceSpec(Settings):
    """A whole service. The constructor checks all settings and raises `InvalidField`."""

    model: ModelSpec
    engines: EngineSpec = field(default_factory=EngineSpec)
    store: StoreSpec = field(default_factory=StoreSpec)
    gateway: GatewaySpec = field(default_factory=GatewaySpec)
    limits: Mapping[str, NamespaceLimits] = setting(dict, maxProperties=PATTERNS_MAX)
    """Limits of namespaces, by pattern. Limits in `gateway.tokens_file` take precedence."""
    privacy: Mapping[str, NamespacePrivacy] = setting(dict, maxProperties=PATTERNS_MAX)
    """What answers reveal within a namespace, by pattern. Rules in `gateway.tokens_file` take precedence."""

    @property
    def rules(self) -> NamespaceRules:
        """Limits and privacy."""
        return NamespaceRules(self.limits, self.privacy)

    def __post_init__(self) -> None:
        check(self)
        _ = self.rules  # checks them
        codec_named(self.model.codec)
        if self.engines.expert.selector is not None:
            parse_selector(self.engines.expert.selector)
        store, gateway = self.store, self.gateway
        if (most := store.expert.shards_max) is not None and most < store.shards:
            raise InvalidField("store.expert.shards_max", f"{most} is less than shards, {store.shards}")
        if store.tiers and not store.data_dir:
            raise InvalidField("store.data_dir", "is mandatory with tiers; it holds the shards' identities")
        if len({bool(file) for file in (store.tls_ca, store.tls_cert, store.tls_key)}) > 1:
            raise InvalidField("store.tls", "give tls_ca, tls_cert and tls_key together")
        expert = store.expert
        if expert.tokens_file and not (expert.token_file or store.tls_ca):
            raise InvalidField(
                "store.expert.token_file",
                "is mandatory with tokens_file unless tls_ca is set; name the file with the token that "
                "engines and gateways send",
            )
        if bool(gateway.tls_cert) != bool(gateway.tls_key):
            raise InvalidField("gateway.tls", "give tls_cert and tls_key together")


@dataclass(frozen=True)
class Placement:
    """Where replicas run, and how they find each other, which differs between one machine and a cluster.

    Resources are Ray's custom ones, by name. With one node group per shard, `shard={"kintsugi_shard": 1}` and
    one `kintsugi_shard` per group place every shard on its own group and volume.
    """

    shard: Mapping[str, float] = field(default_factory=dict)
    engine: Mapping[str, float] = field(default_factory=dict)
    gateway: Mapping[str, float] = field(default_factory=dict)
    store_url: str = ""
    """URL at which engines find the shards. Empty: both applications run in one Ray cluster."""


HERE = Placement()


def spec_from_yaml_mapping(values: Mapping[str, Any]) -> ServiceSpec:
    """Build a service from a file's values. Raises `InvalidField` and `UnknownField` with the key's path."""
    return load(ServiceSpec, values, where="config")


def serve_config(
    spec: ServiceSpec,
    placement: Placement = HERE,
    applications: Sequence[str] = (STORE_APP, SERVICE_APP),
) -> dict[str, Any]:
    """Return the configuration for `serve deploy`, or for KubeRay's `serveConfigV2`, as plain values.

    With two clusters, each runs one of the ``applications``. Raises `InvalidField`.
    """
    makers = {STORE_APP: store_application, SERVICE_APP: service_application}
    return {
        "proxy_location": "Disabled",
        "applications": [makers[name](spec, placement) for name in applications],
    }


def store_application(spec: ServiceSpec, placement: Placement = HERE) -> dict[str, Any]:
    """Return the application of the shards. Its `args` depend on `spec.store` alone, so that no other change
    restarts them."""
    store, most = spec.store, spec.store.expert.shards_max or spec.store.shards
    shard = {
        "name": SHARD_DEPLOYMENT,
        **_replicas(store.shards, most, {"policy_function": SHARD_POLICY}),
        "ray_actor_options": _actor(SHARD_CPUS, 0.0, placement.shard, SHARD_ENV),
        # Directory and shards apply these without a restart.
        "user_config": {
            "replication": store.replication,
            **non_default_fields(NamespaceRules(limits=spec.limits)),
            **({"tokens_file": spec.gateway.tokens_file} if spec.gateway.tokens_file else {}),
            # With ratio 0, computation hides no loading, and shards keep their own ratio.
            **({"ratio": spec.engines.expert.ratio} if spec.engines.expert.ratio else {}),
        },
        **_health(),
    }
    # The arguments contain no counts, and no keys, which shards never read.
    own = replace(store, shards=1, replication=1, expert=replace(store.expert, shards_max=None, keys_file=""))
    return _application(STORE_APP, STORE_BUILDER, {"store": non_default_fields(own)}, shard)


def service_application(spec: ServiceSpec, placement: Placement = HERE) -> dict[str, Any]:
    """Return the application of engines and gateway."""
    engines, gateway = spec.engines, spec.gateway
    store_url = placement.store_url or directory_url(spec.store)
    engine = {
        "name": ENGINE_DEPLOYMENT,
        **_replicas(engines.replicas, engines.most, {"policy_function": ENGINE_POLICY}),
        "ray_actor_options": _actor(engines.cpus, engines.gpus, placement.engine),
        "max_ongoing_requests": REQUESTS_MAX,
        "max_queued_requests": QUEUED_MAX,
        "request_router_config": {
            "request_router_class": ENGINE_ROUTER,
            "request_router_kwargs": {"store_url": store_url},
            "request_routing_stats_period_s": 1.0,
        },
        **_health(),
    }
    front = {
        "name": GATEWAY_DEPLOYMENT,
        "num_replicas": gateway.replicas,
        "ray_actor_options": _actor(GATEWAY_CPUS, 0.0, placement.gateway),
        # Two gateways on one host would compete for the same ports.
        "max_replicas_per_node": 1,
        "user_config": {
            "gateway": non_default_fields(gateway, "replicas"),
            **non_default_fields(spec.rules),
        },
        **_health(),
    }
    args = {
        "model": non_default_fields(spec.model),
        "engines": non_default_fields(engines, "replicas", "replicas_max", "cpus", "gpus"),
        "store_url": store_url,
        # Engine metrics listen on the same interface as shard metrics.
        "host": spec.store.expert.host,
    }
    return _application(SERVICE_APP, SERVICE_BUILDER, args, engine, front)


def directory_url(store: StoreSpec, host: str = "") -> str:
    """Return the URL at which engines and clients find the shards; ``host``: the head node's address."""
    expert = store.expert
    given = {"token_file": expert.token_file, "keys": expert.keys_file}
    if store.tls_ca:
        given |= {name: getattr(store, name) for name in ("tls_ca", "tls_cert", "tls_key")}
        given["tls_name"] = expert.tls_name
    query = urlencode({name: value for name, value in given.items() if value}, safe="/")
    host = host or expert.host
    address = f"{f'[{host}]' if ':' in host else host}:{expert.directory_port}"
    return f"shards://{address}{'?' * bool(query)}{query}"


def _application(
    name: str, builder: str, args: dict[str, Any], *deployments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        # Clients do not use Serve's HTTP proxy.
        "route_prefix": None,
        "import_path": builder,
        "args": args,
        "deployments": list(deployments),
    }


def _replicas(least: int, most: int, policy: dict[str, Any]) -> dict[str, Any]:
    if least == most:
        return {"num_replicas": least}
    autoscaling = {
        "min_replicas": least,
        "max_replicas": most,
        "upscale_delay_s": 10.0,
        "downscale_delay_s": 300.0,
        "policy": policy,
    }
    return {"num_replicas": "auto", "autoscaling_config": autoscaling}


def _actor(
    cpus: float, gpus: float, resources: Mapping[str, float], env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus}
    if resources:
        options["resources"] = dict(resources)
    if env:
        options["runtime_env"] = {"env_vars": dict(env)}
    return options


def _health() -> dict[str, Any]:
    return {
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_timeout_s": DRAIN_S + END_MARGIN_S,
    }
