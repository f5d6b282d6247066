"""The chart: real helm 3 and 4 render every value set, and every object is one that Kubernetes takes."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils as kubernetes_schemas
from scripts.chart_schema import HINT, render_files

from kintsugi_operator.api.blend_service import BlendServiceSpec
from kintsugi_operator.api.corpus_precompute import CorpusPrecomputeSpec
from kintsugi_operator.api.manifest import from_manifest
from kintsugi_operator.controller.cluster import OWNED
from kintsugi_operator.desired.validation import check_corpus, check_service
from kintsugi_operator.objects.base import Owner
from kintsugi_operator.objects.network import OPERATOR
from kintsugi_operator.objects.service import service_objects
from tests.e2e.kubernetes.rendering import (
    CHART,
    HELMS,
    NAMESPACE,
    RELEASE,
    VALUES,
    Manifest,
    canonical,
    helm_named,
    one,
    pod_of,
    rendered,
)
from tests.unit.operator.rights import chart_rules, expand_rules

KUBERNETES = ("1.30", "1.36")
"""Oldest and newest that are supported: Chart.yaml's kubeVersion, and the newest whose schemas are known."""
OURS = "kintsugi.dev/v1alpha1"
CRDS_OF_OTHERS = ("monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1")

every_helm = pytest.mark.parametrize("helm", HELMS)
every_value_set = pytest.mark.parametrize("value_set", sorted(VALUES))


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    """The definitions have 1 MB, and are read for every object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kubernetes_schemas, "schema_contents", functools.cache(kubernetes_schemas.schema_contents)
        )
        yield


@functools.cache
def closed_crd(kind: str) -> dict[str, Any]:
    """The schema of our kind, in which an unknown key is an error, as for a strict API server."""
    for path in (CHART / "crds").glob("*.yaml"):
        crd = yaml.safe_load(path.read_text())
        if crd["spec"]["names"]["kind"] == kind:
            (version,) = crd["spec"]["versions"]
            return closed(version["schema"]["openAPIV3Schema"])
    raise AssertionError(f"no CRD for {kind}")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("properties") and schema.get("additionalProperties") is None:
        schema = {**schema, "additionalProperties": False}
        schema["properties"] = {name: closed(inner) for name, inner in schema["properties"].items()}
    if isinstance(schema.get("items"), dict):
        schema = {**schema, "items": closed(schema["items"])}
    return schema


def test_there_are_eight_value_sets() -> None:
    assert len(VALUES) == 8


def test_values_and_their_schema_are_generated_from_their_types() -> None:
    for path, text in render_files().items():
        assert path.read_text() == text, f"run scripts/chart_schema.py: {path.name} is out of date"


@every_helm
@every_value_set
def test_lints_strictly(helm: str, value_set: str) -> None:
    done = helm_named(helm).run("lint", "--strict", str(CHART), "-f", str(VALUES[value_set]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 chart(s) failed" in done.stdout


@every_value_set
def test_both_helms_render_the_same(value_set: str) -> None:
    texts = [sorted(map(canonical, rendered(helm, value_set))) for helm in HELMS]
    assert texts[0] == texts[1]


def test_rendering_again_changes_nothing() -> None:
    """A tool that compares what it renders with the cluster, such as Argo CD, would see a token as drift."""
    again = helm_named(HELMS[1]).template("defaults")
    assert sorted(map(canonical, again)) == sorted(map(canonical, rendered(HELMS[1], "defaults")))


@every_value_set
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_kubernetes_own(value_set: str, version: str) -> None:
    validated = 0
    for manifest in rendered(HELMS[1], value_set):
        if manifest["apiVersion"] in (OURS, *CRDS_OF_OTHERS):
            continue
        assert kubernetes_validate.validate(manifest, version, strict=True) == version
        validated += 1
    assert validated >= 7


@every_value_set
def test_our_objects_pass_their_crds(value_set: str) -> None:
    ours = [each for each in rendered(HELMS[1], value_set) if each["apiVersion"] == OURS]
    assert bool(ours) == (value_set != "minimal")
    for manifest in ours:
        schema = closed_crd(manifest["kind"])
        schema["properties"]["metadata"] = {"type": "object"}
        jsonschema.Draft202012Validator(schema).validate(manifest)
        if manifest["kind"] == "BlendService":
            check_service(from_manifest(BlendServiceSpec, manifest["spec"]))
        else:
            check_corpus(from_manifest(CorpusPrecomputeSpec, manifest["spec"]))


@every_value_set
def test_every_object_is_in_the_release_and_labelled(value_set: str) -> None:
    for manifest in rendered(HELMS[1], value_set):
        metadata = manifest["metadata"]
        assert ("namespace" in metadata) != manifest["kind"].startswith("ClusterRole")
        assert metadata.get("namespace", NAMESPACE) == NAMESPACE
        assert metadata["labels"]["app.kubernetes.io/instance"] == RELEASE
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "Helm"


@every_value_set
def test_no_two_objects_have_one_name(value_set: str) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in rendered(HELMS[1], value_set)]
    assert len(names) == len(set(names))


@every_value_set
def test_pods_pass_the_restricted_standard_and_name_their_resources(value_set: str) -> None:
    pods = [pod for each in rendered(HELMS[1], value_set) if (pod := pod_of(each)) is not None]
    assert pods
    for pod in (pod["spec"] for pod in pods):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert all("hostPath" not in volume for volume in pod.get("volumes", []))
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]


@every_value_set
def test_only_what_talks_to_kubernetes_has_a_token(value_set: str) -> None:
    for manifest in rendered(HELMS[1], value_set):
        pod = pod_of(manifest)
        if pod is not None:
            callers = ("operator", "remove", "crds", "token", "forget")
            expected = manifest["metadata"]["name"] in [f"{RELEASE}-{one}" for one in callers]
            assert pod["spec"]["automountServiceAccountToken"] is expected


@every_value_set
def test_selectors_match_the_pods_they_mean(value_set: str) -> None:
    manifests = rendered(HELMS[1], value_set)
    labels = one(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for manifest in manifests:
        spec = manifest.get("spec", {})
        if manifest["kind"] in ("Deployment", "PodDisruptionBudget"):
            assert spec["selector"]["matchLabels"].items() <= labels.items()
        if manifest["kind"] == "NetworkPolicy":
            assert spec["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_operators_pods_are_those_that_the_services_policies_let_in() -> None:
    labels = one(rendered(HELMS[1], "defaults"), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert OPERATOR.items() <= labels.items()


@pytest.mark.parametrize("value_set", ["defaults", "minimal"])
def test_the_operator_may_do_what_it_does_and_nothing_else(value_set: str) -> None:
    manifests = rendered(HELMS[1], value_set)
    name = f"{RELEASE}-operator"
    wide = one(manifests, "ClusterRole", f"{NAMESPACE}-{name}") if value_set == "minimal" else None
    own = wide or one(manifests, "Role", name)
    lease = one(manifests, "Role", f"{name}-lease")
    assert [expand_rules(role["rules"]) for role in (own, lease)] == list(map(expand_rules, chart_rules()))
    assert [rule.get("resourceNames") for rule in lease["rules"]] == [None, [name], [name]], (
        "creating has no name yet"
    )
    # It looks for its own Deployment, under the name that it may read.
    (container,) = one(manifests, "Deployment", name)["spec"]["template"]["spec"]["containers"]
    assert f"--deployment={name}" in container["args"]
    for resource in OWNED:
        group = resource.api_version.rpartition("/")[0]
        # Server-side apply of a new object is checked for both.
        assert {(group, resource.plural, verb) for verb in ("create", "patch")} <= expand_rules(own["rules"])


@every_value_set
def test_only_an_operator_of_the_whole_cluster_has_rights_beyond_the_namespace(value_set: str) -> None:
    roles = [each for each in rendered(HELMS[1], value_set) if each["kind"].startswith("ClusterRole")]
    hooks = [each for each in roles if "helm.sh/hook" in each["metadata"].get("annotations", {})]
    assert bool([each for each in roles if each not in hooks]) == (value_set == "minimal")
    assert {each["metadata"]["name"] for each in hooks} == {f"{NAMESPACE}-{RELEASE}-prepare"}


@every_value_set
def test_the_hook_for_crds_may_read_and_change_those_two_and_only_while_it_runs(value_set: str) -> None:
    manifests = rendered(HELMS[1], value_set)
    role = one(manifests, "ClusterRole", f"{NAMESPACE}-{RELEASE}-prepare")
    (rule,) = role["rules"]
    crds = [yaml.safe_load(path.read_text()) for path in sorted((CHART / "crds").glob("*.yaml"))]
    assert rule["resourceNames"] == [crd["metadata"]["name"] for crd in crds]
    assert rule["verbs"] == ["get", "patch"]
    annotations = role["metadata"]["annotations"]
    assert annotations["helm.sh/hook"] == "pre-upgrade"
    assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
    carried = one(manifests, "ConfigMap", f"{RELEASE}-prepare")["data"]
    assert [json.loads(carried[name]) for name in sorted(carried)] == crds
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    assert {crd["metadata"]["annotations"]["kintsugi.dev/version"] for crd in crds} == {version}


PODS_OF_OPERATOR: dict[str, Any] = {
    "labels": {"example.com/cost": "shared", "app.kubernetes.io/name": "mine"},
    "annotations": {"example.com/owner": "search"},
    "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "nodeSelector": {"example.com/pool": "system"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-cluster-critical",
    "serviceAccountName": "mine",
    "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "volumeMounts": [{"name": "ca", "mountPath": "/ca"}],
}
PLACED = ("nodeSelector", "tolerations", "affinity", "priorityClassName")


@every_helm
def test_the_operators_pods_have_what_its_template_adds(helm: str) -> None:
    arguments = ("--set-json", f"operator.podTemplate={json.dumps(PODS_OF_OPERATOR)}")
    manifests = helm_named(helm).template("ha", *arguments, "--set", "operator.cpuLimit=1")
    template = one(manifests, "Deployment")["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert (labels["example.com/cost"], labels["app.kubernetes.io/name"]) == ("shared", "kintsugi-operator")
    assert template["metadata"]["annotations"] == PODS_OF_OPERATOR["annotations"]
    (container,) = template["spec"]["containers"]
    assert PODS_OF_OPERATOR["env"][0] in container["env"]
    assert [one["name"] for one in container["volumeMounts"]] == ["tmp", "ca"]
    assert [one["name"] for one in template["spec"]["volumes"]] == ["tmp", "ca"]
    assert container["resources"]["limits"]["cpu"] == 1
    pods = [pod["spec"] for each in manifests if (pod := pod_of(each))]
    assert len(pods) > 3
    for pod in pods:
        assert {name: pod[name] for name in PLACED} == {name: PODS_OF_OPERATOR[name] for name in PLACED}
    accounts = [each["metadata"]["name"] for each in manifests if each["kind"] == "ServiceAccount"]
    assert f"{RELEASE}-operator" not in accounts
    for binding in ("operator", "operator-lease"):
        (subject,) = one(manifests, "RoleBinding", f"{RELEASE}-{binding}")["subjects"]
        assert subject["name"] == "mine"


@every_helm
def test_an_operator_has_a_role_in_each_namespace_that_it_manages(helm: str) -> None:
    manifests = helm_named(helm).template("defaults", "--set", "operator.namespaces={team-a,team-b}")
    managed = [NAMESPACE, "team-a", "team-b"]
    for kind in ("Role", "RoleBinding"):
        mine = [each["metadata"] for each in manifests if each["kind"] == kind]
        assert [each["namespace"] for each in mine if each["name"] == f"{RELEASE}-operator"] == managed
    (container,) = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert [one for one in container["args"] if "namespace" in one] == [f"--namespace={n}" for n in managed]
    *_, pods = one(manifests, "NetworkPolicy")["spec"]["egress"]
    (expression,) = pods["to"][0]["namespaceSelector"]["matchExpressions"]
    assert expression["values"] == managed
    assert not [each for each in rendered(helm, "defaults") if each["metadata"].get("namespace") == "team-a"]


@every_helm
def test_roles_for_people_are_made_on_request(helm: str) -> None:
    manifests = helm_named(helm).template("defaults", "--set", "operator.aggregateRoles=true")
    prefix = f"{NAMESPACE}-{RELEASE}-operator"
    view, edit = (one(manifests, "ClusterRole", f"{prefix}-{name}") for name in ("view", "edit"))
    aggregate = "rbac.authorization.k8s.io/aggregate-to-"
    assert {f"{aggregate}{name}" for name in ("view", "edit", "admin")} <= set(view["metadata"]["labels"])
    assert f"{aggregate}view" not in edit["metadata"]["labels"]
    assert view["rules"][0]["verbs"] == ["get", "list", "watch"]
    assert "blendservices/scale" in edit["rules"][0]["resources"]
    assert not {"get", "list", "watch"} & set(edit["rules"][0]["verbs"])


@every_helm
def test_policies_name_the_clusters_own_dns_and_api_server(helm: str) -> None:
    cluster = "expert.dnsNamespace=openshift-dns,expert.dnsPorts={5353},expert.apiServerPorts={8443}"
    manifests = helm_named(helm).template("defaults", "--set", cluster)
    dns, api_server, _ = one(manifests, "NetworkPolicy")["spec"]["egress"]
    named = {"kubernetes.io/metadata.name": "openshift-dns"}
    assert dns["to"] == [{"namespaceSelector": {"matchLabels": named}}]
    assert {one["port"] for one in dns["ports"]} == {5353}
    assert api_server == {"ports": [{"port": 8443}]}
    assert one(manifests, "BlendService")["spec"]["expert"]["dnsPorts"] == [5353]


@every_helm
def test_names_labels_and_objects_are_the_users(helm: str) -> None:
    extra = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-mine"}}]
    labels = "commonLabels.team=search,commonLabels.app\\.kubernetes\\.io/name=evil"
    arguments = ("--set-json", f"extraObjects={json.dumps(extra)}", "--set", f"nameOverride=acme,{labels}")
    manifests = helm_named(helm).template("ha", *arguments)
    assert one(manifests, "ConfigMap", f"{RELEASE}-mine")
    assert one(manifests, "BlendService")["metadata"]["name"] == "acme"
    ours = [each for each in manifests if each["metadata"]["name"] != f"{RELEASE}-mine"]
    assert {each["metadata"]["labels"].get("team") for each in ours} == {"search"}
    assert "evil" not in json.dumps([each["metadata"] for each in ours])


def test_the_operator_logs_as_it_is_told() -> None:
    manifests = helm_named(HELMS[1]).template("defaults", "--set", "operator.logFormat=json")
    (container,) = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert "--log-format=json" in container["args"]


@every_helm
@pytest.mark.parametrize("setting", ["operator.upgradeCrds=false", "operator.enabled=false"])
def test_nothing_touches_crds_where_others_keep_them(helm: str, setting: str) -> None:
    manifests = helm_named(helm).template("defaults", "--set", setting)
    assert not [each for each in manifests if each["kind"].startswith("ClusterRole")]
    assert f"{RELEASE}-crds" not in [each["metadata"]["name"] for each in manifests]


def test_one_operator_has_no_disruption_budget_and_two_have() -> None:
    kinds = {name: [each["kind"] for each in rendered(HELMS[1], name)] for name in ("defaults", "ha")}
    assert "PodDisruptionBudget" not in kinds["defaults"]
    assert "PodDisruptionBudget" in kinds["ha"]


@every_helm
def test_an_unset_repository_says_how_to_build_images(helm: str) -> None:
    arguments = ["template", RELEASE, str(CHART), "--set", "model.name=org/m"]
    done = helm_named(helm).run(*arguments)
    assert done.returncode != 0
    assert HINT in done.stderr
    unchecked = helm_named(helm).run(*arguments, "--skip-schema-validation")
    assert unchecked.returncode != 0
    assert "make images" in unchecked.stderr


@every_helm
@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ("model.nam=m", "model"),
        ("model.codec=int2", "model.codec"),
        ("model.name=gpt2", "model.name"),
        ("model.path=models/7b/final", "model.path"),
        ("engines.replicasMax=none", "engines.replicasMax"),
        ("engines.expert.ratio=2", "engines.expert.ratio"),
        ("engines.gpus=-1", "engines.gpus"),
        ("store.shards=0", "store.shards"),
        ("store.tiers[0].name=Fast\\,store.tiers[0].gib=1", "store.tiers.0.name"),
        ("gateway.serviceType=Ingress", "gateway.serviceType"),
        ("image.servingDigest=sha256:1", "image.servingDigest"),
        ("image.repository=https://registry/x", "image.repository"),
        ("image.repository=registry/x:1.0", "image.repository"),
        ("engines.memory=64GB", "engines.memory"),
        ("expert.egress[0].namespace=x", "expert.egress.0"),
        ("expert.podTemplates.gateway.env[0].name=not a name", "expert.podTemplates.gateway.env.0.name"),
        ("nameOverride=a-name-that-is-longer-than-forty-characters", "nameOverride"),
        ("test.namespace=a b", "test.namespace"),
        ("store.tiers[0].name=ssd,store.tiers[0].gib=0", "store.tiers.0.gib"),
        ("operator.replicas=9", "operator.replicas"),
        ("operator.memory=lots", "operator.memory"),
        ("precompute.corpora[0].name=c", "precompute.corpora.0"),
        ("monitoring.interval=often", "monitoring.interval"),
        ("expert.podTemplates.engines.hostNetwork=true", "expert.podTemplates.engines"),
        ("expert.podTemplates.store.priorityClassName=High", "expert.podTemplates.store.priorityClassName"),
        ("expert.redis.address=redis", "expert.redis.address"),
        ("ingress.hosts[0]=https://a.b", "ingress.hosts.0"),
        ("httpRoute.parentRefs[0].namespace=infra", "httpRoute.parentRefs.0"),
        ("httpRoute.parentRefs[0].name=Public", "httpRoute.parentRefs.0.name"),
        ("unheard=1", ""),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(helm: str, setting: str, path: str) -> None:
    done = helm_named(helm).run(
        "template",
        RELEASE,
        str(CHART),
        "-f",
        str(VALUES["defaults"]),
        "--set",
        setting.replace("\\,", ","),
    )
    assert done.returncode != 0
    said = re.sub(r"at '/?([^']*)'", lambda match: match[1].replace("/", "."), done.stderr)
    assert f"- {path or '(root)'}: " in said or f"- {path}: " in said, done.stderr


@every_helm
@pytest.mark.parametrize(("kind", "mandatory"), [("ingress", "hosts"), ("httpRoute", "parentRefs")])
def test_a_way_in_that_is_enabled_says_what_it_needs(helm: str, kind: str, mandatory: str) -> None:
    done = helm_named(helm).run(
        "template", RELEASE, str(CHART), "-f", str(VALUES["defaults"]), "--set", f"{kind}.enabled=true"
    )
    assert done.returncode != 0
    assert kind in done.stderr
    assert mandatory in done.stderr


def test_an_ingress_leads_to_the_gateways_of_whichever_revision_serves() -> None:
    manifests = rendered(HELMS[1], "multi-tenant")
    ingress = one(manifests, "Ingress")
    assert ingress["spec"]["ingressClassName"] == "nginx"
    assert ingress["spec"]["tls"] == [
        {"secretName": "rag-certificate", "hosts": ["rag.example.com", "*.rag.example.com"]}
    ]
    assert ingress["metadata"]["annotations"] == {"nginx.ingress.kubernetes.io/proxy-buffering": "off"}
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == ingress["spec"]["tls"][0]["hosts"]
    for rule in ingress["spec"]["rules"]:
        (path,) = rule["http"]["paths"]
        assert (path["path"], path["pathType"]) == ("/", "Prefix")
        assert path["backend"]["service"] == {"name": http_service(manifests), "port": {"name": "http"}}


def test_a_route_leads_to_the_gateways_of_whichever_revision_serves() -> None:
    manifests = rendered(HELMS[1], "ha")
    route = one(manifests, "HTTPRoute")["spec"]
    assert route["parentRefs"] == [{"name": "public", "namespace": "infra", "sectionName": "https"}]
    assert route["hostnames"] == ["rag.example.com"]
    assert route["rules"] == [{"backendRefs": [{"name": http_service(manifests), "port": 8000}]}]


def http_service(manifests: list[Manifest]) -> str:
    """The Service that the operator makes for the gateway's HTTP, by name; its port is called `http`."""
    service = one(manifests, "BlendService")
    owner = Owner("BlendService", service["metadata"]["name"], NAMESPACE, "uid")
    made = service_objects(from_manifest(BlendServiceSpec, service["spec"]), owner, "revision")
    (http,) = (each for each in made if each["spec"]["ports"][0]["name"] == "http")
    return str(http["metadata"]["name"])


