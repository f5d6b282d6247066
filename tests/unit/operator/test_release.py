"""An operator that is removed for good releases its services, even if the API server refuses it once."""

from __future__ import annotations

import pytest

from kintsugi_operator.controller.cluster import BLEND_SERVICE, Refused, Resource
from kintsugi_operator.controller.finalizer import release_services
from kintsugi_operator.controller.index import Index
from kintsugi_operator.objects.names import FINALIZER
from kintsugi_operator.objects.pods import Manifest
from tests.fakes.cluster import FakeCluster
from tests.unit.operator.test_reconcile import World, run


class RefusesOnce(FakeCluster):
    """Where `is_refusing`, the next change of a finalizer finds that somebody else was faster."""

    is_refusing = False

    async def merge(self, resource: Resource, namespace: str, name: str, patch: Manifest) -> Manifest:
        if self.is_refusing:
            self.is_refusing = False
            raise Refused(f"PATCH {resource.kind} {name}", 409, "the object has been modified")
        return await super().merge(resource, namespace, name, patch)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("tests.unit.operator.test_reconcile.FakeCluster", RefusesOnce)
    world = World()
    world.up()
    return world


def release(world: World) -> None:
    """What the operator does last, after its Deployment was deleted."""
    index = Index()
    shelf = index.shelves[BLEND_SERVICE, ""]
    live = world.cluster.find("BlendService", "acme")
    shelf.replace([shelf.pack(live)], int(live["metadata"]["resourceVersion"]))
    run(release_services(world.cluster, index, world.me, home="default", deployment="operator"))


@pytest.mark.parametrize("is_refusing", [False, True], ids=["at once", "after a refused write"])
def test_services_are_released_and_have_no_owner(
    world: World, monkeypatch: pytest.MonkeyPatch, is_refusing: bool
) -> None:
    live = world.cluster.find("BlendService", "acme")
    assert live["metadata"]["finalizers"] == [FINALIZER]
    assert live["status"]["operator"]["lease"] == world.me.lease
    monkeypatch.setattr(world.cluster, "is_refusing", is_refusing)
    release(world)
    live = world.cluster.find("BlendService", "acme")
    assert live["metadata"]["finalizers"] == []
    assert not live["status"].get("operator", {}).get("lease")
