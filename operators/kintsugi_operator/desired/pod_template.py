"""Checks of what a spec adds to pods: nothing may take the place of what the operator, KubeRay or Ray set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from kintsugi.core.errors import InvalidField
from kintsugi_operator.api.manifest import GROUP
from kintsugi_operator.api.patterns import LABEL
from kintsugi_operator.api.pod_template import PodTemplate
from kintsugi_operator.objects.deployed import DATA, TIERS
from kintsugi_operator.objects.jobs import CORPUS_FILES, STATE
from kintsugi_operator.objects.names import LABEL_NAME
from kintsugi_operator.objects.pods import MODELS, SCRATCH, TMP

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
"""Volumes of the operator and KubeRay."""
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
"""Those of the restricted pod security standard."""
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
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def check_pod_template(template: PodTemplate, where: str) -> None:
    """Raise `InvalidField` for an addition that would override something, with the field and the reason."""
    check_keys(template.labels, f"{where}.labels")
    check_keys(template.annotations, f"{where}.annotations")
    for key, value in template.labels.items():
        if key in RESERVED_LABELS:
            raise InvalidField(f"{where}.labels", f"{key} cannot be set: {RESERVED_LABELS[key]}")
        if not _VALUE.fullmatch(value):
            raise InvalidField(f"{where}.labels", f"{key}: {value!r} is not a label's value")
    _check_volumes(template, where)
    _check_mounts(template, where)


def check_keys(pairs: Mapping[str, str], where: str) -> None:
    """Raise `InvalidField` for a key that Kubernetes does not take, or that is the operator's or Ray's."""
    for key in pairs:
        prefix = key.rpartition("/")[0]
        if any(prefix == own or prefix.endswith(f".{own}") for own in RESERVED_PREFIXES):
            raise InvalidField(where, f"{key} cannot be set: {prefix} is the operator's or Ray's own")
        if not _KEY.fullmatch(key):
            raise InvalidField(where, f"{key!r} is not a key: write name or prefix/name")


def _check_volumes(template: PodTemplate, where: str) -> None:
    names = set()
    for index, volume in enumerate(template.volumes):
        place = f"{where}.volumes.{index}"
        name = volume.get("name")
        if not isinstance(name, str) or not re.fullmatch(LABEL, name):
            raise InvalidField(f"{place}.name", f"{name!r} is not a volume's name: use a-z, 0-9 and -")
        if name in names:
            raise InvalidField(f"{place}.name", f"{name} is there twice")
        if RESERVED_VOLUMES.fullmatch(name):
            raise InvalidField(f"{place}.name", f"{name} is the operator's or KubeRay's: choose another")
        names.add(name)
        kinds = sorted(set(volume) - {"name"})
        if len(kinds) != 1:
            raise InvalidField(place, f"a volume has one source; this has {len(kinds)}")
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
            raise InvalidField(f"{place}.name", f"podTemplate.volumes has no volume {mount.name}")
        if mount.sub_path.startswith("/"):
            raise InvalidField(f"{place}.subPath", f"{mount.sub_path} must be relative to the volume")
        if ".." in path.parts or ".." in PurePosixPath(mount.sub_path).parts:
            raise InvalidField(place, "a path must not contain ..")
        for reserved in map(PurePosixPath, RESERVED_PATHS):
            if path.is_relative_to(reserved) or reserved.is_relative_to(path):
                raise InvalidField(
                    f"{place}.mountPath", f"{path} would hide {reserved}, which is the operator's"
                )
        if path in paths:
            raise InvalidField(f"{place}.mountPath", f"{path} is there twice")
        paths.add(path)
