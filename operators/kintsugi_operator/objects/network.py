"""Disruption budgets and network policies. The policies deny all traffic that they do not allow."""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.core.deploy import ENGINE_METRICS_PORT, SHARD_METRICS_PORT, SHARD_PORT
from kintsugi_operator.api.blend_service import BlendServiceSpec, Egress, ServiceExpert
from kintsugi_operator.objects.base import Owner, make_object
from kintsugi_operator.objects.deployed import (
    DIRECTORY_PORT,
)
from kintsugi_operator.objects.names import LABEL_PART, join_name, labels, selector
from kintsugi_operator.objects.pods import DASHBOARD_PORT, METRICS_PORT, Manifest

NAMESPACE_NAME = "kubernetes.io/metadata.name"
KUBERAY = {"app.kubernetes.io/name": "kuberay-operator"}
OPERATOR = {"app.kubernetes.io/name": "kintsugi-operator"}
USERS = ("service", "corpus")
"""Parts of a service whose pods call the store."""
POLICY = "networking.k8s.io/v1"


def budgets(spec: BlendServiceSpec, owner: Owner, active: str, engines: int) -> list[Manifest]:
    """Budgets that let a node's maintenance evict one shard, engine or gateway at a time. `engines`: the
    present number of engine pods.

    They set `minAvailable`: `maxUnavailable` would forbid every eviction, because it needs the scale
    subresource of the pods' controller, which RayClusters lack. A pod that is not ready may always be
    evicted, since it could otherwise never be replaced.
    """
    engine_pods = max(spec.engines.replicas, engines)
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
    """`minAvailable` of a Ray cluster's head: 0 or 1.

    Without a Redis, the loss of a head stops all its workers, so it may be evicted only if there is one
    worker. With a Redis, the workers survive it.
    """
    return int(workers > 1 and not spec.expert.redis.address)


def policies(spec: BlendServiceSpec, owner: Owner, home: str) -> list[Manifest]:
    """All policies; none without `network.policies`. `home`: the operator's namespace; empty: any."""
    if not spec.network.policies:
        return []
    return [
        _policy(owner, "deny", _match(owner), ingress=[], egress=[_dns(spec.expert)]),
        *_within_clusters(owner),
        _store_policy(spec, owner),
        _users_policy(spec, owner),
        _gateway_policy(spec, owner),
        _heads_policy(spec, owner, home),
        _engines_policy(owner, home),
        *_metrics_policies(spec, owner),
    ]


def _within_clusters(owner: Owner) -> list[Manifest]:
    """Allow all traffic within a Ray cluster, whose processes choose their own ports."""
    clusters = {part: _match(owner, part=part) for part in ("store", *USERS)}
    return [
        _policy(owner, f"within-{part}", pods, [{"from": _peers(pods)}], [{"to": _peers(pods)}])
        for part, pods in clusters.items()
    ]


def _store_policy(spec: BlendServiceSpec, owner: Owner) -> Manifest:
    """Let engines, gateways and jobs call the store, and shards their bucket."""
    ingress = [{"from": _peers(_users(owner)), "ports": _ports(SHARD_PORT, DIRECTORY_PORT)}]
    # A policy cannot name a host, so all destinations are allowed.
    egress = [{"ports": _ports(spec.store.expert.bucket_port)}] if spec.store.bucket_url else None
    return _policy(owner, "store", _match(owner, part="store"), ingress=ingress, egress=egress)


def _users_policy(spec: BlendServiceSpec, owner: Owner) -> Manifest:
    """Let engines, gateways and jobs call the store, download models and corpora, and call the destinations
    in `expert.egress`."""
    store = {"to": _peers(_match(owner, part="store")), "ports": _ports(SHARD_PORT, DIRECTORY_PORT)}
    downloads = [{"ports": _ports(443)}] if spec.network.downloads else []
    egress = [store, *downloads, *map(_egress_rule, spec.expert.egress)]
    return _policy(owner, "users", _users(owner), egress=egress)


