"""Our finalizer while the operator watches: nobody but the reconciler touches it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import pytest

from kintsugi_operator.controller.cluster import BLEND_SERVICE
from kintsugi_operator.controller.metrics import OperatorMetrics
from kintsugi_operator.controller.reconcile import utc_now
from kintsugi_operator.objects.names import FINALIZER
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.operator import OperatorOptions, operate
from tests.fakes.api_server import FakeApiServer
from tests.fakes.cluster import FakeWeb
from tests.unit.operator.conversation import served
from tests.unit.operator.test_reconcile import OLD, World, run
from tests.unit.operator.test_shell import stopped, until

LOOKS = 10
OTHERS = "example.com/backup"
NOTE = {"example.com/note": "seen"}


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look again at once, and fetch no metrics from pods that do not exist."""
    monkeypatch.setattr("kintsugi_operator.controller.reconcile.SOON_S", 0.05)
    monkeypatch.setattr("kintsugi_operator.controller.reconcile.LATER_S", 0.05)
    monkeypatch.setattr("kintsugi_operator.operator.Web", lambda session: FakeWeb())


@dataclass
class Operated:
    """A world, and an operator that watches it."""

    world: World
    server: FakeApiServer
    metrics: OperatorMetrics = field(default_factory=OperatorMetrics)

    @property
    def service(self) -> Manifest:
        return self.world.cluster.find("BlendService", "acme")

    @property
    def is_there(self) -> bool:
        return "acme" in self.world.cluster.named("BlendService")

    def is_true(self, condition: str) -> bool:
        """Whether the service's condition says so; False while there is none."""
        found = self.service.get("status", {}).get("conditions", [])
        return any((one["type"], one["status"]) == (condition, "True") for one in found)

    @property
    def looked(self) -> int:
        """The number of looks so far."""
        found = self.metrics.registry.get_sample_value("kintsugi_operator_reconcile_seconds_count")
        return int(found or 0)

    async def looks(self, count: int = LOOKS) -> None:
        """Wait until the operator has looked at the service that many times more."""
        aim = self.looked + count
        await until(lambda: self.looked >= aim)

    async def annotate(self, looks: int = LOOKS) -> None:
        """A person changes the object; the operator hears of it, and looks that many times."""
        changed = copy.deepcopy(self.service)
        changed["metadata"]["annotations"] = NOTE
        self.world.cluster.put(changed)
        await self.looks(looks)

    async def delete(self) -> None:
        """A person deletes the service."""
        await self.world.cluster.delete(BLEND_SERVICE, "default", "acme")

    def finalizers(self) -> list[list[str]]:
        """What the service's finalizers have been since the operator watches, each change once."""
        seen: list[list[str]] = []
        for type_, changed in self.server.events:
            if changed["kind"] == "BlendService" and type_ != "DELETED":
                now = changed["metadata"].get("finalizers", [])
                seen += [now] if seen[-1:] != [now] else []
        return seen


SETTINGS = OperatorOptions("", "me", namespaces=("default",))


@contextlib.asynccontextmanager
async def operated(
    world: World, settings: OperatorOptions = SETTINGS, server: FakeApiServer | None = None
) -> AsyncIterator[Operated]:
    """An operator with these settings, on a stand-in of its own or on one that others use, too."""
    it = Operated(world, server or FakeApiServer(world.cluster))
    async with served(it.server.answer) as client, aiohttp.ClientSession() as session:
        task = asyncio.create_task(operate(client, settings, session, it.metrics))
        try:
            yield it
        finally:
            await stopped(task)


async def drained(it: Operated) -> None:
    """Play Kubernetes and KubeRay while a deleted service drains; assert the order."""
    cluster = it.world.cluster
    await until(lambda: f"acme-{OLD}" not in cluster.named("RayService"))
    assert cluster.named("RayService") == ["acme-store"]
    await it.looks()
    assert cluster.named("RayService") == ["acme-store"]
    assert "engines, gateways and jobs are finishing" in it.world.condition("Ready")["message"]
    it.world.lose_pods(OLD)
    await until(lambda: cluster.named("RayService") == [])
    await it.looks()
    assert "shards are writing back" in it.world.condition("Ready")["message"]
    assert FINALIZER in it.service["metadata"]["finalizers"]
    it.world.lose_pods("store")


@pytest.fixture
def world() -> World:
    """A service that an operator has brought up, and that nobody operates now."""
    world = World()
    world.now = utc_now()
    world.up()
    return world


def test_the_finalizer_is_set_once_and_stays() -> None:
    async def main() -> None:
        world = World()
        async with operated(world) as it:
            world.make()
            await until(lambda: {"acme-store", f"acme-{OLD}"} <= set(world.cluster.named("RayService")))
            world.kuberay.serve("acme-store")
            world.kuberay.serve(f"acme-{OLD}")
            await until(lambda: it.is_true("Ready"))
            await it.annotate()
            assert it.finalizers() == [[], [FINALIZER]]

    run(main())


def test_an_idle_service_is_not_written(world: World) -> None:
    async def main() -> None:
        before = world.cluster.writes.copy()
        async with operated(world) as it:
            await it.looks()
            await it.annotate()
            assert world.cluster.writes == before
            assert it.service["metadata"]["finalizers"] == [FINALIZER]
            assert it.service["metadata"]["annotations"] == NOTE

    run(main())


def test_a_deleted_service_drains_before_it_goes(world: World) -> None:
    async def main() -> None:
        async with operated(world) as it:
            await it.looks()
            await it.delete()
            await drained(it)
            await until(lambda: not it.is_there)
            assert it.finalizers() == [[FINALIZER]]

    run(main())


def test_a_service_that_was_deleted_while_no_operator_ran_drains(world: World) -> None:
    """As after an upgrade: it is listed with the finalizer that an earlier operator gave it."""

    async def main() -> None:
        await world.cluster.delete(BLEND_SERVICE, "default", "acme")
        async with operated(world) as it:
            await drained(it)
            await until(lambda: not it.is_there)

    run(main())


def test_a_service_that_lost_its_finalizer_gets_it_again(world: World) -> None:
    """An earlier operator may have left it without."""
    del world.cluster.find("BlendService", "acme")["metadata"]["finalizers"]

    async def main() -> None:
        async with operated(world) as it:
            await it.annotate()
            assert it.finalizers() == [[], [FINALIZER]]
            await it.delete()
            await drained(it)
            await until(lambda: not it.is_there)

    run(main())


def test_only_what_others_have_set_outlives_our_finalizer(world: World) -> None:
    world.cluster.find("BlendService", "acme")["metadata"]["finalizers"].append(OTHERS)

    async def main() -> None:
        async with operated(world) as it:
            await it.delete()
            await drained(it)
            await until(lambda: it.service["metadata"]["finalizers"] == [OTHERS])
            await it.annotate(looks=1)
            assert it.finalizers() == [[FINALIZER, OTHERS], [OTHERS]]
            assert it.service["metadata"]["annotations"] == NOTE

    run(main())