@pytest.mark.parametrize("value_set", ["defaults", "minimal"])
def test_nothing_leads_in_from_outside_unless_enabled(value_set: str) -> None:
    kinds = {each["kind"] for each in rendered(HELMS[1], value_set)}
    assert not kinds & {"Ingress", "HTTPRoute"}


@every_helm
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            [
                f"precompute.corpora[{index}].{pair}"
                for index in (0, 1)
                for pair in ("name=c", "namespace=n", "source=s")
            ],
            'precompute.corpora: two are called "c"',
        ),
        (["image.serving=serving-cpu"], "image.serving is serving-cpu, but engines.gpus is 1"),
        (
            ["image.serving=serving-gpu", "engines.gpus=0"],
            "image.serving is serving-gpu, but engines.gpus is 0",
        ),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused(helm: str, settings: list[str], says: str) -> None:
    values = [part for setting in settings for part in ("--set", setting)]
    done = helm_named(helm).run("template", RELEASE, str(CHART), "-f", str(VALUES["defaults"]), *values)
    assert done.returncode != 0
    assert says in done.stderr


@pytest.mark.parametrize("value_set", ["defaults", "tls", "minimal"])
def test_notes_say_how_to_send_a_first_request(value_set: str) -> None:
    """helm 3 shows them only where it reaches a cluster; both render them when they lint."""
    done = helm_named(HELMS[1]).run(
        "install",
        RELEASE,
        str(CHART),
        "-n",
        NAMESPACE,
        "--dry-run=client",
        "-f",
        str(VALUES[value_set]),
    )
    assert done.returncode == 0, done.stderr
    notes = done.stdout.split("NOTES:")[1]
    assert ("curl" in notes) == (value_set != "minimal")
    assert ("--cacert" in notes) == (value_set == "tls")
    assert "A job before each helm upgrade upgrades the CRDs" in notes


