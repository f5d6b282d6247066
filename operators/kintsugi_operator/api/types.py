"""What a user may ask for: the specs of both kinds, from which their CRDs are generated.

In YAML the names are camelCase (`from_manifest`). Bounds stand in `metadata` of the fields, rules over
several fields in `RULES` of the class as CEL; both end up in the CRD, where the API server checks them. What
an older CRD let pass, or CEL cannot say, `validation` checks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from kintsugi.core.errors import InvalidField, UnknownField
from kintsugi.core.layout import Codec
from kintsugi.core.schema import STRICT, load
from kintsugi_operator.api.bounds import (
    CIDR,
    CRON,
    HOST_AND_PATH,
    LABEL,
    MODEL,
    NAME,
    NAMESPACE,
    OPTIONAL_LABEL,
    OPTIONAL_NAME,
    QUANTITY,
    CelRule,
    field_with_bounds,
)
from kintsugi_operator.api.environment import Variable

GROUP = "kintsugi.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
SHARDS_MAX = 256
RAY_VERSION = "2.60.0"

T = TypeVar("T")


class PullPolicy(StrEnum):
    """When an image is pulled."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class VolumeKind(StrEnum):
    """What a shard's volumes are."""

    PERSISTENT = "Persistent"
    """Claims that outlive pods, upgrades and, unless `retain` is false, the service."""
    EPHEMERAL = "Ephemeral"
    """Generic ephemeral volumes: gone with the pod."""


class ShardPlacement(StrEnum):
    """Where shards run."""

    BESIDE_ENGINES = "BesideEngines"
    """Preferably on nodes with engines."""
    APART = "Apart"
    """Preferably on nodes without engines or other shards."""


class FillOnMiss(StrEnum):
    """What becomes of a chunk that was missed."""

    OFF = "off"
    BACKGROUND = "background"


class ServiceType(StrEnum):
    """How the gateway is reached."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class CorpusFormat(StrEnum):
    """Of a corpus's files."""

    BY_SUFFIX = ""
    JSONL = "jsonl"
    PARQUET = "parquet"
    CSV = "csv"
    TEXT = "text"
    MARKDOWN = "markdown"
    HTML = "html"


@dataclass(frozen=True)
class Toleration:
    """As in a pod's spec."""

    __pydantic_config__ = STRICT

    RULES: ClassVar = (
        CelRule("self.key != '' || self.operator == 'Exists'", "without a key, operator must be Exists"),
        CelRule("self.operator == 'Equal' || self.value == ''", "operator Exists takes no value"),
    )

    key: str = field_with_bounds("", maxLength=316)
    operator: str = field_with_bounds("Equal", enum=["Equal", "Exists"])
    value: str = field_with_bounds("", maxLength=63)
    effect: str = field_with_bounds("", enum=["", "NoSchedule", "PreferNoSchedule", "NoExecute"])


@dataclass(frozen=True)
class Nodes:
    """Which nodes pods may run on."""

    __pydantic_config__ = STRICT

    selector: Mapping[str, str] = field_with_bounds(dict, maxProperties=64, valueLength=63)
    """Labels that a node must have."""
    tolerations: tuple[Toleration, ...] = field_with_bounds((), maxItems=32)


@dataclass(frozen=True)
class Image:
    """A container image."""

    __pydantic_config__ = STRICT

    repository: str = field_with_bounds(minLength=1, maxLength=255, pattern=rf"^{HOST_AND_PATH}$")
    tag: str = field_with_bounds("latest", maxLength=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    digest: str = field_with_bounds("", maxLength=71, pattern=r"^(sha256:[0-9a-f]{64})?$")
    """Wins over the tag."""
    pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT

    @property
    def reference(self) -> str:
        """What a container's `image` says."""
        return f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.tag}"


@dataclass(frozen=True)
class Model:
    """What is served. Any change is a new revision: the old engines serve until the new ones may."""

    __pydantic_config__ = STRICT

    path: str = field_with_bounds(minLength=1, maxLength=1024, pattern=MODEL)
    """Folder of the checkpoint within the image or the claim, or a hub name, org/model, that each pod
    downloads."""
    name: str = field_with_bounds("", maxLength=255)
    """What clients call it; empty: the last part of the path."""
    dtype: str = field_with_bounds("auto", enum=["auto", "bfloat16", "float16", "float32"])
    max_model_len: int | None = field_with_bounds(None, minimum=1)
    """Tokens."""
    system_prompt: str | None = field_with_bounds(None, maxLength=65536)
    """What chunks are prefilled behind; unset: the tokenizer's BOS."""
    codec: str = field_with_bounds("raw", enum=[codec.name.lower() for codec in Codec])
    """How chunk KV is encoded."""
    volume_claim: str = field_with_bounds("", pattern=OPTIONAL_NAME, maxLength=253)
    """A PersistentVolumeClaim with checkpoints, mounted read-only at /models."""
    token_secret: str = field_with_bounds("", pattern=OPTIONAL_NAME, maxLength=253)
    """A Secret whose key `token` lets the model be downloaded."""


