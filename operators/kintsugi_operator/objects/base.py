"""What all objects share: metadata, owners, and how a Ray cluster is put together."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kintsugi_operator.api.blend_service import Redis
from kintsugi_operator.api.manifest import API_VERSION
from kintsugi_operator.objects.pods import Manifest, resources, security

RAY_API_VERSION = "ray.io/v1"
OBJECT_STORE_BYTES = 256 << 20
"""Ray's own object store: chunk KV never passes through it."""
GROUP_PODS_MAX = 1024
"""Maximum number of pods in a worker group. Serve's replicas decide how many there are."""


@dataclass(frozen=True)
class Owner:
    """The object that others are made for."""

    kind: str
    name: str
    namespace: str
    uid: str

    def reference(self) -> Manifest:
        """For `ownerReferences`: Kubernetes deletes what is owned with its owner."""
        return {
            "apiVersion": API_VERSION,
            "kind": self.kind,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def make_object(
    owner: Owner,
    kind: str,
    name: str,
    labels: Mapping[str, str],
    body: Manifest,
    api_version: str = "v1",
    owned: bool = True,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """An object with everything but its digest."""
    metadata: Manifest = {"name": name, "namespace": owner.namespace, "labels": dict(labels)}
    if owned:
        metadata["ownerReferences"] = [owner.reference()]
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}


@dataclass(frozen=True)
class Group:
    """Equal workers of a Ray cluster."""

    name: str
    template: Manifest
    replicas: int
    resources: Mapping[str, float]
    """Ray's custom ones, of each pod."""
    cpus: float
    gpus: int = 0
    fixed: bool = False
    """Not for Ray's autoscaler to change."""

    def manifest(self) -> Manifest:
        """A worker group of KubeRay's."""
        bounds = (self.replicas, self.replicas) if self.fixed else (0, GROUP_PODS_MAX)
        return {
            "groupName": self.name,
            "replicas": self.replicas,
            "minReplicas": bounds[0],
            "maxReplicas": bounds[1],
            "numOfHosts": 1,
            "rayStartParams": {
                "num-cpus": str(math.ceil(self.cpus)),
                "num-gpus": str(self.gpus),
                "object-store-memory": str(OBJECT_STORE_BYTES),
                # KubeRay pastes it into a shell's command line.
                "resources": f"'{json.dumps(dict(self.resources))}'",
            },
            "template": self.template,
        }


def fault_tolerance(redis: Redis) -> Manifest:
    """What makes a Ray cluster outlive its head, as a part of its spec; nothing without a Redis."""
    if not redis.address:
        return {}
    options: Manifest = {"redisAddress": redis.address}
    if redis.username:
        options["redisUsername"] = {"value": redis.username}
    if redis.password_secret:
        key = {"name": redis.password_secret, "key": "password"}
        options["redisPassword"] = {"valueFrom": {"secretKeyRef": key}}
    return {"gcsFaultToleranceOptions": options}


def ray_cluster(
    head: Manifest, groups: Sequence[Group], ray_version: str, autoscaled: bool = False, head_cpus: int = 0
) -> Manifest:
    """A cluster whose head runs nothing but what is pinned to it, unless it has CPUs."""
    cluster: Manifest = {
        "rayVersion": ray_version,
        "headGroupSpec": {
            "rayStartParams": {
                "num-cpus": str(head_cpus),
                "dashboard-host": "0.0.0.0",
                "object-store-memory": str(OBJECT_STORE_BYTES),
            },
            "template": head,
        },
        "workerGroupSpecs": [group.manifest() for group in groups],
    }
    if autoscaled:
        cluster["enableInTreeAutoscaling"] = True
        cluster["autoscalerOptions"] = {
            "version": "v2",
            "idleTimeoutSeconds": 300,
            "securityContext": security(),
            "resources": resources(0.5, "512Mi"),
        }
    return cluster


def serve_yaml(config: Mapping[str, Any]) -> str:
    """`serveConfigV2` is text. JSON is YAML, and the same config is the same text."""
    return json.dumps(config, sort_keys=True, indent=1)


def ray_service_body(config: Mapping[str, Any], upgrade: str, cluster: Manifest) -> Manifest:
    """The body of a RayService. `upgrade`: KubeRay's way to bring about a changed cluster."""
    return {
        "spec": {
            "serveConfigV2": serve_yaml(config),
            "upgradeStrategy": {"type": upgrade},
            "excludeHeadPodFromServeSvc": True,
            "rayClusterConfig": cluster,
        }
    }
