"""The operator on a real API server, with its controllers and without a kubelet (see `clusters`).

Install, defaults and rejection, objects, scaling, a change of the model, a bad spec, a restart in the middle,
deletion, two operators, rights. Skipped with a line that says so where KUBECONFIG or KUBERAY_CRDS is not set.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kintsugi_operator.api.blend_service import BlendServiceSpec
from kintsugi_operator.api.manifest import from_manifest
from kintsugi_operator.controller.cluster import (
    BLEND_SERVICE,
    BUDGET,
    CLAIM,
    CONFIG_MAP,
    CORPUS_PRECOMPUTE,
    OWNED,
    POD,
    POLICY,
    RAY_CLUSTER,
    RAY_JOB,
    RAY_SERVICE,
    SERVICE,
    SERVICE_ACCOUNT,
    Refused,
    Resource,
)
from kintsugi_operator.controller.index import KINDS
from kintsugi_operator.objects.deployed import EngineRevision
from kintsugi_operator.objects.names import FINALIZER, LABEL_SERVICE
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.views import digest_of
from tests.e2e.kubernetes.clusters import (
    SMALL,
    Kube,
    Operator,
    Team,
    kubeconfig_for,
    kuberay_crds,
    needs_cluster,
    small_spec,
    until,
)
from tests.unit.operator.rights import chart_rules

pytestmark = [needs_cluster, pytest.mark.timeout(600)]

RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces"


def pods(*roles: str, **template: Any) -> dict[str, Any]:
    """Parts of a spec that add a template to the pods of roles."""
    return {"expert": {"podTemplates": dict.fromkeys(roles, template)}}


def revision(**parts: Any) -> str:
    return EngineRevision.of(from_manifest(BlendServiceSpec, small_spec(**parts))).name


def serving(team: Team, **parts: Any) -> None:
    """A service that serves."""
    team.make(**parts)
    old = revision(**parts)
    team.is_ready("acme-store")
    team.is_ready(f"acme-{old}")
    team.wait_for_condition("Ready", "True")


def at_rest(team: Team, operator: Operator) -> None:
    """Nothing is written any more, however often the operator looks."""
    until(lambda: quiet_look(team, operator), "looks without writes", operator.said)


def quiet_look(team: Team, operator: Operator) -> bool:
    writes, looks = operator.writes(), operator.looks()
    team.touch()
    until(lambda: operator.looks() > looks, "a look", operator.said)
    return operator.writes() == writes


def test_installing_gives_both_kinds_with_status_and_columns(cluster: Kube, team: Team) -> None:
    assert {"blendservices", "blendservices/status", "corpusprecomputes"} <= {
        one["name"] for one in cluster.request("GET", "/apis/kintsugi.dev/v1alpha1")["resources"]
    }
    team.make()
    live = team.wait_for(BLEND_SERVICE, "acme")
    spec = live["spec"]
    assert spec["store"]["shards"] == 1
    assert spec["store"]["expert"]["volumes"] == {
        "kind": "Persistent",
        "retain": True,
        "dataGib": 1.0,
        "storageClass": "",
    }
    assert spec["engines"]["replicas"] == 1
    assert "replicasMax" not in spec["engines"]
    assert spec["gateway"]["grpcPort"] == 7500
    assert spec["network"]["policies"] is True
    # What the API server has filled in is what the operator would have.
    assert from_manifest(BlendServiceSpec, spec) == from_manifest(BlendServiceSpec, SMALL)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"gateway": {"insecure": False}}, "tokensSecret is mandatory"),
        ({"store": {"shards": 2, "replication": 3}}, "replication must not exceed shards"),
        ({"engines": {"replicas": 0}}, "spec.engines.replicas"),
        ({"engines": {"replicas": 3, "replicasMax": 2}}, "the largest number of engines"),
        ({"store": {"shards": 0}}, "spec.store.shards"),
        ({"store": {"tiers": [{"name": "a", "gib": 1}, {"name": "a", "gib": 2}]}}, "tiers"),
        ({"network": {"policies": False}}, "store.tlsSecret"),
        ({"gateway": {"httpPort": 7500}}, "must differ"),
        ({"model": {"codec": "zip"}}, "spec.model.codec"),
        ({"image": ""}, "spec.image"),
        ({"image": "https://registry/x"}, "spec.image"),
        ({"model": {"path": "gpt2"}}, "spec.model.path"),
        (
            pods("gateway", env=[{"name": "RAY_ADDRESS", "value": "x"}]),
            "the operator or Ray sets this variable",
        ),
        (pods("gateway", env=[{"name": "A"}, {"name": "A"}]), "env"),
        (pods("engines", env=[{"name": "A", "valueFrom": {}}]), "env[0].valueFrom"),
        (
            pods(
                "store",
                env=[{"name": "A", "value": "b", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            ),
            "give value or valueFrom",
        ),
        ({"expert": {"egress": [{"ports": []}]}}, "spec.expert.egress"),
        ({"expert": {"egress": [{"ports": [1], "namespace": "a", "cidr": "::/0"}]}}, "not both"),
    ],
)
def test_the_api_server_refuses_what_cannot_be(team: Team, parts: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        team.make(**parts)
    assert team.find(BLEND_SERVICE, "acme") is None


def test_the_api_server_refuses_changes_that_volumes_cannot_follow(team: Team) -> None:
    team.make(store={"tiers": [{"name": "nvme", "gib": 10}]})
    with pytest.raises(Refused, match="choose another name"):
        team.make(store={"tiers": [{"name": "data", "gib": 5}]})
    with pytest.raises(Refused, match="kind of volumes cannot be changed"):
        team.make(store={"expert": {"volumes": {"kind": "Ephemeral"}}})
    with pytest.raises(Refused, match="must start with a letter"):
        team.make("1st")


def fill(team: Team, **values: Any) -> Manifest:
    """Create or change a corpus of the service."""
    manifest = {
        "apiVersion": CORPUS_PRECOMPUTE.api_version,
        "kind": CORPUS_PRECOMPUTE.kind,
        "metadata": {"name": "docs", "namespace": team.namespace},
        "spec": {"service": "acme", "namespace": "tenant", "source": "/corpus", **values},
    }
    return team.kube.apply(CORPUS_PRECOMPUTE.path(team.namespace, "docs"), manifest)


def test_a_corpus_keeps_its_tenant(team: Team) -> None:
    assert fill(team)["spec"]["tokensMax"] == 512
    with pytest.raises(Refused, match="namespace of a corpus cannot be changed"):
        fill(team, namespace="other")
    with pytest.raises(Refused, match="overlap must be less"):
        fill(team, overlap=512)


def test_a_service_becomes_objects_and_then_nothing_is_written(team: Team, operator: Operator) -> None:
    serving(team, store={"shards": 2, "tiers": [{"name": "nvme", "gib": 10}]})
    tags = {LABEL_SERVICE: "acme"}
    names = {
        one.kind: sorted(found["metadata"]["name"] for found in team.kube.list(one, team.namespace, **tags))
        for one in OWNED
    }
    old = revision(store={"shards": 2, "tiers": [{"name": "nvme", "gib": 10}]})
    assert names[RAY_SERVICE.kind] == sorted(["acme-store", f"acme-{old}"])
    assert names[SERVICE.kind] == ["acme-directory", "acme-grpc", "acme-http"]
    assert names[CLAIM.kind] == ["acme-data-0", "acme-data-1", "acme-nvme-0", "acme-nvme-1"]
    assert names[BUDGET.kind] == sorted(
        f"acme-{what}" for what in ("engines", "gateways", "shards", "service-head", "store-head")
    )
    assert names[SERVICE_ACCOUNT.kind] == ["acme-head", "acme-service"]
    assert names[CONFIG_MAP.kind] == [f"acme-revision-{old}"]
    assert "acme-deny" in names[POLICY.kind]
    live = team.wait_for(BLEND_SERVICE, "acme")
    assert FINALIZER in live["metadata"]["finalizers"]
    assert live["status"]["endpoints"]["grpc"] == f"acme-grpc.{team.namespace}.svc:7500"
    managers = {
        field["manager"] for field in team.wait_for(RAY_SERVICE, "acme-store")["metadata"]["managedFields"]
    }
    assert "kintsugi-operator" in managers
    at_rest(team, operator)


def test_events_tell_what_happened(team: Team, operator: Operator) -> None:
    serving(team)
    path = f"/api/v1/namespaces/{team.namespace}/events"

    def reasons() -> set[str]:
        found = team.kube.request("GET", path, fieldSelector="involvedObject.name=acme")["items"]
        return {one["reason"] for one in found}

    # No kubelet runs, so no shard is ready.
    until(lambda: "ServingWithoutStore" in reasons(), "Events", operator.said)
    at_rest(team, operator)
    before = reasons()
    team.make(gateway={"httpPort": 8265})
    until(lambda: reasons() - before == {"SpecRefused"}, "the spec is refused", operator.said)


def test_every_pod_is_admitted_where_pods_are_restricted(team: Team, operator: Operator) -> None:
    """The namespace enforces the standard; the API server is asked without anything being made."""
    added = {
        "labels": {"example.com/team": "search"},
        "annotations": {"example.com/owner": "search"},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "topology.kubernetes.io/zone",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {LABEL_SERVICE: "acme"}},
            }
        ],
        "volumes": [{"name": "cache", "emptyDir": {}}],
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    }
    serving(team, **pods("engines", "store", "gateway", "heads", **added))
    fill(team)
    jobs = until(lambda: team.kube.list(RAY_JOB, team.namespace), "the corpus's job", operator.said)
    found = [*team.kube.list(RAY_SERVICE, team.namespace), *jobs]
    assert len(found) == 3
    for one in found:
        config = one["spec"].get("rayClusterConfig") or one["spec"]["rayClusterSpec"]
        templates = [config["headGroupSpec"]["template"]]
        templates += [group["template"] for group in config.get("workerGroupSpecs") or []]
        for template in templates:
            assert template["metadata"]["labels"]["example.com/team"] == "search"
            # The ServiceAccount's own admission wants it to be there; heads of clusters have theirs.
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"generateName": "p-", "labels": template["metadata"]["labels"]},
                "spec": template["spec"],
            }
            path = Resource("Pod", "pods").path(team.namespace)
            assert team.kube.request("POST", path, pod, dryRun="All")["kind"] == "Pod"


def test_a_shard_may_be_evicted_and_not_two(team: Team, operator: Operator) -> None:
    """Pods as KubeRay makes them: their controller has no scale that Kubernetes could count from."""
    serving(team, store={"shards": 2})
    config = team.wait_for(RAY_SERVICE, "acme-store")["spec"]["rayClusterConfig"]
    kind = {"apiVersion": RAY_CLUSTER.api_version, "kind": RAY_CLUSTER.kind}
    cluster = {**kind, "metadata": {"name": "store"}, "spec": config}
    made = team.kube.request("POST", RAY_CLUSTER.path(team.namespace), cluster)
    owner = {**kind, "name": "store", "uid": made["metadata"]["uid"], "controller": True}
    for index, group in enumerate(config["workerGroupSpecs"]):
        labels = group["template"]["metadata"]["labels"]
        metadata = {"name": f"shard-{index}", "labels": labels, "ownerReferences": [owner]}
        # Where there are nodes, a kubelet would say that they are not ready.
        spec = {**group["template"]["spec"], "schedulerName": "nobody"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        team.kube.request("POST", POD.path(team.namespace), pod)
        ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        path = POD.path(team.namespace, f"shard-{index}", "status")
        team.kube.request("PATCH", path, ready, "application/strategic-merge-patch+json")

    def allowed() -> bool:
        status = team.wait_for(BUDGET, "acme-shards").get("status") or {}
        return status.get("expectedPods") == 2 and status.get("disruptionsAllowed") == 1

    until(allowed, "one shard may go", lambda: str(team.find(BUDGET, "acme-shards")))


def test_at_rest_nothing_is_asked(team: Team, operator: Operator) -> None:
    serving(team)
    at_rest(team, operator)
    requests, looks = operator.requests(), operator.looks()
    until(lambda: operator.looks() >= looks + 3, "looks", operator.said)
    # A watch may end at any time; it goes on without a list.
    assert operator.requests() | {"watch": 0} == requests | {"watch": 0}
    assert requests["list"] == len(KINDS)


def test_deleted_crds_let_services_drain_and_come_back(cluster: Kube, team: Team, operator: Operator) -> None:
    serving(team)
    try:
        cluster.uninstall_crds(f"{one.plural}.kintsugi.dev" for one in (CORPUS_PRECOMPUTE, BLEND_SERVICE))
        until(lambda: not cluster.is_served(BLEND_SERVICE), "the CRD is gone", operator.said)
        assert team.kube.list(RAY_SERVICE, team.namespace) == []
        assert operator.process.poll() is None
    finally:
        cluster.install_crds()
    team.make()
    team.wait_for(RAY_SERVICE, "acme-store")
    said = operator.log.read_text()
    assert said.count("the API server does not serve corpusprecomputes") == 1
    assert "Traceback" not in said


def test_kuberays_crds_may_go_and_come_back(cluster: Kube, team: Team, operator: Operator) -> None:
    serving(team)
    rollout = team.status()["rollout"]
    try:
        cluster.uninstall_crds(
            one["metadata"]["name"] for one in kuberay_crds(Path(os.environ["KUBERAY_CRDS"]))
        )
        team.wait_for_condition("KubeRayReady", "False", "Missing")
        team.wait_for_condition("Ready", "False")
        assert team.status()["rollout"] == rollout
    finally:
        until(lambda: not cluster.is_served(RAY_SERVICE), "the CRDs are gone", operator.said)
        cluster.install_crds()
    team.wait_for_condition("KubeRayReady", "True")
    team.is_ready(f"acme-{revision()}")
    team.wait_for_condition("Ready", "True")
    assert operator.process.poll() is None


def test_drift_is_corrected(team: Team, operator: Operator) -> None:
    serving(team)
    path = SERVICE.path(team.namespace, "acme-grpc")
    patch = {"spec": {"selector": {"kintsugi.dev/revision": "elsewhere"}}}
    team.kube.request("PATCH", path, patch, "application/merge-patch+json")
    team.kube.delete(POLICY, team.namespace, "acme-deny")
    team.touch()
    until(lambda: team.selected() == revision(), "the selector is back", operator.said)
    team.wait_for(POLICY, "acme-deny")
    at_rest(team, operator)


def test_scaling(team: Team, operator: Operator) -> None:
    serving(team)
    name = f"acme-{revision()}"
    before = team.wait_for(RAY_SERVICE, name)["spec"]
    store = team.wait_for(RAY_SERVICE, "acme-store")["spec"]
    team.make(engines={"replicasMax": 6})
    until(
        lambda: team.wait_for(RAY_SERVICE, name)["spec"]["serveConfigV2"] != before["serveConfigV2"],
        "engines may be more",
        operator.said,
    )
    after = team.wait_for(RAY_SERVICE, name)["spec"]
    assert '"max_replicas": 6' in after["serveConfigV2"]
    assert after["rayClusterConfig"] == before["rayClusterConfig"]
    assert team.wait_for(RAY_SERVICE, "acme-store")["spec"] == store

    def replicas() -> list[int]:
        groups = team.wait_for(RAY_SERVICE, "acme-store")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        return [group["replicas"] for group in groups]

    team.make(store={"shards": 3})
    until(lambda: replicas() == [1, 1, 1], "three shards", operator.said)
    team.wait_for(CLAIM, "acme-data-2")
    team.make(store={"shards": 1})
    until(lambda: replicas() == [1, 0, 0], "one shard", operator.said)
    assert team.find(CLAIM, "acme-data-2") is not None


def test_something_else_may_scale_the_engines(team: Team, operator: Operator) -> None:
    path = BLEND_SERVICE.path(team.namespace, "acme", "scale")
    team.make(engines={"replicas": 2})
    until(lambda: team.status().get("engineSelector"), "the status has a selector", operator.said)
    scale = team.kube.request("GET", path)
    assert scale["spec"]["replicas"] == 2
    assert f"{LABEL_SERVICE}=acme" in scale["status"]["selector"]
    patch = {"spec": {"replicas": 3}}
    team.kube.request("PATCH", path, patch, "application/merge-patch+json")
    assert team.wait_for(BLEND_SERVICE, "acme")["spec"]["engines"]["replicas"] == 3
    name = f"acme-{revision()}"
    until(
        lambda: '"num_replicas": 3' in team.wait_for(RAY_SERVICE, name)["spec"]["serveConfigV2"],
        "three engines",
        operator.said,
    )
    with pytest.raises(Refused, match=r"spec\.engines\.replicas"):
        team.kube.request("PATCH", path, {"spec": {"replicas": 0}}, "application/merge-patch+json")


def test_what_pods_must_not_be_given_is_said_with_the_reason(team: Team, operator: Operator) -> None:
    team.make(**pods("engines", hostNetwork=True))
    said = team.wait_for_condition("Valid", "False", "InvalidSpec")["message"]
    assert said.startswith("spec.expert.podTemplates.engines.hostNetwork: cannot be set: ")
    team.make(**pods("engines", priorityClassName="serving"))
    team.wait_for_condition("Valid", "True")


def test_kuberay_takes_a_redis_and_nothing_drifts(team: Team, operator: Operator) -> None:
    redis = {"address": "rediss://redis.infra.svc:6380", "username": "ray", "passwordSecret": "redis"}
    annotations = {"example.com/scheme": "internal"}
    parts = {"expert": {"redis": redis}, "gateway": {"expert": {"serviceAnnotations": annotations}}}
    serving(team, **parts)
    for name in ("acme-store", f"acme-{revision(**parts)}"):
        options = team.wait_for(RAY_SERVICE, name)["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
        assert options["redisAddress"] == redis["address"]
        assert options["redisPassword"]["valueFrom"]["secretKeyRef"]["name"] == "redis"
    service = team.wait_for(SERVICE, "acme-http")
    assert service["metadata"]["annotations"]["example.com/scheme"] == "internal"
    at_rest(team, operator)


def test_another_model_serves_once_its_engines_are_ready(team: Team, operator: Operator) -> None:
    serving(team)
    old, new = revision(), revision(model={"path": "/models/other"})
    store = team.wait_for(RAY_SERVICE, "acme-store")["spec"]
    team.make(model={"path": "/models/other"})
    team.wait_for(RAY_SERVICE, f"acme-{new}")
    team.wait_for_condition("RolledOut", "False", "Starting")
    assert team.selected() == old
    team.is_ready(f"acme-{new}")
    until(lambda: team.selected() == new, "requests go to the new model", operator.said)
    assert team.wait_for(RAY_SERVICE, "acme-store")["spec"] == store


def test_a_bad_spec_leaves_what_runs_alone(team: Team, operator: Operator) -> None:
    serving(team)
    before = applied(team)
    assert len(before) > len(OWNED)
    team.make(gateway={"httpPort": 8265})
    valid = team.wait_for_condition("Valid", "False")
    assert "spec.gateway.httpPort" in valid["message"]
    assert team.condition("Ready")["reason"] == "InvalidSpec"
    assert applied(team) == before
    team.make()
    team.wait_for_condition("Valid", "True")
    team.wait_for_condition("Ready", "True")


def applied(team: Team) -> dict[tuple[str, str], tuple[str, str]]:
    """What the operator wrote last, and into which object. Controllers write statuses whenever they like."""
    return {
        (one["kind"], one["metadata"]["name"]): (one["metadata"]["uid"], digest_of(one))
        for resource in OWNED
        for one in team.kube.list(resource, team.namespace, **{LABEL_SERVICE: "acme"})
    }


def test_a_restart_in_the_middle(team: Team, operator: Operator) -> None:
    serving(team)
    old, new = revision(), revision(model={"path": "/models/other"})
    team.make(model={"path": "/models/other"})
    team.wait_for_condition("RolledOut", "False", "Starting")
    operator.kill()
    second = Operator(team, "second")
    try:
        second.wait_until_it_leads()
        at_rest(team, second)
        assert team.selected() == old
        team.is_ready(f"acme-{new}")
        until(lambda: team.selected() == new, "requests go to the new model", second.said)
    finally:
        second.stop()


def test_deletion_lets_volumes_stay_and_nothing_else(team: Team, operator: Operator) -> None:
    serving(team)
    team.kube.delete(BLEND_SERVICE, team.namespace, "acme")
    until(lambda: team.find(BLEND_SERVICE, "acme") is None, "the service is gone", operator.said)
    left = [resource for resource in OWNED if resource is not CLAIM]

    def gone() -> bool:
        found = [team.kube.list(one, team.namespace, **{LABEL_SERVICE: "acme"}) for one in left]
        return not any(found)

    # What is owned is collected by Kubernetes' own garbage collector.
    until(gone, "what it owned is gone", operator.said)
    assert team.find(CLAIM, "acme-data-0") is not None


def test_of_two_operators_one_leads(team: Team, operator: Operator) -> None:
    second = Operator(team, "second")
    try:
        until(lambda: b"waits for the lease" in second.log.read_bytes(), "the second waits", second.said)
        team.make()
        team.wait_for(RAY_SERVICE, "acme-store")
        assert operator.is_leader()
        assert not second.is_leader()
        assert second.writes() == 0
        operator.kill()
        second.wait_until_it_leads()
        team.make(store={"shards": 2})
        team.wait_for(CLAIM, "acme-data-1")
    finally:
        second.stop()


def test_its_rights_suffice_and_are_no_more(team: Team, tmp_path: Path) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "operator"}}
    team.kube.request("POST", SERVICE_ACCOUNT.path(team.namespace), account)
    for name, rules in zip(("operator", "operator-lease"), chart_rules(), strict=True):
        grant(team, name, rules)
    path = SERVICE_ACCOUNT.path(team.namespace, "operator", "token")
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = team.kube.request("POST", path, request)["status"]["token"]
    one = Operator(team, "bound", kubeconfig_for(team.kube.configuration, token, tmp_path / "kubeconfig"))
    try:
        one.wait_until_it_leads()
        serving(team)
        at_rest(team, one)
        team.kube.delete(BLEND_SERVICE, team.namespace, "acme")
        until(lambda: team.find(BLEND_SERVICE, "acme") is None, "the service is gone", one.said)
    finally:
        one.stop()
    assert "forbidden" not in one.log.read_text()
    who = f"system:serviceaccount:{team.namespace}:operator"
    for group, resource, verb in (
        ("", "secrets", "get"),
        ("", "pods", "create"),
        ("", "pods", "delete"),
        ("", "pods/exec", "create"),
        ("", "namespaces", "list"),
        ("rbac.authorization.k8s.io", "roles", "create"),
        ("apiextensions.k8s.io", "customresourcedefinitions", "get"),
        ("kintsugi.dev", "blendservices", "delete"),
    ):
        assert not may(team, who, group, resource, verb), f"{verb} {resource}"


def grant(team: Team, name: str, rules: list[dict[str, Any]]) -> None:
    """A Role, bound to the ServiceAccount `operator`."""
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": name},
        # Without `resourceNames`: the Lease has another name here.
        "rules": [{key: rule[key] for key in ("apiGroups", "resources", "verbs")} for rule in rules],
    }
    team.kube.request("POST", f"{RBAC}/{team.namespace}/roles", role)
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": team.namespace}],
    }
    team.kube.request("POST", f"{RBAC}/{team.namespace}/rolebindings", binding)


def may(team: Team, who: str, group: str, resource: str, verb: str) -> bool:
    """What the API server says."""
    name, _, sub = resource.partition("/")
    attributes = {"namespace": team.namespace, "group": group, "resource": name, "verb": verb}
    if sub:
        attributes["subresource"] = sub
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": who, "resourceAttributes": attributes},
    }
    answer = team.kube.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def test_an_upgrade_from_the_previous_chart() -> None:
    pytest.skip("there is no previous version of the chart yet: 0.1.0 is the first")


@pytest.mark.full
def test_a_hundred_services_at_rest_write_nothing(team: Team, operator: Operator) -> None:
    room = team.kube.service_addresses()
    if room is not None and room < 512:
        pytest.skip(f"300 Services need a larger --service-cluster-ip-range: there are {room} addresses")
    for index in range(100):
        team.make(f"service-{index}")
    for index in range(100):
        until(
            partial(team.find, RAY_SERVICE, f"service-{index}-store"),
            f"service-{index}",
            operator.said,
        )
    looks = operator.looks()
    until(lambda: operator.looks() > looks + 300, "all are at rest", within_s=300)
    writes, looks = operator.writes(), operator.looks()
    until(lambda: operator.looks() > looks + 100, "each is looked at again", within_s=300)
    assert operator.writes() == writes
    pages = int(Path(f"/proc/{operator.process.pid}/statm").read_text().split()[1])
    assert pages * 4096 < 110 << 20
