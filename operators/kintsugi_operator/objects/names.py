"""Names and labels of objects. All fit Kubernetes' limits; equal inputs have equal names."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kintsugi_operator.api.manifest import GROUP

NAME_LENGTH_MAX = 63
"""Limit of Services, label values and parts of host names."""
RAY_NAME_LENGTH_MAX = 47
"""Limit of RayServices and RayJobs: KubeRay appends a suffix and refuses longer names."""
DIGEST_LENGTH = 10

LABEL_NAME = "app.kubernetes.io/name"
"""KubeRay sets this label on Ray's pods, and its Services select pods by it, so the operator does not set it
there."""
LABEL_SERVICE = f"{GROUP}/service"
LABEL_CORPUS = f"{GROUP}/corpus"
LABEL_PART = f"{GROUP}/part"
"""`store`, `service` or `corpus`: which Ray cluster a pod belongs to."""
LABEL_ROLE = f"{GROUP}/role"
"""`head`, `shard`, `engine`, `gateway` or `worker`."""
LABEL_REVISION = f"{GROUP}/revision"
LABEL_SHARD = f"{GROUP}/shard"
LABEL_TEMPLATE = f"{GROUP}/template"
"""Digest of the pod template that a shard's pod was made from."""
ANNOTATION_DIGEST = f"{GROUP}/desired"
"""Digest of the manifest that was applied: an object with the wanted digest needs no write."""
ANNOTATION_CLUSTER = f"{GROUP}/cluster"
"""Digest of a Ray cluster's spec. KubeRay copies it from the RayService to the RayCluster."""
ANNOTATION_VOLUME = f"{GROUP}/volume"
"""Storage class and size that the spec asked of a claim, as `CLASS/SIZE`."""
ANNOTATION_IMAGE = f"{GROUP}/image"
"""What a shard's pod was made with, as `RAY-VERSION IMAGE`."""
FINALIZER = f"{GROUP}/finalizer"
"""Keeps a deleted BlendService until it has drained (`controller.finalizer`)."""
FIELD_MANAGER = "kintsugi-operator"


def digest(value: Any) -> str:
    """Digest of plain values, independent of the order of keys: lower-case letters and digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def fit_name(name: str, length_max: int = NAME_LENGTH_MAX) -> str:
    """Return the name; if it is too long, its beginning and a digest of the whole name."""
    if len(name) <= length_max:
        return name
    return f"{name[: length_max - DIGEST_LENGTH - 1].rstrip('-.')}-{digest(name)}"


def join_name(*parts: str, length_max: int = NAME_LENGTH_MAX) -> str:
    """Join parts with hyphens: `acme-store`. A shortened name never equals a complete one."""
    return fit_name("-".join(parts), length_max)


def ray_named(*parts: str) -> str:
    """Name of a RayService or a RayJob."""
    return join_name(*parts, length_max=RAY_NAME_LENGTH_MAX)


def selector(service: str, **labels: str) -> dict[str, str]:
    """Labels that select a service's pods, narrowed by `part`, `role`, `revision` and `shard`."""
    keys = {"part": LABEL_PART, "role": LABEL_ROLE, "revision": LABEL_REVISION, "shard": LABEL_SHARD}
    return {LABEL_SERVICE: service, **{keys[name]: value for name, value in labels.items()}}


def labels(service: str, **narrower: str) -> dict[str, str]:
    """Labels of an object or pod: the recommended labels of Kubernetes, and ours."""
    return {
        LABEL_NAME: "kintsugi",
        "app.kubernetes.io/instance": service,
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
        **selector(service, **narrower),
    }
