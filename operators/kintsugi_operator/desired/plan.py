"""Decides which objects a BlendService needs, its status and the next step: a pure function of its spec, its
last status and what was observed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from kintsugi_operator.api.blend_service import BlendServiceSpec, Model
from kintsugi_operator.api.status import BlendServiceStatus, Condition, RolloutStatus
from kintsugi_operator.desired.compare import replacement_patch
from kintsugi_operator.desired.rollout import Phase, step, wanted_revisions
from kintsugi_operator.desired.shards import ShardStep, next_step, ready_shards
from kintsugi_operator.objects.base import Owner
from kintsugi_operator.objects.deployed import EngineRevision
from kintsugi_operator.objects.names import (
    ANNOTATION_CLUSTER,
    ANNOTATION_DIGEST,
    LABEL_TEMPLATE,
    digest,
    selector,
)
from kintsugi_operator.objects.network import budgets, policies
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.objects.service import PART as SERVICE_PART
from kintsugi_operator.objects.service import account_objects, endpoints, revision_objects, service_objects
from kintsugi_operator.objects.store import PART as STORE_PART
from kintsugi_operator.objects.store import (
    StoreImage,
    choose_store_image,
    head_of_store,
    needs_restart,
    ray_service_name,
    shard_templates,
    store_objects,
)
from kintsugi_operator.observed import conditions as c
from kintsugi_operator.observed.protection import is_recent
from kintsugi_operator.observed.views import Observed, RayServiceView, Refusal, label_of


@dataclass(frozen=True)
class ClusterPatch:
    """A change to the store's RayCluster that KubeRay does not make itself."""

    cluster: str
    patch: Manifest

    def over(self, live: Manifest) -> Manifest:
        """The merge patch for the live RayCluster. It also removes keys that only the live head has."""
        spec = self.patch["spec"]
        former = live.get("spec", {}).get("headGroupSpec") or {}
        head = replacement_patch(spec["headGroupSpec"], former)
        return {**self.patch, "spec": {**spec, "headGroupSpec": head}}


@dataclass(frozen=True)
class Desired:
    """The decision of one reconciliation."""

    objects: tuple[Manifest, ...]
    """Signed objects. Everything else that the service owns is obsolete."""
    status: BlendServiceStatus
    shard_step: ShardStep
    cluster_patch: ClusterPatch | None = None


def plan_service(
    spec: BlendServiceSpec,
    owner: Owner,
    before: BlendServiceStatus,
    observed: Observed,
    now: datetime,
) -> Desired:
    """Decide for a spec that `validation.check_service` has accepted."""
    requested = EngineRevision.of(spec)
    known = {**observed.revisions, requested.name: requested}
    rollout = step(before.rollout, requested.name, observed, now)
    rollout = _drop_unknown(rollout, known, requested.name)
    has_moved = (rollout.phase, rollout.pending) != (before.rollout.phase, before.rollout.pending)
    since = before.rollout.since if before.rollout.since and not has_moved else c.timestamp(now)
    rollout = replace(rollout, since=since)

    running = _running_image(before, observed, now)
    image = choose_store_image(spec, running)
    running_groups = observed.store.worker_groups if observed.store is not None else 0
    groups = max(spec.store.shards, running_groups, before.shard_groups)
    store = store_objects(spec, owner, image, groups)
    templates = [label_of(one, LABEL_TEMPLATE) for one in shard_templates(spec, owner, image)]
    head = label_of(head_of_store(spec, owner, image), LABEL_TEMPLATE)
    shard_step = next_step(templates, head, observed.pods)
    if observed.store is not None and observed.store.serve_config and shard_step.outdated:
        # The new Serve configuration waits until every pod has the new volumes and sizes.
        store[-1]["spec"]["serveConfigV2"] = observed.store.serve_config

    objects = [
        *account_objects(owner),
        *store,
        *(one for name in wanted_revisions(rollout) for one in revision_objects(spec, owner, known[name])),
        *service_objects(spec, owner, rollout.active),
        *budgets(spec, owner, rollout.active, observed.engines.get(rollout.active, 0)),
        *policies(spec, owner, observed.home),
    ]
    status = replace(
        _status(spec, owner, observed, rollout, shard_step, running, known[rollout.active].model),
        observed_generation=before.observed_generation,
        shard_groups=groups,
        store_image=running.image if running is not None else "",
        operator=before.operator,
    )
    return Desired(tuple(map(sign, objects)), status, shard_step, _cluster_patch(store[-1], observed))


