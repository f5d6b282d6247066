"""What a service consists of, and its Ray Serve configuration. Pure: `kintsugi serve` and operator use it.

Two Serve applications, so that nothing about models or engines ever restarts a shard: `STORE_APP` with one
deployment of shards, `SERVICE_APP` with engines and gateway.

Serve starts all replicas of an application anew when its `args` change, and none when only counts, resources
or a deployment's `user_config` do. So counts are nowhere in `args`, and what the gateway alone needs is its
`user_config`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import codec_named
from kintsugi.core.schema import STRICT, load

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

PORT_MAX = 65535
HEALTH_CHECK_PERIOD_S = 2.0
"""How long a dead replica may go unnoticed."""
HEALTH_CHECK_TIMEOUT_S = 30.0
"""A machine that is busy with a prefill answers late."""
END_MARGIN_S = 15.0
"""What a replica is given beyond its drain time before Serve kills it: Serve waits two seconds first, and
files and ports are closed after it."""
REQUESTS_MAX = 512
"""That run or wait in one engine; more wait in the gateway's handle, up to `QUEUED_MAX`."""
QUEUED_MAX = 4096


METRICS_PORTS = 16
FILLS = ("off", "background")


@dataclass(frozen=True)
class ModelSpec:
    """What is served."""

    __pydantic_config__ = STRICT

    path: str
    """Folder of the checkpoint, or a hub name, `org/model`."""
    name: str = ""
    """What clients call it; empty: the last part of the path."""
    dtype: str = "auto"
    max_model_len: int | None = None
    system_prompt: str | None = None
    """What chunks are prefilled behind; None: the tokenizer's BOS."""
    codec: str = "raw"

    def __post_init__(self) -> None:
        if not self.path:
            raise InvalidField("model.path", "is mandatory: a checkpoint's folder or a model's name")
        codec_named(self.codec)


@dataclass(frozen=True)
class Scale:
    """How many replicas; `min == max` is no autoscaling."""

    __pydantic_config__ = STRICT

    min: int = 1
    max: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise InvalidField("replicas", f"min {self.min} and max {self.max} must satisfy 1 <= min <= max")


@dataclass(frozen=True)
class OpenAISpec:
    """vLLM's server flags that concern prompts and tools."""

    __pydantic_config__ = STRICT

    chat_template: str | None = None
    """A file, or the template itself. None: the model's own."""
    tool_call_parser: str | None = None
    """vLLM's name of one: the model may then be given tools to choose from."""
    reasoning_parser: str = ""
    """vLLM's name of one: what a model thinks is kept apart from what it answers."""


@dataclass(frozen=True)
class EngineSpec:
    """One group of equal engines."""

    __pydantic_config__ = STRICT

    replicas: Scale = field(default_factory=Scale)
    cpus: float = 1.0
    gpus: float = 0.0
    kv_cache_gib: float | None = None
    """None leaves it to vLLM on a GPU; 2 on a CPU."""
    allow_uncalibrated: bool = False
    calibrate: bool = True
    """Whether a model without a report is calibrated while it serves full prefill."""
    questions: str = ""
    """JSON lines to calibrate on; empty: those of the bundled model, or passages that come with us."""
    shadow_share: float = 0.005
    """Of the blended requests, computed once more in full when nobody waits, to see whether blends are still
    what was calibrated. 0: none."""
    queueing_ms_max: float = 500.0
    """With `replicas.max > replicas.min`: more engines where requests are predicted to wait longer."""
    drain_s: float = 60.0
    """How long requests may go on once an engine or a gateway is to stop."""
    metrics_port: int = 7580
    """First of `METRICS_PORTS` of which an engine takes one that is free; 0: no metrics."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the engine's process."""
    connector: Mapping[str, Any] = field(default_factory=dict)
    """More of `engine.config.EngineConfig`."""
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """More of vLLM's engine arguments."""
    openai: OpenAISpec = field(default_factory=OpenAISpec)

    def __post_init__(self) -> None:
        _check_amount("engines.cpus", self.cpus)
        _check_amount("engines.gpus", self.gpus)
        _check_amount("engines.drain_s", self.drain_s)
        if not 0 <= self.shadow_share <= 1:
            raise InvalidField("engines.shadow_share", f"{self.shadow_share} is outside [0, 1]")
        _check_size("engines.queueing_ms_max", self.queueing_ms_max)
        _check_port("engines.metrics_port", self.metrics_port)
        if self.kv_cache_gib is not None:
            _check_size("engines.kv_cache_gib", self.kv_cache_gib)
        for name in sorted({"store", "prefix_token_ids"} & set(self.connector)):
            raise InvalidField(f"engines.connector.{name}", "follows from the rest of the configuration")
        for name in sorted({"model", "kv_transfer_config"} & set(self.vllm)):
            raise InvalidField(f"engines.vllm.{name}", "follows from the rest of the configuration")


