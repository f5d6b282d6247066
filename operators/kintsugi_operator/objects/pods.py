"""Pod templates. Each meets the `restricted` pod security standard and sets requests and limits."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kintsugi.core.deploy import RAY_CLUSTER_ENVIRONMENT
from kintsugi_operator.api.manifest import to_manifest
from kintsugi_operator.api.pod_template import PodTemplate, Variable
from kintsugi_operator.objects.names import LABEL_TEMPLATE, digest

Manifest = dict[str, Any]
Environment = Mapping[str, str | Mapping[str, Any]]
"""Values, or `valueFrom` mappings, by name."""

USER_ID = 10001
"""Any user but root: images work with every user id."""
DASHBOARD_PORT = 8265
AGENT_PORT = 52365
METRICS_PORT = 8080
"""Port of Ray's metrics, as KubeRay sets it."""
GCS_PORT = 6379
READY_PATH = "/readyz"
HOSTNAME = "kubernetes.io/hostname"
ZONE = "topology.kubernetes.io/zone"
TMP = "/tmp"
SCRATCH = "/scratch"
TLS = "/etc/kintsugi/tls"
STORE_TLS = "/etc/kintsugi/store-tls"
STORE_KEYS = "/etc/kintsugi/store-keys"
STORE_TOKENS = "/etc/kintsugi/store-tokens"
STORE_TOKEN = "/etc/kintsugi/store-token"
TOKENS = "/etc/kintsugi/tokens"
MODELS = "/models"

_SUFFIXES = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_SUFFIXES |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60}


def quantity(text: str) -> float:
    """Bytes or cores of a Kubernetes quantity."""
    number, suffix = re.fullmatch(r"([0-9.]+(?:[eE][0-9]+)?)([A-Za-z]*)", text).groups()  # type: ignore[union-attr]
    return float(number) * _SUFFIXES.get(suffix, 1.0)


def mebibytes(gib: float) -> str:
    """A size as a Kubernetes quantity, rounded up."""
    return f"{math.ceil(gib * 1024)}Mi"


def cores(cpus: float) -> str:
    """Cores as a Kubernetes quantity in thousandths, rounded up."""
    return f"{math.ceil(cpus * 1000)}m"


@dataclass(frozen=True)
class Volume:
    """A volume and where it is mounted."""

    name: str
    path: str
    source: Mapping[str, Any]
    read_only: bool = False


def scratch(name: str, path: str, size: str, in_memory: bool = False) -> Volume:
    """An empty folder that is deleted with the pod."""
    medium = {"medium": "Memory"} if in_memory else {}
    return Volume(name, path, {"emptyDir": {**medium, "sizeLimit": size}})


def secret(name: str, path: str, secret_name: str, items: Mapping[str, str] | None = None) -> Volume:
    """A Secret's keys as files that only the pod's group may read. `items`: files by key; None: all keys."""
    source: Manifest = {"secretName": secret_name, "defaultMode": 0o440}
    if items is not None:
        source["items"] = [{"key": key, "path": file} for key, file in items.items()]
    return Volume(name, path, {"secret": source}, read_only=True)


def claim_volume(name: str, path: str, claim: str, read_only: bool = False) -> Volume:
    """An existing PersistentVolumeClaim."""
    source = {"persistentVolumeClaim": {"claimName": claim, **({"readOnly": True} if read_only else {})}}
    return Volume(name, path, source, read_only)


def ephemeral(name: str, path: str, claim_spec: Manifest) -> Volume:
    """A generic ephemeral volume: created and deleted with the pod."""
    return Volume(name, path, {"ephemeral": {"volumeClaimTemplate": {"spec": claim_spec}}})


def claim_spec(gib: float, storage_class: str) -> Manifest:
    """The spec of a PersistentVolumeClaim or of its template."""
    named = {"storageClassName": storage_class} if storage_class else {}
    requests = {"storage": mebibytes(gib)}
    return {"accessModes": ["ReadWriteOnce"], "resources": {"requests": requests}, **named}


def spread(labels: Mapping[str, str], apart_from: Mapping[str, str] | None = None) -> Manifest:
    """An affinity that prefers other nodes and zones than those of pods with these labels, and nodes without
    pods that have the labels `apart_from`.

    It has only preferences, because a pod on the wrong node is better than an unschedulable pod. Topology
    spread constraints are not used: for zones, they have no effect on nodes without a zone.
    """
    chosen = [(100, HOSTNAME, labels), (50, ZONE, labels)]
    if apart_from is not None:
        chosen.append((50, HOSTNAME, apart_from))
    terms = []
    for weight, topology, match in chosen:
        term = {"topologyKey": topology, "labelSelector": {"matchLabels": dict(match)}}
        terms.append({"weight": weight, "podAffinityTerm": term})
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}}


@dataclass(frozen=True)
class Pod:
    """The description of one pod of a Ray cluster."""

    labels: Mapping[str, str]
    image: str
    cpus: float
    memory: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    pull_secrets: Sequence[str] = ()
    service_account: str = "default"
    gpus: int = 0
    gpu_resource: str = ""
    shared_memory: str = "512Mi"
    ports: Mapping[str, int] = field(default_factory=dict)
    env: Environment = field(default_factory=dict)
    env_secret: str = ""
    volumes: Sequence[Volume] = ()
    readiness: Mapping[str, Any] = field(default_factory=dict)
    """Readiness probe; empty: a probe of Ray's health endpoint."""
    affinity: Mapping[str, Any] = field(default_factory=dict)
    more: PodTemplate = field(default_factory=PodTemplate)
    """Additions from the BlendService's spec."""
    grace_s: int = 90
    """Time for shards to write back, and for engines and gateways to finish requests."""
    is_head: bool = False
    has_autoscaler: bool = False
    """Whether the head has Ray's autoscaler, which calls the API server."""


