"""What there has to be, for any valid spec."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from kintsugi.core.deploy import RAY_CLUSTER_ENVIRONMENT
from kintsugi.gateway.access import check_exposure
from kintsugi_operator.api.blend_service import BlendServiceSpec
from kintsugi_operator.api.pod_template import RESERVED_VARIABLES
from kintsugi_operator.desired.plan import plan_service
from kintsugi_operator.objects.deployed import EngineRevision, service_spec
from kintsugi_operator.objects.names import LABEL_REVISION, LABEL_ROLE, RAY_NAME_LENGTH_MAX
from kintsugi_operator.objects.network import OPERATOR
from kintsugi_operator.objects.pods import Manifest, quantity
from kintsugi_operator.objects.store import ray_service_name
from kintsugi_operator.observed import views
from kintsugi_operator.observed.views import JobState, Observed, RayServiceView
from tests.unit.operator.planned import (
    BEFORE,
    NEWEST,
    OLDEST,
    PROPERTY,
    matches,
    named,
    objects_of,
    pod_templates,
)
from tests.unit.operator.specs import NOW, OWNER, names, spec_of, specs


@PROPERTY
@given(specs)
def test_it_is_the_same_twice(spec: BlendServiceSpec) -> None:
    first = plan_service(spec, OWNER, BEFORE, Observed(), NOW)
    second = plan_service(spec, OWNER, first.status, Observed(), NOW)
    assert json.dumps(first.objects) == json.dumps(second.objects)
    assert first.status == second.status


@PROPERTY
@given(specs, names)
def test_names_and_labels_fit(spec: BlendServiceSpec, name: str) -> None:
    objects = objects_of(spec, dataclasses.replace(OWNER, name=name))
    keys = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(keys)) == len(keys)
    for one in objects:
        limit = RAY_NAME_LENGTH_MAX if one["kind"].startswith("Ray") else 63
        assert len(one["metadata"]["name"]) <= limit
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", one["metadata"]["name"])
        for label in one["metadata"]["labels"].values():
            assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", label), label
            assert len(label) <= 63


@PROPERTY
@given(specs)
def test_every_selector_matches_a_pod(spec: BlendServiceSpec) -> None:
    objects = objects_of(spec)
    pods = [one["metadata"]["labels"] for one in pod_templates(objects)]
    for one in objects:
        if one["kind"] == "Service":
            assert any(matches(one["spec"]["selector"], pod) for pod in pods)
        if one["kind"] == "PodDisruptionBudget":
            assert any(matches(one["spec"]["selector"]["matchLabels"], pod) for pod in pods)
    # A service's port is one that its pods have.
    for one in (one for one in objects if one["kind"] == "Service"):
        (port,) = one["spec"]["ports"]
        for template in pod_templates(objects):
            if matches(one["spec"]["selector"], template["metadata"]["labels"]):
                ports = template["spec"]["containers"][0]["ports"]
                assert port["targetPort"] in {each["name"] for each in ports}


@pytest.mark.parametrize(
    ("deployment", "job", "state"),
    [
        ("", "", JobState.RUNNING),
        ("Running", "RUNNING", JobState.RUNNING),
        ("Complete", "SUCCEEDED", JobState.SUCCEEDED),
        ("Failed", "FAILED", JobState.FAILED),
        ("Failed", "", JobState.FAILED),
        # The status of the attempt that has ended.
        ("Retrying", "FAILED", JobState.RUNNING),
        ("Suspending", "STOPPED", JobState.RUNNING),
        ("Suspended", "", JobState.SUSPENDED),
    ],
)
def test_a_job_has_failed_only_when_it_is_not_tried_again(deployment: str, job: str, state: JobState) -> None:
    status = {"jobDeploymentStatus": deployment, "jobStatus": job}
    assert views.job_view({"metadata": {"name": "j"}, "status": status}).state is state


def test_only_the_operator_of_this_release_reaches_dashboards() -> None:
    """Whoever reaches a dashboard runs code there, and anybody may label a pod of his own namespace."""
    observed = Observed(store=RayServiceView(is_ready=True), home="kintsugi")
    (rule,) = named(objects_of(spec_of(), observed=observed), "NetworkPolicy", "acme-heads")["spec"][
        "ingress"
    ]
    (peer,) = [one for one in rule["from"] if one["podSelector"]["matchLabels"] == OPERATOR]
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "kintsugi"}}


def test_a_budget_can_be_counted_without_the_scale_of_a_ray_cluster() -> None:
    """RayClusters have no scale: Kubernetes lets no pod of theirs go under `maxUnavailable`."""
    spec = spec_of(store={"shards": 3}, gateway={"replicas": 2}, engines={"replicasMax": 4})

    def least(engines: int) -> dict[str, int]:
        observed = Observed(
            store=RayServiceView(is_ready=True),
            engines={EngineRevision.of(spec).name: engines, "retiring": 9},
        )
        budgets = [one for one in objects_of(spec, observed=observed) if one["kind"] == "PodDisruptionBudget"]
        assert all("maxUnavailable" not in one["spec"] for one in budgets)
        assert all(one["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for one in budgets)
        return {one["metadata"]["name"]: one["spec"]["minAvailable"] for one in budgets}

    heads = {"acme-store-head": 1, "acme-service-head": 0}
    assert least(0) == {"acme-shards": 2, "acme-engines": 0, "acme-gateways": 1, **heads}
    assert (least(4)["acme-engines"], least(4)["acme-service-head"]) == (3, 1)


@PROPERTY
@given(specs)
def test_every_container_has_requests_limits_and_probes(spec: BlendServiceSpec) -> None:
    for template in pod_templates(objects_of(spec)):
        for container in template["spec"]["containers"]:
            resources = container["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"])
            assert resources["requests"] == resources["limits"]
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                # Nothing that would have to exist in the image.
                assert {"httpGet", "tcpSocket"} & set(container[probe])
            ports = [each["containerPort"] for each in container["ports"]]
            assert len(set(ports)) == len(ports)


@PROPERTY
@given(specs)
def test_a_shard_s_pod_holds_full_tiers_and_no_monitor_of_ray_ends_it(spec: BlendServiceSpec) -> None:
    store = spec.store
    disk_gib = sum(tier.gib for tier in store.tiers)
    for template in pod_templates(objects_of(spec)):
        (container,) = (one for one in template["spec"]["containers"] if one["name"].startswith("ray-"))
        variables = {one["name"]: one.get("value") for one in container["env"]}
        assert (
            variables["RAY_memory_monitor_refresh_ms"] == variables["RAY_worker_oom_score_adjustment"] == "0"
        )
        assert variables.items() >= RAY_CLUSTER_ENVIRONMENT.items()
        if template["metadata"]["labels"].get(LABEL_ROLE) == "shard":
            memory_gib = quantity(container["resources"]["limits"]["memory"]) / 2**30
            # Ray, the process and gRPC; manifests of chunks in RAM, and of those on disk.
            assert memory_gib >= 2 + 1.1 * store.ram_gib + 0.005 * disk_gib


@PROPERTY
@given(specs)
def test_every_pod_is_restricted(spec: BlendServiceSpec) -> None:
    """The pod security standard `restricted`, and a root file system that cannot be written."""
    for template in pod_templates(objects_of(spec)):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        kinds = {"csi", "emptyDir", "secret", "configMap", "persistentVolumeClaim", "ephemeral"}
        for volume in pod["volumes"]:
            assert set(volume) - {"name"} <= kinds
        mounts = {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"] if "csi" not in volume}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["readOnlyRootFilesystem"] is True
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert {"/tmp", "/dev/shm"} <= set(paths)
            assert len(set(paths)) == len(paths)
        # Only Ray's autoscaler, beside the service's head, talks to Kubernetes.
        assert pod["automountServiceAccountToken"] is (pod["serviceAccountName"].endswith("-head"))


@settings(PROPERTY, max_examples=4)
@given(specs)
def test_manifests_are_valid_for_the_oldest_and_newest_kubernetes(spec: BlendServiceSpec) -> None:
    objects = objects_of(spec)
    for version in (OLDEST, NEWEST):
        for one in objects:
            if not one["kind"].startswith("Ray"):
                kubernetes_validate.validate(one, version, strict=True)
        for template in pod_templates(objects):
            metadata = {"name": "p", **template["metadata"]}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
            kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.skipif("KUBERAY_CRDS" not in os.environ, reason="KUBERAY_CRDS names no folder of KubeRay's CRDs")
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs)
def test_ray_objects_are_valid(spec: BlendServiceSpec) -> None:
    schemas = kuberay_schemas(Path(os.environ["KUBERAY_CRDS"]))
    for one in objects_of(spec):
        if one["kind"].startswith("Ray"):
            jsonschema.validate(one, closed(schemas[one["kind"]]))


def kuberay_schemas(path: Path) -> dict[str, Any]:
    files = sorted(path.rglob("*.yaml")) if path.is_dir() else [path]
    schemas = {}
    for file in files:
        for crd in yaml.safe_load_all(file.read_text()):
            if crd and crd.get("kind") == "CustomResourceDefinition":
                (version,) = [one for one in crd["spec"]["versions"] if one["name"] == "v1"]
                schemas[crd["spec"]["names"]["kind"]] = version["schema"]["openAPIV3Schema"]
    return schemas


def closed(schema: Any) -> Any:
    """A schema that knows no other properties, and Kubernetes' idea of an int or a string."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        kept["properties"] = {name: closed(one) for name, one in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            # The root's metadata is Kubernetes' own.
            kept.setdefault("additionalProperties", schema["properties"] == {})
    return kept


