"""A small model of a Kubernetes cluster with KubeRay, and random histories of a BlendService in it.

The operator's own `Reconciler` runs against it. A pod becomes ready if the API server admits it, a node fits
it, its claims bind, its image and its Secrets exist, and its process can run with its settings. KubeRay makes
pods from templates once and never changes them. `docs/operate/repairs.md` lists the alphabet of mistakes and
failures.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kintsugi_operator.controller.cluster import Resource
from kintsugi_operator.objects.names import LABEL_ROLE, LABEL_SHARD
from kintsugi_operator.objects.pods import Manifest, quantity
from kintsugi_operator.observed.conditions import timestamp
from kintsugi_operator.observed.views import is_pod_ready, label_of
from tests.fakes.cluster import FakeCluster, FakeReads
from tests.unit.operator.specs import NOW

GIB = 1 << 30
IMAGES = {"r/k/serving:1": "2.60.0", "r/k/serving:2": "2.60.0", "r/k/store:2": "2.60.0"}
"""Images of the registry, and the version of Ray in each."""
SECRETS = frozenset({"tokens", "tls"})
CLASSES = frozenset({"", "fast"})
VOLUME_GIB_MAX = 1000.0
ENGINE_GIB_MIN = 4.0
"""An engine with less memory is killed."""
VLLM_KEYS = frozenset({"max_model_len", "max_num_seqs", "enforce_eager"})


@dataclass
class Node:
    """A node: what pods may ask of it."""

    name: str
    labels: Mapping[str, str]
    gpus: int
    gib: float = 128.0
    cpus: float = 64.0
    is_alive: bool = True


class Borrowed(FakeReads):
    """Reads without copies: nobody changes what is read."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        return self._cluster.objects.get((resource.kind, namespace, name))

    async def list(self, resource: Resource, namespace: str, labels: Mapping[str, str]) -> Sequence[Manifest]:
        found = [one for one in self._cluster.objects.values() if one["kind"] == resource.kind]
        return [one for one in found if all(label_of(one, key) == value for key, value in labels.items())]


