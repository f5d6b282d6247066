"""What a service consists of, and its Ray Serve configuration. Pure: `kintsugi serve` and operator use it.

Two Serve applications, so that nothing about models or engines ever restarts a shard: `STORE_APP` with one
deployment of shards, `SERVICE_APP` with engines and gateway.

Serve starts all replicas of an application anew when its `args` or an autoscaling policy change, those of a
deployment when its resources or its environment do, and none when only counts or a `user_config` do. So
counts are nowhere in `args`, and what the gateway alone needs is its `user_config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlencode

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import codec_named
from kintsugi.core.namespaces.limits import NamespaceLimits
from kintsugi.core.namespaces.privacy import NamespacePrivacy
from kintsugi.core.namespaces.rules import PATTERNS_MAX, NamespaceRules
from kintsugi.core.rules import Rule, has_items, this
from kintsugi.core.schema import load
from kintsugi.core.settings import Settings, check, non_default_fields, setting

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
"""malloc's arenas in a shard: each keeps what the largest burst of messages took."""
SHARD_ENV = {"MALLOC_ARENA_MAX": str(SHARD_ARENAS_MAX)}
"""Ray's worker has threads, and so arenas, before `store.shard.malloc` can bound them."""

PORT_MAX = 65535
HEALTH_CHECK_PERIOD_S = 2.0
"""A dead replica is noticed within this time and Serve's own period."""
HEALTH_CHECK_TIMEOUT_S = 30.0
"""A machine that is busy with a prefill answers late."""
END_MARGIN_S = 15.0
"""Time beyond its drain time that a replica gets before Serve kills it: Serve waits two seconds before it
starts to drain, and files and ports close after it."""
REQUESTS_MAX = 512
"""Requests that run or wait in one engine; more wait in the gateway's handle, up to `QUEUED_MAX`."""
QUEUED_MAX = 4096


METRICS_PORTS = 16


@dataclass(frozen=True)
class ModelSpec(Settings):
    """The model that is served."""

    path: str = setting(minLength=1)
    """Folder of the checkpoint, a hub name, `org/model`, or the reference model's, `smollm2-135m`."""
    name: str = ""
    """What clients call it; empty: the last part of the path."""
    dtype: str = "auto"
    """Data type of weights and KV cache; `auto`: the checkpoint's own."""
    max_model_len: int | None = setting(None, minimum=1)
    """Longest prompt and answer together, in tokens; unset: what the model allows."""
    form: str = setting("auto", enum=["auto", "chat", "plain"])
    """How prompts are written: by the chat template, or plain; `auto`: chat where the model has a template.
    Chunks are prefilled behind what the form writes before them."""
    system_prompt: str | None = None
    """The system prompt that chunks are prefilled behind, without the template's marks; unset: the
    template's own, if it has one."""
    codec: str = "raw"
    """How chunk KV is encoded in the store: `raw` keeps every bit, the others take less room."""
    context: str = setting("none", minLength=1)
    """Natural text that chunks are prefilled behind, after the system prompt: `none`, `bundled` (the first
    two passages that ship with Kintsugi) or the path of a text file. It is the same for every tenant."""


@dataclass(frozen=True)
class Scale(Settings):
    """How many replicas; `min` = `max` is no autoscaling."""

    RULES = (Rule(this.min <= this.max, "min must not exceed max"),)

    min: int = setting(1, minimum=1)
    """Smallest number of replicas."""
    max: int = setting(1, minimum=1)
    """Largest number of replicas."""


@dataclass(frozen=True)
class OpenAISpec(Settings):
    """vLLM's server flags that concern prompts and tools."""

    chat_template: str | None = None
    """A file, or the template itself. None: the model's own."""
    tool_call_parser: str | None = None
    """vLLM's name of a parser of tool calls: requests may then offer tools. Unset: they may not."""
    reasoning_parser: str = ""
    """vLLM's name of a parser that separates what a model thinks from what it answers."""


