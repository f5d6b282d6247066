"""Services and operators that come and go, on a real API server (see `clusters`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kintsugi_operator.controller.cluster import (
    BLEND_SERVICE,
    DEPLOYMENT,
    LEASE,
    POLICY,
    RAY_SERVICE,
)
from kintsugi_operator.objects.names import ANNOTATION_DIGEST, FIELD_MANAGER, FINALIZER
from kintsugi_operator.observed.views import digest_of
from tests.e2e.kubernetes.clusters import MERGE, Kube, Operator, Team, needs_cluster, team_of, until
from tests.e2e.kubernetes.drains import Drainer
from tests.e2e.kubernetes.test_cluster import at_rest, serving

pytestmark = [needs_cluster, pytest.mark.timeout(600)]


@pytest.fixture
def elsewhere(cluster: Kube) -> Iterator[str]:
    """Another namespace."""
    with team_of(cluster, {}) as other:
        yield other.namespace


def finalizers(team: Team, name: str = "acme") -> list[str]:
    live = team.find(BLEND_SERVICE, name)
    return [] if live is None else live["metadata"].get("finalizers", [])


def delete_namespace(team: Team) -> None:
    """Delete it, and wait until it is gone."""
    path = f"/api/v1/namespaces/{team.namespace}"
    team.kube.request("DELETE", path)
    listed = "/api/v1/namespaces"

    def is_gone() -> bool:
        names = [one["metadata"]["name"] for one in team.kube.request("GET", listed)["items"]]
        return team.namespace not in names

    until(is_gone, "the namespace is gone", lambda: str(team.kube.request("GET", path)["status"]))


def deployment() -> dict[str, Any]:
    """One without a pod: the test is the operator's kubelet."""
    labels = {"app": FIELD_MANAGER}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "operator", "image": "none"}]}}
    spec = {"replicas": 0, "selector": {"matchLabels": labels}, "template": pod}
    return {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.kind,
        "metadata": {"name": FIELD_MANAGER},
        "spec": spec,
    }


def test_what_was_never_ready_goes_without_an_operator(team: Team, operator: Operator) -> None:
    team.make()
    team.wait_for_condition("Reconciled", "True")
    assert finalizers(team) == []
    operator.kill()
    team.kube.delete(BLEND_SERVICE, team.namespace, "acme")
    until(lambda: team.find(BLEND_SERVICE, "acme") is None, "the service is gone")
    until(lambda: team.find(RAY_SERVICE, "acme-store") is None, "what it owned is gone")


def test_a_namespace_is_not_held_by_an_operator_elsewhere(team: Team, elsewhere: str) -> None:
    operator = Operator(team, "first", home=elsewhere)
    try:
        operator.wait_until_it_leads()
        serving(team)
        assert finalizers(team) == [FINALIZER]
        delete_namespace(team)
    finally:
        operator.stop()


def test_an_operator_whose_namespace_is_deleted_lets_services_go(team: Team, operator: Operator) -> None:
    serving(team)
    team.kube.request("DELETE", f"/api/v1/namespaces/{team.namespace}")
    # Its pod would be told to end now.
    operator.stop()
    until(lambda: team.find(BLEND_SERVICE, "acme") is None, "the service is gone", operator.said)


def test_an_operator_that_is_removed_lets_services_go_and_leaves_no_lease(team: Team) -> None:
    team.kube.request("POST", DEPLOYMENT.path(team.namespace), deployment())
    options = [f"--namespace={team.namespace}", f"--deployment={FIELD_MANAGER}"]
    operator = Operator(team, "first", options=options)
    try:
        operator.wait_until_it_leads()
        serving(team)
        assert finalizers(team) == [FINALIZER]
        team.kube.delete(DEPLOYMENT, team.namespace, FIELD_MANAGER)
    finally:
        operator.stop()
    assert finalizers(team) == []
    until(lambda: team.find(LEASE, FIELD_MANAGER) is None, "the Lease is gone", operator.said)


def test_two_operators_do_not_fight(team: Team, elsewhere: str, operator: Operator) -> None:
    wide = Operator(team, "wide", home=elsewhere, options=[])
    try:
        wide.wait_until_it_leads()
        serving(team)
        until(
            lambda: f"{elsewhere}/{FIELD_MANAGER} ignores them" in wide.said(),
            "one leaves it alone",
            wide.said,
        )
        at_rest(team, operator)
        writes = wide.writes()
        at_rest(team, operator)
        assert wide.writes() == writes
        assert team.status()["operator"]["lease"] == f"{team.namespace}/{FIELD_MANAGER}"
        operator.kill()
        until(
            lambda: team.status()["operator"]["lease"] == f"{elsewhere}/{FIELD_MANAGER}",
            "the other one takes over",
            wide.said,
        )
    finally:
        wide.stop()


def test_policies_that_are_applied_again_keep_their_generation(team: Team, operator: Operator) -> None:
    serving(team)
    before = team.kube.list(POLICY, team.namespace)
    for one in before:
        patch = {"metadata": {"annotations": {ANNOTATION_DIGEST: "another"}}}
        path = POLICY.path(team.namespace, one["metadata"]["name"])
        team.kube.request("PATCH", path, patch, MERGE)
    until(
        lambda: all(digest_of(one) != "another" for one in team.kube.list(POLICY, team.namespace)),
        "all are applied again",
        operator.said,
    )
    after = team.kube.list(POLICY, team.namespace)
    assert {one["metadata"]["generation"] for one in after} == {1}


def test_services_drain_although_the_operator_is_killed(cluster: Kube) -> None:
    with team_of(cluster, {}) as team:
        found = Drainer(team, seed=1).run(5)
    assert found.faults == {}, f"seed {found.seed}"
