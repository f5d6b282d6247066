"""Random histories of a BlendService: a person's edits, right and wrong ones, and failures of the cluster.

The last spec is good and the failures end. `docs/operate/repairs.md` lists `MISTAKES` and `FAILURES`.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from kintsugi.core.errors import KintsugiError
from kintsugi_operator.api.manifest import API_VERSION
from kintsugi_operator.controller.metrics import OperatorMetrics
from kintsugi_operator.controller.reconcile import Reconciler
from kintsugi_operator.objects.names import LABEL_ROLE
from kintsugi_operator.observed.views import is_pod_ready, label_of
from kintsugi_operator.operator import OperatorOptions
from tests.fakes.cluster import FakeWeb
from tests.simulation.kubernetes import IMAGES, Borrowed, ModelCluster, Node

Spec = dict[str, Any]
Edit = Callable[[Spec], None]
EDITS_MAX = 5
LOOKS_BETWEEN = (1, 2, 4, 8)
END_S_MAX = 1800.0
"""Time from the last edit, when all failures have ended, to a service that is well again."""
STEP_S = 10.0


def _template(spec: Spec, role: str, **fields: Any) -> None:
    spec["expert"].setdefault("podTemplates", {})[role] = fields


NOWHERE = {"nodeSelector": {"pool": "nobody-has-it"}}
MISTAKES: dict[str, Edit] = {
    "an image tag that nobody pushed": lambda spec: spec.update(image="r/k/serving:typo"),
    "a store image that nobody pushed": lambda spec: spec["store"].update(image="r/k/store:typo"),
    "a version of Ray that the image lacks": lambda spec: spec["expert"].update(rayVersion="2.99.0"),
    "a node selector of shards that matches no node": lambda spec: _template(spec, "store", **NOWHERE),
    "a node selector of engines that matches no node": lambda spec: _template(spec, "engines", **NOWHERE),
    "a node selector of gateways that matches no node": lambda spec: _template(spec, "gateway", **NOWHERE),
    "a node selector of heads that matches no node": lambda spec: _template(spec, "heads", **NOWHERE),
    "a PriorityClass that does not exist": lambda spec: _template(spec, "store", priorityClassName="typo"),
    "a Secret with certificates that nobody made": lambda spec: spec["gateway"].update(tlsSecret="typo"),
    "a Secret of the store that nobody made": lambda spec: spec["store"].update(tlsSecret="typo"),
    "a claim with checkpoints that nobody made": lambda spec: spec["model"].update(volumeClaim="typo"),
    "a storage class that does not exist": lambda spec: _volumes(spec).update(storageClass="typo"),
    "a tier's storage class that does not exist": lambda spec: _add_tier(spec, storageClass="typo"),
    "a volume that no disk has room for": lambda spec: _volumes(spec).update(dataGib=1024.0),
    "a volume that shrinks": lambda spec: _volumes(spec).update(dataGib=0.5),
    "more memory than a node has": lambda spec: spec["engines"].update(memory="900Gi"),
    "too little memory for an engine": lambda spec: spec["engines"].update(memory="3Gi"),
    "more CPUs for shards than a node has": lambda spec: spec["store"].update(cpus=900),
    "more GPUs than a node has": lambda spec: spec["engines"].update(gpus=16),
    "an argument that vLLM does not have": lambda spec: spec["engines"]["vllm"].update(max_modl_len=512),
    "a port that Ray needs": lambda spec: spec["gateway"].update(httpPort=8265),
    "one rank more than there are GPUs": lambda spec: spec["engines"]["vllm"].update(tensor_parallel_size=32),
}


def _volumes(spec: Spec) -> Spec:
    found: Spec = spec["store"]["expert"]["volumes"]
    return found


def _add_tier(spec: Spec, **fields: Any) -> None:
    spec["store"]["tiers"] = [
        *spec["store"]["tiers"],
        {"name": f"t{len(spec['store']['tiers'])}x", "gib": 4, **fields},
    ]


@dataclass
class History:
    """One seeded history."""

    seed: int
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        gpus = self.chance.choice([0, 1, 1, 2, 4])
        nodes = self.chance.randint(1, 3)
        self.cluster = ModelCluster(
            [
                Node(f"n{index}", {"pool": f"p{index % 2}"}, gpus if index == 0 else 0)
                for index in range(nodes)
            ]
        )
        self.gpus = gpus
        self.me = OperatorOptions("", "me", namespaces=("default",)).operator
        self.reconciler = self._start()
        self.good = self._first_spec()
        self._runner = asyncio.Runner()

    def _start(self) -> Reconciler:
        reads = Borrowed(self.cluster.api)
        clock, metrics = (lambda: self.cluster.now), OperatorMetrics()
        return Reconciler(self.cluster.api, reads, FakeWeb(), clock, self.me, metrics)

    def _first_spec(self) -> Spec:
        gpus = 1 if self.gpus else 0
        return {
            "model": {"path": "/models/small"},
            "image": "r/k/serving:1",
            "engines": {"replicas": 1, "gpus": gpus, "memory": "8Gi", "vllm": {}},
            "store": {
                "shards": self.chance.randint(1, 3),
                "tiers": [],
                "expert": {"volumes": {"dataGib": 2.0}},
            },
            "gateway": {"tokensSecret": "tokens"},
            "expert": {},
        }

    # -- edits -------------------------------------------------------------------------------------------

    def _change_for_good(self) -> None:
        """Edits that every cluster of the model can run."""
        spec, chance = self.good, self.chance
        engines_max = self.gpus or 3
        changes: list[Edit] = [
            lambda spec: spec["store"].update(shards=chance.randint(1, 3)),
            lambda spec: spec["engines"].update(replicas=chance.randint(1, engines_max)),
            lambda spec: spec.update(image=chance.choice(["r/k/serving:1", "r/k/serving:2"])),
            lambda spec: spec["engines"]["vllm"].update(max_model_len=chance.choice([512, 1024])),
            lambda spec: spec["store"].update(image=chance.choice(["", "r/k/store:2"])),
            lambda spec: spec["store"].update(ramGib=chance.choice([1, 4])),
            lambda spec: _volumes(spec).update(dataGib=_volumes(spec)["dataGib"] + 1),
            lambda spec: _template(spec, "store", nodeSelector={"pool": "p0"}),
            lambda spec: spec["gateway"].update(replicas=chance.randint(1, 2)),
            lambda spec: spec["engines"].update(memory=chance.choice(["6Gi", "8Gi"])),
        ]
        chance.choice(changes)(spec)

    def edit(self, spec: Spec, what: str) -> None:
        """A person applies a spec."""
        live = self.cluster.api.objects.get(("BlendService", "default", "acme"), {})
        self.log.append(what)
        metadata = live.get("metadata", {"name": "acme"})
        metadata["generation"] = metadata.get("generation", 0) + 1
        status = {"status": live["status"]} if "status" in live else {}
        manifest = {"apiVersion": API_VERSION, "kind": "BlendService", "metadata": metadata, **status}
        self.cluster.api.put({**manifest, "spec": copy.deepcopy(spec)})

    # -- failures ----------------------------------------------------------------------------------------

    def _fail(self) -> None:
        name = self.chance.choice(list(FAILURES))
        self.log.append(f"failure: {name}")
        FAILURES[name](self)

    def _heal(self) -> None:
        for node in self.cluster.nodes:
            node.is_alive = True
        self.cluster.pods_max, self.cluster.claims_gib_max = 1000, 1e9
        self.cluster.is_kuberay_up = True
        self.cluster.images = dict(IMAGES)

    # -- time --------------------------------------------------------------------------------------------

    def pass_time(self, looks: int) -> None:
        """The cluster and the operator act in turns."""
        for _ in range(looks):
            self.cluster.step()
            self._look()
            self.cluster.now += timedelta(seconds=STEP_S)

    def _look(self) -> None:
        before = self._rollout()
        try:
            self._runner.run(self.reconciler.service("default", "acme"))
        except KintsugiError as error:
            self.log.append(f"the look failed: {error}")
        after = self._rollout()
        if before and after and before != after and self._serves(before) and not self._serves(after):
            self.cluster.faults.append(f"revision {after} took over from {before}, which served")

    def _rollout(self) -> str:
        status = self.cluster.api.find("BlendService", "acme").get("status") or {}
        return str((status.get("rollout") or {}).get("active", ""))

    def _serves(self, revision: str) -> bool:
        found = self.cluster.api.objects.get(("RayService", "default", f"acme-{revision}"))
        return found is not None and is_pod_ready(found)

    def is_well(self) -> bool:
        """Whether the service and its store follow the spec and are ready, and nothing needs a person.
        Engines of another revision may serve if there are too few GPUs for both."""
        live = self.cluster.api.find("BlendService", "acme")
        status = live.get("status") or {}
        if status.get("observedGeneration") != live["metadata"]["generation"]:
            return False
        found = {one["type"]: one["status"] for one in status.get("conditions", [])}
        wanted = dict.fromkeys(("Ready", "StoreReady", "Valid", "ShardsUpToDate", "Reconciled"), "True")
        engines = self.good["engines"]
        if self.gpus >= 2 * engines["replicas"] * engines["gpus"]:
            wanted["RolledOut"] = "True"
        return {**wanted, "Stalled": "False"}.items() <= found.items()

    def play(self) -> str:
        """Play the whole history. Returns why it did not end well; empty if it did."""
        with self._runner:
            return self._play()

    def _play(self) -> str:
        chance = self.chance
        for index in range(chance.randint(1, EDITS_MAX)):
            if index:
                self._change_for_good()
            spec = copy.deepcopy(self.good)
            wrong = chance.sample(list(MISTAKES), chance.choice([0, 1, 1, 2]))
            for name in wrong:
                MISTAKES[name](spec)
            self.edit(spec, " and ".join(wrong) or "a good spec")
            self.pass_time(chance.choice(LOOKS_BETWEEN))
            if chance.random() < 0.4:
                self._fail()
                self.pass_time(chance.choice(LOOKS_BETWEEN))
                if chance.random() < 0.5:
                    self._heal()
        self._heal()
        self.edit(self.good, "the last, good spec")
        held = dict(self.cluster.durable)
        begun = self.cluster.now
        while not self.is_well():
            if (self.cluster.now - begun).total_seconds() > END_S_MAX:
                return f"not well {END_S_MAX:.0f} s after the last edit: {self.describe()}"
            self.pass_time(1)
        self.pass_time(2)
        lost = [name for name, count in held.items() if self.cluster.durable.get(name, 0) < count]
        faults = [*self.cluster.faults, *(f"claim {name} has lost chunks" for name in lost)]
        if not self.is_well():
            faults.append(f"well only for a moment: {self.describe()}")
        return "; ".join(faults)

    def describe(self) -> str:
        """The history, the conditions and the pods."""
        status = self.cluster.api.find("BlendService", "acme").get("status") or {}
        lines = [*self.log, str(status.get("rollout"))]
        for one in status.get("conditions", []):
            if one["status"] != "True" or one["type"] == "Stalled":
                lines.append(f"{one['type']} {one['status']} {one['reason']}: {one['message'][:300]}")
        for (kind, _, name), one in self.cluster.api.objects.items():
            if kind == "Pod":
                states = [state["state"] for state in one["status"].get("containerStatuses", [])]
                lines.append(f"{name} ready={is_pod_ready(one)} {states} {one['status'].get('conditions')}")
        return "\n".join(lines)


def _lose_node(history: History) -> None:
    history.chance.choice(history.cluster.nodes).is_alive = False


def _crash_pod(history: History) -> None:
    pods = [one for (kind, _, _), one in history.cluster.api.objects.items() if kind == "Pod"]
    if pods:
        history.cluster.crash(history.chance.choice(pods))


def _crash_store(history: History) -> None:
    for (kind, _, _), one in list(history.cluster.api.objects.items()):
        if kind == "Pod" and label_of(one, LABEL_ROLE) == "shard":
            history.cluster.crash(one)


def _lose_registry(history: History) -> None:
    history.cluster.images = {}


def _lose_status(history: History) -> None:
    history.cluster.api.find("BlendService", "acme").pop("status", None)


def _lower_quota(history: History) -> None:
    history.cluster.pods_max = history.chance.randint(0, 4)


def _lower_storage(history: History) -> None:
    history.cluster.claims_gib_max = 3.0


def _stop_kuberay(history: History) -> None:
    history.cluster.is_kuberay_up = False


def _restart_operator(history: History) -> None:
    history.reconciler = history._start()


FAILURES: dict[str, Callable[[History], None]] = {
    "a node is lost": _lose_node,
    "a process crashes": _crash_pod,
    "all shards crash": _crash_store,
    "the registry does not answer": _lose_registry,
    "the status is lost": _lose_status,
    "a quota of pods": _lower_quota,
    "a quota of storage": _lower_storage,
    "KubeRay is down": _stop_kuberay,
    "the operator restarts": _restart_operator,
}