@dataclass(frozen=True)
class Replicas:
    """How many; `min` = `max` is no autoscaling."""

    __pydantic_config__ = STRICT

    RULES: ClassVar = (CelRule("self.min <= self.max", "min must not exceed max"),)

    min: int = field_with_bounds(1, minimum=1, maximum=1024)
    max: int = field_with_bounds(1, minimum=1, maximum=1024)


@dataclass(frozen=True)
class OpenAI:
    """vLLM's server flags that concern prompts and tools."""

    __pydantic_config__ = STRICT

    chat_template: str | None = field_with_bounds(None, maxLength=65536)
    """The template itself, or a file in the image; unset: the model's own."""
    tool_call_parser: str | None = field_with_bounds(None, maxLength=64)
    """vLLM's name of one: the model may then be given tools to choose from."""
    reasoning_parser: str = field_with_bounds("", maxLength=64)
    """vLLM's name of one."""


@dataclass(frozen=True)
class Engines:
    """vLLM with our plugin, one pod each."""

    __pydantic_config__ = STRICT

    replicas: Replicas = field(default_factory=Replicas)
    cpus: float = field_with_bounds(4.0, minimum=0.1, maximum=1024)
    """Cores of each pod."""
    memory: str = field_with_bounds("16Gi", pattern=QUANTITY, maxLength=32)
    """Of each pod."""
    gpus: int = field_with_bounds(0, minimum=0, maximum=16)
    """Of each pod; 0 runs vLLM on the CPU."""
    gpu_resource: str = field_with_bounds("nvidia.com/gpu", minLength=1, maxLength=253)
    kv_cache_gib: float | None = field_with_bounds(None, minimum=0.1)
    """vLLM's own KV cache; unset leaves it to vLLM on a GPU, 2 on a CPU."""
    shared_memory: str = field_with_bounds("2Gi", pattern=QUANTITY, maxLength=32)
    """/dev/shm: Ray's objects. Counts towards `memory`."""
    scratch: str = field_with_bounds("20Gi", pattern=QUANTITY, maxLength=32)
    """Disk for downloads and compilation caches."""
    allow_uncalibrated: bool = False
    """Blend without a calibration report."""
    calibrate: bool = True
    """Calibrate a model without a report in a job of its own, and switch to a new model only after that."""
    shadow_share: float = field_with_bounds(0.005, minimum=0, maximum=1)
    """Of the blended requests, computed once more in full while nobody waits, to see whether blends are still
    what was calibrated."""
    connector: Mapping[str, Any] = field(default_factory=dict)
    """More of the plugin's configuration."""
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """More of vLLM's engine arguments."""
    openai: OpenAI = field(default_factory=OpenAI)
    env: tuple[Variable, ...] = field_with_bounds((), maxItems=64, mapKey="name")
    """Environment variables, also of the jobs that calibrate a model or fill a corpus."""
    nodes: Nodes = field(default_factory=Nodes)


@dataclass(frozen=True)
class Tier:
    """An SSD tier of each shard, on a volume of its own."""

    __pydantic_config__ = STRICT

    RULES: ClassVar = (
        CelRule("self.gib >= oldSelf.gib", "a volume cannot shrink: add a tier under another name"),
        CelRule(
            "self.storageClass == oldSelf.storageClass",
            "a volume keeps its storage class: add a tier under another name",
        ),
    )

    name: str = field_with_bounds(maxLength=20, pattern=r"^[a-z]([-a-z0-9]{0,18}[a-z0-9])?$")
    gib: float = field_with_bounds(minimum=1, maximum=1048576)
    storage_class: str = field_with_bounds("", pattern=OPTIONAL_NAME, maxLength=253)
    """Empty: the cluster's default."""


@dataclass(frozen=True)
class Volumes:
    """What shards keep their chunks on."""

    __pydantic_config__ = STRICT

    RULES: ClassVar = (CelRule("self.kind == oldSelf.kind", "volumes keep their kind: make a new service"),)

    kind: VolumeKind = VolumeKind.PERSISTENT
    retain: bool = True
    """Whether persistent volumes outlive the service."""
    data_gib: float = field_with_bounds(1.0, minimum=0.1, maximum=1024)
    """Identity, catalog of reports."""
    storage_class: str = field_with_bounds("", pattern=OPTIONAL_NAME, maxLength=253)
    """Of the data volume; empty: the cluster's default."""