@dataclass(frozen=True)
class EngineSettings(Settings):
    """Settings of a group of equal engines, on one machine and on Kubernetes alike."""

    replicas: Scale = field(default_factory=Scale)
    cpus: float = setting(1.0, minimum=0)
    """CPU cores of each engine."""
    gpus: float = setting(0.0, minimum=0)
    """GPUs of each engine; 0: vLLM runs on the CPU."""
    kv_cache_gib: float | None = setting(None, exclusiveMinimum=0)
    """Size of vLLM's own KV cache in GiB; unset: what vLLM chooses on a GPU, 2 on a CPU."""
    allow_uncalibrated: bool = False
    """Blend without a calibration report. Answers may then be wrong."""
    shadow_share: float = setting(0.005, minimum=0, maximum=1)
    """Share of blended requests that are computed again in full while nobody waits, to see whether blends are
    still as good as when they were calibrated. 0: none."""
    shadow_per_minute: float = setting(1.0, minimum=0, maximum=600)
    """Blended requests a minute that each engine computes again, where `shadow_share` gives fewer."""
    shadow_positions: int = setting(32, minimum=1, maximum=32)
    """Leading tokens of an answer that are compared."""
    shadow_time_share: float = setting(0.05, exclusiveMinimum=0, maximum=1)
    """Largest share of an engine's time that computing again may take."""
    connector: Mapping[str, Any] = setting(dict, reserved=("store", "prefix_token_ids", "context_token_ids"))
    """Further configuration of the Kintsugi plugin, by its own names."""
    vllm: Mapping[str, Any] = setting(dict, reserved=("model", "kv_transfer_config"))
    """Further engine arguments of vLLM, by its own names."""
    openai: OpenAISpec = field(default_factory=OpenAISpec)


@dataclass(frozen=True)
class EngineSpec(EngineSettings):
    """One group of equal engines."""

    spares: int = setting(0, minimum=0)
    """Engines beyond `replicas` that have loaded the model and get requests only if none of those can take
    them. Each takes the memory of an engine, and its GPUs. Needs `replicas.min` = `replicas.max`."""
    calibrate: bool = True
    """Whether a model without a report is calibrated while it serves full prefill."""
    questions: str = ""
    """JSON lines to calibrate on; empty: those of the bundled model, or the bundled passages."""
    queueing_ms_max: float = setting(500.0, exclusiveMinimum=0)
    """With `replicas.max > replicas.min`: more engines where requests are predicted to wait longer."""
    drain_s: float = setting(60.0, minimum=0)
    """How long requests may continue once an engine or a gateway has to stop."""
    metrics_port: int = setting(7580, minimum=0, maximum=PORT_MAX)
    """First of 16 ports; an engine takes one that is free. 0: no metrics."""
    metrics_host: str = ""
    """The interface that engines' metrics listen on; empty: the store's."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the engine's process."""


@dataclass(frozen=True)
class TierSpec(Settings):
    """An SSD tier of each shard."""

    path: str = setting(minLength=1)
    """A folder on the SSD."""
    gib: float = setting(exclusiveMinimum=0)
    """Size of the tier in GiB."""


