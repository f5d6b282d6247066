"""What a spec may add to pods, and what it must not override."""

from __future__ import annotations

from typing import Any

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi_operator.api.blend_service import BlendServiceSpec
from kintsugi_operator.api.corpus_precompute import CorpusPrecomputeSpec
from kintsugi_operator.api.crd import crds
from kintsugi_operator.api.manifest import from_manifest
from kintsugi_operator.api.pod_template import PodTemplate
from kintsugi_operator.desired.validation import check_corpus, check_service
from kintsugi_operator.objects.deployed import EngineRevision
from kintsugi_operator.objects.jobs import corpus_job
from kintsugi_operator.objects.names import LABEL_ROLE
from kintsugi_operator.objects.pods import Manifest
from tests.unit.operator.planned import objects_of, pod_templates
from tests.unit.operator.specs import OWNER, spec_of

ADDED: dict[str, Any] = {
    "labels": {"example.com/team": "search"},
    "annotations": {"example.com/owner": "search"},
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "priorityClassName": "serving",
    "runtimeClassName": "nvidia",
    "schedulerName": "gpu-scheduler",
    "serviceAccountName": "models-reader",
    "volumes": [{"name": "cache", "csi": {"driver": "cache.example.com"}}],
    "volumeMounts": [{"name": "cache", "mountPath": "/cache", "readOnly": True}],
}
ROLES_OF = {
    "engines": {"engine"},
    "store": {"shard"},
    "gateway": {"gateway"},
    "heads": {"head"},
}
"""Whose pods a template adds to."""


def role_of(template: Manifest) -> str:
    return str(template["metadata"]["labels"][LABEL_ROLE])


def is_added(template: Manifest) -> bool:
    spec, metadata = template["spec"], template["metadata"]
    (container,) = spec["containers"]
    found = [
        metadata["labels"].get("example.com/team") == "search",
        metadata.get("annotations", {}).get("example.com/owner") == "search",
        spec.get("affinity") == ADDED["affinity"],
        spec.get("topologySpreadConstraints") == ADDED["topologySpreadConstraints"],
        *(spec.get(name) == ADDED[name] for name in ("priorityClassName", "runtimeClassName")),
        *(spec.get(name) == ADDED[name] for name in ("schedulerName", "serviceAccountName")),
        ADDED["volumes"][0] in spec["volumes"],
        {"name": "cache", "mountPath": "/cache", "readOnly": True} in container["volumeMounts"],
    ]
    assert all(found) or not any(found), found
    return found[0]


def with_template(role: str, added: dict[str, Any]) -> BlendServiceSpec:
    return spec_of(expert={"podTemplates": {role: added}})


@pytest.mark.parametrize("part", ROLES_OF)
def test_additions_reach_the_pods_of_their_workload_and_no_others(part: str) -> None:
    spec = with_template(part, ADDED)
    check_service(spec)
    reached = {role_of(template): is_added(template) for template in pod_templates(objects_of(spec))}
    assert {role for role, is_there in reached.items() if is_there} == ROLES_OF[part]


@pytest.mark.parametrize("role", ["engines", "corpora"])
def test_additions_reach_the_pods_of_a_corpus(role: str) -> None:
    """It has those of engines where it has none of its own."""
    values = {"service": "acme", "namespace": "n", "source": "/corpus/x"}
    corpus = from_manifest(CorpusPrecomputeSpec, values)
    check_corpus(corpus)
    service = with_template(role, ADDED)
    job = corpus_job(corpus, OWNER, service, EngineRevision.of(service), "r-x-1")
    assert [is_added(template) for template in pod_templates((job,))] == [True, True]


@pytest.mark.parametrize("part", ["engines", "store", "gateway", "heads"])
def test_an_empty_template_changes_nothing(part: str) -> None:
    assert objects_of(with_template(part, {})) == objects_of(spec_of())


@pytest.mark.parametrize("name", sorted(PodTemplate.REFUSED))
def test_what_must_not_be_overridden_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(InvalidField) as caught:
        with_template("store", {name: {}})
    assert str(caught.value).startswith(f"spec.expert.podTemplates.store.{name}: cannot be set: ")
    assert PodTemplate.REFUSED[name] in str(caught.value)


def test_the_api_server_keeps_a_refused_field_for_the_operator_to_explain() -> None:
    schema = crds()["blendservices"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    template = schema["properties"]["spec"]["properties"]["expert"]["properties"]["podTemplates"][
        "additionalProperties"
    ]
    assert template["x-kubernetes-preserve-unknown-fields"] is True
    assert set(template["properties"]) >= {"labels", "affinity", "volumeMounts"}


@pytest.mark.parametrize(
    ("added", "says"),
    [
        (
            {"labels": {"kintsugi.dev/role": "x"}},
            "labels: kintsugi.dev/role cannot be set: kintsugi.dev belongs",
        ),
        ({"labels": {"ray.io/cluster": "x"}}, "labels: ray.io/cluster cannot be set: ray.io belongs"),
        (
            {"labels": {"app.kubernetes.io/name": "x"}},
            "labels: app.kubernetes.io/name cannot be set: KubeRay's Services select pods by it",
        ),
        ({"labels": {"a": "not a value"}}, "labels: a: 'not a value' is not a valid value of a label"),
        ({"labels": {"-a": "x"}}, "labels: '-a' is not a valid key"),
        ({"annotations": {"ray.io/ft-enabled": "false"}}, "annotations: ray.io/ft-enabled cannot be set"),
        ({"volumes": [{"name": "Cache", "emptyDir": {}}]}, "volumes.0.name: 'Cache' must have at most 63"),
        ({"volumes": [{"name": "tmp", "emptyDir": {}}]}, "volumes.0.name: tmp belongs to the operator"),
        (
            {"volumes": [{"name": "tier-nvme", "emptyDir": {}}]},
            "volumes.0.name: tier-nvme belongs to the operator",
        ),
        ({"volumes": [{"name": "a"}]}, "volumes.0: a volume must have one source, but this has 0"),
        (
            {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]},
            "volumes.0.hostPath: the restricted pod security standard allows only configMap, ",
        ),
        (
            {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "a", "emptyDir": {}}]},
            "volumes.1.name: a occurs twice",
        ),
        (
            {"volumeMounts": [{"name": "a", "mountPath": "/a"}]},
            "volumeMounts.0.name: volumes has no volume a",
        ),
        *(
            (
                {
                    "volumes": [{"name": "a", "emptyDir": {}}],
                    "volumeMounts": [{"name": "a", "mountPath": path}],
                },
                f"volumeMounts.0{says}",
            )
            for path, says in (
                ("/tmp/x", ".mountPath: /tmp/x would hide the operator's folder /tmp"),
                ("/etc", ".mountPath: /etc would hide the operator's folder /etc/kintsugi"),
                ("/", ".mountPath: / would hide the operator's folder /tmp"),
                ("/a/../tmp", ": a path must not contain .."),
            )
        ),
    ],
)
def test_an_addition_that_would_override_something_is_refused(added: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_service(with_template("engines", added))
    assert str(caught.value).startswith(f"spec.expert.podTemplates.engines.{says}")
