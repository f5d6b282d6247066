"""Network policies of a service."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from kintsugi_operator.api.blend_service import BlendServiceSpec
from kintsugi_operator.desired.plan import plan_service
from kintsugi_operator.observed.views import Observed
from tests.unit.operator.planned import (
    BEFORE,
    PROPERTY,
    matches,
    named,
    objects_of,
    pod_templates,
)
from tests.unit.operator.specs import NOW, OWNER, spec_of, specs


def test_what_may_be_called_is_what_the_spec_names() -> None:
    asked = [
        {"ports": [4317], "namespace": "observability"},
        {"ports": [3128, 9000], "cidr": "10.0.0.0/8"},
        {"ports": [8443]},
    ]
    objects = objects_of(spec_of(network={"downloads": False}, expert={"egress": asked}))
    plain = objects_of(spec_of(network={"downloads": False}))
    (policy,) = [one["spec"] for one in objects if one not in plain]
    (expression,) = policy["podSelector"]["matchExpressions"]
    assert expression["values"] == ["service", "corpus"]
    assert policy["policyTypes"] == ["Egress"]
    _, collector, proxy, anywhere = policy["egress"]
    assert collector["to"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "observability"}}}
    ]
    assert proxy["to"] == [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    assert [one["port"] for one in proxy["ports"]] == [3128, 9000]
    assert "to" not in anywhere


@pytest.mark.parametrize(("told", "namespace"), [({}, "team"), ({"kuberayNamespace": "kuberay"}, "kuberay")])
def test_kuberay_reaches_dashboards_from_one_namespace_only(told: dict[str, str], namespace: str) -> None:
    """Its label alone would let in whoever may make a pod somewhere."""
    policy = named(objects_of(spec_of(expert=told)), "NetworkPolicy", "acme-heads")
    (peer,) = [one for one in policy["spec"]["ingress"][0]["from"] if "kuberay" in str(one["podSelector"])]
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    seen = plan_service(spec_of(expert=told), OWNER, BEFORE, Observed(), NOW)
    (condition,) = [one for one in seen.status.conditions if one.type == "KubeRayReady"]
    assert (
        condition.message
        == f"network policies admit KubeRay of namespace {namespace} (expert.kuberayNamespace)"
    )


def test_dns_and_api_server_are_those_of_the_cluster() -> None:
    told = {"dnsNamespace": "", "dnsPorts": [5353], "apiServerPorts": [8443]}
    objects = objects_of(spec_of(expert=told))
    (dns,) = named(objects, "NetworkPolicy", "acme-deny")["spec"]["egress"]
    assert dns == {"ports": [{"protocol": protocol, "port": 5353} for protocol in ("UDP", "TCP")]}
    (api_server,) = named(objects, "NetworkPolicy", "acme-heads")["spec"]["egress"]
    assert [one["port"] for one in api_server["ports"]] == [8443]
    (dns,) = named(objects_of(spec_of()), "NetworkPolicy", "acme-deny")["spec"]["egress"]
    assert dns["to"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "kube-system"}


def test_without_policies_there_are_none() -> None:
    spec = spec_of(network={"policies": False}, store={"insecure": True})
    assert not [one for one in objects_of(spec) if one["kind"] == "NetworkPolicy"]


@PROPERTY
@given(specs)
def test_policies_have_no_empty_lists(spec: BlendServiceSpec) -> None:
    """The API server drops them, so that each one that is applied would be a new generation."""
    for policy in (one for one in objects_of(spec) if one["kind"] == "NetworkPolicy"):
        assert [] not in policy["spec"].values()


def test_policies_deny_what_they_do_not_name() -> None:
    objects = objects_of(spec_of(network={"clientNamespaces": ["shop"]}))
    policies = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "NetworkPolicy"}
    deny = policies["acme-deny"]
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in deny
    for template in pod_templates(objects):
        assert matches(deny["podSelector"]["matchLabels"], template["metadata"]["labels"])
    (rule,) = policies["acme-clients"]["ingress"]
    assert rule["from"][0]["namespaceSelector"]["matchExpressions"][0]["values"] == ["shop"]
    # A shard is open to engines and jobs, on two ports, and to nobody else.
    (rule,) = policies["acme-store"]["ingress"]
    assert [one["port"] for one in rule["ports"]] == [7400, 7410]


def test_shards_may_call_their_bucket() -> None:
    store: dict[str, Any] = {"tiers": [{"name": "a", "gib": 1}], "bucketUrl": "s3://chunks"}
    store["expert"] = {"bucketPort": 9000}
    policy = named(objects_of(spec_of(store=store)), "NetworkPolicy", "acme-store")["spec"]
    assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == [9000]