class Watched(FakeCluster):
    """The API server, which notes what must never be asked of it."""

    def __init__(self, model: ModelCluster) -> None:
        super().__init__()
        self._model = model

    async def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply also removes what the manifest lacks."""
        stored = self.objects.get((manifest["kind"], "default", manifest["metadata"]["name"]))
        if stored is not None and manifest["kind"] == "RayService":
            stored.pop("spec", None)
        return await super().apply(manifest)

    async def evict(self, namespace: str, pod: str) -> bool:
        self._model.judge_eviction(self.find("Pod", pod))
        return await super().evict(namespace, pod)


class ModelCluster:
    """Nodes, a registry, quotas, volumes, KubeRay, kubelets. `step` lets each act once."""

    def __init__(self, nodes: list[Node]) -> None:
        self.now = NOW
        self.nodes = nodes
        self.images = dict(IMAGES)
        self.is_kuberay_up = True
        self.pods_max = 1000
        """A quota: further pods are refused."""
        self.claims_gib_max = 1e9
        self.api = Watched(self)
        self.api.refuse = self._refuse
        self.api.on_change = self._note
        self.faults: list[str] = []
        """What was lost, or put at risk."""
        self.durable: dict[str, int] = defaultdict(int)
        """Number of durable chunks, by claim."""
        self._pods: dict[str, Manifest] = {}
        self._node_of: dict[str, str] = {}
        self._goals: dict[str, str] = {}
        self._count = 0

    # -- what the operator is told -----------------------------------------------------------------------

    def _refuse(self, manifest: Manifest) -> str:
        if manifest["kind"] == "PersistentVolumeClaim":
            return self._refuse_claim(manifest)
        return ""

    def _refuse_claim(self, manifest: Manifest) -> str:
        name, asked = manifest["metadata"]["name"], manifest["spec"]
        live = self.api.objects.get(("PersistentVolumeClaim", "default", name))
        if live is not None:
            if asked.get("storageClassName", "") != live["spec"].get("storageClassName", ""):
                return "spec is immutable after creation except resources.requests"
            if _gib_of(asked) < live.get("status", {}).get("gib", 0.0):
                return "field can not be less than status.capacity"
        others = [one for one in self._all("PersistentVolumeClaim") if one["metadata"]["name"] != name]
        if sum(_gib_of(one["spec"]) for one in others) + _gib_of(asked) > self.claims_gib_max:
            return "exceeded quota: storage, requested: requests.storage"
        return ""

    def _note(self, type_: str, changed: Manifest) -> None:
        if type_ != "DELETED":
            return
        name = changed["metadata"]["name"]
        if changed["kind"] == "PersistentVolumeClaim" and self.durable.pop(name, 0):
            self.faults.append(f"claim {name} was deleted with durable chunks")
        if changed["kind"] == "Pod":
            self._pods.pop(name, None)
            self._node_of.pop(name, None)

    def judge_eviction(self, pod: Manifest) -> None:
        """A ready shard goes only while all others are ready; a ready head never goes."""
        if not is_pod_ready(pod):
            return
        if label_of(pod, LABEL_ROLE) == "head":
            self.faults.append(f"head {pod['metadata']['name']} was evicted while it served")
        shards = self.api.find("BlendService", "acme")["spec"]["store"]["shards"]
        others = {label_of(one, LABEL_SHARD) for one in self._all("Pod") if is_pod_ready(one)}
        missing = {str(index) for index in range(shards)} - others
        if missing:
            self.faults.append(f"shard {label_of(pod, LABEL_SHARD)} was evicted while {missing} were down")

    def _all(self, kind: str) -> list[Manifest]:
        return [one for one in self.api.objects.values() if one["kind"] == kind]

    # -- everybody acts once -----------------------------------------------------------------------------

    def step(self) -> None:
        """KubeRay, the scheduler, the volumes and the kubelets act."""
        if self.is_kuberay_up:
            for service in self._all("RayService"):
                self._serve(service)
            for cluster in self._all("RayCluster"):
                self._make_pods(cluster)
        for name in list(self._pods):
            if name in self._pods:
                self._run(self._pods[name])
        for pod in self._all("Pod"):
            if label_of(pod, LABEL_ROLE) == "shard" and is_pod_ready(pod):
                for claim in _claims_of(pod):
                    self.durable[claim] += 1

    def _serve(self, service: Manifest) -> None:
        """RayService: a cluster that starts, one that serves, and the switch between both."""
        status = service.setdefault("status", {})
        active = self._cluster_of(status, "activeServiceStatus")
        pending = self._cluster_of(status, "pendingServiceStatus")
        goal = _goal_of(service["spec"]["rayClusterConfig"])
        newest = pending or active
        is_kept = service["spec"]["upgradeStrategy"]["type"] == "None"
        if newest is None or not (is_kept or self._goals[newest["metadata"]["name"]] == goal):
            if pending is not None:
                self.api._collect(pending)
            pending = self._make_cluster(service, goal)
            status["pendingServiceStatus"] = {"rayClusterName": pending["metadata"]["name"]}
        elif not is_kept:
            _take_replicas(newest["spec"], service["spec"]["rayClusterConfig"])
        if pending is not None and self._is_up(pending):
            status["activeServiceStatus"] = status.pop("pendingServiceStatus")
            if active is not None:
                self.api._collect(active)
            active = pending
        serves = active is not None and self._is_up(active, of_each=1)
        _set_ready(status, serves, timestamp(self.now))
        self.api.announce(service)

    def _cluster_of(self, status: Manifest, which: str) -> Manifest | None:
        name = (status.get(which) or {}).get("rayClusterName", "")
        return self.api.objects.get(("RayCluster", "default", name))

    def _make_cluster(self, service: Manifest, goal: str) -> Manifest:
        self._count += 1
        metadata = service["metadata"]
        name = f"{metadata['name']}-{self._count}"
        self._goals[name] = goal
        owner = {"uid": metadata["uid"], "name": metadata["name"]}
        made = {"name": name, "namespace": "default", "labels": dict(metadata["labels"])}
        made |= {"annotations": dict(metadata["annotations"]), "ownerReferences": [owner]}
        spec = copy.deepcopy(service["spec"]["rayClusterConfig"])
        return self.api.put({"kind": "RayCluster", "metadata": made, "spec": spec})

    def _is_up(self, cluster: Manifest, of_each: int = 1 << 30) -> bool:
        """Whether all pods that the cluster's spec asks for are ready, at most `of_each` of a group: KubeRay
        switches to a complete cluster, which then stays Ready while it has an endpoint."""
        pods = self._pods_of(cluster)
        groups = [("head", 1), *((one["groupName"], one["replicas"]) for one in _groups(cluster))]
        return all(
            sum(is_pod_ready(one) for one in pods if one["metadata"]["group"] == name) >= min(count, of_each)
            for name, count in groups
        )

    def _pods_of(self, cluster: Manifest) -> list[Manifest]:
        name = cluster["metadata"]["name"]
        return [one for one in self._pods.values() if one["metadata"]["cluster"] == name]

    def _make_pods(self, cluster: Manifest) -> None:
        pods = self._pods_of(cluster)
        groups = [("head", 1, cluster["spec"]["headGroupSpec"]["template"])]
        groups += [(one["groupName"], one["replicas"], one["template"]) for one in _groups(cluster)]
        for group, count, template in groups:
            mine = [one for one in pods if one["metadata"]["group"] == group]
            for extra in mine[count:]:
                self.api._collect(extra)
            for _ in range(count - len(mine)):
                problem = self._refuse_pod(template)
                _set_failure(cluster, problem)
                if not problem:
                    self._make_pod(cluster, group, template)

    def _refuse_pod(self, template: Manifest) -> str:
        if len(self._pods) >= self.pods_max:
            return "pods is forbidden: exceeded quota: pods"
        if name := template["spec"].get("priorityClassName"):
            return f"pods is forbidden: no PriorityClass with name {name} was found"
        return ""

    def _make_pod(self, cluster: Manifest, group: str, template: Manifest) -> None:
        self._count += 1
        name = f"{cluster['metadata']['name']}-{group}-{self._count}"
        metadata = copy.deepcopy(template["metadata"])
        metadata |= {"name": name, "namespace": "default", "creationTimestamp": timestamp(self.now)}
        # Two keys of the model's own.
        metadata |= {"cluster": cluster["metadata"]["name"], "group": group}
        owner = {"uid": cluster["metadata"]["uid"], "name": cluster["metadata"]["name"]}
        metadata["ownerReferences"] = [owner]
        self._pods[name] = self.api.put(
            {"kind": "Pod", "metadata": metadata, "spec": copy.deepcopy(template["spec"]), "status": {}}
        )

    # -- the scheduler and the kubelets ------------------------------------------------------------------

    def _run(self, pod: Manifest) -> None:
        name, status = pod["metadata"]["name"], pod["status"]
        node = self._node_of.get(name) or self._schedule(pod)
        if not node:
            why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            status["conditions"] = [{**why, "message": "0 nodes are available"}]
            self.api.announce(pod)
            return
        if not next(one for one in self.nodes if one.name == node).is_alive:
            self.api._collect(pod)
            return
        (container,) = pod["spec"]["containers"]
        waiting, is_running = self._why_waiting(pod, container), self._is_running(pod)
        if waiting:
            state: Manifest = {"waiting": {"reason": waiting}}
        elif is_running:
            state = status["containerStatuses"][0]["state"]
        else:
            state = {"running": {"startedAt": timestamp(self.now)}}
        status["containerStatuses"] = [{"name": "ray", "image": container["image"], "state": state}]
        _set_ready(status, bool(is_running and not waiting), timestamp(self.now))
        self.api.announce(pod)

    def _is_running(self, pod: Manifest) -> bool:
        return any("running" in one["state"] for one in pod["status"].get("containerStatuses", []))

    def crash(self, pod: Manifest) -> None:
        """The pod's process ends, and is started again."""
        pod["status"].pop("containerStatuses", None)
        _set_ready(pod["status"], False, timestamp(self.now))
        self.api.announce(pod)

    def _schedule(self, pod: Manifest) -> str:
        wanted = pod["spec"].get("nodeSelector") or {}
        for node in self.nodes:
            if not node.is_alive or not wanted.items() <= node.labels.items():
                continue
            there = [self._pods[name] for name, where in self._node_of.items() if where == node.name]
            asked = [sum(column) for column in zip(*map(_ask_of, [*there, pod]), strict=True)]
            if asked[0] <= node.gpus and asked[1] <= node.gib and asked[2] <= node.cpus and self._bind(pod):
                self._node_of[pod["metadata"]["name"]] = node.name
                return node.name
        return ""

    def _bind(self, pod: Manifest) -> bool:
        """Whether all claims of a pod are bound, binding those that can be."""
        found = [self.api.objects.get(("PersistentVolumeClaim", "default", one)) for one in _claims_of(pod)]
        for claim in found:
            if claim is None:
                return False
            spec, status = claim["spec"], claim.setdefault("status", {"phase": "Pending"})
            is_possible = spec.get("storageClassName", "") in CLASSES and _gib_of(spec) <= VOLUME_GIB_MAX
            if status["phase"] != "Bound" and not is_possible:
                self.api.announce(claim)
                return False
        for claim in filter(None, found):
            gib = _gib_of(claim["spec"])
            if claim["status"]["phase"] != "Bound" or claim["status"]["gib"] < gib <= VOLUME_GIB_MAX:
                capacity = {"storage": claim["spec"]["resources"]["requests"]["storage"]}
                claim["status"] = {"phase": "Bound", "gib": gib, "capacity": capacity}
                self.api.announce(claim)
        return True

    def _why_waiting(self, pod: Manifest, container: Manifest) -> str:
        image, role = container["image"], label_of(pod, LABEL_ROLE)
        volumes = [one.get("secret", {}).get("secretName") for one in pod["spec"]["volumes"]]
        if image not in self.images and not self._is_running(pod):
            return "ImagePullBackOff"
        if not set(filter(None, volumes)) <= SECRETS:
            return "ContainerCreating"
        cluster = self.api.find("RayCluster", pod["metadata"]["cluster"])
        version = IMAGES.get(image, "")
        heads = [one for one in self._pods_of(cluster) if one["metadata"]["group"] == "head"]
        if role != "head" and not any(is_pod_ready(one) and _version_of(one) == version for one in heads):
            return "PodInitializing"
        if version != cluster["spec"]["rayVersion"]:
            return "CrashLoopBackOff"
        if role == "engine" and not self._can_engine_run(pod):
            return "CrashLoopBackOff"
        return ""

    def _can_engine_run(self, pod: Manifest) -> bool:
        cluster = self.api.find("RayCluster", pod["metadata"]["cluster"])
        owner = cluster["metadata"]["ownerReferences"][0]["name"]
        service = self.api.objects.get(("RayService", "default", owner))
        if service is None:
            return False
        (application,) = json.loads(service["spec"]["serveConfigV2"])["applications"]
        keys = set(application["args"]["engines"].get("vllm", {})) - {"tensor_parallel_size"}
        return keys <= VLLM_KEYS and _ask_of(pod)[1] >= ENGINE_GIB_MIN


