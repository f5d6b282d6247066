"""Names and labels of objects. Everything fits its limit, and the same input has the same name."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kintsugi_operator.api.manifest import GROUP

NAME_LENGTH_MAX = 63
"""Limit of Services, label values and whatever becomes part of a host name."""
RAY_NAME_LENGTH_MAX = 47
"""Limit of RayServices and RayJobs: KubeRay appends to their names and refuses longer ones."""
DIGEST_LENGTH = 10

LABEL_NAME = "app.kubernetes.io/name"
"""KubeRay's own on pods of Ray: its Services select by it, so pods must not carry ours."""
LABEL_SERVICE = f"{GROUP}/service"
LABEL_CORPUS = f"{GROUP}/corpus"
LABEL_PART = f"{GROUP}/part"
"""`store`, `service`, `calibration` or `corpus`: which Ray cluster a pod belongs to."""
LABEL_ROLE = f"{GROUP}/role"
"""`head`, `shard`, `engine`, `gateway` or `worker`."""
LABEL_REVISION = f"{GROUP}/revision"
LABEL_SHARD = f"{GROUP}/shard"
LABEL_TEMPLATE = f"{GROUP}/template"
"""Digest of the pod template that a shard's pod was made from."""
ANNOTATION_DIGEST = f"{GROUP}/desired"
"""Digest of what was applied: an object that still has it needs no write."""
ANNOTATION_CLUSTER = f"{GROUP}/cluster"
"""Digest of a Ray cluster: KubeRay copies the annotations of a RayService to the RayCluster that it makes."""
FINALIZER = f"{GROUP}/finalizer"
"""Holds a BlendService until it has drained. The reconciler alone sets and removes it."""
FIELD_MANAGER = "kintsugi-operator"


def digest(value: Any) -> str:
    """Digest of plain values, whatever the order of their keys: lower-case letters and digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def fit_name(name: str, length_max: int = NAME_LENGTH_MAX) -> str:
    """The name, or as much of it as leaves room for a digest of the whole."""
    if len(name) <= length_max:
        return name
    return f"{name[: length_max - DIGEST_LENGTH - 1].rstrip('-.')}-{digest(name)}"


def join_name(*parts: str, length_max: int = NAME_LENGTH_MAX) -> str:
    """`acme-store` of `acme` and `store`. A cut name never equals one that was not cut."""
    return fit_name("-".join(parts), length_max)


def ray_named(*parts: str) -> str:
    """Name of a RayService or a RayJob."""
    return join_name(*parts, length_max=RAY_NAME_LENGTH_MAX)


def selector(service: str, **labels: str) -> dict[str, str]:
    """Labels that select a service's pods; `part`, `role`, `revision` and `shard` narrow the choice."""
    keys = {"part": LABEL_PART, "role": LABEL_ROLE, "revision": LABEL_REVISION, "shard": LABEL_SHARD}
    return {LABEL_SERVICE: service, **{keys[name]: value for name, value in labels.items()}}


def labels(service: str, **narrower: str) -> dict[str, str]:
    """Labels of an object or pod: Kubernetes' recommended ones and ours."""
    return {
        LABEL_NAME: "kintsugi",
        "app.kubernetes.io/instance": service,
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
        **selector(service, **narrower),
    }
