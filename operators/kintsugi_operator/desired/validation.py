"""Checks of specs beyond the bounds and rules of their types. Errors say what to change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_network
from pathlib import PurePosixPath
from typing import Any

from kintsugi.core.deploy import ENGINE_METRICS_PORT, SHARD_METRICS_PORT, SHARD_PORT
from kintsugi.core.errors import InvalidField
from kintsugi_operator.api.blend_service import BlendServiceSpec, Egress, Engines, Gateways
from kintsugi_operator.api.corpus_precompute import CorpusPrecomputeSpec
from kintsugi_operator.api.manifest import GROUP, check_manifest
from kintsugi_operator.api.patterns import LABEL, SUBDOMAIN
from kintsugi_operator.api.pod_template import PodTemplate
from kintsugi_operator.desired.schedule import check_schedule
from kintsugi_operator.objects.deployed import (
    DATA,
    DIRECTORY_PORT,
    TIERS,
)
from kintsugi_operator.objects.jobs import CORPUS_FILES, STATE
from kintsugi_operator.objects.names import LABEL_NAME
from kintsugi_operator.objects.pods import (
    AGENT_PORT,
    DASHBOARD_PORT,
    GCS_PORT,
    METRICS_PORT,
    MODELS,
    SCRATCH,
    TMP,
    quantity,
)

RESERVED_PORTS = {
    GCS_PORT: "Ray's GCS",
    SHARD_PORT: "shards",
    SHARD_METRICS_PORT: "metrics of shards",
    DIRECTORY_PORT: "the store's directory",
    ENGINE_METRICS_PORT: "metrics of engines",
    METRICS_PORT: "Ray's metrics",
    DASHBOARD_PORT: "Ray's dashboard",
    10001: "Ray's client server",
    AGENT_PORT: "Ray's agent",
}
WORKER_PORTS = range(10002, 20000)
"""Ray's worker processes listen on free ports of this range."""
RESERVED_PREFIXES = (GROUP, "ray.io")
RESERVED_LABELS = {
    LABEL_NAME: "KubeRay's Services select pods by it",
    "app.kubernetes.io/created-by": "KubeRay's Services select pods by it",
    "app.kubernetes.io/instance": "it names the BlendService",
    "app.kubernetes.io/managed-by": "it names the operator",
}
RESERVED_VOLUMES = re.compile(
    "tmp|shared-memory|shared-mem|ray-logs|scratch|models|data|tier-.*|store-tls|tls|tokens|revision|state|corpus"
)
"""Names of the operator's and KubeRay's volumes."""
VOLUME_KINDS = (
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
)
"""The kinds that the restricted pod security standard allows."""
RESERVED_PATHS = (
    TMP,
    "/dev/shm",
    SCRATCH,
    DATA,
    TIERS,
    STATE,
    CORPUS_FILES,
    "/etc/kintsugi",
    "/opt/kintsugi",
    "/opt/venv",
    MODELS,
    "/var/run/secrets/kubernetes.io/serviceaccount",
)
_KEY = re.compile(rf"({SUBDOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
KEY_WORDS = "is not a valid key: write name or prefix/name, such as example.com/team"
VALUE_WORDS = (
    "is not a valid value of a label: use at most 63 letters, digits, -, _ and ., with a letter or a digit "
    "at both ends"
)


def check_service(spec: BlendServiceSpec) -> None:
    """Raise `InvalidField` for a spec that no cluster could run."""
    check_manifest(spec)
    _check_engines(spec.engines)
    _check_gateway(spec.gateway)
    _check_egress(spec.expert.egress)
    for role, template in spec.expert.pod_templates.items():
        check_pod_template(template, f"spec.expert.podTemplates.{role}")


def check_corpus(spec: CorpusPrecomputeSpec) -> None:
    """Raise `InvalidField` for a spec that no job could run."""
    check_manifest(spec)
    if spec.schedule:
        check_schedule(spec.schedule)


def _check_engines(engines: Engines) -> None:
    if quantity(engines.expert.shared_memory) >= quantity(engines.memory):
        raise InvalidField(
            "spec.engines.expert.sharedMemory", "counts towards memory: make it smaller than memory"
        )
    ranks = engines.vllm.get("tensor_parallel_size", 1)
    if engines.gpus and isinstance(ranks, int) and ranks > engines.gpus:
        raise InvalidField(
            "spec.engines.vllm.tensor_parallel_size",
            f"{ranks} ranks need {ranks} GPUs, but an engine's pod has {engines.gpus}: set engines.gpus",
        )


def _check_gateway(gateway: Gateways) -> None:
    check_keys(gateway.expert.service_annotations, "spec.gateway.expert.serviceAnnotations")
    for field, port in (("grpcPort", gateway.grpc_port), ("httpPort", gateway.http_port)):
        taken = RESERVED_PORTS.get(port, "Ray's workers" if port in WORKER_PORTS else "")
        if taken:
            raise InvalidField(f"spec.gateway.{field}", f"{port} is used by {taken}: choose another port")


def _check_egress(egress: Sequence[Egress]) -> None:
    for index, one in enumerate(egress):
        try:
            ip_network(one.cidr or "0.0.0.0/0")
        except ValueError as error:
            where = f"spec.expert.egress.{index}.cidr"
            raise InvalidField(where, f"{error}; write a network, such as 10.0.0.0/8") from None


def check_pod_template(template: PodTemplate, where: str) -> None:
    """Raise `InvalidField` for an addition that overrides something of the operator, KubeRay or Ray."""
    check_keys(template.labels, f"{where}.labels")
    check_keys(template.annotations, f"{where}.annotations")
    for key in template.labels:
        if key in RESERVED_LABELS:
            raise InvalidField(f"{where}.labels", f"{key} cannot be set: {RESERVED_LABELS[key]}")
    check_labels(template.labels, f"{where}.labels")
    check_labels(template.node_selector, f"{where}.nodeSelector")
    check_labels({one.key: one.value for one in template.tolerations if one.key}, f"{where}.tolerations")
    _check_selectors(template.affinity, f"{where}.affinity")
    _check_selectors(template.topology_spread_constraints, f"{where}.topologySpreadConstraints")
    _check_volumes(template, where)
    _check_mounts(template, where)


def check_keys(pairs: Mapping[str, str], where: str) -> None:
    """Raise `InvalidField` for an invalid key, or a key that belongs to the operator or Ray."""
    for key in pairs:
        prefix = key.rpartition("/")[0]
        if any(prefix == own or prefix.endswith(f".{own}") for own in RESERVED_PREFIXES):
            raise InvalidField(where, f"{key} cannot be set: {prefix} belongs to the operator or Ray")
        if not _KEY.fullmatch(key):
            raise InvalidField(where, f"{key!r} {KEY_WORDS}")


def check_labels(pairs: Mapping[str, str], where: str) -> None:
    """Raise `InvalidField` for a key or a value that no label can have."""
    for key, value in pairs.items():
        if not _KEY.fullmatch(key):
            raise InvalidField(where, f"{key!r} {KEY_WORDS}")
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise InvalidField(where, f"{key}: {value!r} {VALUE_WORDS}")


def _check_selectors(value: Any, where: str) -> None:
    """Raise `InvalidField` for a selector within free-form fields that no label can match."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key == "matchLabels" and isinstance(inner, Mapping):
                check_labels(inner, f"{where}.{key}")
            elif key == "matchExpressions" and isinstance(inner, Sequence):
                for one in inner:
                    for text in one.get("values") or ("",):
                        check_labels({str(one.get("key", "")): text}, f"{where}.{key}")
            else:
                _check_selectors(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _check_selectors(inner, f"{where}.{index}")


def _check_volumes(template: PodTemplate, where: str) -> None:
    names = set()
    for index, volume in enumerate(template.volumes):
        place = f"{where}.volumes.{index}"
        name = volume.get("name")
        if not isinstance(name, str) or not re.fullmatch(LABEL, name):
            raise InvalidField(f"{place}.name", f"{name!r} {LABEL.words}")
        if name in names:
            raise InvalidField(f"{place}.name", f"{name} occurs twice")
        if RESERVED_VOLUMES.fullmatch(name):
            raise InvalidField(
                f"{place}.name", f"{name} belongs to the operator or KubeRay: choose another name"
            )
        names.add(name)
        kinds = sorted(set(volume) - {"name"})
        if len(kinds) != 1:
            raise InvalidField(place, f"a volume must have one source, but this has {len(kinds)}")
        if kinds[0] not in VOLUME_KINDS:
            allowed = ", ".join(VOLUME_KINDS)
            raise InvalidField(
                f"{place}.{kinds[0]}", f"the restricted pod security standard allows only {allowed}"
            )


def _check_mounts(template: PodTemplate, where: str) -> None:
    names = {volume["name"] for volume in template.volumes}
    paths: set[PurePosixPath] = set()
    for index, mount in enumerate(template.volume_mounts):
        place = f"{where}.volumeMounts.{index}"
        path = PurePosixPath("/" + mount.mount_path.lstrip("/"))
        if mount.name not in names:
            raise InvalidField(f"{place}.name", f"volumes has no volume {mount.name}")
        if mount.sub_path.startswith("/"):
            raise InvalidField(f"{place}.subPath", f"{mount.sub_path} must be relative to the volume")
        if ".." in path.parts or ".." in PurePosixPath(mount.sub_path).parts:
            raise InvalidField(place, "a path must not contain ..")
        for reserved in map(PurePosixPath, RESERVED_PATHS):
            if path.is_relative_to(reserved) or reserved.is_relative_to(path):
                raise InvalidField(
                    f"{place}.mountPath", f"{path} would hide the operator's folder {reserved}"
                )
        if path in paths:
            raise InvalidField(f"{place}.mountPath", f"{path} occurs twice")
        paths.add(path)
