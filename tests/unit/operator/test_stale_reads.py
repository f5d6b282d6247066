"""What watches have told may be behind: no decision that cannot be taken back rests on it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import pytest

from kintsugi_operator.controller.cluster import POD, RAY_SERVICE, Refused, Resource
from kintsugi_operator.controller.metrics import OperatorMetrics
from kintsugi_operator.controller.reconcile import Reconciler
from kintsugi_operator.objects.names import FINALIZER
from kintsugi_operator.objects.pods import Manifest
from tests.fakes.cluster import FakeReads
from tests.unit.operator.test_reconcile import World, run


class Behind(FakeReads):
    """Watches that have told of one object only what it was, and nothing of some kinds."""

    def __init__(self, world: World, old: Manifest | None = None, unseen: Sequence[Resource] = ()) -> None:
        super().__init__(world.cluster)
        self._old = old
        self._unseen = unseen

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        if self._old is not None and self._old["kind"] == resource.kind:
            return copy.deepcopy(self._old)
        return await super().get(resource, namespace, name)

    async def list(self, resource: Resource, namespace: str, labels: Mapping[str, str]) -> Sequence[Manifest]:
        return [] if resource in self._unseen else await super().list(resource, namespace, labels)


def with_reads(world: World, reads: Behind) -> Reconciler:
    return Reconciler(world.cluster, reads, world.web, lambda: world.now, world.me, OperatorMetrics())


@pytest.fixture
def world() -> World:
    world = World()
    world.up()
    return world


def test_a_status_is_not_written_from_an_old_object(world: World) -> None:
    old = copy.deepcopy(world.cluster.find("BlendService", "acme"))
    old["status"]["rollout"]["active"] = "former"
    world.make()
    before = copy.deepcopy(world.cluster.find("BlendService", "acme"))
    with pytest.raises(Refused, match="modified"):
        run(with_reads(world, Behind(world, old)).service("default", "acme"))
    assert world.cluster.find("BlendService", "acme")["status"] == before["status"]


def test_a_service_is_not_let_go_before_a_fresh_look(world: World) -> None:
    live = world.cluster.find("BlendService", "acme")
    live["metadata"]["deletionTimestamp"] = world.now.isoformat()
    assert world.cluster.named("Pod")
    run(with_reads(world, Behind(world, unseen=(POD, RAY_SERVICE))).service("default", "acme"))
    assert live["metadata"]["finalizers"] == [FINALIZER]
    assert "acme-store" in world.cluster.named("RayService")


def test_what_a_first_look_writes_is_of_the_version_that_the_finalizer_made() -> None:
    world = World()
    world.make()
    world.look()
    assert world.condition("Reconciled")["status"] == "True"
