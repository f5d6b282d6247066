"""Finds out why pods do not start, so that users need not inspect each pod."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from kintsugi_operator.objects.names import LABEL_PART
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.views import is_leaving, label_of

SLOW_S = 120.0
"""A pod that takes longer to create its containers probably lacks a volume."""
PULLING = ("ErrImagePull", "ImagePullBackOff")
CREATING = ("ContainerCreating", "PodInitializing")


def list_pod_failures(pods: Sequence[Manifest], now: datetime) -> dict[str, str]:
    """Return, for each part of a service, the first pod that does not start, and why."""
    found: dict[str, str] = {}
    for pod in sorted(pods, key=lambda one: str(one["metadata"]["name"])):
        part = label_of(pod, LABEL_PART)
        if part not in found and (why := describe_failure(pod, now)):
            found[part] = f"pod {pod['metadata']['name']}: {why}"
    return found


def describe_failure(pod: Manifest, now: datetime) -> str:
    """Return why a pod does not start; empty for a pod that runs, terminates or may still start. The same
    failure always has the same text, because each change of the text causes a write."""
    if is_leaving(pod):
        return ""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return f"it cannot be scheduled: {condition.get('message', '')}"
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
        return "a Secret, ConfigMap or claim that it mounts may be missing (see kubectl describe pod)"
    if reason in PULLING:
        return f"image {container.get('image', '')} cannot be pulled"
    ended = ((container.get("lastState") or {}).get("terminated") or {}).get("reason", "")
    if reason == "CrashLoopBackOff":
        return f"it crashes repeatedly ({ended or 'see its log'})"
    return f"{reason}: {waiting.get('message', '')}"
