"""Why pods do not start, so that a user need not look it up pod by pod."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from kintsugi_operator.objects.names import LABEL_PART
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.views import is_leaving, label_of

SLOW_S = 120.0
"""After this time in creation, a volume of the pod is probably missing."""
PULLING = ("ErrImagePull", "ImagePullBackOff")
CREATING = ("ContainerCreating", "PodInitializing")


def troubles_of(pods: Sequence[Manifest], now: datetime) -> dict[str, str]:
    """The first trouble of each part of a service, with the pod's name."""
    found: dict[str, str] = {}
    for pod in sorted(pods, key=lambda one: str(one["metadata"]["name"])):
        part = label_of(pod, LABEL_PART)
        if part not in found and (why := trouble_of(pod, now)):
            found[part] = f"pod {pod['metadata']['name']}: {why}"
    return found


def trouble_of(pod: Manifest, now: datetime) -> str:
    """Why a pod does not start; empty for one that runs, ends, or may still start by itself. The text stays
    the same as long as the trouble does, because each change is a write."""
    if is_leaving(pod):
        return ""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return f"no node takes it: {condition.get('message', '')}"
    created = pod["metadata"].get("creationTimestamp")
    is_slow = bool(created) and (now - datetime.fromisoformat(created)).total_seconds() >= SLOW_S
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        if why := _describe_waiting(container, is_slow):
            return why
    return ""


def _describe_waiting(container: Mapping[str, Any], is_slow: bool) -> str:
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason = waiting.get("reason", "")
    if not reason or (reason in CREATING and not is_slow):
        return ""
    if reason in CREATING:
        return "a Secret, ConfigMap or claim that it mounts may be missing (kubectl describe pod says which)"
    if reason in PULLING:
        return f"image {container.get('image', '')} cannot be pulled"
    ended = ((container.get("lastState") or {}).get("terminated") or {}).get("reason", "")
    if reason == "CrashLoopBackOff":
        return f"it ends again and again ({ended or 'see its log'})"
    return f"{reason}: {waiting.get('message', '')}"
