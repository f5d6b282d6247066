"""Every kind of refusal that the operator tells, as Kubernetes and KubeRay show it.

`docs/operate/refusals.md` has the same table; `benchmarks/kubernetes_operator.py` counts what is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.conditions import timestamp
from kintsugi_operator.observed.refusals import SLOW_S
from tests.unit.operator.test_reconcile import OLD, World

Arrange = Callable[[World], None]
LABELS = {"kintsugi.dev/service": "acme", "kintsugi.dev/part": "store"}


@dataclass(frozen=True)
class Case:
    """A refusal, and how it is told."""

    name: str
    condition: str
    reason: str
    says: str
    """Part of the message."""
    arrange: Arrange
    spec: Mapping[str, Any] = field(default_factory=dict)
    event: str = ""
    """The Event's reason; empty: that of the condition."""


def _invalid(name: str, says: str, **spec: Any) -> Case:
    return Case(name, "Valid", "InvalidSpec", says, lambda world: None, spec, event="SpecRefused")


def _refused(name: str, reason: str, message: str) -> Case:
    def arrange(world: World) -> None:
        world.cluster.lose("RayService", "acme-store")
        world.cluster.refuse = lambda one: message if one["kind"] == "RayService" else ""

    return Case(name, "Reconciled", reason, message[:40], arrange)


def _pods_refused(name: str, reason: str, message: str) -> Case:
    """KubeRay may not create pods."""

    def arrange(world: World) -> None:
        metadata = {"name": "acme-store-c1", "labels": LABELS}
        failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreatePod"}
        status = {"conditions": [{**failure, "message": message}]}
        world.cluster.put({"kind": "RayCluster", "metadata": metadata, "spec": {}, "status": status})

    return Case(name, "StoreReady", reason, message[:40], arrange)


def _unschedulable(name: str, reason: str, message: str) -> Case:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return _pod(name, reason, message, {"conditions": [condition]})


def _waiting(name: str, reason: str, says: str, why: str, message: str = "", ended: str = "") -> Case:
    state = {"waiting": {"reason": why, "message": message}}
    container: Manifest = {"name": "ray-worker", "image": "r/x:typo", "state": state}
    if ended:
        container["lastState"] = {"terminated": {"reason": ended}}
    return _pod(name, reason, says, {"containerStatuses": [container]})


def _pod(name: str, reason: str, says: str, status: Manifest) -> Case:
    def arrange(world: World) -> None:
        store = world.cluster.find("RayService", "acme-store")["spec"]["rayClusterConfig"]
        labels = dict(store["workerGroupSpecs"][0]["template"]["metadata"]["labels"])
        metadata = {"name": "shard-0", "labels": labels, "creationTimestamp": timestamp(world.now)}
        world.cluster.put({"kind": "Pod", "metadata": metadata, "status": status})

    return Case(name, "StoreReady", reason, says, arrange)


def _ask_for_more_engines(world: World) -> None:
    """A service serves with one engine; a second one fits no node."""
    for name in ("acme-store", f"acme-{OLD}"):
        world.kuberay.serve(name)
    world.make(engines={"replicas": 2})
    labels = {**LABELS, "kintsugi.dev/part": "service", "kintsugi.dev/revision": OLD}
    metadata = {"name": "engine-1", "labels": {**labels, "kintsugi.dev/role": "engine"}}
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    status = {"conditions": [{**condition, "message": "0/1 nodes: 1 Insufficient nvidia.com/gpu."}]}
    world.cluster.put({"kind": "Pod", "metadata": metadata, "status": status})


def _lose_claim(world: World) -> None:
    world.cluster.find("PersistentVolumeClaim", "acme-data-0")["status"] = {"phase": "Lost"}


def _unbind_claim(world: World) -> None:
    claim = world.cluster.find("PersistentVolumeClaim", "acme-data-0")
    claim["status"] = {"phase": "Pending"}
    claim["metadata"]["creationTimestamp"] = timestamp(world.now)


def _shrink(world: World) -> None:
    claim = world.cluster.find("PersistentVolumeClaim", "acme-data-0")
    claim["status"] = {"phase": "Bound", "capacity": {"storage": "1Gi"}}
    world.make(store={"expert": {"volumes": {"dataGib": 0.5}}})


def _fail_deployment(world: World) -> None:
    failed = {"kintsugi": {"status": "DEPLOY_FAILED", "message": "ImportError: no module named x"}}
    service = world.cluster.find("RayService", f"acme-{OLD}")
    service["status"] = {"pendingServiceStatus": {"applicationStatuses": failed}}


def _silence_kuberay(world: World) -> None:
    service = world.cluster.find("RayService", f"acme-{OLD}")
    service["metadata"]["creationTimestamp"] = timestamp(world.now)


def _take_name(world: World) -> None:
    world.cluster.lose("Service", "acme-grpc")
    world.cluster.put({"kind": "Service", "metadata": {"name": "acme-grpc", "labels": {}}, "spec": {}})


def _uninstall(plural: str) -> Arrange:
    def arrange(world: World) -> None:
        world.cluster.ray -= {plural}

    return arrange


