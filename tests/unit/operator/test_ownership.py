"""Which of two operators owns a service, and what the other one does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from kintsugi_operator.api.status import OperatorStatus
from kintsugi_operator.controller.metrics import OperatorMetrics
from kintsugi_operator.controller.owners import CLUSTER, GONE_S, NAMESPACE, Owners
from kintsugi_operator.controller.reconcile import CONTESTED_S, Reconciler
from tests.fakes.cluster import FakeReads
from tests.unit.operator.test_reconcile import World, run

WIDE = OperatorStatus("platform/wide", CLUSTER)
OTHER = OperatorStatus("other/wide", CLUSTER)
NARROW = OperatorStatus("team/narrow", NAMESPACE)


class Shared(World):
    """A cluster with two operators, whose Leases are renewed when a test says so."""

    def __init__(self, *operators: OperatorStatus) -> None:
        super().__init__()
        self.operators = {
            one.lease: Reconciler(
                self.cluster,
                FakeReads(self.cluster),
                self.web,
                lambda: self.now,
                one,
                OperatorMetrics(),
                one.lease.split("/")[0],
            )
            for one in operators
        }
        for one in filter(lambda one: one.lease, operators):
            self.renew(one)

    def renew(self, one: OperatorStatus) -> None:
        namespace, name = one.lease.split("/")
        spec = {"holderIdentity": "pod", "renewTime": self.now.isoformat()}
        self.cluster.put({"kind": "Lease", "metadata": {"name": name, "namespace": namespace}, "spec": spec})

    def looked(self, one: OperatorStatus, times: int = 1) -> float | None:
        """What an operator's last look returned."""
        found = None
        for _ in range(times):
            found = run(self.operators[one.lease].service("default", "acme"))
        return found

    @property
    def owner(self) -> str:
        return str(self.cluster.find("BlendService", "acme")["status"]["operator"]["lease"])

    def home(self) -> Any:
        """The namespace from which the operator may read job logs, as policies have it."""
        rules = self.cluster.find("NetworkPolicy", "acme-heads")["spec"]["ingress"]
        return rules[0]["from"][1]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]


@pytest.mark.parametrize(
    ("me", "owner", "is_mine"),
    [
        (WIDE, OperatorStatus(), True),
        (WIDE, WIDE, True),
        (WIDE, OperatorStatus(WIDE.lease, NAMESPACE), True),
        (WIDE, OTHER, False),
        (WIDE, NARROW, False),
        (NARROW, WIDE, True),
        (NARROW, OperatorStatus("team/second", NAMESPACE), False),
    ],
)
def test_who_owns_what(me: OperatorStatus, owner: OperatorStatus, is_mine: bool) -> None:
    world = Shared(me, owner)
    owners = Owners(world.cluster, me, lambda: world.now.timestamp())
    assert run(owners.is_mine(owner)) is is_mine


@pytest.mark.parametrize("order", [(WIDE, NARROW), (NARROW, WIDE)])
def test_two_operators_do_not_fight(
    order: tuple[OperatorStatus, ...], caplog: pytest.LogCaptureFixture
) -> None:
    world = Shared(*order)
    world.make()
    for one in order * 4:
        world.looked(one)
    before = world.cluster.writes.copy()
    for one in order * 4:
        world.looked(one)
    assert world.cluster.writes == before
    assert (world.owner, world.home()) == (NARROW.lease, "team")
    said = f"operator {NARROW.lease} owns services here; {WIDE.lease} ignores them"
    assert caplog.text.count(said) == 1


def test_who_does_not_own_a_service_does_not_say_that_it_has_seen_it() -> None:
    world = Shared(WIDE, OTHER)
    world.make()
    world.looked(WIDE, 3)
    live = world.cluster.find("BlendService", "acme")
    live["metadata"]["generation"] = 7
    assert world.looked(OTHER, 2) == CONTESTED_S
    assert live["status"]["observedGeneration"] == 1
    world.looked(WIDE, 2)
    assert live["status"]["observedGeneration"] == 7


def test_who_is_gone_is_followed() -> None:
    world = Shared(WIDE, NARROW)
    world.make()
    world.looked(NARROW, 3)
    for _ in range(3):
        world.renew(NARROW)
        assert world.looked(WIDE) == CONTESTED_S
        world.now += timedelta(seconds=GONE_S)
    world.looked(WIDE)
    assert world.owner == WIDE.lease
    world.looked(WIDE, 2)
    assert world.home() == "platform"


def test_a_lease_that_is_deleted_is_not_renewed() -> None:
    world = Shared(WIDE, OTHER)
    world.make()
    world.looked(WIDE, 3)
    world.looked(OTHER)
    world.cluster.lose("Lease", "wide", "platform")
    world.looked(OTHER)
    world.now += timedelta(seconds=GONE_S)
    world.looked(OTHER)
    assert world.owner == OTHER.lease


def test_a_corpus_is_its_services_owners() -> None:
    world = Shared(WIDE, OTHER)
    world.make()
    world.fill()
    world.looked(WIDE, 3)
    before = world.cluster.writes.copy()
    assert run(world.operators[OTHER.lease].corpus("default", "docs")) == CONTESTED_S
    assert world.cluster.writes == before
    run(world.operators[WIDE.lease].corpus("default", "docs"))
    assert world.cluster.writes != before
