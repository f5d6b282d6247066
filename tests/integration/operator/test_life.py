"""Services and operators that come and go at the same time, on the stand-in API server."""

from __future__ import annotations

import asyncio

import pytest

from kintsugi_operator.controller.cluster import BLEND_SERVICE, DEPLOYMENT, ApiServer
from kintsugi_operator.controller.election import Candidate, LeaseLost, lead
from kintsugi_operator.controller.reconcile import utc_now
from kintsugi_operator.objects.names import FINALIZER
from kintsugi_operator.operator import OperatorOptions
from tests.fakes.api_server import FakeApiServer
from tests.fakes.cluster import FakeWeb
from tests.unit.operator.conversation import served
from tests.unit.operator.test_finalizer import OTHERS, operated
from tests.unit.operator.test_reconcile import OLD, World, run
from tests.unit.operator.test_shell import QUICK, until

NARROW = OperatorOptions("default", "me", namespaces=("default",), deployment="kintsugi-operator")
WIDE = OperatorOptions("platform", "me", deployment="wide")


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look again at once, and fetch no metrics from pods that do not exist."""
    for name in ("SOON_S", "LATER_S", "CONTESTED_S"):
        monkeypatch.setattr(f"kintsugi_operator.controller.reconcile.{name}", 0.05)
    monkeypatch.setattr("kintsugi_operator.operator.Web", lambda session: FakeWeb())


@pytest.fixture
def world() -> World:
    """A service that an operator has brought up, and that nobody operates now."""
    return world_of(NARROW)


def world_of(settings: OperatorOptions) -> World:
    world = World()
    world.now = utc_now()
    world.me = settings.operator
    world.reconciler = world.restart()
    world.up()
    for one in (NARROW, WIDE):
        metadata = {"name": one.deployment, "namespace": one.lease_namespace}
        world.cluster.put({"apiVersion": "apps/v1", "kind": DEPLOYMENT.kind, "metadata": metadata})
    return world


def is_held(world: World, name: str = "acme") -> bool:
    return FINALIZER in world.cluster.find("BlendService", name)["metadata"].get("finalizers", [])


def delete(world: World, name: str = "acme") -> None:
    run(world.cluster.delete(BLEND_SERVICE, "default", name))


def test_what_was_never_ready_goes_without_an_operator(world: World) -> None:
    world.make("second")
    world.settle("second")
    assert "second-store" in world.cluster.named("RayService")
    delete(world, "second")
    assert "second" not in world.cluster.named("BlendService")
    assert "second-store" not in world.cluster.named("RayService")


def test_a_namespace_is_not_held_by_an_operator_elsewhere() -> None:
    """Nothing can be made there any more, and its pods are deleted anyway."""
    world = world_of(WIDE)

    async def main() -> None:
        async with operated(world, WIDE) as it:
            await it.looks()
            for name in world.cluster.named("Pod"):
                # A node takes its time to end them.
                world.cluster.find("Pod", name)["metadata"]["finalizers"] = [OTHERS]
            world.cluster.delete_namespace("default")
            await until(lambda: not it.is_there)
            assert world.cluster.named("Pod")

    run(main())


def test_an_operator_whose_namespace_is_deleted_lets_services_go(world: World) -> None:
    """Kubernetes deletes pods first, and the operator's is one of them."""

    async def main() -> None:
        async with operated(world, NARROW) as it:
            await it.looks()
            assert is_held(world)
            world.cluster.leaving_namespaces.add("default")
        assert not is_held(world)
        world.cluster.delete_namespace("default")
        assert not it.is_there

    run(main())


@pytest.mark.parametrize("is_deleted_first", [False, True])
def test_an_operator_that_is_removed_lets_services_go(world: World, is_deleted_first: bool) -> None:
    async def main() -> None:
        async with operated(world, NARROW) as it:
            await it.looks()
            if is_deleted_first:
                await it.delete()
                await until(lambda: f"acme-{OLD}" not in world.cluster.named("RayService"))
            world.cluster.lose("Deployment", NARROW.deployment)
        if is_deleted_first:
            assert not it.is_there
        else:
            assert not is_held(world)
            assert world.cluster.find("BlendService", "acme")["status"]["operator"] == {
                "lease": "",
                "scope": "",
            }

    run(main())
    assert world.cluster.named("BlendService") == ([] if is_deleted_first else ["acme"])


def test_an_operator_that_is_restarted_lets_nothing_go(world: World) -> None:
    async def main() -> None:
        async with operated(world, NARROW) as it:
            await it.looks()
        before = world.cluster.writes.copy()
        async with operated(world, NARROW) as it:
            await it.looks()
        assert world.cluster.writes == before
        assert is_held(world)

    run(main())


def test_two_operators_do_not_fight(world: World) -> None:
    """One looks after the whole cluster, the other after one namespace."""

    async def main() -> None:
        server = FakeApiServer(world.cluster)
        async with operated(world, NARROW, server) as narrow, operated(world, WIDE, server) as wide:
            await asyncio.gather(narrow.looks(), wide.looks())
            before = world.cluster.writes.copy()
            await asyncio.gather(narrow.looks(20), wide.looks(20))
            assert world.cluster.writes == before
            assert narrow.service["status"]["operator"] == {
                "lease": "default/kintsugi-operator",
                "scope": "Namespace",
            }

    run(main())


def test_the_other_operator_takes_over_from_one_that_is_removed(world: World) -> None:
    async def main() -> None:
        server = FakeApiServer(world.cluster)
        async with operated(world, WIDE, server) as wide:
            async with operated(world, NARROW, server) as narrow:
                await asyncio.gather(narrow.looks(), wide.looks())
                world.cluster.lose("Deployment", NARROW.deployment)
            await until(lambda: wide.service["status"]["operator"]["lease"] == "platform/kintsugi-operator")
            await until(lambda: is_held(world))

    run(main())


def test_a_lease_goes_with_its_deployment(world: World) -> None:
    async def main() -> None:
        async with served(FakeApiServer(world.cluster).answer) as client:

            async def work() -> None:
                await asyncio.sleep(3600)

            candidate = Candidate(ApiServer(client), "l", "default", "a", NARROW.deployment, QUICK)
            leading = asyncio.create_task(lead(candidate, work))
            await until(lambda: "l" in world.cluster.named("Lease"))
            await ApiServer(client).delete(DEPLOYMENT, "default", NARROW.deployment)
            assert world.cluster.named("Lease") == []
            # It is not made again by the operator that still runs.
            with pytest.raises(LeaseLost):
                await leading
            assert world.cluster.named("Lease") == []

    run(main())
