"""What a lost or drained node takes with it, and which probes tell when something is back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kintsugi.core.deploy import ENGINE_METRICS_PORT, SHARD_METRICS_PORT
from kintsugi_operator.api.corpus_precompute import CorpusPrecomputeSpec
from kintsugi_operator.api.crd import crds
from kintsugi_operator.api.manifest import from_manifest
from kintsugi_operator.desired.plan import plan_service
from kintsugi_operator.objects.deployed import EngineRevision
from kintsugi_operator.objects.jobs import corpus_job
from kintsugi_operator.objects.names import ANNOTATION_CLUSTER, LABEL_NAME, LABEL_REVISION, LABEL_ROLE
from kintsugi_operator.objects.pods import AGENT_PORT, DASHBOARD_PORT, Manifest
from kintsugi_operator.observed.views import Observed, RayServiceView
from tests.unit.operator.planned import BEFORE, named, objects_of, pod_templates
from tests.unit.operator.specs import NOW, OWNER, spec_of

REVISION = EngineRevision.of(spec_of()).name


def role(name: str, part: str = "", **parts: Any) -> Manifest:
    """The pod template of a role."""
    found = [
        template
        for template in pod_templates(objects_of(spec_of(**parts)))
        if template["metadata"]["labels"].get(LABEL_ROLE) == name
        and template["metadata"]["labels"]["kintsugi.dev/part"] in (part or "store", part or "service")
    ]
    return found[0]


def probe(template: Manifest, kind: str) -> tuple[str, int]:
    """Path and port number of a probe."""
    (container,) = template["spec"]["containers"]
    asked = container[kind]["httpGet"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    return asked["path"], ports.get(asked["port"], asked["port"])


@pytest.mark.parametrize(("name", "port"), [("shard", SHARD_METRICS_PORT), ("engine", ENGINE_METRICS_PORT)])
@pytest.mark.parametrize("tls", [{}, {"tlsSecret": "certificates"}])
def test_a_shard_or_engine_is_ready_when_its_own_process_says_so(
    name: str, port: int, tls: dict[str, str]
) -> None:
    """Ray is healthy long before a shard has opened its volumes or an engine has loaded its model."""
    template = role(name, store=tls)
    assert probe(template, "readinessProbe") == ("/readyz", port)
    # A worker on which Serve has placed nothing yet must start, and must not be killed.
    for kind in ("startupProbe", "livenessProbe"):
        assert probe(template, kind) == ("/api/local_raylet_healthz", AGENT_PORT)


def test_heads_and_jobs_are_ready_when_ray_is() -> None:
    """A job's driver waits for its workers, so nothing of ours may decide whether they are ready."""
    assert probe(role("head", "store"), "readinessProbe") == ("/api/gcs_healthz", DASHBOARD_PORT)
    assert probe(role("head", "service"), "readinessProbe") == ("/api/gcs_healthz", DASHBOARD_PORT)
    corpus = from_manifest(CorpusPrecomputeSpec, {"service": "acme", "namespace": "n", "source": "/corpus/x"})
    job = corpus_job(corpus, OWNER, spec_of(), EngineRevision.of(spec_of()), "r-x-1")
    head, worker = pod_templates((job,))
    assert probe(head, "readinessProbe") == ("/api/gcs_healthz", DASHBOARD_PORT)
    assert probe(worker, "readinessProbe") == ("/api/local_raylet_healthz", AGENT_PORT)


def test_pods_of_ray_leave_kuberay_the_label_that_its_services_select() -> None:
    objects = objects_of(spec_of())
    for template in pod_templates(objects):
        assert LABEL_NAME not in template["metadata"]["labels"]
    for one in objects:
        assert one["metadata"]["labels"][LABEL_NAME] == "kintsugi"


def test_a_patch_removes_what_only_the_live_head_has() -> None:
    observed = Observed(store=RayServiceView(is_ready=True, cluster="acme-store-c1"), cluster_digest="old")
    patch = plan_service(spec_of(), OWNER, BEFORE, observed, NOW).cluster_patch
    assert patch is not None
    live = {"spec": {"headGroupSpec": {"template": {"metadata": {"labels": {"gone": "x"}}}}}}
    written = patch.over(live)["spec"]["headGroupSpec"]["template"]["metadata"]["labels"]
    assert written["gone"] is None


def terms(template: Manifest, kind: str) -> list[tuple[str, dict[str, str]]]:
    """Topology and labels of the preferences of a pod; nothing may be required."""
    affinity = template["spec"]["affinity"].get(kind, {})
    assert set(affinity) <= {"preferredDuringSchedulingIgnoredDuringExecution"}
    return [
        (one["podAffinityTerm"]["topologyKey"], one["podAffinityTerm"]["labelSelector"]["matchLabels"])
        for one in affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    ]


@pytest.mark.parametrize("name", ["shard", "engine", "gateway", "head"])
def test_equal_pods_prefer_different_nodes_and_zones(name: str) -> None:
    template = role(name)
    labels = template["metadata"]["labels"]
    own = [
        topology
        for topology, match in terms(template, "podAntiAffinity")
        if match.items() <= labels.items() and match[LABEL_ROLE] == name
    ]
    assert own == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]


