"""Types of the statuses that the operator writes. `api.crd` generates the CRDs from them: the docstrings here
are the descriptions there."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kintsugi.core.settings import setting
from kintsugi_operator.api.manifest import ManifestSettings


class ConditionStatus(StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class Condition(ManifestSettings):
    """A status condition, with the fields that Kubernetes' own conditions have."""

    DESCRIPTION = "As Kubernetes writes them."

    type: str
    status: ConditionStatus
    reason: str
    message: str = setting("", maxLength=4096)
    last_transition_time: str = setting("", format="date-time")
    observed_generation: int = 0


@dataclass(frozen=True)
class TierStatus(ManifestSettings):
    """One tier of all shards together."""

    DESCRIPTION = "Of all shards together."

    name: str
    bytes_used: int = setting(format="int64")
    bytes_total: int = setting(format="int64")


@dataclass(frozen=True)
class Endpoints(ManifestSettings):
    """Where clients find what, within the cluster."""

    grpc: str = ""
    http: str = ""
    directory: str = ""
    """`shards://` URL of the store."""


@dataclass(frozen=True)
class RolloutStatus(ManifestSettings):
    """Which revision of the engines serves, and which is to."""

    active: str = ""
    pending: str = ""
    phase: str = "Idle"
    since: str = ""
    """When the phase began."""
    retiring: tuple[str, ...] = ()
    """Served before; removed once what they had begun is done."""
    retiring_since: str = ""


@dataclass(frozen=True)
class OperatorStatus(ManifestSettings):
    """The operator that owns the service. Others leave it alone."""

    lease: str = ""
    """`NAMESPACE/NAME` of the Lease that its leader holds."""
    scope: str = ""
    """`Cluster` or `Namespace`."""


@dataclass(frozen=True)
class CalibrationStatus(ManifestSettings):
    """A calibration that has ended. It is remembered here, since its RayJob may be deleted."""

    revision: str
    state: str
    """`Succeeded` or `Failed`."""
    message: str = setting("", maxLength=1024)
    failures: int = 0
    """How often it has failed."""
    job: str = ""
    """UID of the RayJob that failed last."""


@dataclass(frozen=True)
class BlendServiceStatus(ManifestSettings):
    """What the operator has seen and done."""

    observed_generation: int = 0
    shards_ready: int = 0
    shards_desired: int = 0
    shard_groups: int = 0
    """Worker groups that the store has, those without a shard included: KubeRay forgets the pods of a group
    that is taken away."""
    store_image: str = ""
    """What shards run; engine images do not change it."""
    engines_ready: bool = False
    engine_replicas: int = 0
    """Engine pods of the revision that serves."""
    engine_selector: str = ""
    """Labels of those pods, for autoscalers that use the `scale` subresource."""
    tiers: tuple[TierStatus, ...] = ()
    hit_rate: float | None = None
    """Share of chunk tokens that were found, lately."""
    calibration: str = ""
    calibrations: tuple[CalibrationStatus, ...] = setting((), mapKey="revision")
    """Calibrations of present revisions that have ended. They are not repeated."""
    model: str = ""
    """Served now."""
    endpoints: Endpoints = field(default_factory=Endpoints)
    rollout: RolloutStatus = field(default_factory=RolloutStatus)
    operator: OperatorStatus = field(default_factory=OperatorStatus)
    conditions: tuple[Condition, ...] = setting((), mapKey="type")


@dataclass(frozen=True)
class CorpusPrecomputeStatus(ManifestSettings):
    """What the last job has done."""

    observed_generation: int = 0
    phase: str = ""
    job: str = ""
    """Name of the RayJob."""
    run: str = ""
    """What the job was started for: digest of this spec, the model and the tick."""
    last_schedule_time: str = ""
    last_success_time: str = ""
    documents: int = 0
    documents_failed: int = 0
    chunks: int = 0
    chunks_failed: int = 0
    coverage: float | None = None
    """Share of the corpus's chunks that the store holds."""
    progress: float | None = None
    """Share of the work that is done."""
    conditions: tuple[Condition, ...] = setting((), mapKey="type")
