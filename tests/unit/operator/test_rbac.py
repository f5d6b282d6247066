"""The chart's rights are those that a whole life of a service uses, and no others."""

from __future__ import annotations

from datetime import timedelta

from kintsugi_operator.controller.index import KINDS
from kintsugi_operator.desired.rollout import RETIRE_AFTER_S
from kintsugi_operator.objects.deployed import EngineRevision
from tests.unit.operator.rights import chart_rules, expand_rules
from tests.unit.operator.specs import spec_of
from tests.unit.operator.test_reconcile import OLD, World, run

UNSEEN = {("kintsugi.dev", "blendservices/finalizers", "update")}
UNSEEN |= {("kintsugi.dev", "corpusprecomputes/finalizers", "update")}
"""Asked by an admission plugin, not by a request."""
WATCHED = {
    (kind.resource.api_version.rpartition("/")[0], kind.resource.plural, verb)
    for kind in KINDS
    for verb in ("list", "watch")
}
ALIKE = {"delete"}
"""Of kinds that are pruned the same way: which of them become superfluous is up to the spec."""


def test_every_right_is_used_and_every_use_is_a_right() -> None:
    world = World()
    world.up(store={"shards": 2})
    world.fill()
    run(world.reconciler.corpus("default", "docs"))
    world.make(model={"path": "/models/other"}, store={"shards": 2, "ramGib": 8}, network={"policies": False})
    world.make(
        model={"path": "/models/other"},
        store={"shards": 2, "ramGib": 8, "insecure": True},
        network={"policies": False},
    )
    world.look()
    new = EngineRevision.of(spec_of(model={"path": "/models/other"})).name
    world.kuberay.serve("acme-store")
    world.kuberay.serve(f"acme-{new}")
    for _ in range(4):
        world.look()
        run(world.reconciler.corpus("default", "docs"))
        for job in world.cluster.named("RayJob"):
            world.kuberay.finish(job)
        world.kuberay.pods("acme-store-c1")
    world.now += timedelta(seconds=RETIRE_AFTER_S + 1)
    world.look()
    assert f"acme-{OLD}" not in world.cluster.named("RayService")
    claimed = world.cluster.find("BlendService", "acme")["status"]["operator"]
    claimed["scope"] = world.me.scope
    claimed["lease"] = "elsewhere/kintsugi-operator"
    world.look()
    claimed["lease"] = world.me.lease
    world.cluster.find("BlendService", "acme")["metadata"]["deletionTimestamp"] = world.now.isoformat()
    world.now += timedelta(hours=1)
    world.look()
    world.look()
    assert world.cluster.named("BlendService") == []

    rights, used = expand_rules(chart_rules()[0]), world.cluster.used | WATCHED
    assert used <= rights
    unused = rights - used - UNSEEN
    assert {verb for _, _, verb in unused} <= ALIKE


def test_the_lease_is_all_that_the_operator_may_change_of_its_own() -> None:
    rights = {("coordination.k8s.io", "leases", verb) for verb in ("create", "get", "update")}
    assert expand_rules(chart_rules()[1]) == rights | {("apps", "deployments", "get")}
