"""Deletes services while the operator is killed at random moments, and tells which of them drained.

KubeRay and the kubelet are played: pods stay for a random time after their RayService is gone, and nobody
else deletes them. So a service has drained if its store's RayService was there until the last engine had
ended, and the service itself until the last shard had. Everything random follows from a seed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kintsugi_operator.controller.cluster import BLEND_SERVICE, POD, RAY_JOB, RAY_SERVICE
from kintsugi_operator.objects.names import FINALIZER, LABEL_REVISION, LABEL_ROLE, LABEL_SERVICE
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.views import label_of
from tests.e2e.kubernetes.clusters import Operator, Team, until

IDENTITY = "drained"
"""A container that is restarted keeps its pod's name, and with it the Lease."""
BETWEEN_DELETES_S_MAX = 3.0
LIFE_S_MAX = 12.0
"""Of an operator's process. It takes some seconds to start, so that some are killed before they lead."""
POD_END_S_MAX = 3.0
PATIENCE_S = 300.0
POLL_S = 0.1


@dataclass
class Deleted:
    """A service that is being deleted, and what is left of it."""

    name: str
    pods: dict[str, str] = field(default_factory=dict)
    """Names of its pods by role: `engine` and `shard`."""
    ends: dict[str, float] = field(default_factory=dict)
    """When pods end, by role."""
    fault: str = ""
    """What was not in order."""
    is_over: bool = False


@dataclass(frozen=True)
class Drains:
    """What became of all deleted services."""

    seed: int
    deletes: int
    kills: int
    faults: dict[str, str]
    """What was not in order, by service."""

    @property
    def drained(self) -> int:
        return self.deletes - len(self.faults)


class Drainer:
    """Plays everybody but the operator."""

    def __init__(self, team: Team, seed: int, kubeconfig: Path | None = None) -> None:
        self._team = team
        self._seed = seed
        self._random = random.Random(seed)
        self._kubeconfig = kubeconfig
        self._kills = 0
        self._operator: Operator

    def run(self, deletes: int) -> Drains:
        """Bring services up, delete each of them, and wait until all are gone. Stops the operator."""
        self._operator = self._start()
        try:
            services = [Deleted(f"drained-{index}") for index in range(deletes)]
            self._bring_up(services)
            self._delete(services)
        finally:
            self._operator.stop()
        faults = {one.name: one.fault or "it is not gone" for one in services if one.fault or not one.is_over}
        return Drains(self._seed, deletes, self._kills, faults)

    def _start(self) -> Operator:
        return Operator(self._team, IDENTITY, self._kubeconfig)

    def _bring_up(self, services: Sequence[Deleted]) -> None:
        for one in services:
            self._team.make(one.name)
        wanted = {one.name for one in services}
        until(lambda: self._served() >= wanted, "RayServices of all", self._operator.said, PATIENCE_S)
        for ray in self._team.kube.list(RAY_SERVICE, self._team.namespace):
            self._team.is_ready(ray["metadata"]["name"])
        for one in services:
            self._make_pods(one)
        until(lambda: self._held() >= wanted, "all are held", self._operator.said, PATIENCE_S)

    def _served(self) -> set[str]:
        """Services with a RayService for the store and one for the engines."""
        found = self._team.kube.list(RAY_SERVICE, self._team.namespace)
        parts = [(label_of(one, LABEL_SERVICE), bool(label_of(one, LABEL_REVISION))) for one in found]
        return {name for name, _ in parts if {(name, True), (name, False)} <= set(parts)}

    def _held(self) -> set[str]:
        found = self._team.kube.list(BLEND_SERVICE, self._team.namespace)
        return {
            one["metadata"]["name"] for one in found if FINALIZER in one["metadata"].get("finalizers", [])
        }

    def _make_pods(self, service: Deleted) -> None:
        """An engine and a shard that are ready. Nobody schedules them."""
        tags = {LABEL_SERVICE: service.name}
        for ray in self._team.kube.list(RAY_SERVICE, self._team.namespace, **tags):
            for group in ray["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
                labels = group["template"]["metadata"]["labels"]
                role = labels[LABEL_ROLE]
                if role in ("engine", "shard") and role not in service.pods:
                    service.pods[role] = f"{service.name}-{role}"
                    self._make_pod(service.pods[role], labels, group["template"]["spec"])

    def _make_pod(self, name: str, labels: Manifest, spec: Manifest) -> None:
        where = self._team.namespace
        pod = {
            "apiVersion": "v1",
            "kind": POD.kind,
            "metadata": {"name": name, "namespace": where, "labels": labels},
            "spec": {**spec, "schedulerName": "nobody"},
        }
        self._team.kube.request("POST", POD.path(where), pod)
        ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        path = POD.path(where, name, "status")
        self._team.kube.request("PATCH", path, ready, "application/strategic-merge-patch+json")

    def _delete(self, services: Sequence[Deleted]) -> None:
        waiting, deleted = list(services), list[Deleted]()
        now = time.monotonic()
        next_delete, next_kill = now, now + self._random.uniform(0, LIFE_S_MAX)
        give_up = now + len(services) * BETWEEN_DELETES_S_MAX + PATIENCE_S
        while time.monotonic() < give_up and not all(one.is_over for one in services):
            now = time.monotonic()
            if now >= next_kill:
                self._operator.kill()
                self._kills += 1
                self._operator = self._start()
                next_kill = now + self._random.uniform(0, LIFE_S_MAX)
            if waiting and now >= next_delete:
                deleted.append(waiting.pop())
                self._team.kube.delete(BLEND_SERVICE, self._team.namespace, deleted[-1].name)
                next_delete = now + self._random.uniform(0, BETWEEN_DELETES_S_MAX)
            self.play([one for one in deleted if not one.is_over])
            time.sleep(POLL_S)

    def play(self, services: Sequence[Deleted]) -> None:
        """End pods whose RayService is gone, and look whether everything happens in order."""
        where = self._team.namespace
        # In this order: a service that is seen here had not gone when its RayServices were listed.
        rays = {
            (label_of(one, LABEL_SERVICE), "engine" if label_of(one, LABEL_REVISION) else "shard")
            for one in self._team.kube.list(RAY_SERVICE, where)
        }
        there = {one["metadata"]["name"] for one in self._team.kube.list(BLEND_SERVICE, where)}
        jobs = {label_of(one, LABEL_SERVICE) for one in self._team.kube.list(RAY_JOB, where)}
        now = time.monotonic()
        for one in services:
            if one.name not in there and one.pods:
                one.fault = one.fault or f"it was gone before its {' and '.join(one.pods)}"
            if "engine" in one.pods and (one.name, "shard") not in rays:
                one.fault = one.fault or "its store was deleted before its engines had ended"
            for role in [role for role in one.pods if (one.name, role) not in rays]:
                if now >= one.ends.setdefault(role, now + self._random.uniform(0, POD_END_S_MAX)):
                    self._team.kube.delete(POD, where, one.pods.pop(role))
            left = one.pods or one.name in there or one.name in jobs
            one.is_over = not left and not any((one.name, role) in rays for role in ("engine", "shard"))
