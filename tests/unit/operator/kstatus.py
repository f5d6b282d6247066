"""How far an object is, by the rules of kstatus, which helm 4, Flux and kpt go by."""

from __future__ import annotations

import copy
from typing import Any

from kintsugi_operator.api.crd import crds
from kintsugi_operator.objects.pods import Manifest

CURRENT, IN_PROGRESS, FAILED, TERMINATING = "Current", "InProgress", "Failed", "Terminating"


def read_as_api_server(live: Manifest) -> Manifest:
    """The object as a client reads it: the API server fills in the status's default where there is none."""
    found = copy.deepcopy(live)
    crd = crds()[f"{live['kind'].lower()}s"]
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    if "status" not in found and "default" in schema:
        found["status"] = copy.deepcopy(schema["default"])
    return found


def compute_status(live: Manifest) -> str:
    """`CURRENT`, `IN_PROGRESS`, `FAILED` or `TERMINATING`. First the generation counts, then the first of
    Reconciling and Stalled that is true, then Ready; an object that has none of them is current."""
    metadata, status = live["metadata"], live.get("status") or {}
    conditions: list[dict[str, Any]] = status.get("conditions") or []
    if metadata.get("deletionTimestamp"):
        return TERMINATING
    if status.get("observedGeneration", metadata["generation"]) != metadata["generation"]:
        return IN_PROGRESS
    for one in conditions:
        if one["status"] == "True" and one["type"] in ("Reconciling", "Stalled"):
            return IN_PROGRESS if one["type"] == "Reconciling" else FAILED
    ready = [one["status"] for one in conditions if one["type"] == "Ready"]
    return CURRENT if not ready or ready[0] == "True" else IN_PROGRESS
