"""The operator on the stand-in API server: what it asks at rest, and kinds that go and come."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from kintsugi_operator.controller.cluster import (
    BLEND_SERVICE,
    CORPUS_PRECOMPUTE,
    RAY_CLUSTER,
    RAY_CRON_JOB,
    RAY_JOB,
    RAY_SERVICE,
)
from kintsugi_operator.controller.index import KINDS
from kintsugi_operator.controller.reconcile import utc_now
from kintsugi_operator.objects.names import FINALIZER
from tests.fakes.api_server import FakeApiServer
from tests.fakes.cluster import FakeWeb
from tests.unit.operator.conversation import served
from tests.unit.operator.test_finalizer import Operated, drained, operated
from tests.unit.operator.test_reconcile import OLD, World, run
from tests.unit.operator.test_shell import started, until

KUBERAY = (RAY_SERVICE, RAY_JOB, RAY_CLUSTER, RAY_CRON_JOB)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> FakeWeb:
    """No job has a log. Looks and questions come soon."""
    monkeypatch.setattr("kintsugi_operator.controller.reconcile.SOON_S", 0.05)
    monkeypatch.setattr("kintsugi_operator.controller.reconcile.LATER_S", 0.05)
    monkeypatch.setattr("kintsugi_operator.controller.watch.REOPEN_S", 0.01)
    monkeypatch.setattr("kintsugi_operator.controller.watch.MISSING_S", 0.05)
    monkeypatch.setattr("kintsugi_operator.controller.watch.BACKOFF_S_MIN", 0.01)
    web = FakeWeb()
    monkeypatch.setattr("kintsugi_operator.operator.Web", lambda session: web)
    return web


@pytest.fixture
def world(web: FakeWeb) -> World:
    """A service that an operator has brought up, and that nobody operates now."""
    world = World()
    world.web = web
    world.now = utc_now()
    world.reconciler = world.restart()
    world.up(store={"tiers": [{"name": "nvme", "gib": 10}]})
    return world


def names(it: Operated) -> list[str]:
    return it.world.cluster.named("RayService")


def test_at_rest_nothing_is_asked(world: World) -> None:
    async def main() -> None:
        async with operated(world) as it:
            await it.looks()
            expected = {("list", kind.resource.plural): 1 for kind in KINDS}
            expected |= {("watch", kind.resource.plural): 1 for kind in KINDS}
            assert it.server.requests == expected
            assert it.server.list_versions == ["0"] * len(KINDS)
            it.server.send_bookmarks()
            await it.looks(30)
            assert it.server.requests == expected

    run(main())


def test_a_service_is_made_without_lists(world: World) -> None:
    """Its own writes are known at once: each object is applied once, and the status never from an old one."""

    async def main() -> None:
        async with operated(world) as it:
            await it.looks()
            world.make("second")
            applied = world.cluster.writes.copy()
            await until(lambda: "second-store" in names(it) and f"second-{OLD}" in names(it))
            await it.looks(20)
            assert (world.cluster.writes - applied)["apply RayService"] == 2
            assert "kintsugi_operator_reconcile_failures_total{" not in it.metrics.text()
            assert sum(count for (verb, _), count in it.server.requests.items() if verb == "list") == len(
                KINDS
            )

    run(main())


def test_a_changed_object_is_looked_at_when_it_changes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that KubeRay does not own: nobody waits for the next look."""
    monkeypatch.setattr("kintsugi_operator.controller.reconcile.LATER_S", 3600.0)

    async def main() -> None:
        async with operated(world) as it:
            await until(lambda: it.looked >= 1)
            world.cluster.lose("NetworkPolicy", "acme-deny")
            await until(lambda: "acme-deny" in world.cluster.named("NetworkPolicy"))
            for name in [one for one in world.cluster.named("Pod") if "store" in one]:
                world.cluster.lose("Pod", name)
            await until(lambda: it.service["status"]["shards"] == "0/1")

    run(main())


def test_a_watch_that_ends_goes_on_where_it_was(world: World) -> None:
    async def main() -> None:
        async with operated(world) as it:
            await it.looks()
            it.server.end_watches()
            world.make("second")
            await until(lambda: "second-store" in names(it))
            await until(lambda: it.server.requests["watch", "blendservices"] == 2)
            assert it.server.requests["list", "blendservices"] == 1

    run(main())


def test_a_version_that_is_forgotten_is_listed_anew(world: World) -> None:
    async def main() -> None:
        async with operated(world) as it:
            await it.looks()
            world.make("second")
            world.cluster.lose("NetworkPolicy", "acme-deny")
            it.server.forget()
            await until(lambda: "second-store" in names(it))
            await until(lambda: "acme-deny" in world.cluster.named("NetworkPolicy"))
            # Not from a cache, which may be what has forgotten.
            assert it.server.list_versions[len(KINDS) :]
            assert set(it.server.list_versions[len(KINDS) :]) == {""}

    run(main())


