"""Decides about live claims. A bound claim keeps its volume, even if the spec differs; the status then says
so. A claim that was never bound holds nothing and is recreated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kintsugi_operator.objects.names import ANNOTATION_VOLUME
from kintsugi_operator.objects.pods import Manifest, quantity
from kintsugi_operator.observed.views import digest_of

CLAIM = "PersistentVolumeClaim"


@dataclass(frozen=True)
class ClaimStep:
    """What to do about a claim."""

    manifest: Manifest
    """What to apply."""
    must_replace: bool = False
    """Delete the live claim first: Kubernetes cannot change it into the wanted one."""
    kept: str = ""
    """Why the live claim stays as it is; empty: it is applied or replaced."""


def fit_claim(wanted: Manifest, live: Manifest) -> ClaimStep:
    """Compare a wanted claim with the live one. The live claim's annotation records the earlier request, so
    a default storage class, or a claim that a person has enlarged, does not count as a difference."""
    step = ClaimStep(wanted)
    asked, asked_before = digest_of(wanted, ANNOTATION_VOLUME), digest_of(live, ANNOTATION_VOLUME)
    (class_, size), name = asked.split("/"), wanted["metadata"]["name"]
    class_before, size_before = (asked_before or asked).split("/")
    requested, status = str(live["spec"]["resources"]["requests"]["storage"]), live.get("status") or {}
    if status.get("phase") == "Pending" and not live["spec"].get("volumeName"):
        is_smaller = quantity(size) < quantity(requested) and size != size_before
        return replace(step, must_replace=class_ != class_before or is_smaller)
    capacity = str((status.get("capacity") or {}).get("storage") or requested)
    if class_ != class_before:
        held = live["spec"].get("storageClassName") or "the default class"
        return replace(step, kept=f"claim {name} is bound and keeps storage class {held}")
    if size != size_before and quantity(size) < quantity(capacity):
        return replace(step, kept=f"claim {name} keeps {capacity}: a volume cannot shrink")
    if size == size_before and quantity(size) < quantity(requested):
        resources = {"requests": {"storage": requested}}
        return replace(step, manifest={**wanted, "spec": {**wanted["spec"], "resources": resources}})
    return step