@PROPERTY
@given(specs)
def test_the_store_knows_nothing_of_engines_and_model(spec: BlendServiceSpec) -> None:
    """No change of model, image, engines or gateway changes a byte of the store's RayService."""
    observed = running(spec)
    name = ray_service_name(OWNER.name)
    before = named(objects_of(spec, observed=observed), "RayService", name)
    other = dataclasses.replace(
        spec,
        model=dataclasses.replace(spec.model, path="/models/other", codec="fp8", system_prompt="Be brief."),
        image="elsewhere/image:2",
        expert=dataclasses.replace(spec.expert, ray_version="2.61.0"),
        engines=spec_of(engines={"gpus": 2, "replicas": 3, "replicasMax": 9}).engines,
        gateway=dataclasses.replace(spec.gateway, replicas=7, grpc_port=7555),
    )
    after = named(objects_of(other, observed=observed), "RayService", name)
    if not spec.store.image:
        assert after == before
    else:
        assert after["spec"]["rayClusterConfig"] == before["spec"]["rayClusterConfig"]
    assert after["spec"]["serveConfigV2"] == before["spec"]["serveConfigV2"]


def running(spec: BlendServiceSpec) -> Observed:
    """What is seen once the store of a spec is there."""
    store = named(objects_of(spec), "RayService", ray_service_name(OWNER.name))
    return Observed(store=dataclasses.replace(views.ray_service_view(store, NOW), is_ready=True))


