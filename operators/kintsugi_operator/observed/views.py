"""What the operator observes of a service in the cluster: plain values, the input of every decision."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from kintsugi.core.errors import KintsugiError
from kintsugi_operator.api.manifest import from_manifest
from kintsugi_operator.objects.deployed import EngineRevision
from kintsugi_operator.objects.names import (
    ANNOTATION_DIGEST,
    ANNOTATION_IMAGE,
    LABEL_REVISION,
    LABEL_SHARD,
    LABEL_TEMPLATE,
)
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.objects.service import REVISION_KEY
from kintsugi_operator.objects.store import StoreImage
from kintsugi_operator.observed.protection import may_pod_recover, may_service_recover, ready_condition


@dataclass(frozen=True)
class Refusal:
    """Why a part of the service does not start."""

    reason: str
    """A key of `refusals.STALLS_AFTER_S`."""
    message: str


class JobState(StrEnum):
    """The state of a RayJob."""

    ABSENT = "Absent"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def is_final(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED)


@dataclass(frozen=True)
class JobView:
    """The observed state of a RayJob."""

    state: JobState = JobState.ABSENT
    message: str = ""
    name: str = ""
    dashboard: str = ""
    """`host:port` of its Ray cluster's dashboard; empty until it has one."""
    job_id: str = ""
    has_begun: bool = False
    """Whether Ray has the job."""
    digest: str = ""
    """Digest of the manifest that was applied."""


@dataclass(frozen=True)
class RayServiceView:
    """The observed state of a RayService."""

    is_ready: bool = False
    may_recover: bool = False
    """Whether it has served and may come back by itself (`observed.protection`)."""
    cluster: str = ""
    """Name of the RayCluster that serves, or else of the one that starts."""
    message: str = ""
    serve_config: str = ""
    worker_groups: int = 0
    image: StoreImage | None = None
    """Image of the first worker group; None if it names none."""

    @property
    def is_protected(self) -> bool:
        return self.is_ready or self.may_recover


HEAD = -1
"""Index of the store's head among its pods."""


@dataclass(frozen=True)
class StorePod:
    """The observed state of a pod of the store."""

    name: str
    shard: int
    """Index of the shard, or `HEAD`."""
    template: str
    """Digest of the template that the pod was made from."""
    is_ready: bool
    is_leaving: bool = False
    image: StoreImage | None = None
    """Image and Ray version that a shard was made with; None for a head."""
    may_recover: bool = False
    """Whether it may hold chunks although it is not ready (`observed.protection`)."""

    @property
    def is_protected(self) -> bool:
        return self.is_ready or self.may_recover


@dataclass(frozen=True)
class CorpusView:
    """The progress of one of the service's CorpusPrecomputes."""

    revision: str
    """The revision that the last job was for."""
    is_finished: bool
    is_suspended: bool = False


@dataclass(frozen=True)
class Observed:
    """Everything that the operator observed of a service."""

    is_kuberay_installed: bool = True
    is_kuberay_recent: bool = True
    """Whether KubeRay is 1.6 or newer, and so serves RayCronJobs."""
    store: RayServiceView | None = None
    cluster_digest: str = ""
    """Digest of the configuration that was last applied to the store's RayCluster."""
    pods: tuple[StorePod, ...] = ()
    """Pods of the store: its shards and its head."""
    services: Mapping[str, RayServiceView] = field(default_factory=dict)
    """By revision."""
    engines: Mapping[str, int] = field(default_factory=dict)
    """Number of engine pods that are not being deleted, by revision."""
    engines_ready: Mapping[str, int] = field(default_factory=dict)
    """Number of those engine pods that are ready, by revision."""
    gateways_ready: Mapping[str, int] = field(default_factory=dict)
    """Number of gateway pods that are ready, by revision."""
    revisions: Mapping[str, EngineRevision] = field(default_factory=dict)
    """Revisions that ConfigMaps hold, by name."""
    selected: str = ""
    """The revision that the gateway's Service selects."""
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    """Why parts do not start: the store by its part, engines and gateways by revision."""
    corpora: tuple[CorpusView, ...] = ()
    home: str = ""
    """Namespace of the operator's own pods; empty: unknown."""


