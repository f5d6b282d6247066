"""Disruption budgets and network policies, which deny everything that is not named here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kintsugi_operator.api.blend_service import BlendServiceSpec, Egress
from kintsugi_operator.objects.base import Owner, make_object
from kintsugi_operator.objects.deployed import (
    DIRECTORY_PORT,
    ENGINE_METRICS_PORT,
    SHARD_METRICS_PORT,
    SHARD_PORT,
)
from kintsugi_operator.objects.names import LABEL_PART, join_name, labels, selector
from kintsugi_operator.objects.pods import DASHBOARD_PORT, METRICS_PORT, Manifest

NAMESPACE_NAME = "kubernetes.io/metadata.name"
KUBERAY = {"app.kubernetes.io/name": "kuberay-operator"}
OPERATOR = {"app.kubernetes.io/name": "kintsugi-operator"}
USERS = ("service", "calibration", "corpus")
"""Parts whose pods call the store."""
POLICY = "networking.k8s.io/v1"


def budgets(spec: BlendServiceSpec, owner: Owner, active: str, engines: int) -> list[Manifest]:
    """At most one shard at a time, and one engine or gateway, is taken away for a node's maintenance.
    `engines`: pods that the autoscaler has made of them.

    As `minAvailable`: Kubernetes counts what may be missing by the scale of the pods' controller, RayClusters
    have none, and a budget that cannot be counted lets nothing go. What is not ready may go at any time, or a
    pod that cannot start could never be replaced.
    """
    engine_pods = max(spec.engines.scale.min, engines)
    store, service = {"part": "store"}, {"part": "service", "revision": active}
    chosen = {
        "shards": (spec.store.shards - 1, {**store, "role": "shard"}),
        "engines": (engine_pods - 1, {**service, "role": "engine"}),
        "gateways": (spec.gateway.replicas - 1, {**service, "role": "gateway"}),
        "store-head": (_heads_kept(spec, spec.store.shards), {**store, "role": "head"}),
        "service-head": (_heads_kept(spec, engine_pods), {**service, "role": "head"}),
    }
    budgets = []
    for what, (least, match) in chosen.items():
        body = {
            "minAvailable": least,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector(owner.name, **match)},
        }
        name, tags = join_name(owner.name, what), labels(owner.name)
        budgets.append(make_object(owner, "PodDisruptionBudget", name, tags, {"spec": body}, "policy/v1"))
    return budgets


def _heads_kept(spec: BlendServiceSpec, workers: int) -> int:
    """How many of a Ray cluster's one head must stay.

    Without a Redis a head takes all its workers with it, so it may go when they may: where there is one. With
    a Redis the workers outlive it.
    """
    return int(workers > 1 and not spec.redis.address)


def policies(spec: BlendServiceSpec, owner: Owner, home: str) -> list[Manifest]:
    """None where the spec wants none. `home`: the operator's namespace; empty: any."""
    if not spec.network.policies:
        return []
    return [
        _policy(owner, "deny", {}, ingress=[], egress=[_dns()]),
        *_within_clusters(owner),
        _store_policy(spec, owner),
        _gateway_policy(spec, owner),
        _heads_policy(spec, owner, home),
        _metrics_policy(spec, owner, home),
        *_calls_of_users(spec, owner),
    ]


def _within_clusters(owner: Owner) -> list[Manifest]:
    """Ray's processes choose their ports: free within a cluster, closed around it."""
    peers = {part: _pods(selector(owner.name, part=part)) for part in ("store", *USERS)}
    return [
        _policy(owner, f"within-{part}", {"part": part}, [{"from": pods}], [{"to": pods}])
        for part, pods in peers.items()
    ]


def _store_policy(spec: BlendServiceSpec, owner: Owner) -> Manifest:
    """Engines, gateways and jobs may read and write chunks; shards may call their bucket."""
    expression = {"key": LABEL_PART, "operator": "In", "values": list(USERS)}
    users = {"matchLabels": selector(owner.name), "matchExpressions": [expression]}
    ingress = [{"from": [{"podSelector": users}], "ports": _ports(SHARD_PORT, DIRECTORY_PORT)}]
    # Policies know no names, so it may be anywhere.
    egress = [{"ports": _ports(spec.store.bucket_port)}] if spec.store.bucket_url else None
    return _policy(owner, "store", {"part": "store"}, ingress=ingress, egress=egress)