def _running_image(before: BlendServiceStatus, observed: Observed, now: datetime) -> StoreImage | None:
    """The image that the store runs with; None if the store has nothing to lose (`observed.protection`): no
    shard was ever ready, or everything is down for good."""
    if observed.store is None or observed.store.image is None:
        return None
    applied = observed.store.image
    # What was applied last may never have run.
    if held := {pod.image for pod in observed.pods if pod.is_protected and pod.image is not None}:
        return applied if applied in held else min(held, key=str)
    down = next((one for one in before.conditions if one.type == c.STORE), None)
    is_made = bool(before.store_image) or observed.store.is_protected
    is_waited_for = down is None or not c.is_false(down) or is_recent(down.last_transition_time, now)
    return replace(applied, image=before.store_image or applied.image) if is_made and is_waited_for else None


def sign(manifest: Manifest) -> Manifest:
    """The manifest with its own digest as an annotation, so that an unchanged object needs no write."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION_DIGEST: digest(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def _drop_unknown(
    rollout: RolloutStatus, known: Mapping[str, EngineRevision], requested: str
) -> RolloutStatus:
    """Drop revisions whose ConfigMap was deleted, because nothing else holds their configuration. If the
    active revision is dropped, the requested one becomes active."""
    if rollout.active not in known:
        return RolloutStatus(active=requested)
    return replace(
        rollout,
        pending=rollout.pending if rollout.pending in known else "",
        retiring=tuple(one for one in rollout.retiring if one in known),
    )


def _cluster_patch(store: Manifest, observed: Observed) -> ClusterPatch | None:
    """The update that the store's RayCluster needs; None if it is up to date.

    KubeRay copies a RayService's annotations to its RayCluster, among them the digest of the desired cluster.
    A cluster with another digest has not been updated.
    """
    if observed.store is None or not observed.store.cluster or not observed.cluster_digest:
        return None
    wanted = store["metadata"]["annotations"][ANNOTATION_CLUSTER]
    if wanted == observed.cluster_digest:
        return None
    cluster = store["spec"]["rayClusterConfig"]
    specs = {key: cluster[key] for key in ("rayVersion", "headGroupSpec", "workerGroupSpecs")}
    # Null removes these options. The head reads them at its next restart.
    specs["gcsFaultToleranceOptions"] = cluster.get("gcsFaultToleranceOptions")
    patch = {"metadata": {"annotations": {ANNOTATION_CLUSTER: wanted}}, "spec": specs}
    return ClusterPatch(observed.store.cluster, patch)


def _status(
    spec: BlendServiceSpec,
    owner: Owner,
    observed: Observed,
    rollout: RolloutStatus,
    shard_step: ShardStep,
    running: StoreImage | None,
    model: Model,
) -> BlendServiceStatus:
    ready = ready_shards(spec.store.shards, observed.pods)
    active = observed.services.get(rollout.active)
    engines_ready = active is not None and active.is_ready
    return BlendServiceStatus(
        shards=f"{ready}/{spec.store.shards}",
        engines=_engine_count(spec, observed, rollout.active),
        engine_replicas=observed.engines.get(rollout.active, 0),
        engine_selector=_engine_selector(owner, rollout.active),
        model=model.name or model.path.rstrip("/").rsplit("/", 1)[-1],
        endpoints=endpoints(spec, owner.name, owner.namespace),
        rollout=rollout,
        conditions=(
            c.true(c.VALID, "Accepted"),
            _kuberay_condition(spec, owner, observed),
            _store_condition(spec, observed, ready),
            _shards_condition(spec, owner, running, shard_step),
            _rollout_condition(spec, rollout, observed),
            _ready_condition(ready, engines_ready, observed, rollout),
        ),
    )


def _engine_count(spec: BlendServiceSpec, observed: Observed, active: str) -> str:
    """Ready and requested engines of the active revision. Ray's autoscaler creates a pod for each engine that
    it wants."""
    wanted = max(spec.engines.replicas, observed.engines.get(active, 0))
    return f"{observed.engines_ready.get(active, 0)}/{wanted}"


def _engine_selector(owner: Owner, revision: str) -> str:
    labels = selector(owner.name, part=SERVICE_PART, role="engine", revision=revision)
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _kuberay_condition(spec: BlendServiceSpec, owner: Owner, observed: Observed) -> Condition:
    if not observed.is_kuberay_installed:
        hint = "this cluster serves no RayService: install KubeRay 1.6 or newer, its CRDs included"
        return c.false(c.KUBERAY, "Missing", hint)
    if not observed.is_kuberay_recent:
        hint = "this cluster serves no RayCronJob, which KubeRay has since 1.6: upgrade KubeRay and its CRDs"
        return c.false(c.KUBERAY, "TooOld", hint)
    if not spec.network.policies:
        return c.true(c.KUBERAY, "Installed")
    home = spec.expert.kuberay_namespace or owner.namespace
    return c.true(
        c.KUBERAY,
        "Installed",
        f"network policies admit KubeRay of namespace {home} (expert.kuberayNamespace)",
    )


def _store_condition(spec: BlendServiceSpec, observed: Observed, ready: int) -> Condition:
    if ready >= spec.store.shards:
        return c.true(c.STORE, "AllShardsReady")
    text = f"{ready} of {spec.store.shards} shards are ready"
    return _not_up(c.STORE, "ShardsMissing", text, observed.store, observed.refusals.get(STORE_PART))


def _not_up(
    type_: str, reason: str, text: str, service: RayServiceView | None, refusal: Refusal | None
) -> Condition:
    """A false condition, with KubeRay's message about a RayService, and the refusal that caused it."""
    said = (service.message if service is not None else "", refusal.message if refusal is not None else "")
    message = text + "".join(f": {one}" for one in said if one)
    return c.false(type_, refusal.reason if refusal is not None else reason, message)


