"""Specs for tests: a small one by hand, and any valid one by hypothesis."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from kintsugi_operator.api.blend_service import ROLES, BlendServiceSpec
from kintsugi_operator.api.manifest import from_manifest
from kintsugi_operator.objects.base import Owner
from kintsugi_operator.objects.pods import Manifest

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
OWNER = Owner("BlendService", "acme", "team", "uid-1")
SMALL: dict[str, Any] = {
    "model": {"path": "/models/small"},
    "image": "registry.example/kintsugi/serving-cpu:1",
    "gateway": {"tokensSecret": "acme-tokens"},
}


def merged(parts: dict[str, Any]) -> dict[str, Any]:
    """The small one with parts of it replaced, as YAML names them."""
    spec = dict(SMALL)
    for key, value in parts.items():
        spec[key] = {**SMALL.get(key, {}), **value} if isinstance(value, dict) else value
    return spec


def spec_of(**parts: Any) -> BlendServiceSpec:
    """The small one with parts of it replaced, as a spec."""
    return from_manifest(BlendServiceSpec, merged(parts))


names = st.from_regex(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
objects = st.from_regex(r"[a-z]([-a-z0-9]{0,30}[a-z0-9])?", fullmatch=True)
optional = st.one_of(st.just(""), objects)
quantities = st.sampled_from(["4Gi", "16Gi", "120Gi", "1Ti", "900000Mi"])

tolerations = st.one_of(
    st.builds(lambda key, value: {"key": key, "value": value, "effect": "NoSchedule"}, objects, objects),
    st.just({"operator": "Exists"}),
)
images = st.sampled_from(["a/b:tag", "registry.example:5000/x/y", f"a/b:1@sha256:{'0' * 64}"])


@st.composite
def variables(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Environment variables that a spec may add."""
    found = draw(st.lists(st.sampled_from(["OTEL_SERVICE_NAME", "HTTPS_PROXY", "A", "_b9"]), unique=True))
    return [{"name": name, **draw(sources)} for name in found]