@dataclass(frozen=True)
class Store:
    """The chunk KV-cache store."""

    __pydantic_config__ = STRICT

    RULES: ClassVar = (CelRule("self.replication <= self.shards", "replication must not exceed shards"),)

    shards: int = field_with_bounds(1, minimum=1, maximum=SHARDS_MAX)
    replication: int = field_with_bounds(1, minimum=1, maximum=8)
    """Shards that hold each chunk."""
    ramp_seconds: float = field_with_bounds(60.0, minimum=0, maximum=86400)
    """How long a shard that joins empty takes to be given all its chunks."""
    ram_gib: float = field_with_bounds(4.0, minimum=0.1, maximum=65536)
    """RAM tier of each shard."""
    tiers: tuple[Tier, ...] = field_with_bounds((), maxItems=8, mapKey="name")
    """Fastest first, below RAM."""
    volumes: Volumes = field(default_factory=Volumes)
    cpus: float = field_with_bounds(1.0, minimum=0.1, maximum=1024)
    """Of each shard."""
    image: Image | None = None
    """Unset: the service's image as it was when the store was made. Shards restart, one at a time, only when
    this or a figure of theirs changes."""
    ray_version: str = field_with_bounds("", pattern=r"^([0-9]+\.[0-9]+\.[0-9]+)?$", maxLength=20)
    """The one in the store's image; unset: as the service's was when the store was made."""
    tls_secret: str = field_with_bounds("", pattern=OPTIONAL_NAME, maxLength=253)
    """A Secret with ca.crt, tls.crt and tls.key: shards and their clients show each other certificates."""
    tls_name: str = field_with_bounds("kintsugi-store", pattern=NAME, maxLength=253)
    """The DNS name that tls.crt is for: pods are called by addresses that nobody knows beforehand."""
    insecure: bool = False
    """Plaintext, and no NetworkPolicies around it either."""
    placement: ShardPlacement = ShardPlacement.APART
    env: tuple[Variable, ...] = field_with_bounds((), maxItems=64, mapKey="name")
    """Environment variables of shards. They restart, one at a time, when these change."""
    nodes: Nodes = field(default_factory=Nodes)


@dataclass(frozen=True)
class Gateway:
    """gRPC and HTTP front end."""

    __pydantic_config__ = STRICT

    RULES: ClassVar = (CelRule("self.grpcPort != self.httpPort", "grpcPort and httpPort must differ"),)

    replicas: int = field_with_bounds(1, minimum=1, maximum=64)
    cpus: float = field_with_bounds(1.0, minimum=0.1, maximum=64)
    memory: str = field_with_bounds("2Gi", pattern=QUANTITY, maxLength=32)
    grpc_port: int = field_with_bounds(7500, minimum=1024, maximum=65535)
    http_port: int = field_with_bounds(8000, minimum=1024, maximum=65535)
    service_type: ServiceType = ServiceType.CLUSTER_IP
    tokens_secret: str = field_with_bounds("", pattern=OPTIONAL_NAME, maxLength=253)
    """A Secret whose key `tokens.yaml` holds hashed bearer tokens and their namespaces."""
    insecure: bool = False
    """Serve without tokens."""
    fill_on_miss: FillOnMiss = FillOnMiss.BACKGROUND
    read_only: bool = False
    overtaking: bool = False
    """Requests may carry a priority below 0, and so go before all that carry none."""
    env: tuple[Variable, ...] = field_with_bounds((), maxItems=64, mapKey="name")
    """Environment variables, OpenTelemetry's OTEL_EXPORTER_OTLP_ENDPOINT among them: see `network.egress`."""
    nodes: Nodes = field(default_factory=Nodes)


@dataclass(frozen=True)
class Tls:
    """Certificates of the gateway."""

    __pydantic_config__ = STRICT

    secret: str = field_with_bounds("", pattern=OPTIONAL_NAME, maxLength=253)
    """A Secret with tls.crt and tls.key; empty: plaintext."""
    require_client: bool = False
    """Clients must show a certificate that the Secret's ca.crt has signed."""


@dataclass(frozen=True)
class Egress:
    """Something outside that may be called."""

    __pydantic_config__ = STRICT

    # CEL reserves the word namespace and escapes it so.
    RULES: ClassVar = (
        CelRule("self.__namespace__ == '' || self.cidr == ''", "name a namespace or a cidr, not both"),
    )

    ports: tuple[int, ...] = field_with_bounds(minItems=1, maxItems=32, itemMinimum=1, itemMaximum=65535)
    """Of TCP."""
    namespace: str = field_with_bounds("", pattern=OPTIONAL_LABEL, maxLength=63)
    """Its pods; without this and `cidr`: any address."""
    cidr: str = field_with_bounds("", pattern=CIDR, maxLength=43)
    """Its addresses, such as 10.0.0.0/8."""