@dataclass(frozen=True)
class TierSpec:
    """An SSD tier of each shard."""

    __pydantic_config__ = STRICT

    path: str
    gib: float

    def __post_init__(self) -> None:
        if not self.path:
            raise InvalidField("store.tiers.path", "is mandatory: a folder on the SSD")
        _check_size("store.tiers.gib", self.gib)


@dataclass(frozen=True)
class StoreSpec:
    """The chunk KV-cache store."""

    __pydantic_config__ = STRICT

    shards: int = 1
    shards_max: int | None = None
    """None: always `shards`. More are started when what is evicted is soon wanted again."""
    replication: int = 1
    """Shards that hold each chunk."""
    ramp_s: float = 60.0
    """How long a shard that joins empty takes to be given all its chunks: until then others keep what they
    have. 0: no time at all."""
    ram_gib: float = 4.0
    tiers: tuple[TierSpec, ...] = ()
    """Fastest first, below RAM."""
    data_dir: str = ""
    """Identity and reports; empty: nothing outlives the shard. Each shard of a host takes a folder in it, and
    in each tier's."""
    cpus: float = 0.5
    host: str = "127.0.0.1"
    """What shards and directory listen on. Beyond loopback they need TLS, or `insecure`."""
    directory_port: int = 7410
    """Where clients ask which shards there are, on the head node."""
    port: int = 0
    """Of a shard; 0: any that is free, as several on one host need it."""
    metrics_port: int = 7480
    """First of `METRICS_PORTS` of which a shard takes one that is free; 0: no metrics."""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_name: str = ""
    """What all shards' certificates are for; empty: the address that each is called by."""
    insecure: bool = False
    """Listen beyond loopback without TLS."""
    share_arena: bool = True
    """Let engines of a shard's host read its RAM directly; without, chunks travel over gRPC there, too."""
    drain_s: float = 60.0
    """How long a shard may write back what only RAM holds, once it is to stop."""

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise InvalidField("store.shards", f"{self.shards} must be at least 1")
        if self.shards_max is not None and self.shards_max < self.shards:
            raise InvalidField("store.shards_max", f"{self.shards_max} is less than the {self.shards} shards")
        if not 1 <= self.replication <= self.shards:
            raise InvalidField(
                "store.replication", f"{self.replication} must lie between 1 and {self.shards} shards"
            )
        if self.tiers and not self.data_dir:
            raise InvalidField("store.data_dir", "is needed with tiers: it holds the shards' identities")
        if len({bool(file) for file in (self.tls_ca, self.tls_cert, self.tls_key)}) > 1:
            raise InvalidField("store.tls", "give tls_ca, tls_cert and tls_key together")
        for name in ("ram_gib", "cpus", "drain_s", "ramp_s"):
            _check_amount(f"store.{name}", getattr(self, name))
        _check_size("store.ram_gib", self.ram_gib)
        for name in ("directory_port", "port", "metrics_port"):
            _check_port(f"store.{name}", getattr(self, name))
        if not self.directory_port:
            raise InvalidField("store.directory_port", "must be named: clients have to know it")


@dataclass(frozen=True)
class GatewaySpec:
    """gRPC and HTTP front end."""

    __pydantic_config__ = STRICT

    replicas: int = 1
    host: str = "127.0.0.1"
    grpc_port: int = 7500
    http_port: int = 8000
    cpus: float = 0.25
    tokens_file: str = ""
    """Hashed bearer tokens and their namespaces."""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    insecure: bool = False
    """Listen beyond loopback without tokens."""
    fill_on_miss: str = "background"
    """`off` or `background`."""
    read_only: bool = False
    overtaking: bool = False
    """Requests may carry a priority below 0, and so go before all that carry none."""
    data_dir: str = ""
    """What the gateway knows of chunk texts; empty: forgotten with the process."""
    ledger: str = ""
    """State folder of the precompute whose corpora segments may name and messages may hold."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise InvalidField("gateway.replicas", f"{self.replicas} must be at least 1")
        _check_amount("gateway.cpus", self.cpus)
        for name in ("grpc_port", "http_port"):
            _check_port(f"gateway.{name}", getattr(self, name))
        if self.fill_on_miss not in FILLS:
            raise InvalidField("gateway.fill_on_miss", f"{self.fill_on_miss!r} is not {' or '.join(FILLS)}")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidField("gateway.tls", "give tls_cert and tls_key together")


@dataclass(frozen=True)
class ServiceSpec:
    """All of it; read from YAML with `core.schema.load`."""

    __pydantic_config__ = STRICT

    model: ModelSpec
    engines: EngineSpec = field(default_factory=EngineSpec)
    store: StoreSpec = field(default_factory=StoreSpec)
    gateway: GatewaySpec = field(default_factory=GatewaySpec)


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
    proxy_port: int | None = None
    """Of Serve's HTTP proxy, which carries nothing of ours, but answers a cluster's health checks. None: no
    proxy."""
    proxy_host: str = "127.0.0.1"


HERE = Placement()


def spec_from_yaml_mapping(values: Mapping[str, Any]) -> ServiceSpec:
    """What a configuration file says. Raises `InvalidField` and `UnknownField` with the key's path."""
    return load(ServiceSpec, values, where="config")