key_refs = st.fixed_dictionaries({"name": objects, "key": st.sampled_from(["token", "a.b_c-d"])})
sources = st.one_of(
    st.fixed_dictionaries({}, optional={"value": st.text(max_size=20)}),
    key_refs.map(lambda ref: {"valueFrom": {"secretKeyRef": ref}}),
    key_refs.map(lambda ref: {"valueFrom": {"configMapKeyRef": ref}}),
    st.just({"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}),
)
egress = st.fixed_dictionaries(
    {"ports": st.lists(st.integers(1, 65535), min_size=1, max_size=3)},
    optional={"namespace": objects},
) | st.fixed_dictionaries({"ports": st.just([3128]), "cidr": st.sampled_from(["10.0.0.0/8", "fd00::/8"])})
pod_templates = st.fixed_dictionaries(
    {},
    optional={
        "labels": st.just({"example.com/team": "search", "app.kubernetes.io/part-of": "rag"}),
        "annotations": st.just({"example.com/owner": "search@example.com"}),
        "affinity": st.just({"nodeAffinity": {}}),
        "topologySpreadConstraints": st.just(
            [{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}]
        ),
        "priorityClassName": objects,
        "runtimeClassName": objects,
        "schedulerName": objects,
        "env": variables(),
        "nodeSelector": st.dictionaries(objects, objects, max_size=2),
        "tolerations": st.lists(tolerations, max_size=2),
        "volumes": st.just([{"name": "cache", "csi": {"driver": "cache.example.com"}}]),
    },
)
templates = st.dictionaries(st.sampled_from(ROLES), pod_templates, max_size=3)
engines = st.fixed_dictionaries(
    {"replicas": st.integers(1, 8)},
    optional={
        "replicasMax": st.integers(8, 16),
        "cpus": st.sampled_from([0.5, 4, 7.25]),
        "memory": quantities,
        "gpus": st.integers(0, 4),
        "quality": st.sampled_from(["strict", "balanced", "off", False]),
        "vllm": st.sampled_from([{"max_num_seqs": 16}, {"max_model_len": 512, "dtype": "float16"}]),
        "expert": st.fixed_dictionaries({}, optional={"ratio": st.just(0.2), "portable": st.booleans()}),
    },
)


@st.composite
def stores(draw: st.DrawFn) -> dict[str, Any]:
    shards = draw(st.integers(1, 5))
    short: st.SearchStrategy[str] = objects.map(lambda name: name[:20].rstrip("-"))
    tiers = draw(st.lists(short, unique=True, max_size=3))
    return {
        "shards": shards,
        "replication": draw(st.integers(1, min(shards, 8))),
        "ramGib": draw(st.sampled_from([0.25, 4, 96])),
        "tiers": [{"name": name, "gib": draw(st.sampled_from([1, 200.5]))} for name in tiers],
        "tlsSecret": draw(optional),
        "keysSecret": draw(optional),
        "tokensSecret": draw(optional),
        **({"bucketUrl": "s3://chunks/a"} if bool(tiers) and draw(st.booleans()) else {}),
        "insecure": True,
        "expert": {
            "volumes": {
                "kind": draw(st.sampled_from(["Persistent", "Ephemeral"])),
                "retain": draw(st.booleans()),
            },
            "bucketPort": draw(st.sampled_from([443, 9000])),
        },
        **({"image": draw(images)} if draw(st.booleans()) else {}),
    }


@st.composite
def gateways(draw: st.DrawFn) -> dict[str, Any]:
    tokens, tls = draw(optional), draw(optional)
    expert = draw(gateway_experts)
    expert["requireClientCertificate"] = bool(tls) and draw(st.booleans())
    return {
        "tokensSecret": tokens,
        "tlsSecret": tls,
        "expert": expert,
        "insecure": not tokens or draw(st.booleans()),
        **draw(gateway_options),
    }


gateway_options = st.fixed_dictionaries(
    {},
    optional={
        "replicas": st.integers(1, 4),
        "serviceType": st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"]),
        "grpcPort": st.just(7501),
    },
)
gateway_experts = st.fixed_dictionaries(
    {},
    optional={
        "serviceAnnotations": st.just({"example.com/load-balancer": "internal"}),
        "fillOnMiss": st.booleans(),
    },
)
redis = st.sampled_from(
    [
        {},
        {"address": "redis.infra.svc:6379"},
        {"address": "rediss://redis:6380", "username": "ray", "passwordSecret": "redis"},
    ]
)
models = st.fixed_dictionaries(
    {"path": st.sampled_from(["/models/a", "org/name"])},
    optional={
        "name": objects,
        "codec": st.sampled_from(["raw", "int8"]),
        "systemPrompt": st.text(max_size=40),
        "volumeClaim": objects,
        "tokenSecret": objects,
    },
)
networks = st.fixed_dictionaries(
    {"policies": st.booleans(), "downloads": st.booleans()},
    optional={
        "clientNamespaces": st.lists(objects, max_size=2),
        "monitoringNamespace": objects,
    },
)
experts = st.fixed_dictionaries(
    {"podTemplates": templates, "redis": redis},
    optional={"kuberayNamespace": objects, "egress": st.lists(egress, max_size=2)},
)


@st.composite
def manifests(draw: st.DrawFn) -> dict[str, Any]:
    """The `spec` of a BlendService."""
    return {
        "model": draw(models),
        "image": draw(images),
        "engines": draw(engines),
        "store": draw(stores()),
        "gateway": draw(gateways()),
        "network": draw(networks),
        "expert": draw(experts),
        "imagePullSecrets": draw(st.lists(objects, max_size=2)),
    }


specs = manifests().map(lambda values: from_manifest(BlendServiceSpec, values))


def secret_keys(template: Manifest, secret: str) -> list[tuple[str, str]]:
    """The keys of a Secret that a pod mounts, and where."""
    pod = template["spec"]
    paths = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    return [
        (item["key"], f"{paths[volume['name']]}/{item['path']}")
        for volume in pod["volumes"]
        if volume.get("secret", {}).get("secretName") == secret
        for item in volume["secret"]["items"]
    ]
