"""Specs as YAML has them, what is refused, and the CRDs."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jsonschema
import kubernetes_validate
import pytest
from hypothesis import given, settings

from kintsugi.core.errors import InvalidField, UnknownField
from kintsugi.core.settings import Pattern, bounds_of, camel
from kintsugi.core.spaces import check_namespace
from kintsugi_operator.api.blend_service import BlendServiceSpec, Engines
from kintsugi_operator.api.corpus_precompute import CorpusPrecomputeSpec
from kintsugi_operator.api.crd import crds
from kintsugi_operator.api.manifest import from_manifest, to_manifest
from kintsugi_operator.desired.validation import check_corpus, check_service
from kintsugi_operator.objects.deployed import EngineRevision
from tests.unit.operator.specs import SMALL, manifests, spec_of, specs

ROOT = Path(__file__).resolve().parents[3]
MATCHES = re.compile(r"self\.matches\('([^'\\]*)'\)")
"""A rule on a text. Without a backslash, CEL and Python read the expression alike."""


def _evaluate_matches(
    _: Any, rules: list[dict[str, str]], value: Any, schema: dict[str, Any]
) -> Iterator[jsonschema.ValidationError]:
    """Rules on texts, as the API server evaluates them."""
    for rule in rules:
        found = MATCHES.fullmatch(rule["rule"])
        if found and isinstance(value, str) and not re.search(found[1], value):
            yield jsonschema.ValidationError(rule["message"])


Crd = jsonschema.validators.extend(
    jsonschema.Draft7Validator, {"x-kubernetes-validations": _evaluate_matches}
)
BLEND_SERVICE, CORPUS_PRECOMPUTE = (
    Crd(crds()[name]["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    for name in ("blendservices", "corpusprecomputes")
)


@settings(max_examples=15, deadline=None)
@given(specs)
def test_a_spec_survives_its_manifest(spec: BlendServiceSpec) -> None:
    assert from_manifest(BlendServiceSpec, to_manifest(spec)) == spec


@settings(max_examples=15, deadline=None)
@given(manifests())
def test_what_the_types_accept_the_crd_accepts(values: dict[str, Any]) -> None:
    BLEND_SERVICE.validate({"spec": values})
    BLEND_SERVICE.validate({"spec": to_manifest(from_manifest(BlendServiceSpec, values))})


def test_names_are_camel_in_yaml() -> None:
    assert (camel("ram_gib"), camel("max"), camel("max_model_len")) == ("ramGib", "max", "maxModelLen")


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"store": {"shard": 2}}, UnknownField, r"spec\.store\.shard: unknown; did you mean 'shards'"),
        ({"engines": {"replica": 1}}, UnknownField, r"spec\.engines\.replica"),
        ({"store": {"ramGib": "much"}}, InvalidField, r"spec\.store\.ramGib"),
        ({"model": {"path": None}}, InvalidField, r"spec\.model\.path"),
        ({"store": {"tiers": [{"name": "a"}]}}, InvalidField, r"spec\.store\.tiers\.0\.gib: is mandatory"),
        ({"gateway": []}, InvalidField, r"spec\.gateway"),
    ],
)
def test_a_wrong_field_is_named_as_yaml_does(
    values: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        from_manifest(BlendServiceSpec, {**SMALL, **values})


def env_of(*variables: dict[str, Any]) -> dict[str, Any]:
    """A spec whose engines have these environment variables."""
    return {"expert": {"podTemplates": {"engines": {"env": list(variables)}}}}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"gateway": {"tokensSecret": ""}}, "spec: gateway.tokensSecret is mandatory"),
        ({"network": {"policies": False}}, "spec: without network.policies the store needs store.tlsSecret"),
        (
            {"engines": {"replicas": 3, "replicasMax": 2}},
            "spec.engines.replicasMax: the largest number of engines",
        ),
        ({"engines": {"replicas": 0}}, "spec.engines.replicas: 0 must be at least 1"),
        (
            {"store": {"bucketUrl": "s3://chunks"}},
            "spec.store.bucketUrl: a bucket stores the chunks that SSD tiers evict",
        ),
        ({"gateway": {"httpPort": 7500}}, "spec.gateway.httpPort: grpcPort and httpPort must differ"),
        ({"gateway": {"httpPort": 8265}}, "8265 is used by Ray's dashboard"),
        ({"engines": {"expert": {"sharedMemory": "16Gi"}}}, "counts towards"),
        ({"store": {"replication": 2}}, "spec.store.replication: replication must not exceed shards"),
        ({"gateway": {"expert": {"requireClientCertificate": True}}}, "spec.gateway.tlsSecret"),
        ({"engines": {"vllm": {"model": "x"}}}, "spec.engines.vllm.model"),
        ({"engines": {"expert": {"ratio": 2}}}, "spec.engines.expert.ratio: 2.0 must be at most 1"),
        ({"expert": {"podTemplates": {"shards": {}}}}, "spec.expert.podTemplates.shards: unknown"),
        ({"model": {"codec": "zip"}}, "spec.model.codec: 'zip' is not one of 'raw'"),
        ({"gateway": {"grpcPort": 12000}}, "spec.gateway.grpcPort: 12000 is used by Ray's workers"),
        (
            {"engines": {"gpus": 1, "vllm": {"tensor_parallel_size": 2}}},
            "spec.engines.vllm.tensor_parallel_size: 2 ranks need 2 GPUs",
        ),
        ({"store": {"shards": 257}}, "spec.store.shards: 257 must be at most 256"),
        (
            {"store": {"tiers": [{"name": "a", "gib": 1}, {"name": "a", "gib": 2}]}},
            "tiers.1.name: a is repeated",
        ),
        ({"engines": {"memory": "much"}}, "spec.engines.memory: "),
        (
            {"expert": {"podTemplates": {"engines": {"tolerations": [{}]}}}},
            "tolerations.0: without a key, operator must be",
        ),
        (
            {"model": {"path": "s3://bucket/model"}},
            r"spec\.model\.path: 's3://bucket/model' must be an absolute path, such as",
        ),
        (
            {"expert": {"podTemplates": {"store": {"env": [{"name": "RAY_ADDRESS", "value": "x"}]}}}},
            "spec.expert.podTemplates.store.env.0.name: the operator or Ray sets .* \\(got 'RAY_ADDRESS'\\)",
        ),
        (env_of({"name": "HF_TOKEN", "value": "x"}), "model.tokenSecret"),
        (
            {"expert": {"redis": {"username": "ray"}}},
            "spec.expert.redis.passwordSecret: a username needs passwordSecret",
        ),
        ({"expert": {"redis": {"address": "redis"}}}, "spec.expert.redis.address: 'redis' must be HOST:PORT"),
        (
            {"gateway": {"expert": {"serviceAnnotations": {"kintsugi.dev/desired": "x"}}}},
            "spec.gateway.expert.serviceAnnotations: kintsugi.dev/desired cannot be set",
        ),
        (env_of({"name": "A"}, {"name": "A"}), "podTemplates.engines.env.1.name: A is repeated"),
        (env_of({"name": "A", "valueFrom": {}}), "env.0.valueFrom: is mandatory: at least 1 entries"),
        (
            env_of({"name": "A", "value": "b", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}),
            "env.0.value: give value or valueFrom",
        ),
        ({"expert": {"egress": [{"ports": []}]}}, "spec.expert.egress.0.ports: is mandatory"),
        (
            {"expert": {"podTemplates": {"store": {"nodeSelector": {"disk": "fast!"}}}}},
            "spec.expert.podTemplates.store.nodeSelector: disk: 'fast!' is not a valid value of a label",
        ),
        ({"expert": {"egress": [{"ports": [1], "cidr": "10.0.0.1/8"}]}}, "spec.expert.egress.0.cidr"),
        ({"expert": {"egress": [{"ports": [1], "cidr": "::/0", "namespace": "n"}]}}, "not both"),
    ],
)
def test_a_spec_that_cannot_work_says_what_to_change(parts: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidField, match=says):
        check_service(spec_of(**parts))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"namespace": "a b"}, "spec.namespace"),
        ({"overlap": 512}, "overlap"),
        ({"schedule": "61 * * * *"}, "schedule"),
        ({"workers": {"vllm": {"revision": "x"}}}, "spec.workers.vllm: unknown"),
    ],
)
def test_a_corpus_that_cannot_work_says_what_to_change(values: dict[str, Any], says: str) -> None:
    base = {"service": "acme", "namespace": "tenant", "source": "/corpus"}
    with pytest.raises(InvalidField, match=says):
        check_corpus(from_manifest(CorpusPrecomputeSpec, {**base, **values}))


@pytest.mark.parametrize("name", ["a", "a/b", "A.b-c_d", "9", "a b", "", "/a", "é", "x" * 128, "x" * 129])
def test_a_tenants_name_is_the_cores(name: str) -> None:
    base = {"service": "acme", "namespace": name, "source": "/corpus"}
    try:
        check_namespace(name)
    except InvalidField:
        with pytest.raises(InvalidField, match=r"spec\.namespace"):
            check_corpus(from_manifest(CorpusPrecomputeSpec, base))
        assert not CORPUS_PRECOMPUTE.is_valid({"spec": base})
    else:
        check_corpus(from_manifest(CorpusPrecomputeSpec, base))
        CORPUS_PRECOMPUTE.validate({"spec": base})


def test_the_crds_are_valid_and_structural() -> None:
    for crd in crds().values():
        for version in ("1.30", "1.36"):
            kubernetes_validate.validate(crd, version, strict=True)
        (version_,) = crd["spec"]["versions"]
        scaled = {"scale"} if crd["spec"]["names"]["kind"] == "BlendService" else set()
        assert set(version_["subresources"]) == {"status", *scaled}
        for path, schema in structures(version_["schema"]["openAPIV3Schema"]):
            # A structural schema names every type, unless it keeps what it does not know: `off` of `quality`
            # is a boolean in YAML.
            keeps = schema.get("x-kubernetes-preserve-unknown-fields") and "enum" in schema
            assert "type" in schema or keeps, path
            if "default" in schema:
                jsonschema.validate(schema["default"], schema)


def structures(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(path, schema)]
    for name, one in schema.get("properties", {}).items():
        found += structures(one, f"{path}.{name}")
    if "items" in schema:
        found += structures(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        found += structures(schema["additionalProperties"], f"{path}{{}}")
    return found


def test_every_field_is_described() -> None:
    """For `kubectl explain`: what a field means stands in its docstring, once."""
    for kind, crd in crds().items():
        root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for part in ("spec", "status"):
            fields = described_fields(root["properties"][part], part)
            assert len(fields) > 15
            missing = [path for path, text in fields.items() if not text]
            assert not missing, f"{kind}: give {', '.join(missing)} a docstring"
            unclear = [path for path, text in fields.items() if re.match(r"(Of|The same|As)\b", text)]
            assert not unclear, f"{kind}: {', '.join(unclear)} should stand on their own"
            assert all(text.endswith((".", ".)")) for text in fields.values())


def described_fields(schema: dict[str, Any], path: str) -> dict[str, str]:
    """Descriptions of the properties under `path`, empty where there is none."""
    return {
        f"{where}.{name}".removeprefix("."): one.get("description", "")
        for where, inner in structures(schema, path)
        for name, one in inner.get("properties", {}).items()
    }


def test_every_rule_of_the_types_is_in_the_crd() -> None:
    text = json.dumps(crds())
    for rule in (*BlendServiceSpec.RULES, *CorpusPrecomputeSpec.RULES):
        assert rule.message.split()[0] in text
    spec = crds()["blendservices"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert len(spec["x-kubernetes-validations"]) == len(BlendServiceSpec.RULES)
    tiers = spec["properties"]["store"]["properties"]["tiers"]
    assert tiers["x-kubernetes-list-map-keys"] == ["name"]
    assert "'data'" in tiers["items"]["x-kubernetes-validations"][0]["rule"]
    volumes = spec["properties"]["store"]["properties"]["expert"]["properties"]["volumes"]
    assert "oldSelf" in volumes["x-kubernetes-validations"][0]["rule"]


def test_the_api_server_compares_the_two_numbers_of_engines_at_little_cost() -> None:
    """Also where an autoscaler writes `replicas`. Comparisons of numbers cost the API server next to nothing;
    loops, patterns and conversions of text might exceed its budget."""
    spec = crds()["blendservices"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    (rule,) = spec["properties"]["engines"]["x-kubernetes-validations"]
    assert rule["rule"] == "!has(self.replicasMax) || self.replicas <= self.replicasMax"
    for replicas, most, is_valid in ((1, None, True), (2, 2, True), (1, 4, True), (3, 2, False)):
        assert Engines.RULES[0].is_kept_by(Engines(replicas=replicas, replicas_max=most)) is is_valid


EXPRESSION = re.compile(r"\[[a-zA-Z0-9^-]+\]|\(\?|[)\]][*+?{]|\\|\.\*|\^|\$")
"""What gives a regular expression away."""


def test_whatever_the_crd_refuses_it_refuses_in_words() -> None:
    """The API server prints the regular expression of a pattern, and the message of a rule."""
    expression_cost = 0.0
    for kind, crd in crds().items():
        for path, schema in structures(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"], kind):
            assert "pattern" not in schema, path
            for rule in schema.get("x-kubernetes-validations", []):
                assert rule["message"], path
                assert not EXPRESSION.search(rule["message"]), f"{path}: {rule}"
                if found := MATCHES.fullmatch(rule["rule"]):
                    expression_cost += cost_of_matches(path, schema, found[1])
    assert 0 < expression_cost < 1e7  # Kubernetes allows 1e7 to one expression and 1e8 to a CRD


def cost_of_matches(path: str, schema: dict[str, Any], expression: str) -> float:
    """Kubernetes' estimate: a tenth of the text's bytes times a quarter of the expression's, for each item
    of the lists and mappings around it."""
    items = 64 ** (path.count("[]") + path.count("{}"))
    return (0.1 * (4 * schema["maxLength"] + 1)) * (0.25 * len(expression)) * items


def patterned_fields() -> Iterator[tuple[type[Any], str, Pattern]]:
    """Every field of the CRDs whose text has a pattern."""
    for cls in settings_within(BlendServiceSpec, CorpusPrecomputeSpec):
        for one in dataclasses.fields(cls):
            bounds = bounds_of(cls, one)
            if pattern := bounds.get("pattern") or bounds.get("items", {}).get("pattern"):
                yield cls, one.name, pattern


def settings_within(*classes: type[Any]) -> set[type[Any]]:
    """The classes of settings that these consist of."""
    found: set[type[Any]] = set()
    left: list[Any] = list(classes)
    while left:
        one = left.pop()
        if isinstance(one, type) and dataclasses.is_dataclass(one) and one not in found:
            found.add(one)
            left += get_type_hints(one).values()
        left += get_args(one)
    return found


def test_the_operator_refuses_in_the_words_of_the_crd() -> None:
    fields = list(patterned_fields())
    assert len(fields) > 25
    for cls, name, pattern in fields:
        assert isinstance(pattern, Pattern), f"{cls.__name__}.{name}"
        assert not EXPRESSION.search(pattern.words), pattern.words
        assert "\\" not in pattern, f"{pattern} would read otherwise in CEL"


def test_rules_speak_of_fields_that_are_there() -> None:
    """The API server refuses a whole CRD for one rule that it cannot compile."""
    words = (
        "as break const continue else false for function if import in let loop namespace null package return "
        "true var void while"
    )
    reserved = set(words.split())
    looked_at = 0
    for crd in crds().values():
        root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for where, schema in structures(root):
            for rule in schema.get("x-kubernetes-validations", []):
                for path, call in re.findall(r"[sS]elf((?:\.\w+)+)(\(?)", rule["rule"]):
                    names = path.strip(".").split(".")
                    inner = schema
                    for name in names[:-1] if call else names:
                        assert name not in reserved, f"{where}: {rule['rule']}"
                        if name == "metadata":  # Kubernetes' own
                            break
                        inner = inner["properties"][name.removeprefix("__").removesuffix("__")]
                        looked_at += 1
    assert looked_at > 30


def test_the_files_are_what_the_types_say() -> None:
    script = [sys.executable, str(ROOT / "scripts/crds.py"), "--check"]
    assert subprocess.run(script, check=False, cwd=ROOT).returncode == 0


def test_a_field_that_is_as_it_would_be_anyhow_changes_no_revision() -> None:
    """Else a later operator, with more fields, would start all engines anew."""
    told = spec_of(model={"codec": "raw", "name": ""}, engines={"expert": {"portable": True}, "vllm": {}})
    assert EngineRevision.of(told).name == EngineRevision.of(spec_of()).name
    assert EngineRevision.of(spec_of(model={"codec": "int8"})).name != EngineRevision.of(spec_of()).name


def test_everything_that_a_rule_may_look_at_is_bounded() -> None:
    """Kubernetes refuses a CRD whose rules could cost too much, and takes what has no bound for endless."""

    def check(schema: dict[str, Any], where: str) -> None:
        if schema.get("type") == "string" and "enum" not in schema:
            assert schema["maxLength"] <= 65536, where
        if schema.get("type") == "array":
            assert schema["maxItems"] <= 64, where
            check(schema["items"], f"{where}[]")
        if "additionalProperties" in schema:
            assert schema["maxProperties"] <= 64, where
            check(schema["additionalProperties"], f"{where}{{}}")
        for name, inner in schema.get("properties", {}).items():
            check(inner, f"{where}.{name}")

    for crd in crds().values():
        root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        check(root["properties"]["spec"], "spec")