def test_deleted_crds_let_services_drain_and_come_back(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with operated(world) as it:
            await it.looks()
            world.fill()
            world.cluster.uninstall(CORPUS_PRECOMPUTE)
            world.cluster.uninstall(BLEND_SERVICE)
            assert world.cluster.ours == {"blendservices"}
            await drained(it)
            await until(lambda: world.cluster.ours == frozenset())
            await until(lambda: it.server.requests["list", "blendservices"] > 3)
            world.cluster.install(BLEND_SERVICE)
            world.make("second")
            await until(lambda: "second-store" in names(it))

    with caplog.at_level(logging.INFO):
        run(main())
    for plural in ("blendservices", "corpusprecomputes"):
        assert caplog.text.count(f"does not serve {plural}: apply the chart's CRDs") == 1
    assert "serves blendservices now" in caplog.text


def test_an_operator_that_starts_with_one_kind_does_what_it_owes(world: World) -> None:
    """As one that was restarted while CRDs are deleted."""

    async def main() -> None:
        world.cluster.uninstall(CORPUS_PRECOMPUTE)
        world.cluster.uninstall(BLEND_SERVICE)
        async with operated(world) as it:
            await drained(it)
            await until(lambda: world.cluster.ours == frozenset())

    run(main())


def test_kuberay_may_go_and_come_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with operated(world) as it:
            await it.looks()
            status = it.service["status"]
            assert status["shards"] == "1/1"
            rollout = status["rollout"]
            for kind in KUBERAY:
                world.cluster.uninstall(kind)
            world.lose_pods("")
            await until(lambda: world.condition("KubeRayReady")["reason"] == "Missing")
            status = it.service["status"]
            assert status["shards"] == "0/1"
            assert status["rollout"] == rollout
            assert {one: world.condition(one)["status"] for one in ("Ready", "StoreReady")} == {
                "Ready": "False",
                "StoreReady": "False",
            }
            monkeypatch.setattr("kintsugi_operator.controller.reconcile.SOON_S", 3600.0)
            for kind in KUBERAY:
                world.cluster.install(kind)
            await until(lambda: names(it) == sorted(["acme-store", f"acme-{OLD}"]))
            # Heard from its watch alone.
            world.kuberay.serve(f"acme-{OLD}")
            await until(lambda: it.is_true("Ready"))
            assert world.condition("KubeRayReady")["status"] == "True"

    run(main())


def test_kuberay_may_come_later(web: FakeWeb) -> None:
    async def main() -> None:
        world = World(served=frozenset())
        world.make()
        async with operated(world) as it:
            await until(lambda: bool(it.service.get("status", {}).get("conditions")))
            assert world.condition("KubeRayReady")["reason"] == "Missing"
            assert names(it) == []
            for kind in KUBERAY:
                world.cluster.install(kind)
            await until(lambda: len(names(it)) == 2)
            await until(lambda: it.is_true("KubeRayReady"))

    run(main())


def test_the_process_outlives_its_crds_and_says_what_ended_it(tmp_path: Path, unused_port: int) -> None:
    world = World()
    world.up()

    async def main() -> tuple[int, str]:
        server = FakeApiServer(world.cluster)
        async with served(server.answer) as client, asyncio.timeout(90):
            url = client.configuration.host
            started_up = started(url, tmp_path, unused_port, namespace="default", log=tmp_path / "log")
            async with started_up as process:
                await until(lambda: server.requests["watch", "blendservices"] > 0, 60)
                world.cluster.uninstall(CORPUS_PRECOMPUTE)
                await until(lambda: server.requests["list", "corpusprecomputes"] > 1, 60)
                world.cluster.uninstall(BLEND_SERVICE)
                await until(lambda: names_in(world) == ["acme-store"], 60)
                world.lose_pods(OLD)
                await until(lambda: names_in(world) == [], 60)
                world.lose_pods("store")
                await until(lambda: world.cluster.ours == frozenset(), 60)
                assert process.returncode is None
                process.terminate()
                return await process.wait(), (tmp_path / "log").read_text()

    code, said = run(main())
    assert code == 0
    assert said.count("ended by SIGTERM") == 1
    assert said.count("does not serve corpusprecomputes") == 1
    assert "Traceback" not in said


def names_in(world: World) -> list[str]:
    return world.cluster.named("RayService")


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_the_finalizer_is_what_held_it(world: World) -> None:
    """What the tests above rest on: the stand-in serves a deleted CRD until its last object is gone."""
    world.cluster.uninstall(BLEND_SERVICE)
    assert FINALIZER in world.cluster.find("BlendService", "acme")["metadata"]["finalizers"]
    assert world.cluster.serves(BLEND_SERVICE)
    world.cluster.uninstall(CORPUS_PRECOMPUTE)
    assert not world.cluster.serves(CORPUS_PRECOMPUTE)
