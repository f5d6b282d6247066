"""The cluster of KUBECONFIG, a namespace on it, and an operator there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.kubernetes.clusters import Kube, Operator, Team, kube, team_of

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Kube]:
    with kube() as one:
        one.install_crds()
        yield one


@pytest.fixture
def team(cluster: Kube) -> Iterator[Team]:
    with team_of(cluster, RESTRICTED) as one:
        yield one


@pytest.fixture
def operator(team: Team) -> Iterator[Operator]:
    one = Operator(team, "first")
    try:
        one.wait_until_it_leads()
        yield one
    finally:
        one.stop()