def _groups(cluster: Manifest) -> list[Manifest]:
    found: list[Manifest] = cluster["spec"]["workerGroupSpecs"]
    return found


def _goal_of(config: Manifest) -> str:
    """What KubeRay makes a new cluster for: everything but numbers of pods."""
    muted = ("replicas", "minReplicas", "maxReplicas")
    groups = [{k: v for k, v in one.items() if k not in muted} for one in config["workerGroupSpecs"]]
    return json.dumps({**config, "workerGroupSpecs": groups}, sort_keys=True)


def _take_replicas(spec: Manifest, wanted: Manifest) -> None:
    for mine, theirs in zip(spec["workerGroupSpecs"], wanted["workerGroupSpecs"], strict=True):
        mine["replicas"] = theirs["replicas"]


def _version_of(pod: Manifest) -> str:
    return IMAGES.get(pod["spec"]["containers"][0]["image"], "")


def _claims_of(pod: Manifest) -> list[str]:
    volumes = [one.get("persistentVolumeClaim", {}) for one in pod["spec"]["volumes"]]
    return [one["claimName"] for one in volumes if one]


def _ask_of(pod: Manifest) -> tuple[float, float, float]:
    asked = pod["spec"]["containers"][0]["resources"]["requests"]
    return (
        float(asked.get("nvidia.com/gpu", 0)),
        quantity(asked["memory"]) / GIB,
        quantity(asked["cpu"]),
    )


def _gib_of(spec: Manifest) -> float:
    return quantity(spec["resources"]["requests"]["storage"]) / GIB


def _set_ready(status: Manifest, is_ready: bool, now: str) -> None:
    others = [one for one in status.get("conditions", []) if one["type"] not in ("Ready", "PodScheduled")]
    former: Manifest = next((one for one in status.get("conditions", []) if one["type"] == "Ready"), {})
    value = str(is_ready)
    since = former["lastTransitionTime"] if former.get("status") == value else now
    status["conditions"] = [*others, {"type": "Ready", "status": value, "lastTransitionTime": since}]


def _set_failure(cluster: Manifest, problem: str) -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreatePod", "message": problem}
    cluster["status"] = {"conditions": [failure] if problem else []}