BUCKET_URL = r"^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_.-]+)*)?$"
"""`s3://BUCKET/PREFIX`, or nothing."""
BUCKET_RULE = Rule(
    (this.bucket_url == "") | has_items(this.tiers),
    "a bucket takes what SSD tiers give up: name one in tiers",
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
    ramp_s: float = setting(60.0, minimum=0)
    """Seconds over which an empty shard that joins is given its share of the chunks."""
    ram_gib: float = setting(4.0, exclusiveMinimum=0)
    """Size of each shard's RAM tier in GiB."""
    bucket_url: str = setting("", pattern=BUCKET_URL, maxLength=512)
    """S3-compatible bucket for what SSD tiers give up, such as s3://chunks/kintsugi; empty: none. Shards take
    its endpoint, region and credentials from their environment (AWS_ENDPOINT_URL, AWS_REGION …)."""
    bucket_gib: float = setting(100.0, exclusiveMinimum=0)
    """What each shard may keep in the bucket, in GiB."""
    scrub_mib_per_s: float = setting(16.0, minimum=0)
    """MiB per second of what it holds that each shard verifies in the background; 0: it does not."""
    erase_grace_s: float = setting(2.0, minimum=0, maximum=240)
    """How long an erasure lets clients finish the reads and puts of its chunks before it cuts them."""
    cpus: float = setting(0.5, minimum=0)
    """CPU cores of each shard."""


@dataclass(frozen=True)
class StoreSpec(StoreSettings):
    """The chunk KV-cache store."""

    RULES = (*StoreSettings.RULES, BUCKET_RULE)

    shards_max: int | None = None
    """None: always `shards`. More are started when what is evicted is soon wanted again."""
    tiers: tuple[TierSpec, ...] = ()
    """Fastest first, below RAM."""
    data_dir: str = ""
    """Identity and reports; empty: nothing outlives the shard. Each shard of a host takes a folder in it, and
    in each tier's."""
    host: str = "127.0.0.1"
    """The interface that shards and directory listen on. Beyond loopback they need TLS, or `insecure`."""
    directory_port: int = setting(7410, minimum=1, maximum=PORT_MAX)
    """Where clients ask which shards there are, on the head node."""
    port: int = setting(0, minimum=0, maximum=PORT_MAX)
    """Port of a shard; 0: any that is free, since several may share a host."""
    metrics_port: int = setting(7480, minimum=0, maximum=PORT_MAX)
    """First of 16 ports; a shard takes one that is free. 0: no metrics."""
    metrics_host: str = ""
    """The interface that shards' metrics listen on; empty: `host`."""
    protect_metrics: bool = False
    """Ask for a token with the verb `admin` on every namespace before a shard shows its metrics."""
    tls_ca: str = ""
    """PEM file of the authority that signed the certificates of shards, engines and gateways."""
    tls_cert: str = ""
    """PEM file of the certificate that shards, engines and gateways show each other."""
    tls_key: str = ""
    """PEM file of that certificate's private key."""
    tls_name: str = ""
    """The name that all shards' certificates are for; empty: the address that each is called by."""
    insecure: bool = False
    """Listen beyond loopback without TLS."""
    tokens_file: str = ""
    """JSON file of hashed bearer tokens and of client certificates, with what each may do on a shard. Empty:
    whoever connects may do everything."""
    token_file: str = ""
    """File with the token that engines and gateways show to shards."""
    audit_dir: str = ""
    """Folder of the shards' audit logs; empty: none are written."""
    share_arena: bool = True
    """Let engines on a shard's host read its RAM directly; otherwise chunks travel over gRPC there, too."""
    drain_s: float = setting(60.0, minimum=0)
    """How long a shard that has to stop may write back what only RAM holds."""
    keys_file: str = ""
    """File with the keys of encrypted namespaces, for engines and gateways; shards never read it."""


@dataclass(frozen=True)
class GatewaySettings(Settings):
    """Settings of the gRPC and HTTP front end, on one machine and on Kubernetes alike."""

    replicas: int = setting(1, minimum=1)
    """Number of gateways."""
    cpus: float = setting(0.25, minimum=0)
    """CPU cores of each gateway."""
    grpc_port: int = setting(7500, minimum=0, maximum=PORT_MAX)
    """Port of the gRPC service."""
    http_port: int = setting(8000, minimum=0, maximum=PORT_MAX)
    """Port of the OpenAI-compatible HTTP service."""
    fill_on_miss: str = setting("background", enum=["off", "background"])
    """What happens to a chunk that the store lacks: `background` prefills and stores it later, `off` leaves
    it missing."""
    read_only: bool = False
    """Refuse requests that put or delete chunks."""
    overtaking: bool = False
    """Allow requests a priority below 0, with which they run before all requests without one."""
    engine_places: int | None = setting(None, minimum=1, maximum=65536)
    """Requests that each gateway has engines answer at a time. Further ones wait in a queue in which
    namespaces take turns by their weights; unset: none wait."""


@dataclass(frozen=True)
class GatewaySpec(GatewaySettings):
    """gRPC and HTTP front end."""

    host: str = "127.0.0.1"
    """The interface that the gateway listens on. Beyond loopback it needs TLS and tokens, or `insecure`."""
    tokens_file: str = ""
    """JSON file of hashed bearer tokens and their namespaces."""
    tls_cert: str = ""
    """PEM file of the gateway's certificate."""
    tls_key: str = ""
    """PEM file of that certificate's private key."""
    tls_client_ca: str = ""
    """PEM file of the authority that signed clients' certificates; empty: clients need none."""
    insecure: bool = False
    """Listen beyond loopback without tokens."""
    audit_dir: str = ""
    """Folder of the gateway's audit log; empty: none is written."""
    data_dir: str = ""
    """Folder for the chunk texts that the gateway knows; empty: it forgets them when it stops."""
    ledger: str = ""
    """State folder of the precompute whose corpora segments may name and messages may hold."""


@dataclass(frozen=True)
class ServiceSpec(Settings):
    """A whole service. Making one checks everything that it holds and raises `InvalidField`."""

    model: ModelSpec
    engines: EngineSpec = field(default_factory=EngineSpec)
    store: StoreSpec = field(default_factory=StoreSpec)
    gateway: GatewaySpec = field(default_factory=GatewaySpec)
    limits: Mapping[str, NamespaceLimits] = setting(dict, maxProperties=PATTERNS_MAX)
    """What namespaces may use, by pattern. Limits in `gateway.tokens_file` count before these."""
    privacy: Mapping[str, NamespacePrivacy] = setting(dict, maxProperties=PATTERNS_MAX)
    """What answers reveal within a namespace, by pattern. Those in `gateway.tokens_file` count before."""

    @property
    def rules(self) -> NamespaceRules:
        """Limits and privacy."""
        return NamespaceRules(self.limits, self.privacy)

    def __post_init__(self) -> None:
        check(self)
        _ = self.rules  # checks them
        codec_named(self.model.codec)
        store, gateway, replicas = self.store, self.gateway, self.engines.replicas
        if self.engines.spares and replicas.min != replicas.max:
            raise InvalidField(
                "engines.spares",
                f"needs a fixed number of engines, and replicas go from {replicas.min} to {replicas.max}: "
                "set replicas.min and .max alike, or spares to 0",
            )
        if store.shards_max is not None and store.shards_max < store.shards:
            raise InvalidField(
                "store.shards_max", f"{store.shards_max} is less than the {store.shards} shards"
            )
        if store.tiers and not store.data_dir:
            raise InvalidField("store.data_dir", "is needed with tiers: it holds the shards' identities")
        if len({bool(file) for file in (store.tls_ca, store.tls_cert, store.tls_key)}) > 1:
            raise InvalidField("store.tls", "give tls_ca, tls_cert and tls_key together")
        if store.tokens_file and not (store.token_file or store.tls_ca):
            raise InvalidField(
                "store.token_file",
                "is needed with tokens_file, unless engines and gateways show a certificate: name the file "
                "with their token",
            )
        if store.protect_metrics and not store.tokens_file:
            raise InvalidField(
                "store.protect_metrics", "needs store.tokens_file, which says who may read metrics"
            )
        if bool(gateway.tls_cert) != bool(gateway.tls_key):
            raise InvalidField("gateway.tls", "give tls_cert and tls_key together")


@dataclass(frozen=True)
class Placement:
    """Where replicas may run, and how they find each other: what differs between one machine and a cluster.

    Resources are Ray's custom ones, by name. With a node group for each shard, `shard={"kintsugi_shard": 1}`
    and one `kintsugi_shard` per group put every shard on a group, and its volume, of its own.
    """

    shard: Mapping[str, float] = field(default_factory=dict)
    engine: Mapping[str, float] = field(default_factory=dict)
    gateway: Mapping[str, float] = field(default_factory=dict)
    store_url: str = ""
    """Where engines find the shards. Empty: both applications share a Ray cluster and its network."""


HERE = Placement()


def spec_from_yaml_mapping(values: Mapping[str, Any]) -> ServiceSpec:
    """Build a service from a file's values. Raises `InvalidField` and `UnknownField` with the key's path."""
    return load(ServiceSpec, values, where="config")


def serve_config(
    spec: ServiceSpec,
    placement: Placement = HERE,
    applications: Sequence[str] = (STORE_APP, SERVICE_APP),
) -> dict[str, Any]:
    """The configuration that `serve deploy` reads, or KubeRay as `serveConfigV2`: plain values.

    On two clusters each has one of the ``applications``. Raises `InvalidField`.
    """
    makers = {STORE_APP: store_application, SERVICE_APP: service_application}
    return {
        "proxy_location": "Disabled",
        "applications": [makers[name](spec, placement) for name in applications],
    }


_NOT_FOR_SHARDS = ("shards", "shards_max", "replication", "ramp_s", "cpus", "keys_file")


def store_application(spec: ServiceSpec, placement: Placement = HERE) -> dict[str, Any]:
    """The shards. Their `args` depend on `spec.store` alone, so that nothing else restarts them."""
    store = spec.store
    shard = {
        "name": SHARD_DEPLOYMENT,
        **_replicas(Scale(store.shards, store.shards_max or store.shards), {"policy_function": SHARD_POLICY}),
        "ray_actor_options": _actor(store.cpus, 0.0, placement.shard, SHARD_ENV),
        # Directory and shards take these over without a restart.
        "user_config": {
            "replication": store.replication,
            "ramp_s": store.ramp_s,
            **non_default_fields(NamespaceRules(limits=spec.limits)),
            **({"tokens_file": spec.gateway.tokens_file} if spec.gateway.tokens_file else {}),
            **_placement_ratio(spec.engines),
        },
        **_health(store.drain_s),
    }
    return _application(
        STORE_APP,
        STORE_BUILDER,
        {"store": non_default_fields(store, *_NOT_FOR_SHARDS)},
        shard,
    )


def service_application(spec: ServiceSpec, placement: Placement = HERE) -> dict[str, Any]:
    """Engines and gateway."""
    engines, gateway = spec.engines, spec.gateway
    store_url = placement.store_url or directory_url(spec.store)
    engine = {
        "name": ENGINE_DEPLOYMENT,
        **_replicas(
            engines.replicas,
            {
                "policy_function": ENGINE_POLICY,
                "policy_kwargs": {"queueing_ms_max": engines.queueing_ms_max},
            },
            engines.spares,
        ),
        "ray_actor_options": _actor(engines.cpus, engines.gpus, placement.engine, engines.env),
        "max_ongoing_requests": REQUESTS_MAX,
        "max_queued_requests": QUEUED_MAX,
        "request_router_config": {
            "request_router_class": ENGINE_ROUTER,
            "request_router_kwargs": {"store_url": store_url},
            "request_routing_stats_period_s": 1.0,
        },
        **_engine_user_config(engines, placement),
        **_health(engines.drain_s),
    }
    front = {
        "name": GATEWAY_DEPLOYMENT,
        "num_replicas": gateway.replicas,
        "ray_actor_options": _actor(gateway.cpus, 0.0, placement.gateway),
        # Ports are a host's: two gateways on one would fight for them.
        "max_replicas_per_node": 1,
        "user_config": {
            "gateway": non_default_fields(gateway, "replicas", "cpus"),
            "drain_s": engines.drain_s,
            **non_default_fields(spec.rules),
        },
        **_health(engines.drain_s),
    }
    args = {
        "model": non_default_fields(spec.model),
        "engines": non_default_fields(
            engines, "replicas", "spares", "cpus", "gpus", "queueing_ms_max", "drain_s", "env"
        ),
        "store_url": store_url,
        # Engine metrics listen on the same interface as shard metrics.
        "host": engines.metrics_host or spec.store.host,
    }
    return _application(SERVICE_APP, SERVICE_BUILDER, args, engine, front)


def _placement_ratio(engines: EngineSpec) -> dict[str, float]:
    """The ratio behind which shards have loads hide, where engines are told one. Engines refuse what is no
    ratio, and at 0 no load hides behind anything: shards then keep their own."""
    ratio = engines.connector.get("ratio")
    return {"ratio": float(ratio)} if isinstance(ratio, int | float) and 0 < ratio <= 1 else {}


def _engine_user_config(engines: EngineSpec, placement: Placement) -> dict[str, Any]:
    """The `user_config` that tells engines how many of them are not spares; None: all.

    Engines tell routers, because a change of the router's own configuration restarts every replica. An engine
    is not told when its `user_config` goes, so without spares it is told that there are none. On Kubernetes,
    which gives engines a node group, there never are any, and Serve would not start engines of an older image
    that cannot take a `user_config`.
    """
    if not engines.spares and placement.engine:
        return {}
    return {"user_config": {"num_serving": engines.replicas.min if engines.spares else None}}


def calibrates_segments(privacy: Iterable[NamespacePrivacy], connector: Mapping[str, Any]) -> bool:
    """Whether a calibration is about segments: chunks are discovered in a namespace with such a privacy, by
    engines whose ``connector`` does not turn that off."""
    settings = connector.get("discovery")
    is_off = isinstance(settings, Mapping) and settings.get("enabled") is False
    return not is_off and any(one.discovers for one in privacy)


def directory_url(store: StoreSpec, host: str = "") -> str:
    """The URL by which engines and clients know the shards, with the head node's address as ``host``."""
    tls = ("tls_ca", "tls_cert", "tls_key", "tls_name") if store.tls_ca else ()
    given = {name: getattr(store, name) for name in (*tls, "token_file")} | {"keys": store.keys_file}
    query = urlencode({name: value for name, value in given.items() if value}, safe="/")
    host = host or store.host
    return f"shards://{f'[{host}]' if ':' in host else host}:{store.directory_port}{'?' * bool(query)}{query}"


def _application(
    name: str, builder: str, args: dict[str, Any], *deployments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        # Clients reach nothing of ours through Serve's HTTP proxy.
        "route_prefix": None,
        "import_path": builder,
        "args": args,
        "deployments": list(deployments),
    }


def _replicas(scale: Scale, policy: dict[str, Any], spares: int = 0) -> dict[str, Any]:
    if scale.min == scale.max:
        return {"num_replicas": scale.min + spares}
    autoscaling = {
        "min_replicas": scale.min,
        "max_replicas": scale.max,
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


def _health(drain_s: float) -> dict[str, Any]:
    return {
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_timeout_s": drain_s + END_MARGIN_S,
    }