_SELECTOR = {"podTemplates": {"engines": {"nodeSelector": {"pool": "not a value"}}}}
_LABEL = {"podTemplates": {"store": {"labels": {"a..b/c": "x"}}}}
CASES = (
    _invalid("an argument that vLLM lacks", "max_model_len", engines={"vllm": {"max_modl_len": 512}}),
    _invalid("a node selector that no node can match", "not a value", expert=_SELECTOR),
    _invalid("a label that no pod can have", "a..b/c", expert=_LABEL),
    _invalid("a resource that cannot exist", "gpuResource", engines={"expert": {"gpuResource": "gpu"}}),
    _invalid("a tier named data", "choose another name", store={"tiers": [{"name": "data", "gib": 1}]}),
    _invalid("fewer engines at most than at least", "replicas", engines={"replicas": 4, "replicasMax": 2}),
    _refused(
        "a quota of objects", "QuotaExceeded", "exceeded quota: objects, requested: count/rayservices=1"
    ),
    _refused(
        "a webhook that denies", "WebhookDenied", 'admission webhook "policy.example" denied the request'
    ),
    _refused("a webhook that does not answer", "WebhookFailed", 'failed calling webhook "policy.example"'),
    _refused(
        "missing rights", "Forbidden", 'User "x" cannot patch resource "rayservices" in API group "ray.io"'
    ),
    _refused(
        "an invalid object", "InvalidObject", 'RayService "acme-store" is invalid: spec: Required value'
    ),
    Case("a name in use", "Reconciled", "NameInUse", "does not belong", _take_name),
    Case("a volume that shrinks", "Reconciled", "VolumeKept", "keeps 1Gi", _shrink),
    _pods_refused("a quota of limits", "QuotaExceeded", "failed quota: cpu: must specify limits.cpu"),
    _pods_refused(
        "the pod security standard", "PodSecurityViolated", 'violates PodSecurity "restricted:latest"'
    ),
    _pods_refused(
        "a LimitRange", "LimitRangeExceeded", "maximum memory usage per Container is 1Gi, but limit is 6Gi"
    ),
    _pods_refused(
        "a missing PriorityClass", "PriorityClassMissing", "no PriorityClass with name typo was found"
    ),
    _pods_refused(
        "a missing RuntimeClass", "RuntimeClassMissing", 'RuntimeClass.node.k8s.io "typo" not found'
    ),
    _pods_refused(
        "a missing ServiceAccount", "ServiceAccountMissing", "error looking up service account default/typo"
    ),
    _pods_refused("another refusal of pods", "PodsRefused", "something that nobody has foreseen"),
    _unschedulable(
        "too few GPUs or too little memory", "Unschedulable", "0/3 nodes: 3 Insufficient nvidia.com/gpu."
    ),
    _unschedulable(
        "a selector without a node",
        "NodeNotMatched",
        "0/3: 3 node(s) didn't match Pod's node affinity/selector.",
    ),
    _unschedulable("a taint", "TaintNotTolerated", "0/3 nodes: 3 node(s) had untolerated taint {gpu: true}."),
    _unschedulable("a missing claim", "ClaimMissing", 'persistentvolumeclaim "models" not found'),
    _unschedulable(
        "a volume of no class", "VolumeUnbound", "pod has unbound immediate PersistentVolumeClaims"
    ),
    Case(
        "more engines than fit, while one serves",
        "RolledOut",
        "Unschedulable",
        "1 of 2 engines",
        _ask_for_more_engines,
    ),
    Case("a claim that does not bind", "StoreReady", "VolumeUnbound", "claim acme-data-0", _unbind_claim),
    Case("a claim without its volume", "StoreReady", "VolumeLost", "claim acme-data-0", _lose_claim),
    _waiting("an image that cannot be pulled", "ImageNotPulled", "r/x:typo", "ImagePullBackOff"),
    _waiting("an invalid image name", "ImageNameInvalid", "InvalidImageName", "InvalidImageName", "bad"),
    _waiting("a Secret that is not there", "MountMissing", "a Secret, ConfigMap", "ContainerCreating"),
    _waiting("a key that a Secret lacks", "ConfigMissing", "key x", "CreateContainerConfigError", "key x"),
    _waiting(
        "a container that cannot start",
        "ContainerFailed",
        "no such file",
        "RunContainerError",
        "no such file",
    ),
    _waiting("too little memory", "OutOfMemory", "OOMKilled", "CrashLoopBackOff", ended="OOMKilled"),
    _waiting("a process that crashes", "Crashing", "see its log", "CrashLoopBackOff"),
    _pod("a pod that its node evicted", "Evicted", "disk", {"reason": "Evicted", "message": "disk pressure"}),
    Case("an application that cannot start", "Ready", "DeployFailed", "no module named x", _fail_deployment),
    Case(
        "KubeRay that does not watch",
        "Ready",
        "KubeRaySilent",
        "check that its operator runs",
        _silence_kuberay,
    ),
    Case(
        "no KubeRay",
        "KubeRayReady",
        "Missing",
        "install KubeRay",
        _uninstall("rayservices"),
        event="KubeRayMissing",
    ),
    Case(
        "an old KubeRay",
        "KubeRayReady",
        "TooOld",
        "upgrade KubeRay",
        _uninstall("raycronjobs"),
        event="KubeRayTooOld",
    ),
)


def why_untold(case: Case) -> str:
    """Why a refusal is not told in full within the bound; empty if it is: a reason and a message of the
    object, a warning, and `Stalled`."""
    world = World()
    if not case.spec:
        world.make()
        world.settle()
    else:
        world.make(**case.spec)
    case.arrange(world)
    for _ in range(5):
        world.look()
        world.now += timedelta(seconds=SLOW_S / 3)
    found, stalled = world.condition(case.condition), world.condition("Stalled")
    if (found["status"], found["reason"]) != ("False", case.reason) or case.says not in found["message"]:
        return f"{case.condition} is {found}"
    if (stalled["status"], stalled["reason"]) != ("True", case.reason):
        return f"Stalled is {stalled}"
    events = [world.cluster.find("Event", name) for name in world.cluster.named("Event")]
    if (case.event or case.reason, "Warning") not in {(one["reason"], one["type"]) for one in events}:
        return f"the Events are {[(one['reason'], one['message']) for one in events]}"
    return ""