def _shards_condition(
    spec: BlendServiceSpec, owner: Owner, running: StoreImage | None, shard_step: ShardStep
) -> Condition:
    if needs_restart(spec, running):
        return c.false(
            c.SHARDS,
            "RestartNeeded",
            "another version of Ray cannot be rolled out shard by shard: delete RayService "
            f"{ray_service_name(owner.name)} when the store may be down; persistent volumes stay",
        )
    if not shard_step.outdated:
        return c.true(c.SHARDS, "UpToDate")
    return c.false(c.SHARDS, "Upgrading", f"{shard_step.message}; {shard_step.outdated} left")


def _rollout_condition(spec: BlendServiceSpec, rollout: RolloutStatus, observed: Observed) -> Condition:
    if not rollout.pending:
        return _scale_condition(spec, rollout.active, observed)
    messages: dict[str, str] = {
        Phase.STARTING: "its engines are starting",
        Phase.WARMING: "corpora are being filled for it",
    }
    text = f"revision {rollout.active} serves until {rollout.pending} is ready"
    text += f": {messages.get(rollout.phase, rollout.phase)}"
    if rollout.phase != Phase.STARTING:
        return c.false(c.ROLLED_OUT, str(rollout.phase), text)
    name = rollout.pending
    return _not_up(
        c.ROLLED_OUT, str(rollout.phase), text, observed.services.get(name), observed.refusals.get(name)
    )


def _scale_condition(spec: BlendServiceSpec, active: str, observed: Observed) -> Condition:
    """Whether a revision that serves has all its pods. While it does not serve, `Ready` says why."""
    service = observed.services.get(active)
    counts = {
        "engines": (observed.engines_ready.get(active, 0), spec.engines.replicas),
        "gateways": (observed.gateways_ready.get(active, 0), spec.gateway.replicas),
    }
    missing = [f"{ready} of {wanted} {role}" for role, (ready, wanted) in counts.items() if ready < wanted]
    if service is None or not service.is_ready or not missing:
        return c.true(c.ROLLED_OUT, "Idle")
    text = f"{' and '.join(missing)} of revision {active} are ready"
    return _not_up(c.ROLLED_OUT, "Scaling", text, None, observed.refusals.get(active))


def _ready_condition(
    ready: int, engines_ready: bool, observed: Observed, rollout: RolloutStatus
) -> Condition:
    if engines_ready and ready:
        return c.true(c.READY, "Serving")
    if engines_ready:
        return c.true(c.READY, "ServingWithoutStore", "no shard is ready: requests get a full prefill")
    if not observed.is_kuberay_installed:
        return c.false(c.READY, "KubeRayMissing", "see KubeRayReady")
    name = rollout.active
    text = f"no engine of revision {name} is ready"
    return _not_up(c.READY, "EnginesStarting", text, observed.services.get(name), observed.refusals.get(name))
