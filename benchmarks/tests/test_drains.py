"""Services drain although the operator is killed, and what tells so can tell the contrary."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.kubernetes_operator import stand_in
from kintsugi_operator.controller.cluster import BLEND_SERVICE, POD, RAY_SERVICE, Resource
from kintsugi_operator.objects.names import LABEL_REVISION, LABEL_SERVICE
from kintsugi_operator.objects.pods import Manifest
from tests.e2e.kubernetes import drains
from tests.e2e.kubernetes.clusters import Team
from tests.e2e.kubernetes.drains import Deleted, Drainer

SERVICE: Manifest = {"metadata": {"name": "acme"}}
STORE: Manifest = {"metadata": {"name": "acme-store", "labels": {LABEL_SERVICE: "acme"}}}
ENGINES: Manifest = {"metadata": {"name": "acme-r", "labels": {LABEL_SERVICE: "acme", LABEL_REVISION: "r"}}}


def drainer_of(found: Mapping[Resource, list[Manifest]], ended: list[str]) -> Drainer:
    """One that sees these objects."""

    def delete(resource: Resource, namespace: str, name: str) -> None:
        assert resource is POD
        ended.append(name)

    def listed(resource: Resource, namespace: str) -> list[Manifest]:
        return found.get(resource, [])

    team: Any = SimpleNamespace(namespace="t", kube=SimpleNamespace(list=listed, delete=delete))
    return Drainer(cast(Team, team), seed=1)


@pytest.mark.timeout(300)
def test_services_drain_although_the_operator_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "LIFE_S_MAX", 6.0)
    with stand_in() as stage:
        found = Drainer(stage.team, seed=2, kubeconfig=stage.kubeconfig).run(3)
    assert found.faults == {}, f"seed {found.seed}"
    assert found.kills > 0


@pytest.mark.parametrize(
    ("there", "fault"),
    [
        ({BLEND_SERVICE: [SERVICE], RAY_SERVICE: [STORE, ENGINES]}, ""),
        ({BLEND_SERVICE: [SERVICE], RAY_SERVICE: [STORE]}, ""),
        ({BLEND_SERVICE: [SERVICE], RAY_SERVICE: [ENGINES]}, "store was deleted before its engines"),
        ({BLEND_SERVICE: [SERVICE]}, "store was deleted before its engines"),
        ({RAY_SERVICE: [STORE, ENGINES]}, "gone before its engine and shard"),
    ],
)
def test_what_is_not_in_order_is_seen(there: Mapping[Resource, list[Manifest]], fault: str) -> None:
    service = Deleted("acme", {"engine": "e", "shard": "s"})
    drainer_of(there, []).play([service])
    assert (fault in service.fault) if fault else not service.fault
    assert not service.is_over


def test_pods_end_after_their_ray_service_and_then_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "POD_END_S_MAX", 0.0)
    service, ended = Deleted("acme", {"engine": "e", "shard": "s"}), list[str]()
    there = {BLEND_SERVICE: [SERVICE], RAY_SERVICE: [STORE, ENGINES]}
    for gone in (ENGINES, STORE):
        there[RAY_SERVICE].remove(gone)
        drainer_of(there, ended).play([service])
        assert not service.is_over
    assert ended == ["e", "s"]
    del there[BLEND_SERVICE]
    drainer_of(there, ended).play([service])
    assert service.is_over
    assert not service.fault