def environment(variables: Sequence[Variable]) -> Environment:
    """The variables of a spec in their order, since `$(NAME)` refers to earlier variables."""
    return {one.name: one.value_from or one.value for one in variables}


def security() -> Manifest:
    """The security context of a container."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def resources(cpus: float, memory: str, gpus: int = 0, gpu_resource: str = "") -> Manifest:
    """Requests equal to limits, so that a pod is not evicted because of its neighbours."""
    both = {"cpu": cores(cpus), "memory": memory}
    if gpus:
        both[gpu_resource] = str(gpus)
    return {"requests": dict(both), "limits": dict(both)}


def template(pod: Pod) -> Manifest:
    """The pod template for KubeRay, which adds Ray's command line."""
    more = pod.more
    volumes = [
        scratch("tmp", TMP, "10Gi"),
        scratch("shared-memory", "/dev/shm", pod.shared_memory, in_memory=True),
        *pod.volumes,
    ]
    spec: Manifest = {
        "serviceAccountName": more.service_account_name or pod.service_account,
        "automountServiceAccountToken": pod.has_autoscaler,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": pod.grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(pod, volumes)],
        "volumes": [*({"name": one.name, **one.source} for one in volumes), *map(dict, more.volumes)],
    }
    tolerations = map(to_manifest, more.tolerations)
    optional = {
        "imagePullSecrets": [{"name": name} for name in dict.fromkeys(pod.pull_secrets)],
        "nodeSelector": dict(more.node_selector),
        "tolerations": [{key: value for key, value in one.items() if value} for one in tolerations],
        "affinity": dict(more.affinity or pod.affinity),
        "topologySpreadConstraints": [dict(one) for one in more.topology_spread_constraints],
        "priorityClassName": more.priority_class_name,
        "runtimeClassName": more.runtime_class_name,
        "schedulerName": more.scheduler_name,
    }
    spec |= {key: value for key, value in optional.items() if value}
    metadata: Manifest = {"labels": {**more.labels, **pod.labels}}
    if annotations := {**more.annotations, **pod.annotations}:
        metadata["annotations"] = annotations
    made = {"metadata": metadata, "spec": spec}
    metadata["labels"][LABEL_TEMPLATE] = digest(made)
    return made


def _container(pod: Pod, volumes: Sequence[Volume]) -> Manifest:
    env = {
        "HOME": TMP,
        "XDG_CACHE_HOME": f"{TMP}/cache",
        **RAY_CLUSTER_ENVIRONMENT,
        # Ray's 15 is for machines with other work.
        "RAY_worker_niceness": "0",
        "VLLM_NO_USAGE_STATS": "1",
        **pod.env,
        **environment(pod.more.env),
    }
    ports = {"metrics": METRICS_PORT, **pod.ports}
    if pod.is_head:
        # KubeRay derives its head and serve Services from these names.
        ports |= {"gcs": GCS_PORT, "dashboard": DASHBOARD_PORT, "client": 10001, "serve": 8000}
    health = _health(pod.is_head)
    readiness = pod.readiness or health
    container: Manifest = {
        "name": "ray-head" if pod.is_head else "ray-worker",
        "image": pod.image,
        "securityContext": security(),
        "resources": resources(pod.cpus, pod.memory, pod.gpus, pod.gpu_resource),
        "env": [_variable(name, value) for name, value in env.items()],
        # KubeRay's CRD requires the protocol: it identifies ports by number and protocol.
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        "volumeMounts": [
            *(
                {"name": one.name, "mountPath": one.path, **({"readOnly": True} if one.read_only else {})}
                for one in volumes
            ),
            *(
                {key: value for key, value in to_manifest(one).items() if value}
                for one in pod.more.volume_mounts
            ),
        ],
        # KubeRay's default probes call programs that an image may not have.
        "startupProbe": {**health, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 120},
        "livenessProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
        "readinessProbe": {**readiness, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
    }
    if pod.env_secret:
        container["envFrom"] = [{"secretRef": {"name": pod.env_secret}}]
    return container


def _health(is_head: bool) -> Manifest:
    """A probe of Ray's health endpoint. It needs no program in the image."""
    if is_head:
        return {"httpGet": {"path": "/api/gcs_healthz", "port": DASHBOARD_PORT}}
    return {"httpGet": {"path": "/api/local_raylet_healthz", "port": AGENT_PORT}}


def process_health(port: str) -> Manifest:
    """A readiness probe of the process that Ray Serve places on a worker, at its named metrics port.

    The start-up probe still asks Ray, so a worker without such a process starts, but is not ready.
    """
    return {"httpGet": {"path": READY_PATH, "port": port}}


def _variable(name: str, value: str | Mapping[str, Any]) -> Manifest:
    if isinstance(value, str):
        # KubeRay drops empty values, which would look like drift.
        return {"name": name, "value": value} if value else {"name": name}
    return {"name": name, "valueFrom": value}