def ray_service_view(manifest: Manifest, now: datetime) -> RayServiceView:
    """The view of a RayService as the API server returned it."""
    spec, status = manifest.get("spec", {}), manifest.get("status") or {}
    ready = ready_condition(manifest)
    active, pending = (status.get(f"{which}ServiceStatus") or {} for which in ("active", "pending"))
    applications = {**(active.get("applicationStatuses") or {}), **(pending.get("applicationStatuses") or {})}
    said = [f"{name}: {app.get('message')}" for name, app in applications.items() if app.get("message")]
    return RayServiceView(
        is_ready=is_service_ready(manifest),
        may_recover=may_service_recover(manifest, now),
        cluster=active.get("rayClusterName") or pending.get("rayClusterName") or "",
        message="; ".join([*said, *([ready["message"]] if ready.get("message") else [])])[:1024],
        serve_config=spec.get("serveConfigV2", ""),
        worker_groups=len((spec.get("rayClusterConfig") or {}).get("workerGroupSpecs") or []),
        image=_image_of(spec),
    )


def _image_of(spec: Manifest) -> StoreImage | None:
    try:
        cluster = spec["rayClusterConfig"]
        container = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
        return StoreImage(container["image"], cluster["rayVersion"])
    except (KeyError, IndexError, TypeError):
        return None


def job_view(manifest: Manifest) -> JobView:
    """The view of a RayJob."""
    status = manifest.get("status") or {}
    deployment, job = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
    state = JobState.RUNNING
    # Between two attempts, and before a suspension, `jobStatus` is that of the last attempt.
    is_between = deployment in ("Retrying", "Suspending")
    if deployment == "Failed" or (job in ("FAILED", "STOPPED") and not is_between):
        state = JobState.FAILED
    elif deployment == "Complete" or job == "SUCCEEDED":
        state = JobState.SUCCEEDED
    elif deployment == "Suspended" or manifest.get("spec", {}).get("suspend"):
        state = JobState.SUSPENDED
    return JobView(
        state,
        str(status.get("message") or status.get("reason") or "")[:1024],
        manifest["metadata"]["name"],
        status.get("dashboardURL", ""),
        status.get("jobId", ""),
        has_begun=bool(job),
        digest=digest_of(manifest),
    )


def store_pod(manifest: Manifest, now: datetime) -> StorePod:
    """The view of a pod of the store."""
    index = label_of(manifest, LABEL_SHARD)
    ray_version, _, image = digest_of(manifest, ANNOTATION_IMAGE).partition(" ")
    return StorePod(
        name=manifest["metadata"]["name"],
        shard=int(index) if index.isdigit() else HEAD,
        template=label_of(manifest, LABEL_TEMPLATE),
        is_ready=is_pod_ready(manifest),
        is_leaving=is_leaving(manifest),
        image=StoreImage(image, ray_version) if image else None,
        may_recover=may_pod_recover(manifest, now),
    )


def is_service_ready(manifest: Manifest) -> bool:
    """Whether a RayService serves."""
    status = manifest.get("status") or {}
    return ready_condition(manifest).get("status") == "True" or status.get("serviceStatus") == "Running"


def is_pod_ready(manifest: Manifest) -> bool:
    """Whether a pod's readiness probes succeed."""
    return ready_condition(manifest).get("status") == "True"


def revision_of(manifest: Manifest) -> tuple[str, EngineRevision] | None:
    """Name and content of the revision that a ConfigMap holds; None if it holds none."""
    try:
        values: Mapping[str, Any] = json.loads(manifest["data"][REVISION_KEY])
        return label_of(manifest, LABEL_REVISION), from_manifest(EngineRevision, values, "revision")
    except (KeyError, ValueError, TypeError, KintsugiError):
        return None


def corpus_view(manifest: Manifest) -> CorpusView:
    """The view of a CorpusPrecompute."""
    status = manifest.get("status") or {}
    return CorpusView(
        revision_of_run(status.get("run", "")),
        status.get("phase") in ("Succeeded", "Failed"),
        bool(manifest["spec"].get("suspend")),
    )


def revision_of_run(run: str) -> str:
    """The revision that a corpus's run was for; empty for a run without one."""
    parts = run.split("-")
    return parts[1] if len(parts) == 3 else ""


def label_of(manifest: Manifest, key: str) -> str:
    """The value of a label; empty without it."""
    return str((manifest["metadata"].get("labels") or {}).get(key, ""))


def is_leaving(manifest: Manifest) -> bool:
    """Whether an object is being deleted."""
    return "deletionTimestamp" in manifest["metadata"]


def digest_of(manifest: Manifest, annotation: str = ANNOTATION_DIGEST) -> str:
    """An annotation of the operator's, such as the digest of what it last applied; empty for an object that
    it did not write."""
    return str((manifest["metadata"].get("annotations") or {}).get(annotation, ""))
