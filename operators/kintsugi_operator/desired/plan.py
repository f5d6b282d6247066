"""Decides which objects a BlendService needs, its status and the next step. A pure function of its spec, its
last status and what was observed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from kintsugi_operator.api.blend_service import BlendServiceSpec, Model
from kintsugi_operator.api.status import BlendServiceStatus, Condition, RolloutStatus
from kintsugi_operator.desired.calibrations import FAILURES_MAX, all_calibrations, record_calibrations
from kintsugi_operator.desired.compare import replacement_patch
from kintsugi_operator.desired.rollout import Phase, Rollout, from_status, step
from kintsugi_operator.desired.shards import Action, ShardStep, next_step, ready_shards
from kintsugi_operator.objects.base import Owner
from kintsugi_operator.objects.deployed import EngineRevision
from kintsugi_operator.objects.jobs import calibration_job
from kintsugi_operator.objects.names import (
    ANNOTATION_CLUSTER,
    ANNOTATION_DIGEST,
    LABEL_NAME,
    LABEL_TEMPLATE,
    digest,
    selector,
)
from kintsugi_operator.objects.network import budgets, policies
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.objects.service import PART as SERVICE_PART
from kintsugi_operator.objects.service import account_objects, endpoints, revision_objects, service_objects
from kintsugi_operator.objects.store import (
    choose_store_image,
    needs_restart,
    ray_service_name,
    shard_templates,
    store_objects,
)
from kintsugi_operator.observed import conditions as c
from kintsugi_operator.observed.views import JobState, JobView, Observed, RayServiceView, label_of


@dataclass(frozen=True)
class ClusterPatch:
    """A change to the store's RayCluster that KubeRay does not make by itself."""

    cluster: str
    patch: Manifest

    def over(self, live: Manifest) -> Manifest:
        """The merge patch for the live RayCluster. It also removes keys that only the live head has; `patch`
        alone would leave them."""
        spec = self.patch["spec"]
        former = live.get("spec", {}).get("headGroupSpec") or {}
        head = replacement_patch(spec["headGroupSpec"], former)
        # KubeRay makes a cluster's head Service once, with the name label that the head's template has then.
        # A head that came back without that label would be found by no worker.
        _drop_removal(head, ("template", "metadata", "labels", LABEL_NAME))
        return {**self.patch, "spec": {**spec, "headGroupSpec": head}}


@dataclass(frozen=True)
class Desired:
    """The decision of one reconciliation."""

    objects: tuple[Manifest, ...]
    """Signed objects. Whatever else the service owns is no longer needed."""
    status: BlendServiceStatus
    shard_step: ShardStep
    cluster_patch: ClusterPatch | None = None


def _drop_removal(patch: Manifest, path: Sequence[str]) -> None:
    """Leave the field at `path` as it is if a merge patch would remove it."""
    *parents, last = path
    for key in parents:
        patch = patch.get(key) or {}
    if last in patch and patch[last] is None:
        del patch[last]


def plan_service(
    spec: BlendServiceSpec,
    owner: Owner,
    before: BlendServiceStatus,
    observed: Observed,
    now: datetime,
) -> Desired:
    """Decide for a spec that `validation.check_service` has accepted."""
    live_jobs = observed.calibrations
    observed = replace(observed, calibrations=all_calibrations(before.calibrations, live_jobs))
    requested = EngineRevision.of(spec)
    known = {**observed.revisions, requested.name: requested}
    now_s = now.timestamp()
    rollout = from_status(before.rollout, _seconds(before.rollout.retiring_since))
    rollout = step(rollout, requested.name, spec.engines.calibrate, observed, now_s)
    rollout = _drop_unknown(rollout, known, requested.name)

    image = choose_store_image(spec, observed.store_image)
    groups = max(spec.store.shards, observed.shard_groups, before.shard_groups)
    store = store_objects(spec, owner, image, groups)
    templates = [label_of(one, LABEL_TEMPLATE) for one in shard_templates(spec, owner, image)]
    shard_step = next_step(templates, observed.pods)
    if observed.store is not None and observed.store.serve_config and shard_step.action is not Action.NONE:
        # Until every pod has the new volumes or sizes.
        store[-1]["spec"]["serveConfigV2"] = observed.store.serve_config

    objects = [
        *account_objects(owner),
        *store,
        *(one for name in rollout.wanted for one in revision_objects(spec, owner, known[name])),
        *_calibration_jobs(spec, owner, rollout, known, observed, live_jobs),
        *service_objects(spec, owner, rollout.active),
        *budgets(spec, owner, rollout.active, observed.engines.get(rollout.active, 0)),
        *policies(spec, owner, observed.home),
    ]
    status = _status(spec, owner, before, observed, rollout, shard_step, known[rollout.active].model, now)
    records = record_calibrations(before.calibrations, live_jobs, rollout.wanted)
    status = replace(status, shard_groups=groups, store_image=image.image, calibrations=records)
    status = replace(status, operator=before.operator)
    return Desired(tuple(map(sign, objects)), status, shard_step, _cluster_patch(store[-1], observed))