def test_a_release_whose_name_cannot_name_a_service_says_what_to_set() -> None:
    done = helm_named(HELMS[1]).run("template", "7b", str(CHART), "-f", str(VALUES["defaults"]))
    assert done.returncode != 0
    assert "set nameOverride" in done.stderr


def test_a_job_makes_the_secret_that_the_gateway_reads() -> None:
    manifests = rendered(HELMS[1], "defaults")
    assert all(each["kind"] != "Secret" for each in manifests), "no token is rendered"
    gateway = one(manifests, "BlendService")["spec"]["gateway"]["tokensSecret"]
    for job, event in (("token", "pre-install,pre-upgrade"), ("forget", "post-delete")):
        found = one(manifests, "Job", f"{RELEASE}-{job}")
        assert found["metadata"]["annotations"]["helm.sh/hook"] == event
        (container,) = found["spec"]["template"]["spec"]["containers"]
        env = {each["name"]: each["value"] for each in container["env"]}
        wanted = json.loads(env["KINTSUGI_TOKENS"])
        assert (wanted["gateway"], wanted["client"]) == (gateway, f"{RELEASE}-client")
        assert (wanted["name"], wanted["namespaces"]) == (RELEASE, ["default"])
    role = one(manifests, "Role", f"{RELEASE}-prepare")
    named = {
        (verb, name)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }
    assert named == {("create", "")} | {
        (verb, name) for verb in ("get", "patch", "delete") for name in (gateway, f"{RELEASE}-client")
    }