def test_each_shard_has_a_group_and_volumes_of_its_own() -> None:
    spec = spec_of(store={"shards": 3, "tiers": [{"name": "nvme", "gib": 100}]})
    objects = objects_of(spec)
    store = named(objects, "RayService", "acme-store")
    groups = store["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert [group["groupName"] for group in groups] == ["shard-0", "shard-1", "shard-2"]
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for group in groups
        for volume in group["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert sorted(claims) == sorted(
        one["metadata"]["name"] for one in objects if one["kind"] == "PersistentVolumeClaim"
    )
    assert len(set(claims)) == 6
    for group in groups:
        # As KubeRay pastes it behind `--resources=`.
        assert json.loads(group["rayStartParams"]["resources"].strip("'")) == {"kintsugi_shard": 1}
    (application,) = json.loads(store["spec"]["serveConfigV2"])["applications"]
    (deployment,) = application["deployments"]
    assert deployment["num_replicas"] == 3
    assert deployment["ray_actor_options"]["resources"] == {"kintsugi_shard": 1}


def test_claims_outlive_the_service_unless_told_otherwise() -> None:
    kept = objects_of(spec_of())
    assert all("ownerReferences" not in one["metadata"] for one in kept if "Claim" in one["kind"])
    gone = objects_of(spec_of(store={"expert": {"volumes": {"retain": False}}}))
    claims = [one for one in gone if "Claim" in one["kind"]]
    assert claims
    assert all(one["metadata"]["ownerReferences"][0]["uid"] == OWNER.uid for one in claims)


def test_a_store_that_shrinks_keeps_its_groups_empty() -> None:
    """KubeRay forgets the pods of a group that is taken away."""
    observed = running(spec_of(store={"shards": 3}))
    store = named(objects_of(spec_of(store={"shards": 1}), observed=observed), "RayService", "acme-store")
    groups = store["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert [(one["replicas"], one["minReplicas"], one["maxReplicas"]) for one in groups] == [
        (1, 1, 1),
        (0, 0, 0),
        (0, 0, 0),
    ]


def test_scaling_engines_changes_no_pod_and_no_argument() -> None:
    """Else Ray would start all engines anew."""
    few, many = (
        named(
            objects_of(spec_of(engines={"replicasMax": most})),
            "RayService",
            f"acme-{EngineRevision.of(spec_of()).name}",
        )
        for most in (2, 8)
    )
    assert few["spec"]["rayClusterConfig"] == many["spec"]["rayClusterConfig"]
    before, after = (json.loads(one["spec"]["serveConfigV2"])["applications"][0] for one in (few, many))
    assert before["args"] == after["args"]
    assert before["deployments"][0]["autoscaling_config"]["max_replicas"] == 2
    assert after["deployments"][0]["autoscaling_config"]["max_replicas"] == 8
    assert "user_config" not in before["deployments"][0]


def test_gpus_are_asked_for_and_used() -> None:
    spec = spec_of(engines={"gpus": 2, "expert": {"gpuResource": "amd.com/gpu"}})
    service = named(objects_of(spec), "RayService", f"acme-{EngineRevision.of(spec).name}")
    engine, gateway = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert engine["template"]["spec"]["containers"][0]["resources"]["limits"]["amd.com/gpu"] == "2"
    assert engine["rayStartParams"]["num-gpus"] == "2"
    assert "amd.com/gpu" not in gateway["template"]["spec"]["containers"][0]["resources"]["limits"]
    args = json.loads(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert args["engines"]["vllm"] == {"tensor_parallel_size": 2}


def test_heads_have_the_size_that_the_spec_names() -> None:
    told = spec_of(expert={"heads": {"cpus": 2.5, "memory": "9Gi"}})
    for spec, size in (
        (told, {"cpu": "2500m", "memory": "9Gi"}),
        (spec_of(), {"cpu": "1000m", "memory": "4Gi"}),
    ):
        for name in ("acme-store", f"acme-{EngineRevision.of(spec).name}"):
            cluster = named(objects_of(spec), "RayService", name)["spec"]["rayClusterConfig"]
            (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
            assert container["resources"] == {"requests": size, "limits": size}


@pytest.mark.parametrize(("written", "told"), [("strict", "strict"), (False, "off")])
def test_quality_is_told_to_the_engines_in_place(written: object, told: str) -> None:
    strict = spec_of(engines={"quality": written})
    name = f"acme-{EngineRevision.of(spec_of()).name}"
    assert f"acme-{EngineRevision.of(strict).name}" == name
    service = named(objects_of(strict), "RayService", name)
    args = json.loads(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert args["engines"]["quality"] == told


def environments(objects: tuple[Manifest, ...]) -> dict[str, list[Manifest]]:
    """The containers' environments, by the role of their pods."""
    return {
        template["metadata"]["labels"][LABEL_ROLE]: container["env"]
        for template in pod_templates(objects)
        for container in template["spec"]["containers"]
    }


def test_variables_reach_the_pods_they_are_for_and_no_others() -> None:
    collector = {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://$(HOST):4317"}
    host = {"name": "HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
    proxy = {"name": "HTTPS_PROXY", "valueFrom": {"secretKeyRef": {"name": "proxy", "key": "url"}}}
    empty = {"name": "MALLOC_ARENA_MAX", "value": ""}
    plain = objects_of(spec_of())
    told = objects_of(
        spec_of(
            expert={
                "podTemplates": {
                    "gateway": {"env": [host, collector]},
                    "engines": {"env": [proxy]},
                    "store": {"env": [empty]},
                }
            }
        )
    )
    added = {
        role: [one for one in env if one not in environments(plain)[role]]
        for role, env in environments(told).items()
    }
    assert added["gateway"] == [host, collector]
    assert added["engine"] == [proxy]
    assert added["shard"] == [{"name": "MALLOC_ARENA_MAX"}]
    assert added["head"] == []


@PROPERTY
@given(specs)
def test_nothing_that_the_operator_sets_may_be_set_by_a_spec(spec: BlendServiceSpec) -> None:
    own = {one.name for added in spec.expert.pod_templates.values() for one in added.env}
    for template in pod_templates(objects_of(spec)):
        names = [one["name"] for one in template["spec"]["containers"][0]["env"]]
        assert len(set(names)) == len(names)
        for name in set(names) - own:
            assert re.match(RESERVED_VARIABLES, name), name


def test_the_gateways_are_those_of_the_active_revision() -> None:
    spec = spec_of()
    service = named(objects_of(spec), "Service", "acme-grpc")
    assert service["spec"]["selector"][LABEL_REVISION] == EngineRevision.of(spec).name
    assert service["spec"]["selector"][LABEL_ROLE] == "gateway"


def test_a_changed_store_image_waits_for_its_own_setting() -> None:
    spec = spec_of()
    observed = running(spec)
    moved = spec_of(image="registry.example/kintsugi/serving-cpu:2")
    store = named(objects_of(moved, observed=observed), "RayService", "acme-store")
    container = store["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    assert container["image"] == "registry.example/kintsugi/serving-cpu:1"
    told = spec_of(store={"image": "registry.example/kintsugi/serving-cpu:2"})
    store = named(objects_of(told, observed=observed), "RayService", "acme-store")
    container = store["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    assert container["image"] == "registry.example/kintsugi/serving-cpu:2"


def test_another_ray_version_of_the_store_is_said_and_not_done() -> None:
    observed = running(spec_of())
    asked: dict[str, Any] = {"expert": {"rayVersion": "2.99.0"}, "store": {"image": "x/y:9"}}
    result = plan_service(spec_of(**asked), OWNER, BEFORE, observed, NOW)
    store = named(result.objects, "RayService", "acme-store")
    cluster = store["spec"]["rayClusterConfig"]
    (container,) = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    assert (cluster["rayVersion"], container["image"] == "x/y:9") == ("2.60.0", False)
    (condition,) = [one for one in result.status.conditions if one.type == "ShardsUpToDate"]
    assert condition.reason == "RestartNeeded"
    assert "acme-store" in condition.message
    # A person deletes the RayService: the store is made again.
    store = named(objects_of(spec_of(**asked)), "RayService", "acme-store")
    assert store["spec"]["rayClusterConfig"]["rayVersion"] == "2.99.0"


def test_another_ray_version_of_the_engines_alone_restarts_no_shard() -> None:
    observed = running(spec_of())
    for image in ("", spec_of().image):
        asked: dict[str, Any] = {"expert": {"rayVersion": "2.99.0"}, "store": {"image": image}}
        result = plan_service(spec_of(**asked), OWNER, BEFORE, observed, NOW)
        (condition,) = [one for one in result.status.conditions if one.type == "ShardsUpToDate"]
        assert condition.reason != "RestartNeeded"


@PROPERTY
@given(specs)
def test_what_is_told_to_gateways_and_shards_lets_them_listen(spec: BlendServiceSpec) -> None:
    told = service_spec(spec)
    gateway, store = told.gateway, told.store
    for port in (gateway.grpc_port, gateway.http_port):
        listen = f"{gateway.host}:{port}"
        check_exposure(listen, bool(gateway.tokens_file), bool(gateway.tls_cert), gateway.insecure)
    assert store.expert.insecure or store.tls_cert


def test_tokens_are_asked_for_with_and_without_tls() -> None:
    for tls in ("", "certificates"):
        told = service_spec(spec_of(gateway={"tlsSecret": tls})).gateway
        assert told.tokens_file == "/etc/kintsugi/tokens/tokens.yaml"
        assert told.insecure is not bool(tls)


def test_the_store_speaks_tls_where_a_secret_is_named() -> None:
    spec = spec_of(store={"tlsSecret": "certificates", "expert": {"tlsName": "acme-store"}})
    objects = objects_of(spec)
    service = named(objects, "RayService", f"acme-{EngineRevision.of(spec).name}")
    args = json.loads(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert args["store_url"].startswith(
        "shards://acme-directory.team.svc:7410?tls_ca=/etc/kintsugi/store-tls/"
    )
    assert args["store_url"].endswith("&tls_name=acme-store")
    store = named(objects, "RayService", "acme-store")
    told = json.loads(store["spec"]["serveConfigV2"])["applications"][0]["args"]["store"]
    assert told["expert"]["tls_name"] == "acme-store"
    assert "insecure" not in told["expert"]
    for template in pod_templates(objects):
        mounts = template["spec"]["containers"][0]["volumeMounts"]
        assert any(mount["mountPath"] == "/etc/kintsugi/store-tls" for mount in mounts)


def test_keys_of_namespaces_reach_those_who_read_chunks_and_no_shard() -> None:
    spec = spec_of(store={"keysSecret": "keys"})
    objects, plain = objects_of(spec), objects_of(spec_of())
    service = named(objects, "RayService", f"acme-{EngineRevision.of(spec).name}")
    args = json.loads(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert args["store_url"].endswith("?keys=/etc/kintsugi/store-keys/keys.json")
    assert named(objects, "RayService", "acme-store") == named(plain, "RayService", "acme-store")
    roles = {
        template["metadata"]["labels"]["kintsugi.dev/role"]
        for template in pod_templates([service])
        for mount in template["spec"]["containers"][0]["volumeMounts"]
        if mount["mountPath"] == "/etc/kintsugi/store-keys"
    }
    assert roles == {"engine", "gateway"}


def test_audit_logs_reach_gateways_and_shards() -> None:
    store = {"expert": {"audit": True, "volumes": {"dataGib": 2}}}
    spec = spec_of(store=store, gateway={"expert": {"audit": True}})
    told, plain = service_spec(spec), service_spec(spec_of())
    assert (told.store.expert.audit_dir, told.gateway.expert.audit_dir) == ("/data/audit", "/data/audit")
    assert (plain.store.expert.audit_dir, plain.gateway.expert.audit_dir) == ("", "")
    objects = objects_of(spec)
    shards = named(objects, "RayService", "acme-store")
    given = json.loads(shards["spec"]["serveConfigV2"])["applications"][0]["args"]["store"]
    assert given["expert"]["audit_dir"] == "/data/audit"
    folders = {
        template["metadata"]["labels"][LABEL_ROLE]: volume
        for template in pod_templates(objects)
        for volume in template["spec"]["volumes"]
        if volume["name"] == "data"
    }
    assert folders["gateway"]["emptyDir"]["sizeLimit"] == "4Gi", "room for the log beside known texts"
    assert {"gateway", "shard"} <= set(folders)