def sign(manifest: Manifest) -> Manifest:
    """The manifest with its own digest as an annotation, by which an unchanged object is recognised."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION_DIGEST: digest(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def _drop_unknown(rollout: Rollout, known: dict[str, EngineRevision], requested: str) -> Rollout:
    """Drop revisions whose ConfigMap is gone: nothing else says how their engines are configured. If the
    active revision is dropped, the requested one becomes active."""
    if rollout.active not in known:
        return Rollout(active=requested)
    return replace(
        rollout,
        pending=rollout.pending if rollout.pending in known else "",
        retiring=tuple(one for one in rollout.retiring if one in known),
    )


def _calibration_jobs(
    spec: BlendServiceSpec,
    owner: Owner,
    rollout: Rollout,
    known: dict[str, EngineRevision],
    observed: Observed,
    live_jobs: Mapping[str, JobView],
) -> list[Manifest]:
    """The calibration job of the pending revision, else of the active one. It starts once the store is ready,
    because it writes its report there. One that has ended is not made again when it is gone."""
    is_store_ready = observed.store is not None and observed.store.is_ready
    if not spec.engines.calibrate:
        return []
    if rollout.calibrated not in live_jobs and (
        rollout.calibrated in observed.calibrations or not is_store_ready
    ):
        return []
    return [calibration_job(spec, owner, known[rollout.calibrated])]


def _cluster_patch(store: Manifest, observed: Observed) -> ClusterPatch | None:
    """The update that the store's RayCluster lacks; None if it is up to date.

    KubeRay copies a RayService's annotations to the RayCluster that it makes, and so the digest of the
    desired cluster. Another digest there means that the cluster was not updated.
    """
    if observed.store is None or not observed.store.cluster or not observed.cluster_digest:
        return None
    wanted = store["metadata"]["annotations"][ANNOTATION_CLUSTER]
    if wanted == observed.cluster_digest:
        return None
    cluster = store["spec"]["rayClusterConfig"]
    specs = {key: cluster[key] for key in ("headGroupSpec", "workerGroupSpecs")}
    # Null removes it. The head takes it over when it restarts next.
    specs["gcsFaultToleranceOptions"] = cluster.get("gcsFaultToleranceOptions")
    patch = {"metadata": {"annotations": {ANNOTATION_CLUSTER: wanted}}, "spec": specs}
    return ClusterPatch(observed.store.cluster, patch)


def _status(
    spec: BlendServiceSpec,
    owner: Owner,
    before: BlendServiceStatus,
    observed: Observed,
    rollout: Rollout,
    shard_step: ShardStep,
    model: Model,
    now: datetime,
) -> BlendServiceStatus:
    ready = ready_shards(spec.store.shards, observed.pods)
    active = observed.services.get(rollout.active)
    engines_ready = active is not None and active.is_ready
    job = observed.calibrations.get(rollout.calibrated)
    retiring_since = datetime.fromtimestamp(rollout.retiring_since_s, UTC)
    has_moved = (rollout.phase, rollout.pending) != (before.rollout.phase, before.rollout.pending)
    return BlendServiceStatus(
        observed_generation=before.observed_generation,
        shards=f"{ready}/{spec.store.shards}",
        engines=_engine_count(spec, observed, rollout.active),
        shards_ready=ready,
        shards_desired=spec.store.shards,
        engines_ready=engines_ready,
        engine_replicas=observed.engines.get(rollout.active, 0),
        engine_selector=_engine_selector(owner, rollout.active),
        tiers=observed.figures.tiers,
        hit_rate=observed.figures.hit_rate,
        calibration=str(job.state) if job is not None else ("Absent" if spec.engines.calibrate else "Off"),
        model=model.name or model.path.rstrip("/").rsplit("/", 1)[-1],
        endpoints=endpoints(spec, owner.name, owner.namespace),
        rollout=RolloutStatus(
            active=rollout.active,
            pending=rollout.pending,
            phase=str(rollout.phase),
            since=timestamp(now) if has_moved or not before.rollout.since else before.rollout.since,
            retiring=rollout.retiring,
            retiring_since=timestamp(retiring_since) if rollout.retiring else "",
        ),
        conditions=(
            c.true(c.VALID, "Accepted"),
            _kuberay_condition(spec, owner, observed),
            _store_condition(spec, observed, ready),
            _shards_condition(spec, owner, observed, shard_step),
            _calibration_condition(spec, rollout, observed),
            _rollout_condition(rollout, observed),
            _ready_condition(ready, engines_ready, observed, rollout),
        ),
    )


def _engine_count(spec: BlendServiceSpec, observed: Observed, active: str) -> str:
    """Ready and wanted engines of the revision that serves. Ray's autoscaler makes a pod for each that it
    wants."""
    wanted = max(spec.engines.scale.min, observed.engines.get(active, 0))
    return f"{observed.engines_ready.get(active, 0)}/{wanted}"


def _engine_selector(owner: Owner, revision: str) -> str:
    labels = selector(owner.name, part=SERVICE_PART, role="engine", revision=revision)
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _kuberay_condition(spec: BlendServiceSpec, owner: Owner, observed: Observed) -> Condition:
    if not observed.kuberay.is_installed:
        hint = "this cluster serves no RayService: install KubeRay 1.6 or newer, its CRDs included"
        return c.false(c.KUBERAY, "Missing", hint)
    if not observed.kuberay.is_recent:
        hint = "this cluster serves no RayCronJob, which KubeRay has since 1.6: upgrade KubeRay and its CRDs"
        return c.false(c.KUBERAY, "TooOld", hint)
    if not spec.network.policies:
        return c.true(c.KUBERAY, "Installed")
    home = spec.network.kuberay_namespace or owner.namespace
    return c.true(c.KUBERAY, "Installed", f"let in from namespace {home} alone: network.kuberayNamespace")


def _store_condition(spec: BlendServiceSpec, observed: Observed, ready: int) -> Condition:
    if ready >= spec.store.shards:
        return c.true(c.STORE, "AllShardsReady")
    messages = _join_messages(observed.store, observed, "store")
    return c.false(c.STORE, "ShardsMissing", f"{ready} of {spec.store.shards} shards are ready{messages}")


def _join_messages(service: RayServiceView | None, observed: Observed, part: str) -> str:
    """The message of KubeRay about a RayService, and of Kubernetes about a pod that does not start."""
    texts = (service.message if service is not None else "", observed.troubles.get(part, ""))
    return "".join(f": {text}" for text in texts if text)


def _shards_condition(
    spec: BlendServiceSpec, owner: Owner, observed: Observed, shard_step: ShardStep
) -> Condition:
    if needs_restart(spec, observed.store_image):
        return c.false(
            c.SHARDS,
            "RestartNeeded",
            "another version of Ray cannot be rolled out shard by shard: delete the RayService "
            f"{ray_service_name(owner.name)} when the store may be away; persistent volumes stay",
        )
    if shard_step.action is Action.NONE:
        return c.true(c.SHARDS, "UpToDate")
    return c.false(c.SHARDS, "Upgrading", f"{shard_step.message}; {shard_step.outdated} left")


def _calibration_condition(spec: BlendServiceSpec, rollout: Rollout, observed: Observed) -> Condition:
    if not spec.engines.calibrate:
        return c.unknown(c.CALIBRATED, "Off", "engines.calibrate is false")
    job = observed.calibrations.get(rollout.calibrated)
    if job is None or job.state is JobState.ABSENT:
        return c.unknown(c.CALIBRATED, "NotStarted", "starts once the store is ready")
    if job.state is JobState.SUCCEEDED:
        return c.true(c.CALIBRATED, "ReportWritten")
    if job.state is JobState.FAILED:
        look = f"Look at RayJob {job.name}; delete it to try again"
        if not job.name:
            look = f"It has failed {FAILURES_MAX} times and its RayJob is gone: change the spec"
        return c.false(
            c.CALIBRATED,
            "Failed",
            f"{job.message or 'the job failed'}. {look}, or set engines.calibrate to false to serve this "
            "model without blending",
        )
    text = f"RayJob {job.name} is measuring; answers are full prefill"
    return c.false(c.CALIBRATED, "Running", text + _join_messages(None, observed, "calibration"))


def _rollout_condition(rollout: Rollout, observed: Observed) -> Condition:
    if not rollout.pending:
        return c.true(c.ROLLED_OUT, "Idle")
    messages = {
        Phase.STARTING: "its engines start",
        Phase.CALIBRATING: "it is calibrated",
        Phase.WARMING: "corpora are filled for it",
        Phase.BLOCKED: "its calibration failed (see Calibrated)",
    }
    text = f"revision {rollout.active} serves until {rollout.pending} may: {messages.get(rollout.phase, '')}"
    if rollout.phase is Phase.STARTING:
        text += _join_messages(observed.services.get(rollout.pending), observed, "service")
    return c.false(c.ROLLED_OUT, str(rollout.phase), text)


def _ready_condition(ready: int, engines_ready: bool, observed: Observed, rollout: Rollout) -> Condition:
    if engines_ready and ready:
        return c.true(c.READY, "Serving")
    if engines_ready:
        return c.true(c.READY, "ServingWithoutStore", "no shard is ready: answers are full prefill")
    if not observed.kuberay.is_installed:
        return c.false(c.READY, "KubeRayMissing", "see KubeRayReady")
    messages = _join_messages(observed.services.get(rollout.active), observed, "service")
    return c.false(c.READY, "EnginesStarting", f"no engine of revision {rollout.active} is ready{messages}")


def timestamp(moment: datetime) -> str:
    """A time as Kubernetes writes it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0