def test_a_new_revision_need_not_avoid_the_old_one() -> None:
    """Else a rollout on as many nodes as engines would be the worse placed the longer both run."""
    for name in ("engine", "gateway"):
        for _, match in terms(role(name), "podAntiAffinity"):
            assert match[LABEL_REVISION] == REVISION


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ({}, {"acme-store-head": 0, "acme-service-head": 0}),
        ({"store": {"shards": 2}}, {"acme-store-head": 1, "acme-service-head": 0}),
        (
            {"engines": {"replicas": 2}},
            {"acme-store-head": 0, "acme-service-head": 1},
        ),
        (
            {
                "store": {"shards": 2},
                "engines": {"replicas": 2},
                "expert": {"redis": {"address": "redis:6379"}},
            },
            {"acme-store-head": 0, "acme-service-head": 0},
        ),
    ],
)
def test_a_head_may_go_when_what_it_takes_with_it_may(parts: dict[str, Any], kept: dict[str, int]) -> None:
    objects = objects_of(spec_of(**parts))
    for name, least in kept.items():
        budget = named(objects, "PodDisruptionBudget", name)["spec"]
        assert budget["minAvailable"] == least
        assert budget["selector"]["matchLabels"][LABEL_ROLE] == "head"


def clusters(**parts: Any) -> dict[str, Manifest]:
    return {
        one["metadata"]["name"]: one["spec"]["rayClusterConfig"]
        for one in objects_of(spec_of(**parts))
        if one["kind"] == "RayService"
    }


def test_redis_keeps_what_heads_know() -> None:
    redis = {"address": "rediss://redis.infra.svc:6380", "username": "ray", "passwordSecret": "redis"}
    for cluster in clusters(expert={"redis": redis}).values():
        assert cluster["gcsFaultToleranceOptions"] == {
            "redisAddress": "rediss://redis.infra.svc:6380",
            "redisUsername": {"value": "ray"},
            "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
        }
    assert all("gcsFaultToleranceOptions" not in cluster for cluster in clusters().values())


def test_heads_may_call_redis_and_nobody_else_may() -> None:
    objects = objects_of(spec_of(expert={"redis": {"address": "redis.infra.svc:6380"}}))
    open_to = {
        one["metadata"]["name"]
        for one in objects
        if one["kind"] == "NetworkPolicy"
        for rule in one["spec"].get("egress", [])
        if {"protocol": "TCP", "port": 6380} in rule.get("ports", [])
    }
    assert open_to == {"acme-heads"}


@pytest.mark.parametrize("address", ["", "redis:6379"])
def test_a_running_store_takes_redis_over_and_gives_it_up(address: str) -> None:
    """With the head's next start: a merge patch removes what is null."""
    observed = Observed(store=RayServiceView(is_ready=True, cluster="acme-store-c1"), cluster_digest="old")
    patch = plan_service(
        spec_of(expert={"redis": {"address": address}}), OWNER, BEFORE, observed, NOW
    ).cluster_patch
    assert patch is not None
    written = patch.over({})["spec"]["gcsFaultToleranceOptions"]
    assert written == ({"redisAddress": address} if address else None)


def test_redis_restarts_no_shard() -> None:
    """Its address is no part of the pods' templates, whose digests decide about restarts."""
    plain, told = (
        clusters()["acme-store"],
        clusters(expert={"redis": {"address": "redis:6379"}})["acme-store"],
    )
    assert plain["workerGroupSpecs"] == told["workerGroupSpecs"]
    stores = [
        named(objects_of(spec), "RayService", "acme-store")
        for spec in (spec_of(), spec_of(expert={"redis": {"address": "r:1"}}))
    ]
    digests = [one["metadata"]["annotations"][ANNOTATION_CLUSTER] for one in stores]
    assert digests[0] != digests[1]


def test_services_carry_the_annotations_of_a_load_balancer() -> None:
    annotations = {"example.com/load-balancer": "internal"}
    objects = objects_of(spec_of(gateway={"expert": {"serviceAnnotations": annotations}}))
    for name in ("acme-grpc", "acme-http"):
        found = named(objects, "Service", name)["metadata"]["annotations"]
        assert annotations.items() <= found.items()
    assert (
        not annotations.items()
        <= named(objects, "Service", "acme-directory")["metadata"]["annotations"].items()
    )


def test_a_fixed_number_of_engines_is_not_autoscaled() -> None:
    spec = spec_of(engines={"replicas": 3})
    service = named(objects_of(spec), "RayService", f"acme-{REVISION}")
    (application,) = json.loads(service["spec"]["serveConfigV2"])["applications"]
    engine = application["deployments"][0]
    assert engine["num_replicas"] == 3
    assert "autoscaling_config" not in engine
    (group, _) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["replicas"] == 3
    observed = Observed(store=RayServiceView(is_ready=True), engines={REVISION: 2})
    budget = named(objects_of(spec, observed=observed), "PodDisruptionBudget", "acme-engines")
    assert budget["spec"]["minAvailable"] == 2


def test_the_scale_subresource_reads_what_the_status_holds() -> None:
    (version,) = crds()["blendservices"]["spec"]["versions"]
    scale, schema = version["subresources"]["scale"], version["schema"]["openAPIV3Schema"]["properties"]
    for path in scale.values():
        at = {"properties": schema}
        for name in path.removeprefix(".").split("."):
            at = at["properties"][name]
        assert at["type"] in ("integer", "string")
    observed = dataclasses.replace(Observed(), engines={REVISION: 2, "other": 1})
    status = plan_service(spec_of(), OWNER, BEFORE, observed, NOW).status
    assert status.engine_replicas == 2
    labels = role("engine")["metadata"]["labels"]
    assert dict(pair.split("=") for pair in status.engine_selector.split(",")).items() <= labels.items()