def _gateway_policy(spec: BlendServiceSpec, owner: Owner) -> Manifest:
    rule: Manifest = {"ports": _ports(spec.gateway.grpc_port, spec.gateway.http_port)}
    if spec.network.client_namespaces:
        names = list(spec.network.client_namespaces)
        chosen = {"matchExpressions": [{"key": NAMESPACE_NAME, "operator": "In", "values": names}]}
        rule["from"] = [{"namespaceSelector": chosen}]
    return _policy(owner, "clients", _match(owner, part="service", role="gateway"), ingress=[rule])


def _heads_policy(spec: BlendServiceSpec, owner: Owner, home: str) -> Manifest:
    """Let only KubeRay and the operator call heads, because the dashboard runs any code that it receives.
    KubeRay deploys through the dashboard, and the operator reads job logs from it."""
    # The operators' own namespaces only: pods elsewhere may have the same label.
    callers = ((spec.expert.kuberay_namespace or owner.namespace, KUBERAY), (home, OPERATOR))
    peers = [
        {"namespaceSelector": _namespace(where), "podSelector": {"matchLabels": labels}}
        for where, labels in callers
    ]
    ingress = [{"from": peers, "ports": _ports(DASHBOARD_PORT)}]
    # Ray's autoscaler runs beside the head and calls the API server.
    egress = [{"ports": _ports(*spec.expert.api_server_ports)}]
    if spec.expert.redis.address:
        # A policy cannot name a host, so all destinations are allowed.
        egress.append({"ports": _ports(int(spec.expert.redis.address.rpartition(":")[2]))})
    return _policy(owner, "heads", _match(owner, role="head"), ingress=ingress, egress=egress)


def _engines_policy(owner: Owner, home: str) -> Manifest:
    """Let the operator read from engines how far they have learned."""
    peers = [{"namespaceSelector": _namespace(home), "podSelector": {"matchLabels": OPERATOR}}]
    ingress = [{"from": peers, "ports": _ports(ENGINE_METRICS_PORT)}]
    return _policy(owner, "engines", _match(owner, part="service", role="engine"), ingress=ingress)


def _metrics_policies(spec: BlendServiceSpec, owner: Owner) -> list[Manifest]:
    """Let Prometheus read metrics, if the spec names its namespace."""
    if not spec.network.monitoring_namespace:
        return []
    peers = [{"namespaceSelector": _namespace(spec.network.monitoring_namespace)}]
    ports = _ports(SHARD_METRICS_PORT, ENGINE_METRICS_PORT, METRICS_PORT, spec.gateway.http_port)
    return [_policy(owner, "metrics", _match(owner), ingress=[{"from": peers, "ports": ports}])]


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
    pods: Manifest,
    ingress: Sequence[Manifest] | None = None,
    egress: Sequence[Manifest] | None = None,
) -> Manifest:
    """`pods`: selector of the pods that it is for. `ingress` and `egress`: the allowed traffic. An empty list
    allows none; None leaves it to other policies."""
    rules = {"ingress": ingress, "egress": egress}
    spec = {
        "podSelector": pods,
        "policyTypes": [direction.capitalize() for direction, some in rules.items() if some is not None],
        # The API server does not store empty lists, so applying one would count as a change of the spec.
        **{direction: list(some) for direction, some in rules.items() if some},
    }
    return make_object(
        owner, "NetworkPolicy", join_name(owner.name, what), labels(owner.name), {"spec": spec}, POLICY
    )


def _dns(expert: ServiceExpert) -> Manifest:
    ports = [{"protocol": protocol, "port": port} for port in expert.dns_ports for protocol in ("UDP", "TCP")]
    if not expert.dns_namespace:
        return {"ports": ports}
    return {"to": [{"namespaceSelector": _namespace(expert.dns_namespace)}], "ports": ports}


def _ports(*ports: int) -> list[Manifest]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def _match(owner: Owner, **labels: str) -> Manifest:
    """Select pods of the service, narrowed as by `names.selector`."""
    return {"matchLabels": selector(owner.name, **labels)}


def _users(owner: Owner) -> Manifest:
    """Select engines, gateways and jobs."""
    expression = {"key": LABEL_PART, "operator": "In", "values": list(USERS)}
    return {**_match(owner), "matchExpressions": [expression]}


def _peers(pods: Manifest) -> list[Manifest]:
    return [{"podSelector": pods}]


def _namespace(name: str) -> Manifest:
    return {"matchLabels": {NAMESPACE_NAME: name}} if name else {}
