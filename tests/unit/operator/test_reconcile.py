"""The shell: what is read, what is written, and when nothing is."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Coroutine
from datetime import datetime, timedelta
from typing import Any

import pytest

from kintsugi_operator.api.manifest import API_VERSION
from kintsugi_operator.controller.cluster import Refused
from kintsugi_operator.controller.finalizer import set_finalizer
from kintsugi_operator.controller.metrics import OperatorMetrics
from kintsugi_operator.controller.reconcile import LATER_S, Reconciler
from kintsugi_operator.desired.compare import drift
from kintsugi_operator.desired.rollout import RETIRE_AFTER_S
from kintsugi_operator.objects.deployed import EngineRevision
from kintsugi_operator.objects.names import FINALIZER, LABEL_REVISION
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.operator import OperatorOptions
from tests.fakes.cluster import FakeCluster, FakeKubeRay, FakeReads, FakeWeb
from tests.unit.operator.specs import NOW, merged, spec_of

OLD = EngineRevision.of(spec_of()).name


class World:
    """An operator, the cluster that it sees, and a clock that a test moves."""

    def __init__(self, **fake: Any) -> None:
        self.cluster = FakeCluster(**fake)
        self.kuberay = FakeKubeRay(self.cluster)
        self.web = FakeWeb()
        self.now = NOW
        self.me = OperatorOptions("", "me", namespaces=("default",)).operator
        self.reconciler = self.restart()

    def restart(self, metrics: OperatorMetrics | None = None) -> Reconciler:
        """A new process."""
        reads = FakeReads(self.cluster)
        return Reconciler(self.cluster, reads, self.web, self._clock, self.me, metrics or OperatorMetrics())

    def _clock(self) -> datetime:
        return self.now

    def make(self, name: str = "acme", **parts: Any) -> Manifest:
        """A person applies a BlendService."""
        spec = merged(parts)
        existing = self.cluster.objects.get(("BlendService", "default", name), {})
        manifest = {
            "apiVersion": API_VERSION,
            "kind": "BlendService",
            **copy.deepcopy({key: existing[key] for key in ("status",) if key in existing}),
            "metadata": existing.get("metadata", {"name": name}),
            "spec": copy.deepcopy(spec),
        }
        return self.cluster.put(manifest)

    def fill(self, name: str = "docs", **values: Any) -> Manifest:
        """A person applies a CorpusPrecompute."""
        spec = {"service": "acme", "namespace": "tenant", "source": "/corpus", **values}
        metadata = {"name": name}
        return self.cluster.put(
            {"apiVersion": API_VERSION, "kind": "CorpusPrecompute", "metadata": metadata, "spec": spec}
        )

    def look(self, name: str = "acme") -> float | None:
        return run(self.reconciler.service("default", name))

    def settle(self, name: str = "acme", times: int = 6) -> None:
        """Until nothing is written any more."""
        for _ in range(times):
            before = self.cluster.writes.total()
            self.look(name)
            if self.cluster.writes.total() == before:
                return
        raise AssertionError(f"still writing: {self.cluster.writes}")

    def up(self, **parts: Any) -> None:
        """A service that serves."""
        self.make(**parts)
        self.settle()
        self.kuberay.serve("acme-store")
        self.kuberay.serve(f"acme-{OLD}")
        self.settle()

    def condition(self, type_: str, name: str = "acme", kind: str = "BlendService") -> dict[str, Any]:
        conditions = self.cluster.find(kind, name)["status"]["conditions"]
        (found,) = [one for one in conditions if one["type"] == type_]
        return found

    def lose_pods(self, of: str) -> None:
        """Kubernetes has ended those whose names hold that."""
        for name in [name for name in self.cluster.named("Pod") if of in name]:
            self.cluster.lose("Pod", name)

    def serving(self) -> str:
        return str(self.cluster.find("Service", "acme-grpc")["spec"]["selector"][LABEL_REVISION])


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


@pytest.fixture
def world() -> World:
    return World()


def test_a_service_becomes_objects_and_then_nothing_is_written(world: World) -> None:
    world.up()
    assert world.condition("Ready")["status"] == "True"
    assert FINALIZER in world.cluster.find("BlendService", "acme")["metadata"]["finalizers"]
    before = world.cluster.writes.copy()
    world.now += timedelta(hours=1)
    world.look()
    assert world.cluster.writes == before


def metrics_page(**values: float) -> str:
    return "".join(
        f"# TYPE kintsugi_quality_{name} gauge\nkintsugi_quality_{name} {value}\n"
        for name, value in values.items()
    )


@pytest.mark.parametrize(
    ("page", "status", "message"),
    [
        (
            metrics_page(open=0, pairs_missing=33, loss=0.05),
            "False",
            "until about 40 more of them are measured",
        ),
        (metrics_page(open=0, loss=0.61), "False", "a mean loss of 0.61, too much to pass"),
        (
            metrics_page(open=1, cost=0.66, loss=0.05),
            "True",
            "compute 66% of a full prefill, with a mean loss of 0.05",
        ),
    ],
)
def test_the_service_says_whether_it_blends(world: World, page: str, status: str, message: str) -> None:
    world.up()
    world.web.pages["http://10.0.0.9:7580/metrics"] = page
    waits_s = world.look()
    told = world.condition("Blending")
    assert told["status"] == status
    assert message in told["message"]
    assert waits_s == LATER_S, "learning is not a change in progress"
    assert world.condition("Reconciling")["status"] == "False"
    before = world.cluster.writes.copy()
    world.web.pages["http://10.0.0.9:7580/metrics"] = page.replace("missing 33", "missing 31")
    world.look()
    assert world.cluster.writes == before, "few reconciliations write"
    world.web.pages.clear()
    world.look()
    assert world.condition("Blending") == told, "an engine that does not answer takes nothing back"


def test_an_engine_that_does_not_learn_and_other_programs_pages_say_nothing(world: World) -> None:
    world.up()
    for page in ("", "vllm_running 1\n", "<html>no metrics</html>", 'kintsugi_quality_dropped{a="b"} 1\n'):
        world.web.pages["http://10.0.0.9:7580/metrics"] = page
        world.look()
    conditions = world.cluster.find("BlendService", "acme")["status"]["conditions"]
    assert "Blending" not in [one["type"] for one in conditions]


def test_defaults_of_the_api_server_are_not_drift(world: World) -> None:
    def defaults(stored: Manifest) -> None:
        if stored["kind"] == "Service":
            stored["spec"].update({"clusterIP": "10.1.1.1", "sessionAffinity": "None"})
        if stored["kind"] == "PersistentVolumeClaim":
            stored["spec"]["resources"]["requests"]["storage"] = "1Gi"
        if stored["kind"] == "NetworkPolicy":
            stored["spec"] = {key: value for key, value in stored["spec"].items() if value != []}

    world.cluster.defaults = defaults
    world.up()
    before = world.cluster.writes.copy()
    world.look()
    assert world.cluster.writes == before


def test_quantities_are_compared_as_kubernetes_writes_them() -> None:
    for ours, theirs in (("1073741824Mi", "1Pi"), ("2000m", "2"), ("1.5Gi", "1536Mi")):
        assert drift({"storage": ours}, {"storage": theirs}) is None
    assert drift({"storage": "2Gi"}, {"storage": "2Gi of it"}) == ".storage"


def test_drift_is_corrected(world: World) -> None:
    world.up()
    world.cluster.find("Service", "acme-grpc")["spec"]["selector"][LABEL_REVISION] = "elsewhere"
    del world.cluster.objects["NetworkPolicy", "default", "acme-deny"]
    world.look()
    assert world.serving() == OLD
    assert "acme-deny" in world.cluster.named("NetworkPolicy")


def test_a_field_that_another_decides_about_is_not_fought_over(world: World) -> None:
    def stubborn(stored: Manifest) -> None:
        if stored["kind"] == "Service":
            stored["spec"]["type"] = "NodePort"

    world.cluster.defaults = stubborn
    world.up()
    before = world.cluster.writes.copy()
    world.look()
    world.look()
    assert world.cluster.writes == before


def test_a_claim_that_somebody_has_enlarged_stays_so(world: World) -> None:
    """To ask for less is refused, and would keep everything else from being applied."""
    world.up()
    claim = world.cluster.find("PersistentVolumeClaim", "acme-data-0")
    claim["spec"]["resources"]["requests"]["storage"] = "5Gi"
    before = world.cluster.writes.copy()
    world.look()
    assert world.cluster.writes == before
    world.make(store={"expert": {"volumes": {"dataGib": 2}}})
    world.settle()
    claim = world.cluster.find("PersistentVolumeClaim", "acme-data-0")
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"
    world.make(store={"expert": {"volumes": {"dataGib": 8}}})
    world.settle()
    claim = world.cluster.find("PersistentVolumeClaim", "acme-data-0")
    assert claim["spec"]["resources"]["requests"]["storage"] == "8192Mi"


def test_policies_that_are_switched_off_go(world: World) -> None:
    world.up()
    world.make(network={"policies": False}, store={"insecure": True})
    world.settle()
    assert world.cluster.named("NetworkPolicy") == []


def test_a_bad_spec_leaves_what_runs_alone(world: World) -> None:
    world.up()
    before = copy.deepcopy(world.cluster.objects)
    world.make(gateway={"httpPort": 7500})
    world.look()
    valid = world.condition("Valid")
    assert (valid["status"], valid["reason"]) == ("False", "InvalidSpec")
    assert "httpPort" in valid["message"]
    assert (world.condition("Ready")["status"], world.condition("Ready")["reason"]) == (
        "False",
        "InvalidSpec",
    )
    for key, one in before.items():
        if key[0] != "BlendService":
            assert world.cluster.objects[key] == one
    world.make()
    world.settle()
    assert world.condition("Valid")["status"] == "True"
    assert world.condition("Ready")["status"] == "True"


def test_another_model_serves_once_its_engines_are_ready(world: World) -> None:
    world.up()
    store = copy.deepcopy(world.cluster.find("RayService", "acme-store")["spec"])
    world.make(model={"path": "/models/other"}, image="registry.example/kintsugi/serving-cpu:2")
    world.settle()
    new = EngineRevision.of(
        spec_of(model={"path": "/models/other"}, image="registry.example/kintsugi/serving-cpu:2")
    ).name
    assert {f"acme-{OLD}", f"acme-{new}"} <= set(world.cluster.named("RayService"))
    assert world.serving() == OLD
    assert world.condition("RolledOut")["reason"] == "Starting"
    world.kuberay.serve(f"acme-{new}")
    world.settle()
    assert world.serving() == new
    assert world.cluster.named("RayJob") == []
    # The old engines end what they began, then go.
    assert f"acme-{OLD}" in world.cluster.named("RayService")
    world.now += timedelta(seconds=RETIRE_AFTER_S + 1)
    world.settle()
    assert world.cluster.named("RayService") == sorted([f"acme-{new}", "acme-store"])
    assert f"acme-revision-{OLD}" not in world.cluster.named("ConfigMap")
    assert world.cluster.find("RayService", "acme-store")["spec"] == store
    assert not world.cluster.evicted


def test_a_restart_in_the_middle_changes_nothing(world: World) -> None:
    """A new process, and even a lost status: the cluster knows enough."""
    world.up()
    world.make(model={"path": "/models/other"})
    world.settle()
    world.reconciler = world.restart()
    before = world.cluster.writes.copy()
    world.look()
    assert world.cluster.writes == before
    del world.cluster.find("BlendService", "acme")["status"]
    world.settle()
    assert world.serving() == OLD
    assert world.cluster.find("BlendService", "acme")["status"]["rollout"]["active"] == OLD
    assert len(world.cluster.named("RayService")) == 3


def test_a_shard_upgrade_restarts_one_at_a_time(world: World) -> None:
    world.up(store={"shards": 2})
    world.kuberay.serve("acme-store")
    world.settle()
    assert world.condition("StoreReady")["status"] == "True"
    world.make(store={"shards": 2, "ramGib": 8})
    config = world.cluster.find("RayService", "acme-store")["spec"]["serveConfigV2"]
    world.look()  # the RayService, and its RayCluster, which KubeRay leaves as it is
    assert world.cluster.evicted == []
    world.look()
    assert world.cluster.evicted == ["acme-store-c1-shard-0-0"]
    world.look()
    world.look()
    assert len(world.cluster.evicted) == 1
    # Shards hear of their new size only once every pod has it.
    assert world.cluster.find("RayService", "acme-store")["spec"]["serveConfigV2"] == config
    assert world.condition("ShardsUpToDate")["reason"] == "Upgrading"
    world.kuberay.pods("acme-store-c1")
    world.look()
    assert world.cluster.evicted[1:] == ["acme-store-c1-shard-1-0"]
    world.kuberay.pods("acme-store-c1")
    world.settle()
    assert len(world.cluster.evicted) == 2
    assert world.cluster.find("RayService", "acme-store")["spec"]["serveConfigV2"] != config
    assert world.condition("ShardsUpToDate")["status"] == "True"


def test_a_head_keeps_nothing_that_is_not_wanted_any_more(world: World) -> None:
    world.up(expert={"podTemplates": {"heads": {"nodeSelector": {"old": "a", "both": "b"}}}})
    world.kuberay.serve("acme-store")
    world.make(expert={"podTemplates": {"heads": {"nodeSelector": {"new": "c", "both": "b"}}}})
    world.look()
    world.look()
    (cluster,) = [name for name in world.cluster.named("RayCluster") if name.startswith("acme-store")]
    head = world.cluster.find("RayCluster", cluster)["spec"]["headGroupSpec"]["template"]["spec"]
    assert head["nodeSelector"] == {"new": "c", "both": "b"}


def test_a_budget_counts_the_engines_that_are_there(world: World) -> None:
    world.up()
    labels = {"kintsugi.dev/service": "acme", "kintsugi.dev/role": "engine", "kintsugi.dev/revision": OLD}
    for index in range(3):
        metadata = {"name": f"more-{index}", "labels": labels}
        world.cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata})
    world.cluster.find("Pod", "more-2")["metadata"]["deletionTimestamp"] = NOW.isoformat()
    pods = [
        one
        for (kind, *_), one in world.cluster.objects.items()
        if kind == "Pod" and labels.items() <= one["metadata"]["labels"].items()
    ]
    world.look()
    budget = world.cluster.find("PodDisruptionBudget", "acme-engines")
    assert budget["spec"]["minAvailable"] == len(pods) - 2 > 0
    world.settle()


def test_a_budget_that_forbids_an_eviction_is_respected(world: World) -> None:
    world.up()
    world.cluster.may_evict = False
    world.make(store={"ramGib": 8})
    for _ in range(4):
        world.look()
    assert ("Pod", "default", "acme-store-c1-shard-0-0") in world.cluster.objects


def test_shards_are_added_and_taken_away(world: World) -> None:
    world.up()
    world.make(store={"shards": 3})
    world.look()
    world.look()
    world.kuberay.serve("acme-store")
    world.settle()
    assert world.cluster.find("BlendService", "acme")["status"]["shards"] == "3/3"
    world.make(store={"shards": 1})
    world.settle()
    cluster = world.cluster.find("RayCluster", "acme-store-c1")
    assert [one["replicas"] for one in cluster["spec"]["workerGroupSpecs"]] == [1, 0, 0]
    # The volumes of the others stay.
    assert world.cluster.named("PersistentVolumeClaim") == ["acme-data-0", "acme-data-1", "acme-data-2"]


def test_deletion_drains_users_before_shards(world: World) -> None:
    world.up()
    live = world.cluster.find("BlendService", "acme")
    live["metadata"]["deletionTimestamp"] = world.now.isoformat().replace("+00:00", "Z")
    world.look()
    assert world.cluster.named("RayService") == ["acme-store"]
    world.look()
    assert world.cluster.named("RayService") == ["acme-store"]
    assert "2 pods remain" in world.condition("Ready")["message"]
    world.lose_pods(OLD)
    world.look()
    assert world.cluster.named("RayService") == []
    assert "shards are writing back" in world.condition("Ready")["message"]
    assert world.look() is not None
    world.lose_pods("store")
    assert world.look() is None
    assert world.cluster.named("BlendService") == []
    # What was owned went with it; volumes stay.
    left = {kind for kind, _, _ in world.cluster.objects}
    assert left == {"PersistentVolumeClaim", "RayCluster", "Event"}


def test_a_lost_node_does_not_keep_a_service_from_going(world: World) -> None:
    world.up()
    live = world.cluster.find("BlendService", "acme")
    live["metadata"]["deletionTimestamp"] = world.now.isoformat()
    world.now += timedelta(minutes=11)
    world.look()
    world.look()
    assert world.cluster.named("BlendService") == []


def test_without_kuberay_it_says_what_to_do() -> None:
    world = World(served=frozenset())
    world.make()
    world.look()
    condition = world.condition("KubeRayReady")
    assert (condition["status"], condition["reason"]) == ("False", "Missing")
    assert "install KubeRay 1.6" in condition["message"]
    assert world.cluster.named("RayService") == []
    world.cluster.ray = frozenset({"rayservices", "rayjobs", "rayclusters"})
    world.look()
    assert world.condition("KubeRayReady")["reason"] == "TooOld"
    assert world.cluster.named("RayService")


def test_a_pod_that_does_not_start_is_said_and_not_written_again(world: World) -> None:
    """A missing Secret, or a node's memory, is seen on pods alone."""
    world.make(gateway={"tlsSecret": "nobody-made-it"})
    world.settle()
    parts = {"store": "StoreReady", "service": "Ready"}
    for part in parts:
        labels = {"kintsugi.dev/service": "acme", "kintsugi.dev/part": part}
        labels |= {LABEL_REVISION: OLD} if part == "service" else {}
        created = (NOW - timedelta(minutes=5)).isoformat()
        waiting = {"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}
        metadata = {"name": f"{part}-pod", "labels": labels, "creationTimestamp": created}
        world.cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": waiting})
    world.look()
    for part, condition in parts.items():
        assert f"pod {part}-pod: a Secret, ConfigMap or claim" in world.condition(condition)["message"]
    world.now += timedelta(minutes=5)
    world.look()
    assert world.condition("Stalled")["reason"] == "MountMissing"
    before = world.cluster.writes.copy()
    world.now += timedelta(minutes=5)
    world.look()
    assert world.cluster.writes == before


def test_a_corpus_says_why_its_pods_do_not_start(world: World) -> None:
    world.up()
    world.fill()
    run(world.reconciler.corpus("default", "docs"))
    labels = {"kintsugi.dev/corpus": "docs", "kintsugi.dev/part": "corpus"}
    state = {"waiting": {"reason": "ImagePullBackOff"}}
    status = {"containerStatuses": [{"image": "r/x:1", "state": state}]}
    metadata = {"name": "docs-head", "labels": labels}
    world.cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status})
    run(world.reconciler.corpus("default", "docs"))
    said = world.condition("Complete", "docs", "CorpusPrecompute")["message"]
    assert said.endswith("pod docs-head: image r/x:1 cannot be pulled")


