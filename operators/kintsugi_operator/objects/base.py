"""Builds metadata and owner references of all objects, and the parts of Ray clusters."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kintsugi_operator.api.blend_service import Redis
from kintsugi_operator.api.manifest import API_VERSION
from kintsugi_operator.objects.names import ANNOTATION_VOLUME
from kintsugi_operator.objects.pods import Manifest, claim_spec, mebibytes, resources, security

RAY_API_VERSION = "ray.io/v1"
OBJECT_STORE_BYTES = 256 << 20
"""Size of Ray's object store. Chunk KV never passes through it."""
GROUP_PODS_MAX = 1024
"""Maximum number of pods in an autoscaled worker group. Serve's replicas decide the number."""


@dataclass(frozen=True)
class Owner:
    """A BlendService or CorpusPrecompute that owns other objects."""

    kind: str
    name: str
    namespace: str
    uid: str

    def reference(self) -> Manifest:
        """An item of `ownerReferences`: Kubernetes deletes owned objects with their owner."""
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
    """Make an object, without its digest."""
    metadata: Manifest = {"name": name, "namespace": owner.namespace, "labels": dict(labels)}
    if owned:
        metadata["ownerReferences"] = [owner.reference()]
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}


def make_claim(
    owner: Owner, name: str, labels: Mapping[str, str], gib: float, storage_class: str, owned: bool = True
) -> Manifest:
    """Make a PersistentVolumeClaim, without its digest."""
    body = {"spec": {**claim_spec(gib, storage_class), "volumeMode": "Filesystem"}}
    asked = {ANNOTATION_VOLUME: f"{storage_class}/{mebibytes(gib)}"}
    return make_object(owner, "PersistentVolumeClaim", name, labels, body, owned=owned, annotations=asked)


def worker_group(
    name: str,
    template: Manifest,
    replicas: int,
    resources: Mapping[str, float],
    cpus: float,
    gpus: int = 0,
    fixed: bool = False,
) -> Manifest:
    """A worker group of a Ray cluster. `resources`: Ray's custom resources of each pod. `fixed`: without
    autoscaling."""
    return {
        "groupName": name,
        "replicas": replicas,
        "minReplicas": replicas if fixed else 0,
        "maxReplicas": replicas if fixed else GROUP_PODS_MAX,
        "numOfHosts": 1,
        "rayStartParams": {
            "num-cpus": str(math.ceil(cpus)),
            "num-gpus": str(gpus),
            "object-store-memory": str(OBJECT_STORE_BYTES),
            # KubeRay inserts it into a shell command line.
            "resources": f"'{json.dumps(dict(resources))}'",
        },
        "template": template,
    }


def fault_tolerance(redis: Redis) -> Manifest:
    """Return the fields with which a Ray cluster survives the loss of its head; none without a Redis."""
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
    head: Manifest, groups: Sequence[Manifest], ray_version: str, autoscaled: bool = False
) -> Manifest:
    """The spec of a Ray cluster. Its head has no CPUs for Ray, so it runs only what is pinned to it."""
    cluster: Manifest = {
        "rayVersion": ray_version,
        "headGroupSpec": {
            "rayStartParams": {
                "num-cpus": "0",
                "dashboard-host": "0.0.0.0",
                "object-store-memory": str(OBJECT_STORE_BYTES),
            },
            "template": head,
        },
        "workerGroupSpecs": list(groups),
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
    """The text of `serveConfigV2`: sorted JSON, which is YAML, so that equal configurations have equal
    texts."""
    return json.dumps(config, sort_keys=True, indent=1)


def ray_service_body(config: Mapping[str, Any], upgrade: str, cluster: Manifest) -> Manifest:
    """The body of a RayService. `upgrade`: KubeRay's upgrade strategy for a changed cluster."""
    return {
        "spec": {
            "serveConfigV2": serve_yaml(config),
            "upgradeStrategy": {"type": upgrade},
            "excludeHeadPodFromServeSvc": True,
            "rayClusterConfig": cluster,
        }
    }