def serve_config(
    spec: ServiceSpec,
    placement: Placement = HERE,
    applications: Sequence[str] = (STORE_APP, SERVICE_APP),
) -> dict[str, Any]:
    """What `serve deploy` reads, or KubeRay as `serveConfigV2`; plain values.

    On two clusters each has one of the ``applications``. Raises `InvalidField`.
    """
    makers = {STORE_APP: store_application, SERVICE_APP: service_application}
    for name in applications:
        if name not in makers:
            raise InvalidField("applications", f"{name!r} is not {' or '.join(makers)}")
    config: dict[str, Any] = {"proxy_location": "Disabled"}
    if placement.proxy_port is not None:
        _check_port("proxy_port", placement.proxy_port)
        http = {"host": placement.proxy_host, "port": placement.proxy_port}
        config = {"proxy_location": "EveryNode", "http_options": http}
    return {**config, "applications": [makers[name](spec, placement) for name in applications]}


def store_application(spec: ServiceSpec, placement: Placement = HERE) -> dict[str, Any]:
    """The shards. Depends on `spec.store` alone, so that nothing else restarts them."""
    store = spec.store
    shard = {
        "name": SHARD_DEPLOYMENT,
        **_replicas(
            Scale(store.shards, store.shards_max or store.shards),
            {"policy_function": SHARD_POLICY},
        ),
        "ray_actor_options": _actor(store.cpus, 0.0, placement.shard),
        # The directory hears of it without a restart.
        "user_config": {"replication": store.replication, "ramp_s": store.ramp_s},
        **_health(store.drain_s),
    }
    return _application(
        STORE_APP,
        STORE_BUILDER,
        {"store": changed(store, "shards", "shards_max", "replication", "ramp_s", "cpus")},
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
        ),
        "ray_actor_options": _actor(engines.cpus, engines.gpus, placement.engine, engines.env),
        "max_ongoing_requests": REQUESTS_MAX,
        "max_queued_requests": QUEUED_MAX,
        "request_router_config": {
            "request_router_class": ENGINE_ROUTER,
            "request_router_kwargs": {"store_url": store_url},
            "request_routing_stats_period_s": 1.0,
        },
        **_health(engines.drain_s),
    }
    front = {
        "name": GATEWAY_DEPLOYMENT,
        "num_replicas": gateway.replicas,
        "ray_actor_options": _actor(gateway.cpus, 0.0, placement.gateway),
        # Ports are a host's: two gateways on one would fight for them.
        "max_replicas_per_node": 1,
        "user_config": {"gateway": changed(gateway, "replicas", "cpus"), "drain_s": engines.drain_s},
        **_health(engines.drain_s),
    }
    args = {
        "model": changed(spec.model),
        "engines": changed(engines, "replicas", "cpus", "gpus", "queueing_ms_max", "drain_s", "env"),
        "store_url": store_url,
        # Engines' metrics are as far to be seen as the shards'.
        "host": spec.store.host,
    }
    return _application(SERVICE_APP, SERVICE_BUILDER, args, engine, front)


def directory_url(store: StoreSpec, host: str = "") -> str:
    """The URL by which engines and clients know the shards, with the head node's address as ``host``."""
    query = ""
    if store.tls_ca:
        given = {name: getattr(store, name) for name in ("tls_ca", "tls_cert", "tls_key", "tls_name")}
        query = "?" + urlencode({name: value for name, value in given.items() if value}, safe="/")
    host = host or store.host
    return f"shards://{f'[{host}]' if ':' in host else host}:{store.directory_port}{query}"


def changed(spec: Any, *without: str) -> dict[str, Any]:
    """The fields of a spec that differ from their defaults, as plain values: a new field restarts nothing."""
    mapping: dict[str, Any] = {}
    for one in dataclasses.fields(spec):
        value = getattr(spec, one.name)
        default = one.default_factory() if callable(one.default_factory) else one.default
        if one.name not in without and value != default:
            mapping[one.name] = _plain(value)
    return mapping


def _plain(value: Any) -> Any:
    """What JSON and YAML know."""
    if dataclasses.is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def _application(
    name: str, builder: str, args: dict[str, Any], *deployments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        # Nothing of ours is reached through Serve's HTTP proxy.
        "route_prefix": None,
        "import_path": builder,
        "args": args,
        "deployments": list(deployments),
    }


def _replicas(scale: Scale, policy: dict[str, Any]) -> dict[str, Any]:
    if scale.min == scale.max:
        return {"num_replicas": scale.min}
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


def _check_amount(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise InvalidField(name, f"{value} must be a number from 0 up")


def _check_size(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidField(name, f"{value} must be a number above 0")


def _check_port(name: str, port: int) -> None:
    if not 0 <= port <= PORT_MAX:
        raise InvalidField(name, f"{port} is no port: 0 to {PORT_MAX}")