@dataclass(frozen=True)
class Network:
    """NetworkPolicies: everything is denied but what follows."""

    __pydantic_config__ = STRICT

    policies: bool = True
    """Whether there are any."""
    client_namespaces: tuple[str, ...] = field_with_bounds((), maxItems=64, itemPattern=LABEL, itemLength=63)
    """Namespaces that may call the gateway; empty: anybody who reaches it."""
    monitoring_namespace: str = field_with_bounds("", pattern=OPTIONAL_NAME, maxLength=63)
    """Whose pods may read metrics."""
    kuberay_namespace: str = field_with_bounds("", pattern=OPTIONAL_NAME, maxLength=63)
    """Where KubeRay's operator runs, which deploys through the dashboards of heads. Empty: this namespace."""
    downloads: bool = True
    """Whether engines and jobs may reach HTTPS outside: models and corpora."""
    egress: tuple[Egress, ...] = field_with_bounds((), maxItems=32)
    """What else engines, gateways and jobs may call: a collector of traces, a proxy, a bucket's endpoint."""


@dataclass(frozen=True)
class BlendServiceSpec:
    """A CacheBlend service: a store, engines, a gateway."""

    __pydantic_config__ = STRICT

    # Not at the gateway: Kubernetes checks defaults against rules, and the gateway's default breaks this one.
    RULES: ClassVar = (
        CelRule(
            "self.gateway.tokensSecret != '' || self.gateway.insecure",
            "gateway.tokensSecret is mandatory: name a Secret with hashed tokens, or set gateway.insecure "
            "to serve anybody",
        ),
        CelRule(
            "self.store.tlsSecret != '' || self.network.policies || self.store.insecure",
            "without network.policies the store needs store.tlsSecret, or store.insecure to say that anybody "
            "in the cluster may read it",
        ),
    )

    model: Model
    image: Image
    """Of engines, gateway and jobs."""
    engines: Engines = field(default_factory=Engines)
    store: Store = field(default_factory=Store)
    gateway: Gateway = field(default_factory=Gateway)
    tls: Tls = field(default_factory=Tls)
    network: Network = field(default_factory=Network)
    ray_version: str = field_with_bounds(RAY_VERSION, pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$", maxLength=20)
    """The one in the images."""
    image_pull_secrets: tuple[str, ...] = field_with_bounds((), maxItems=16, itemPattern=NAME, itemLength=253)


@dataclass(frozen=True)
class Columns:
    """Where a corpus's rows hold what."""

    __pydantic_config__ = STRICT

    text: str = field_with_bounds("text", minLength=1, maxLength=255)
    id: str = field_with_bounds("id", minLength=1, maxLength=255)
    version: str = field_with_bounds("version", minLength=1, maxLength=255)


@dataclass(frozen=True)
class CorpusWorkers:
    """Engines of the job."""

    __pydantic_config__ = STRICT

    replicas: int = field_with_bounds(1, minimum=1, maximum=1024)
    cpus: float = field_with_bounds(4.0, minimum=0.1, maximum=1024)
    memory: str = field_with_bounds("16Gi", pattern=QUANTITY, maxLength=32)
    gpus: int = field_with_bounds(0, minimum=0, maximum=16)
    gpu_resource: str = field_with_bounds("nvidia.com/gpu", minLength=1, maxLength=253)
    scratch: str = field_with_bounds("20Gi", pattern=QUANTITY, maxLength=32)
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of `vllm.LLM`."""
    nodes: Nodes = field(default_factory=Nodes)


@dataclass(frozen=True)
class CorpusPrecomputeSpec:
    """Documents whose chunks are prefilled before anybody asks."""

    __pydantic_config__ = STRICT

    RULES: ClassVar = (
        CelRule("self.overlap < self.tokensMax", "overlap must be less than tokensMax"),
        CelRule(
            "self.service == oldSelf.service", "a corpus keeps its service: make another CorpusPrecompute"
        ),
        CelRule("self.__namespace__ == oldSelf.__namespace__", "a corpus keeps its namespace: make another"),
    )

    service: str = field_with_bounds(minLength=1, maxLength=63, pattern=NAME)
    """A BlendService in this namespace: its model, its image, its store."""
    namespace: str = field_with_bounds(minLength=1, maxLength=128, pattern=NAMESPACE)
    """Tenant whose chunks they become."""
    source: str = field_with_bounds(minLength=1, maxLength=2048)
    """File, folder or URL."""
    volume_claim: str = field_with_bounds("", pattern=OPTIONAL_NAME, maxLength=253)
    """A PersistentVolumeClaim with documents, mounted read-only at /corpus."""
    credentials_secret: str = field_with_bounds("", pattern=OPTIONAL_NAME, maxLength=253)
    """A Secret whose keys become environment variables, such as AWS_ACCESS_KEY_ID."""
    format: CorpusFormat = CorpusFormat.BY_SUFFIX
    columns: Columns = field(default_factory=Columns)
    tokens_max: int = field_with_bounds(512, minimum=1, maximum=1048576)
    """Per chunk."""
    overlap: int = field_with_bounds(0, minimum=0, maximum=1048576)
    """Tokens of a chunk that begin the next one."""
    errors_share: float = field_with_bounds(0.05, minimum=0, maximum=1)
    """Documents that may fail."""
    tokens_per_s: float = field_with_bounds(0.0, minimum=0)
    """Rate limit; 0: none."""
    workers: CorpusWorkers = field(default_factory=CorpusWorkers)
    schedule: str = field_with_bounds("", maxLength=100, pattern=CRON)
    """Cron, five fields, UTC; empty: once, and again for every new model or change of this spec."""
    suspend: bool = False
    """Stop a running job and start none. What was prefilled stays; the job goes on from there."""
    ttl_s: int = field_with_bounds(3600, minimum=0, maximum=31536000)
    """Seconds that a finished job stays."""
    retire_old_editions: bool = False
    """Delete, at the end of a run, chunks of models that were replaced before it began. Those of the model
    before this one stay, for a way back."""
    ledger_gib: float = field_with_bounds(1.0, minimum=0.1, maximum=1024)
    """Volume that remembers which document has which chunks."""


def camel(name: str) -> str:
    """`ram_gib` is `ramGib` in YAML."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def snake(name: str) -> str:
    """And back."""
    return re.sub(r"([A-Z])", lambda match: f"_{match[1].lower()}", name)


def from_manifest(cls: type[T], values: Mapping[str, Any], where: str = "spec") -> T:
    """A spec from an object's. Raises `InvalidField` that names the field as YAML does."""
    if not isinstance(values, Mapping):
        raise InvalidField(where, f"expected a mapping, got {type(values).__name__}")
    try:
        return load(cls, _rename_fields(cls, values, where), where)
    except UnknownField:
        raise
    except InvalidField as error:
        raise InvalidField(".".join(map(camel, error.field.split("."))), error.problem) from None


def to_manifest(value: Any) -> Any:
    """A spec as it stands in an object, defaults filled in, unset fields left out."""
    if dataclasses.is_dataclass(value):
        pairs = ((camel(f.name), getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: to_manifest(inner) for name, inner in pairs if inner is not None}
    if isinstance(value, tuple):
        return [to_manifest(inner) for inner in value]
    return str(value) if isinstance(value, StrEnum) else value


def non_default_values(value: Any) -> Any:
    """What of a spec is not as it would be anyhow. A field that a later version adds changes no digest."""
    if isinstance(value, tuple):
        return [non_default_values(inner) for inner in value]
    if not dataclasses.is_dataclass(value):
        return to_manifest(value)
    kept = {}
    for one in dataclasses.fields(value):
        inner = getattr(value, one.name)
        default = one.default_factory() if callable(one.default_factory) else one.default
        if inner != default:
            kept[camel(one.name)] = non_default_values(inner)
    return kept


def dataclass_within(annotation: Any) -> type[Any] | None:
    """`Tier` of `tuple[Tier, ...]`, `Image` of `Image | None`."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return annotation
    return next((inner for one in get_args(annotation) if (inner := dataclass_within(one))), None)


def _rename_fields(cls: type[Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """With our names. Free maps (labels, vLLM's arguments) keep theirs. Raises `UnknownField`."""
    hints = get_type_hints(cls)
    names = {camel(f.name): f.name for f in dataclasses.fields(cls)}
    renamed: dict[str, Any] = {}
    for key, value in values.items():
        if key not in names:
            raise UnknownField(f"{where}.{key}", names)
        inner = dataclass_within(hints[names[key]])
        path = f"{where}.{key}"
        if inner is not None and isinstance(value, Mapping):
            value = _rename_fields(inner, value, path)
        elif inner is not None and isinstance(value, list):
            value = [_rename_fields(inner, one, path) if isinstance(one, Mapping) else one for one in value]
        renamed[names[key]] = value
    return renamed
