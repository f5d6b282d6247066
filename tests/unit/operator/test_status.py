"""What an object says of itself to kubectl, kstatus and people: status, conditions, columns, Events."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import kubernetes_validate
import pytest

from kintsugi.core.errors import Unavailable
from kintsugi_operator.api.crd import COLUMNS, crds
from kintsugi_operator.api.manifest import from_manifest
from kintsugi_operator.api.status import BlendServiceStatus, Condition, ConditionStatus
from kintsugi_operator.controller.events import REPEAT_S, EventRecorder
from kintsugi_operator.controller.metrics import OBJECTS_MAX, OperatorMetrics
from kintsugi_operator.controller.queue import ObjectKey
from kintsugi_operator.controller.reconcile import SOON_S
from kintsugi_operator.objects.deployed import EngineRevision
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed import conditions as c
from kintsugi_operator.observed.changes import Change
from tests.unit.operator.kstatus import (
    CURRENT,
    FAILED,
    IN_PROGRESS,
    TERMINATING,
    compute_status,
    read_as_api_server,
)
from tests.unit.operator.specs import NOW, spec_of
from tests.unit.operator.test_reconcile import OLD, World, run


@pytest.fixture
def world() -> World:
    return World()


def seen(world: World, kind: str = "BlendService", name: str = "acme") -> str:
    """How far an object is for kstatus."""
    return compute_status(read_as_api_server(world.cluster.find(kind, name)))


def change_spec(world: World, **parts: Any) -> None:
    """A person applies another spec, and the API server counts its generation."""
    world.make(**parts)["metadata"]["generation"] += 1


def test_a_spec_that_was_just_applied_is_not_current(world: World) -> None:
    """What the look saw of the RayServices is older than what it changed."""
    world.up()
    assert seen(world) == CURRENT
    change_spec(world, gateway={"memory": "3Gi"})
    assert world.look() == SOON_S
    assert seen(world) == IN_PROGRESS
    world.settle()
    assert seen(world) == CURRENT


def test_an_object_that_was_just_made_is_not_current(world: World) -> None:
    """helm 4 waits by kstatus, for which an object without a status is done."""
    live = world.make()
    assert compute_status(live) == CURRENT, "without the default, kstatus has nothing to go by"
    assert seen(world) == IN_PROGRESS
    world.fill()
    assert seen(world, "CorpusPrecompute", "docs") == IN_PROGRESS


def test_the_default_status_is_one_that_the_operator_reads(world: World) -> None:
    for crd in crds().values():
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
        assert schema["default"]["observedGeneration"] == -1
        assert not any("default" in one for one in schema["properties"].values()), "nothing is added to ours"
    live = read_as_api_server(world.make())
    status = from_manifest(BlendServiceStatus, live["status"], "status")
    assert [(one.type, one.status, one.reason) for one in status.conditions] == [
        ("Ready", "Unknown", "Pending")
    ]
    world.cluster.find("BlendService", "acme")["status"] = live["status"]
    world.up()
    assert world.condition("Ready")["status"] == "True"


def test_a_service_is_current_once_it_serves(world: World) -> None:
    world.make()
    world.look()
    assert seen(world) == IN_PROGRESS
    world.kuberay.serve("acme-store")
    world.kuberay.serve(f"acme-{OLD}")
    world.settle()
    assert seen(world) == CURRENT
    change_spec(world, store={"shards": 2})
    assert seen(world) == IN_PROGRESS, "nobody has looked at this generation"
    world.settle()
    assert seen(world) == IN_PROGRESS
    assert world.condition("Reconciling")["reason"] == "ShardsMissing"
    world.cluster.find("BlendService", "acme")["metadata"]["deletionTimestamp"] = world.now.isoformat()
    assert seen(world) == TERMINATING


def test_a_spec_that_cannot_work_has_failed_until_it_is_mended(world: World) -> None:
    world.up()
    change_spec(world, gateway={"httpPort": 7500})
    world.look()
    assert seen(world) == FAILED
    assert "httpPort" in world.condition("Stalled")["message"]
    assert (world.condition("Ready")["status"], world.condition("Valid")["status"]) == ("False", "False")
    change_spec(world)
    world.settle()
    assert seen(world) == CURRENT


def test_another_model_is_in_progress_until_it_serves(world: World) -> None:
    world.up()
    change_spec(world, model={"path": "/models/other"})
    world.settle()
    assert seen(world) == IN_PROGRESS, "the old model is ready; what is asked for is not"
    new = EngineRevision.of(spec_of(model={"path": "/models/other"})).name
    world.kuberay.serve(f"acme-{new}")
    world.settle()
    assert seen(world) == CURRENT


def test_a_corpus_is_current_once_its_job_runs(world: World) -> None:
    def look() -> str:
        run(world.reconciler.corpus("default", "docs"))
        return seen(world, "CorpusPrecompute", "docs")

    world.fill()
    assert look() == IN_PROGRESS, "there is no service"
    world.up()
    assert look() == IN_PROGRESS
    assert look() == CURRENT
    (job,) = world.cluster.named("RayJob")
    world.kuberay.finish(job, "FAILED", message="no such bucket")
    assert look() == FAILED


def test_at_most_one_of_reconciling_and_stalled_is_true() -> None:
    """kstatus takes the first, in whatever order they stand."""
    both = [c.false(c.SHARDS, "RestartNeeded", "no"), c.false(c.STORE, "ShardsMissing", "1 of 2")]
    reconciling, stalled = c.summarise_progress(both, NOW)
    assert (reconciling.status, stalled.status) == ("False", "True")


def column(crd_kind: str, title: str, live: Manifest) -> Any:
    """What kubectl would print."""
    (path,) = [path for name, _, path in COLUMNS[crd_kind] if name == title]
    if "conditions" in path:
        type_, field = path.split('"')[1], path.rsplit(".", 1)[1]
        found = [one[field] for one in live["status"]["conditions"] if one["type"] == type_]
        return found[0] if found else ""
    value: Any = live
    for name in path.strip(".").split("."):
        value = value.get(name, "")
    return value


def test_columns_tell_the_truth(world: World) -> None:
    def shown(*titles: str) -> list[Any]:
        live = read_as_api_server(world.cluster.find("BlendService", "acme"))
        return [column("BlendService", title, live) for title in titles]

    world.make(store={"shards": 3}, engines={"replicas": 2, "replicasMax": 4})
    assert shown("Ready", "Reason", "Shards") == ["Unknown", "Pending", ""]
    world.look()
    assert shown("Valid", "Ready", "Shards", "Engines") == ["True", "False", "0/3", "0/2"]
    world.look()
    world.kuberay.serve("acme-store")
    world.kuberay.serve(f"acme-{OLD}")
    for index in range(3):
        labels = {"kintsugi.dev/service": "acme", "kintsugi.dev/role": "engine"}
        labels |= {"kintsugi.dev/revision": OLD, "kintsugi.dev/part": "service"}
        ready = {"conditions": [{"type": "Ready", "status": "True" if index else "False"}]}
        metadata = {"name": f"e{index}", "labels": labels}
        world.cluster.put({"kind": "Pod", "metadata": metadata, "status": ready})
    made_by_fake = sum(
        one["metadata"]["labels"].get("kintsugi.dev/role") == "engine"
        for (kind, _, name), one in world.cluster.objects.items()
        if kind == "Pod" and not name.startswith("e")
    )
    shard = next(name for name in world.cluster.named("Pod") if "shard" in name)
    world.cluster.find("Pod", shard)["status"]["conditions"] = []
    world.look()
    engines = f"{2 + made_by_fake}/{3 + made_by_fake}"
    assert shown("Valid", "Ready", "Shards", "Engines") == ["True", "True", "2/3", engines]
    change_spec(world, gateway={"httpPort": 7500})
    world.look()
    assert shown("Valid", "Ready", "Reason") == ["False", "False", "InvalidSpec"]


def events(world: World) -> list[tuple[str, str]]:
    """Type and reason of each Event, in the order in which they were written."""
    found = [one for (kind, *_), one in world.cluster.objects.items() if kind == "Event"]
    return [(one["type"], one["reason"]) for one in found]


def test_events_tell_what_happened_to_a_service_and_nothing_is_told_at_rest(world: World) -> None:
    world.up()
    assert events(world) == [
        ("Normal", "Serving"),
        ("Normal", "StoreReady"),
    ]
    before = world.cluster.writes.copy()
    for _ in range(3):
        world.now += timedelta(hours=1)
        world.look()
    assert world.cluster.writes == before
    told = len(events(world))
    change_spec(world, gateway={"httpPort": 7500})
    world.look()
    change_spec(world)
    world.settle()
    shard = next(name for name in world.cluster.named("Pod") if "shard" in name)
    world.cluster.find("Pod", shard)["status"]["conditions"] = []
    world.look()
    ready = [{"type": "Ready", "status": "True"}]
    world.cluster.find("Pod", shard)["status"]["conditions"] = ready
    world.look()
    reasons = [reason for _, reason in events(world)[told:]]
    assert reasons == ["SpecRefused", "SpecAccepted", "ServingWithoutStore", "StoreDegraded"]


def test_events_are_ones_that_kubernetes_takes(world: World) -> None:
    world.up()
    told = [one for (kind, *_), one in world.cluster.objects.items() if kind == "Event"]
    for event in told:
        written = {**event, "metadata": {key: event["metadata"][key] for key in ("name", "namespace")}}
        for version in ("1.30", "1.36"):
            kubernetes_validate.validate(written, version, strict=True)
        assert event["involvedObject"]["uid"] == world.cluster.find("BlendService", "acme")["metadata"]["uid"]


def test_a_new_operator_tells_nothing_twice(world: World) -> None:
    world.up()
    world.reconciler = world.restart()
    before = world.cluster.writes.copy()
    world.look()
    assert world.cluster.writes == before


def test_events_tell_of_a_model_that_is_changed_and_of_a_service_that_is_drained(world: World) -> None:
    world.up()
    change_spec(world, model={"path": "/models/other"})
    world.settle()
    new = EngineRevision.of(spec_of(model={"path": "/models/other"})).name
    world.kuberay.serve(f"acme-{new}")
    world.settle()
    reasons = [reason for _, reason in events(world)]
    assert reasons.index("RolloutStarted") < reasons.index("ModelChanged")
    live = world.cluster.find("BlendService", "acme")
    live["metadata"]["deletionTimestamp"] = world.now.isoformat()
    for _ in range(3):
        world.look()
        world.lose_pods("acme")
    assert world.cluster.named("BlendService") == []
    assert events(world)[-2:] == [("Normal", "Draining"), ("Normal", "Drained")]


def test_an_object_that_flaps_has_one_event_which_is_seldom_written(world: World) -> None:
    live = world.make()
    recorder = EventRecorder(world.cluster, world._clock)

    def tell(times: int) -> int:
        before = world.cluster.writes["apply Event"]
        for index in range(times):
            run(recorder.record(live, [Change("NotReady", f"attempt {index}", is_warning=True)]))
        return world.cluster.writes["apply Event"] - before

    assert tell(100) == 1
    world.now += timedelta(seconds=REPEAT_S)
    run(recorder.record(live, [Change("NotReady", "later", is_warning=True)]))
    (event,) = [one for (kind, *_), one in world.cluster.objects.items() if kind == "Event"]
    assert event["message"] == "later"


def test_an_event_that_is_refused_does_not_stop_the_work(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(manifest: Manifest) -> str:
        return "namespace is being terminated" if manifest["kind"] == "Event" else ""

    world.cluster.refuse = refuse
    world.up()
    assert world.condition("Ready")["status"] == "True"
    assert "no Event for Serving" in caplog.text


def samples(metrics: OperatorMetrics, metric: str) -> dict[str, float]:
    """Labels in braces, and the value."""
    lines = [line for line in metrics.text().splitlines() if line.startswith(f"{metric}{{")]
    return {line.rpartition(" ")[0].removeprefix(metric): float(line.rpartition(" ")[2]) for line in lines}


ACME = '{kind="BlendService",name="acme",namespace="default"'


def test_each_object_has_metrics_until_it_is_gone(world: World) -> None:
    metrics = OperatorMetrics()
    world.reconciler = world.restart(metrics)
    world.make()
    world.settle()
    shown = f"{ACME.replace('{', '{condition=%s,')}}}" % '"Ready"'
    assert samples(metrics, "kintsugi_operator_condition")[shown] == 0.0
    world.kuberay.serve("acme-store")
    world.kuberay.serve(f"acme-{OLD}")
    world.settle()
    assert samples(metrics, "kintsugi_operator_condition")[shown] == 1.0
    metrics.forget(ObjectKey("BlendService", "default", "acme"))
    assert "acme" not in metrics.text()


def test_looks_are_timed_and_failures_named() -> None:
    metrics, key = OperatorMetrics(), ObjectKey("BlendService", "team", "acme")
    with metrics.time_look(key):
        pass
    with pytest.raises(Unavailable), metrics.time_look(key):
        raise Unavailable("no answer")
    with pytest.raises(ValueError), metrics.time_look(key):
        raise ValueError("ours")
    assert "kintsugi_operator_reconcile_seconds_count 3.0" in metrics.text()
    labels = 'kind="BlendService",name="acme",namespace="team"}'
    assert samples(metrics, "kintsugi_operator_reconcile_failures_total") == {
        f'{{error="Unavailable",{labels}': 1,
        f'{{error="ValueError",{labels}': 1,
    }


def test_the_number_of_objects_with_metrics_is_bounded() -> None:
    metrics, ready = OperatorMetrics(), Condition("Ready", ConditionStatus.TRUE, "Serving")
    for index in range(OBJECTS_MAX + 10):
        metrics.see(ObjectKey("BlendService", "team", str(index)), [ready])
    assert len(samples(metrics, "kintsugi_operator_condition")) == OBJECTS_MAX