def test_no_secret_is_made_beside_a_given_one() -> None:
    names = [each["metadata"]["name"] for each in rendered(HELMS[1], "ha")]
    assert not {f"{RELEASE}-token", f"{RELEASE}-forget"} & set(names)


def test_the_service_runs_the_image_that_fits_its_engines() -> None:
    images = {
        name: one(rendered(HELMS[1], name), "BlendService")["spec"]["image"] for name in ("defaults", "cpu")
    }
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert images["defaults"] == f"registry.example.com/kintsugi/serving-gpu:{version}"
    assert images["cpu"] == f"localhost/kintsugi/serving-cpu:{version}"


def test_images_can_be_named_by_digest() -> None:
    manifests = rendered(HELMS[1], "air-gapped")
    serving = one(manifests, "BlendService")["spec"]["image"]
    assert serving.startswith("registry.internal:5000/mirror/kintsugi/serving-gpu@sha256:")
    (container,) = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith("registry.internal:5000/mirror/kintsugi/operator@sha256:")
    assert one(manifests, "Deployment")["spec"]["template"]["spec"]["imagePullSecrets"] == [
        {"name": "registry"}
    ]


def test_the_first_request_is_let_in_beside_the_clients_that_are_named() -> None:
    network = one(rendered(HELMS[1], "multi-tenant"), "BlendService")["spec"]["network"]
    assert network["clientNamespaces"] == ["search", "support", NAMESPACE]
    assert one(rendered(HELMS[1], "defaults"), "BlendService")["spec"]["network"]["clientNamespaces"] == []


@every_helm
def test_an_older_kubernetes_is_refused(helm: str) -> None:
    arguments = ["template", RELEASE, str(CHART), "-f", str(VALUES["defaults"]), "--kube-version"]
    assert helm_named(helm).run(*arguments, f"{KUBERNETES[0]}.0").returncode == 0
    refused = helm_named(helm).run(*arguments, "1.29.9")
    assert refused.returncode != 0
    assert "requires kubeVersion: >=1.30" in refused.stderr


def test_a_corpus_names_the_service_of_its_release() -> None:
    corpora = [each for each in rendered(HELMS[1], "multi-tenant") if each["kind"] == "CorpusPrecompute"]
    assert [each["metadata"]["name"] for each in corpora] == ["search-manuals", "support-tickets"]
    assert all(each["spec"]["service"] == RELEASE for each in corpora)
