"""Types of the statuses that the operator writes. `api.crd` generates the CRDs from them; the docstrings
become the descriptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kintsugi.core.settings import setting
from kintsugi_operator.api.manifest import ManifestSettings


class ConditionStatus(StrEnum):
    """Status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class Condition(ManifestSettings):
    """A status condition, with the fields that Kubernetes' own conditions have."""

    type: str
    """Name of the condition, such as Ready."""
    status: ConditionStatus
    """Whether the condition holds: True, False or Unknown."""
    reason: str
    """The reason for this status, as one CamelCase word for programs."""
    message: str = setting("", maxLength=4096)
    """The reason for this status and what to do about it, for people."""
    last_transition_time: str = setting("", format="date-time")
    """When the status last changed."""
    observed_generation: int = 0
    """The `metadata.generation` that the condition was determined for."""


@dataclass(frozen=True)
class Endpoints(ManifestSettings):
    """Addresses by which clients within the cluster reach the service."""

    grpc: str = ""
    """host:port of the gateway's gRPC service."""
    http: str = ""
    """URL of the gateway's OpenAI-compatible HTTP service."""
    directory: str = ""
    """`shards://` URL of the store."""


@dataclass(frozen=True)
class RolloutStatus(ManifestSettings):
    """The revision of the engines that serves, and the one that will replace it."""

    active: str = ""
    """The revision that serves."""
    pending: str = ""
    """The revision that will replace it; empty: none."""
    phase: str = "Idle"
    """Idle, Starting or Warming."""
    since: str = ""
    """When the phase began."""
    retiring: tuple[str, ...] = ()
    """Revisions that served earlier. Each is removed after its requests have had time to finish."""
    retiring_since: str = ""
    """When the last retiring revision stopped serving."""


@dataclass(frozen=True)
class OperatorStatus(ManifestSettings):
    """The operator that owns the service. Other operators do not change it."""

    lease: str = ""
    """`NAMESPACE/NAME` of the Lease that its leader holds."""
    scope: str = ""
    """`Cluster` or `Namespace`."""


@dataclass(frozen=True)
class BlendServiceStatus(ManifestSettings):
    """The observed state of the service."""

    observed_generation: int = 0
    """The `metadata.generation` that this status describes; -1: no operator has reconciled it yet."""
    shards: str = ""
    """Ready and requested shards, such as 2/3."""
    engines: str = ""
    """Ready and requested engines of the revision that serves, such as 2/3."""
    shard_groups: int = 0
    """Number of worker groups in the store, including groups without a shard: KubeRay forgets the pods of a
    group that is removed."""
    store_image: str = ""
    """Image that shards run with; empty before the first one is ready. A new engine image does not change
    it."""
    engine_replicas: int = 0
    """Engine pods of the revision that serves."""
    engine_selector: str = ""
    """Label selector of the engine pods, for autoscalers that use the `scale` subresource."""
    model: str = ""
    """Name of the served model."""
    endpoints: Endpoints = field(default_factory=Endpoints)
    rollout: RolloutStatus = field(default_factory=RolloutStatus)
    operator: OperatorStatus = field(default_factory=OperatorStatus)
    conditions: tuple[Condition, ...] = setting((), mapKey="type")
    """Conditions of the service, each with its reason and what to do about it."""


@dataclass(frozen=True)
class CorpusPrecomputeStatus(ManifestSettings):
    """The observed state of the corpus and its last job."""

    observed_generation: int = 0
    """The `metadata.generation` that this status describes; -1: no operator has reconciled it yet."""
    phase: str = ""
    """Waiting, Starting, Running, Suspended, Succeeded or Failed."""
    job: str = ""
    """Name of the RayJob."""
    run: str = ""
    """What the job was started for: digest of this spec, the model and the scheduled time."""
    last_schedule_time: str = ""
    """The scheduled time that the last job was started for."""
    last_success_time: str = ""
    """When a job last succeeded."""
    documents: int = 0
    """Number of documents that the last job read."""
    documents_failed: int = 0
    """Number of documents that the last job could not read."""
    chunks: int = 0
    """Number of chunks of the documents that the last job read."""
    chunks_failed: int = 0
    """Number of chunks that could not be prefilled or stored."""
    coverage: float | None = None
    """Share of the corpus's chunks that the store holds, 0 to 1."""
    conditions: tuple[Condition, ...] = setting((), mapKey="type")
    """Conditions of the corpus, each with its reason and what to do about it."""
