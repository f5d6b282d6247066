"""What a service consists of, and its Ray Serve configuration. Pure: `kintsugi serve` and operator use it.

Two Serve applications, so that nothing about models or engines ever restarts a shard: `STORE_APP` with one
deployment of shards, `SERVICE_APP` with engines and gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import codec_named
from kintsugi.core.schema import STRICT

STORE_APP = "kintsugi-store"
SERVICE_APP = "kintsugi"
SHARD_DEPLOYMENT = "StoreShard"
ENGINE_DEPLOYMENT = "Engine"
GATEWAY_DEPLOYMENT = "Gateway"


@dataclass(frozen=True)
class ModelSpec:
    """What is served."""

    __pydantic_config__ = STRICT

    path: str
    """Folder of the checkpoint, or a name that vLLM resolves."""
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
        if not 0 <= self.min <= self.max or self.max < 1:
            raise InvalidField("replicas", f"min {self.min} and max {self.max} must satisfy 0 <= min <= max")


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
    connector: Mapping[str, Any] = field(default_factory=dict)
    """More of `engine.config.EngineConfig`."""
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """More of vLLM's engine arguments."""


@dataclass(frozen=True)
class TierSpec:
    """An SSD tier of each shard."""

    __pydantic_config__ = STRICT

    path: str
    gib: float


@dataclass(frozen=True)
class StoreSpec:
    """The chunk KV-cache store."""

    __pydantic_config__ = STRICT

    shards: int = 1
    replication: int = 1
    """Shards that hold each chunk."""
    ram_gib: float = 4.0
    tiers: tuple[TierSpec, ...] = ()
    """Fastest first, below RAM."""
    data_dir: str = ""
    """Identity and reports; empty: nothing outlives the shard."""
    cpus: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.replication <= self.shards:
            raise InvalidField(
                "store.replication", f"{self.replication} must lie between 1 and {self.shards} shards"
            )


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
    data_dir: str = ""
    """What the gateway knows of documents and chunk texts."""


@dataclass(frozen=True)
class ServiceSpec:
    """All of it; read from YAML with `core.schema.load`."""

    __pydantic_config__ = STRICT

    model: ModelSpec
    engines: EngineSpec = field(default_factory=EngineSpec)
    store: StoreSpec = field(default_factory=StoreSpec)
    gateway: GatewaySpec = field(default_factory=GatewaySpec)
