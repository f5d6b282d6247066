"""Kubernetes as `controller.cluster.ApiServer` shows it, in memory: for tests of the shell.

Not an API server: it checks nothing and defaults nothing but what `defaults` says. Applying merges maps, as
server-side apply does with fields of one manager, and replaces lists.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kintsugi.core.errors import Unavailable
from kintsugi_operator.api.manifest import API_VERSION
from kintsugi_operator.controller.cluster import (
    BY_KIND,
    NAMESPACE,
    POD,
    RAY_CLUSTER,
    ApiServer,
    Refused,
    Resource,
)
from kintsugi_operator.controller.scrape import Web
from kintsugi_operator.objects.base import RAY_API_VERSION
from kintsugi_operator.objects.pods import Manifest

OURS = frozenset({"blendservices", "corpusprecomputes"})
RAY = frozenset({"rayservices", "rayjobs", "rayclusters", "raycronjobs"})


class FakeCluster(ApiServer):
    """Objects by kind, namespace and name."""

    def __init__(self, served: frozenset[str] = RAY) -> None:
        self.objects: dict[tuple[str, str, str], Manifest] = {}
        self.ray = served
        self.ours = OURS
        """Kinds of ours that are served."""
        self.terminating: set[str] = set()
        """Kinds whose CRD is deleted and waits for its objects."""
        self.writes: Counter[str] = Counter()
        """By verb and kind."""
        self.evicted: list[str] = []
        self.is_down = False
        self.used: set[tuple[str, str, str]] = set()
        """Group, resource and verb of every request: what an API server would ask rights for."""
        self.may_evict = True
        self.defaults: Callable[[Manifest], None] = lambda manifest: None
        """What the API server would add to a stored object."""
        self.refuse: Callable[[Manifest], str] = lambda manifest: ""
        """Why it would not store it."""
        self.on_change: Callable[[str, Manifest], None] = lambda type_, changed: None
        """Gets every change as a watch would: `ADDED`, `MODIFIED` or `DELETED`, and a copy of the object."""
        self.on_unserved: Callable[[str], None] = lambda plural: None
        """Gets the plural of a kind that is not served any more."""
        self.version = 0
        """`resourceVersion` of the latest change."""
        self.leaving_namespaces: set[str] = set()

    def put(self, manifest: Manifest) -> Manifest:
        """Somebody else makes or replaces an object."""
        kept = copy.deepcopy(manifest)
        metadata = kept["metadata"]
        metadata.setdefault("namespace", "default")
        metadata.setdefault("uid", f"uid-{kept['kind']}-{metadata['name']}")
        metadata.setdefault("generation", 1)
        key = (kept["kind"], metadata["namespace"], metadata["name"])
        type_ = "MODIFIED" if key in self.objects else "ADDED"
        self.objects[key] = kept
        self._stamp(kept, type_)
        return kept

    def serves(self, resource: Resource) -> bool:
        """Whether the kind is served. Kubernetes' own always are."""
        custom = {RAY_API_VERSION: self.ray, API_VERSION: self.ours}
        return resource.plural in custom.get(resource.api_version, {resource.plural})

    def install(self, resource: Resource) -> None:
        """Somebody applies the kind's CRD."""
        self.ray |= {resource.plural} if resource.api_version == RAY_API_VERSION else set()
        self.ours |= {resource.plural} if resource.api_version == API_VERSION else set()

    def uninstall(self, resource: Resource) -> None:
        """Somebody deletes the kind's CRD: its objects are deleted, and it is served until all are gone."""
        self.terminating.add(resource.plural)
        for one in [one for one in self.objects.values() if one["kind"] == resource.kind]:
            self._collect(one)
        self._finish_uninstall(resource)

    def delete_namespace(self, name: str) -> None:
        """Somebody deletes a namespace: nothing new comes in, and what is in it is deleted, pods first."""
        self.leaving_namespaces.add(name)
        found = [one for (_, where, _), one in self.objects.items() if where == name]
        for one in sorted(found, key=lambda one: bool(one["kind"] != POD.kind)):
            self._collect(one)

    def lose(self, kind: str, name: str, namespace: str = "default") -> None:
        """An object is gone, and nothing that it owns."""
        self._stamp(self.objects.pop((kind, namespace, name)), "DELETED")

    def announce(self, stored: Manifest) -> None:
        """Somebody else has changed a stored object."""
        self._stamp(stored)

    def find(self, kind: str, name: str, namespace: str = "default") -> Manifest:
        """The stored object itself: a test may change it."""
        return self.objects[kind, namespace, name]

    def named(self, kind: str) -> list[str]:
        """Names of all objects of a kind."""
        return sorted(name for found, _, name in self.objects if found == kind)

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        self._uses(resource, "get")
        return self.read(resource, namespace, name)

    async def list(self, resource: Resource, namespace: str, labels: Mapping[str, str]) -> list[Manifest]:
        self._uses(resource, "list")
        return list(self.select(resource, namespace, labels))

    def read(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        """A copy of an object, whoever wants it."""
        if self.is_down:
            raise Unavailable("the API server does not answer")
        if resource is NAMESPACE:
            leaving = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if name in self.leaving_namespaces else {}
            return {"kind": NAMESPACE.kind, "metadata": {"name": name, **leaving}}
        return copy.deepcopy(self.objects.get((resource.kind, namespace, name)))

    def select(
        self, resource: Resource, namespace: str, labels: Mapping[str, str | None]
    ) -> Sequence[Manifest]:
        """Copies of the objects of a namespace, or of all without one, that have the labels. A label without
        a value may have any."""
        return [
            copy.deepcopy(one)
            for (kind, where, _), one in self.objects.items()
            if kind == resource.kind and namespace in ("", where) and has_labels(one, labels)
        ]

    async def apply(self, manifest: Manifest) -> Manifest:
        for verb in ("create", "patch"):
            self._uses(BY_KIND[manifest["kind"]], verb)
        if not self.serves(BY_KIND[manifest["kind"]]):
            raise Refused(
                f"PATCH {manifest['kind']}", 404, "the server could not find the requested resource"
            )
        if problem := self.refuse(manifest):
            raise Refused(f"PATCH {manifest['kind']}", 422, problem)
        self.writes[f"apply {manifest['kind']}"] += 1
        metadata = manifest["metadata"]
        key = (manifest["kind"], metadata["namespace"], metadata["name"])
        stored = self.objects.get(key)
        if stored is None:
            self._check_open(metadata["namespace"])
            stored = self.put(manifest)
        else:
            _merge(stored, copy.deepcopy(manifest))
            self._stamp(stored)
        self.defaults(stored)
        return copy.deepcopy(stored)

    async def apply_status(self, live: Manifest, status: Manifest) -> Manifest:
        self._uses(BY_KIND[live["kind"]], "patch", "status")
        self.writes[f"status {live['kind']}"] += 1
        metadata = live["metadata"]
        stored = self._stored(BY_KIND[live["kind"]], metadata["namespace"], metadata["name"], live)
        stored["status"] = copy.deepcopy(status)
        self._stamp(stored)
        return copy.deepcopy(stored)

    async def merge(self, resource: Resource, namespace: str, name: str, patch: Manifest) -> Manifest:
        self._uses(resource, "patch")
        self.writes[f"merge {resource.kind}"] += 1
        stored = self._stored(resource, namespace, name, patch)
        _merge(stored, copy.deepcopy(patch))
        self._keep_or_collect(stored)
        return copy.deepcopy(stored)

    def _stored(self, resource: Resource, namespace: str, name: str, patch: Manifest) -> Manifest:
        """The object that a patch is for. Refuses a patch for another version of it."""
        stored = self.objects.get((resource.kind, namespace, name))
        if stored is None:
            raise Refused(f"PATCH {resource.kind} {name}", 404, "not found")
        wanted = patch.get("metadata", {}).get("resourceVersion")
        if wanted is not None and wanted != stored["metadata"]["resourceVersion"]:
            raise Refused(f"PATCH {resource.kind} {name}", 409, "the object has been modified")
        return stored

    async def create(self, manifest: Manifest) -> None:
        metadata = manifest["metadata"]
        if (manifest["kind"], metadata["namespace"], metadata["name"]) in self.objects:
            raise Refused("POST", 409, "it exists")
        self._check_open(metadata["namespace"])
        self.writes[f"create {manifest['kind']}"] += 1
        self.put(manifest)

    async def replace(self, manifest: Manifest) -> None:
        metadata = manifest["metadata"]
        stored = self.objects[manifest["kind"], metadata["namespace"], metadata["name"]]
        if stored["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            raise Refused("PUT", 409, "the object has been modified")
        self.writes[f"replace {manifest['kind']}"] += 1
        self.put(manifest)

    async def delete(self, resource: Resource, namespace: str, name: str) -> None:
        self._uses(resource, "delete")
        self.writes[f"delete {resource.kind}"] += 1
        stored = self.objects.get((resource.kind, namespace, name))
        if stored is not None:
            self._collect(stored)

    async def evict(self, namespace: str, pod: str) -> bool:
        self._uses(POD, "create", "eviction")
        self.writes["evict Pod"] += 1
        if self.may_evict:
            self.evicted.append(pod)
            self.lose(POD.kind, pod, namespace)
        return self.may_evict

    def _check_open(self, namespace: str) -> None:
        if namespace in self.leaving_namespaces:
            raise Refused("POST", 403, f"namespace {namespace} is being terminated")

    def _uses(self, resource: Resource, verb: str, sub: str = "") -> None:
        group = resource.api_version.split("/")[0] if "/" in resource.api_version else ""
        self.used.add((group, f"{resource.plural}/{sub}" if sub else resource.plural, verb))

    def _stamp(self, stored: Manifest, type_: str = "MODIFIED") -> None:
        self.version += 1
        stored["metadata"]["resourceVersion"] = str(self.version)
        self.on_change(type_, copy.deepcopy(stored))

    def _keep_or_collect(self, stored: Manifest) -> None:
        if "deletionTimestamp" in stored["metadata"] and not stored["metadata"].get("finalizers"):
            self._collect(stored)
        else:
            self._stamp(stored)

    def _collect(self, stored: Manifest) -> None:
        """With all that it owns. What has a finalizer is only marked."""
        metadata = stored["metadata"]
        if metadata.get("finalizers"):
            if "deletionTimestamp" not in metadata:
                metadata["deletionTimestamp"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                self._stamp(stored)
            return
        if self.objects.pop((stored["kind"], metadata["namespace"], metadata["name"]), None) is None:
            return
        self._stamp(stored, "DELETED")
        self._finish_uninstall(BY_KIND.get(stored["kind"], RAY_CLUSTER))
        for one in list(self.objects.values()):
            if any(ref["uid"] == metadata["uid"] for ref in one["metadata"].get("ownerReferences", [])):
                self._collect(one)

    def _finish_uninstall(self, resource: Resource) -> None:
        is_empty = all(kind != resource.kind for kind, _, _ in self.objects)
        if resource.plural in self.terminating and is_empty:
            self.terminating.discard(resource.plural)
            self.ray -= {resource.plural}
            self.ours -= {resource.plural}
            self.on_unserved(resource.plural)


class FakeReads:
    """What watches have told, if they are never behind: the cluster's objects, without a request."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        return self._cluster.read(resource, namespace, name)

    async def list(self, resource: Resource, namespace: str, labels: Mapping[str, str]) -> Sequence[Manifest]:
        return self._cluster.select(resource, namespace, labels)

    def serves(self, resource: Resource) -> bool:
        return self._cluster.serves(resource)


class FakeKubeRay:
    """What KubeRay does to RayServices and RayJobs, as far as the operator sees it."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    def serve(self, name: str, namespace: str = "default") -> None:
        """A RayService is up: its RayCluster, its pods, its condition."""
        service = self._cluster.find("RayService", name, namespace)
        config = service["spec"]["rayClusterConfig"]
        annotations = dict(service["metadata"]["annotations"])
        existing = service.get("status", {}).get("activeServiceStatus", {}).get("rayClusterName")
        if existing is None:
            labels = dict(service["metadata"]["labels"])
            cluster = {"name": f"{name}-c1", "namespace": namespace, "annotations": annotations}
            cluster["labels"] = labels
            self._cluster.put({"kind": RAY_CLUSTER.kind, "metadata": cluster, "spec": copy.deepcopy(config)})
        service["status"] = {
            "conditions": [{"type": "Ready", "status": "True"}],
            "activeServiceStatus": {"rayClusterName": existing or f"{name}-c1"},
        }
        self._cluster.announce(service)
        self.pods(existing or f"{name}-c1", namespace)

    def pods(self, cluster: str, namespace: str = "default") -> None:
        """What is missing of a RayCluster's pods is made and becomes ready."""
        spec = self._cluster.find(RAY_CLUSTER.kind, cluster, namespace)["spec"]
        for group in spec["workerGroupSpecs"]:
            for index in range(group["replicas"]):
                name = f"{cluster}-{group['groupName']}-{index}"
                if (POD.kind, namespace, name) not in self._cluster.objects:
                    labels = dict(group["template"]["metadata"]["labels"])
                    status = {"podIP": "10.0.0.9", "conditions": [{"type": "Ready", "status": "True"}]}
                    metadata = {"name": name, "namespace": namespace, "labels": labels}
                    metadata["annotations"] = dict(group["template"]["metadata"].get("annotations", {}))
                    self._cluster.put({"kind": POD.kind, "metadata": metadata, "status": status})

    def finish(
        self, job: str, status: str = "SUCCEEDED", namespace: str = "default", message: str = ""
    ) -> None:
        """A RayJob has ended."""
        manifest = self._cluster.find("RayJob", job, namespace)
        deployment = "Complete" if status == "SUCCEEDED" else "Failed"
        manifest["status"] = {
            "jobStatus": status,
            "jobDeploymentStatus": deployment,
            "dashboardURL": f"{job}-head-svc.{namespace}.svc:8265",
            "jobId": f"{job}-1",
            "message": message,
        }
        self._cluster.announce(manifest)


class FakeWeb(Web):
    """Pages by URL; everything else is silent."""

    def __init__(self, pages: Mapping[str, str] | None = None) -> None:
        self.pages = dict(pages or {})

    async def fetch(self, url: str) -> str:
        return self.pages.get(url, "")


def has_labels(manifest: Manifest, labels: Mapping[str, str | None]) -> bool:
    """Whether an object has all the labels. One without a value may have any."""
    found = manifest["metadata"].get("labels") or {}
    return all(key in found if value is None else found.get(key) == value for key, value in labels.items())


def _merge(stored: Any, patch: Any) -> None:
    """A JSON merge patch."""
    for key, value in patch.items():
        if value is None:
            stored.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(stored.get(key), dict):
            _merge(stored[key], value)
        else:
            stored[key] = value