def test_what_the_api_server_refuses_is_said(world: World) -> None:
    world.make()
    world.cluster.refuse = lambda one: "quota exceeded" if one["kind"] == "RayService" else ""
    world.look()
    assert "quota exceeded" in world.condition("Reconciled")["message"]
    world.cluster.refuse = lambda one: ""
    world.settle()
    assert world.condition("Reconciled")["status"] == "True"


def test_what_belongs_to_another_is_not_taken(world: World) -> None:
    world.cluster.put({"kind": "Service", "metadata": {"name": "acme-grpc"}, "spec": {"mine": True}})
    world.make()
    world.look()
    condition = world.condition("Reconciled")
    assert condition["status"] == "False"
    assert "Service acme-grpc exists" in condition["message"]
    assert world.cluster.find("Service", "acme-grpc")["spec"] == {"mine": True}


def test_a_changed_object_is_not_overwritten_unseen(world: World) -> None:
    live = world.make()
    stale = copy.deepcopy(live)
    live["metadata"]["resourceVersion"] = "999"
    with pytest.raises(Refused, match="modified"):
        run(set_finalizer(world.cluster, stale, True))


def test_a_corpus_is_filled_and_waited_for(world: World) -> None:
    world.up()
    world.fill()
    run(world.reconciler.corpus("default", "docs"))
    (job,) = [one for one in world.cluster.named("RayJob") if one.startswith("docs")]
    world.kuberay.finish(job)
    report = '\n{\n"documents": 4, "chunks": 9, "documents_failed": 0, "chunks_failed": 0, "coverage": 1.0}\n'
    world.web.pages[f"http://{job}-head-svc.default.svc:8265/api/jobs/{job}-1/logs"] = report
    run(world.reconciler.corpus("default", "docs"))
    status = world.cluster.find("CorpusPrecompute", "docs")["status"]
    assert (status["phase"], status["documents"], status["coverage"]) == ("Succeeded", 4, 1.0)
    before = world.cluster.writes.copy()
    assert run(world.reconciler.corpus("default", "docs"))
    assert world.cluster.writes == before
    # A new model is warm once the corpus has been filled for it.
    world.make(model={"path": "/models/other"})
    world.settle()
    new = EngineRevision.of(spec_of(model={"path": "/models/other"})).name
    world.kuberay.serve(f"acme-{new}")
    world.settle()
    assert world.condition("RolledOut")["reason"] == "Warming"
    run(world.reconciler.corpus("default", "docs"))
    (job,) = [one for one in world.cluster.named("RayJob") if one.startswith("docs")]
    world.kuberay.finish(job)
    run(world.reconciler.corpus("default", "docs"))
    world.settle()
    assert world.serving() == new


def test_a_bad_corpus_says_why(world: World) -> None:
    world.fill(schedule="99 * * * *")
    run(world.reconciler.corpus("default", "docs"))
    assert "schedule" in world.condition("Valid", "docs", "CorpusPrecompute")["message"]
    world.fill("orphan", service="nobody")
    run(world.reconciler.corpus("default", "orphan"))
    assert "nobody" in world.condition("Ready", "orphan", "CorpusPrecompute")["message"]


@pytest.mark.full
def test_a_hundred_services_at_rest_write_nothing(world: World) -> None:
    """The CPU time of a look is printed."""
    for index in range(100):
        world.make(f"service-{index}", store={"shards": 2, "tiers": [{"name": "nvme", "gib": 100}]})
        world.settle(f"service-{index}")
    before, begun_s = world.cluster.writes.copy(), time.process_time()
    for index in range(100):
        world.look(f"service-{index}")
    assert world.cluster.writes == before
    print(f"{(time.process_time() - begun_s) * 10:.1f} ms of CPU for each look")