def _calls_of_users(spec: BlendServiceSpec, owner: Owner) -> list[Manifest]:
    """Policies that let engines, gateways and jobs call the store, download models and corpora, and call
    whatever else the spec names."""
    shards = _pods(selector(owner.name, part="store"))
    calls: dict[str, list[Manifest]] = {
        "to-store": [{"to": shards, "ports": _ports(SHARD_PORT, DIRECTORY_PORT)}],
        "downloads": [{"ports": _ports(443)}] if spec.network.downloads else [],
        "egress": [_egress_rule(one) for one in spec.network.egress],
    }
    return [
        _policy(owner, f"{what}-{part}", {"part": part}, egress=egress)
        for what, egress in calls.items()
        for part in USERS
        if egress
    ]


def _gateway_policy(spec: BlendServiceSpec, owner: Owner) -> Manifest:
    rule: Manifest = {"ports": _ports(spec.gateway.grpc_port, spec.gateway.http_port)}
    if spec.network.client_namespaces:
        names = list(spec.network.client_namespaces)
        chosen = {"matchExpressions": [{"key": NAMESPACE_NAME, "operator": "In", "values": names}]}
        rule["from"] = [{"namespaceSelector": chosen}]
    return _policy(owner, "clients", {"part": "service", "role": "gateway"}, ingress=[rule])


def _heads_policy(spec: BlendServiceSpec, owner: Owner, home: str) -> Manifest:
    """KubeRay deploys through the dashboards of heads; whoever reaches those may run code there. The operator
    reads what jobs have written."""
    kuberay = {
        "namespaceSelector": _namespace(spec.network.kuberay_namespace or owner.namespace),
        "podSelector": {"matchLabels": KUBERAY},
    }
    ingress = [{"from": [kuberay, _operator(home)], "ports": _ports(DASHBOARD_PORT)}]
    # Ray's autoscaler, beside the head, asks Kubernetes.
    egress = [{"ports": _ports(443, 6443)}]
    if spec.redis.address:
        # Policies know no names, so it may be anywhere.
        egress.append({"ports": _ports(int(spec.redis.address.rpartition(":")[2]))})
    return _policy(owner, "heads", {"role": "head"}, ingress=ingress, egress=egress)


def _metrics_policy(spec: BlendServiceSpec, owner: Owner, home: str) -> Manifest:
    """The operator reads bytes and hit rates, Prometheus everything."""
    peers = [_operator(home)]
    if spec.network.monitoring_namespace:
        peers.append({"namespaceSelector": _namespace(spec.network.monitoring_namespace)})
    ports = _ports(SHARD_METRICS_PORT, ENGINE_METRICS_PORT, METRICS_PORT, spec.gateway.http_port)
    return _policy(owner, "metrics", {}, ingress=[{"from": peers, "ports": ports}])


def _operator(home: str) -> Manifest:
    """The operator's pods. A label alone would let in anybody who may make a pod somewhere."""
    return {"namespaceSelector": _namespace(home), "podSelector": {"matchLabels": OPERATOR}}


def _egress_rule(egress: Egress) -> Manifest:
    rule: Manifest = {"ports": _ports(*egress.ports)}
    if egress.namespace:
        rule["to"] = [{"namespaceSelector": _namespace(egress.namespace)}]
    if egress.cidr:
        rule["to"] = [{"ipBlock": {"cidr": egress.cidr}}]
    return rule


def _policy(
    owner: Owner,
    what: str,
    chosen: Mapping[str, str],
    ingress: Sequence[Manifest] | None = None,
    egress: Sequence[Manifest] | None = None,
) -> Manifest:
    """`ingress` and `egress`: what is let through; an empty list lets nothing through, None says nothing."""
    rules = {"ingress": ingress, "egress": egress}
    spec = {
        "podSelector": {"matchLabels": selector(owner.name, **chosen)},
        "policyTypes": [direction.capitalize() for direction, some in rules.items() if some is not None],
        # The API server stores no empty list, and counts each one that is applied as a change of the spec.
        **{direction: list(some) for direction, some in rules.items() if some},
    }
    return make_object(
        owner, "NetworkPolicy", join_name(owner.name, what), labels(owner.name), {"spec": spec}, POLICY
    )


def _dns() -> Manifest:
    ports = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    return {"to": [{"namespaceSelector": _namespace("kube-system")}], "ports": ports}


def _ports(*ports: int) -> list[Manifest]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def _pods(match: Mapping[str, str]) -> list[Manifest]:
    return [{"podSelector": {"matchLabels": dict(match)}}]


def _namespace(name: str) -> Manifest:
    return {"matchLabels": {NAMESPACE_NAME: name}} if name else {}
