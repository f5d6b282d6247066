"""What a repair must not touch: whatever holds chunks in RAM or serves requests.

Everything else, such as a pod whose image cannot be pulled or a revision that never served, has nothing to
lose, so the operator replaces it as soon as the spec changes. What is down, but was ready before, may come
back by itself and stays protected for `PATIENCE_S`.
"""

from __future__ import annotations

from datetime import datetime

from kintsugi_operator.objects.pods import Manifest

PATIENCE_S = 300.0
"""How long a part that was ready stays protected after it goes down."""


def ready_condition(manifest: Manifest) -> Manifest:
    """The condition `Ready` of a pod or a RayService; empty without one."""
    conditions = (manifest.get("status") or {}).get("conditions") or []
    return next((one for one in conditions if one["type"] == "Ready"), {})


def may_pod_recover(pod: Manifest, now: datetime) -> bool:
    """Whether the pod's present process was ready, has been down for less than `PATIENCE_S`, and so may hold
    chunks that only its RAM has."""
    since = ready_condition(pod).get("lastTransitionTime", "")
    states = [one.get("state") or {} for one in (pod.get("status") or {}).get("containerStatuses") or []]
    # Ready became false after the process began, so it was true in between.
    was_ready = any((one.get("running") or {}).get("startedAt", since) < since for one in states)
    return was_ready and is_recent(since, now)


def may_service_recover(service: Manifest, now: datetime) -> bool:
    """Whether a RayService has served and has been down for less than `PATIENCE_S`. KubeRay names an active
    cluster once one has served."""
    active = (service.get("status") or {}).get("activeServiceStatus") or {}
    since = ready_condition(service).get("lastTransitionTime", "")
    return bool(active.get("rayClusterName")) and is_recent(since, now)


def is_recent(since: str, now: datetime) -> bool:
    """Whether a time is less than `PATIENCE_S` ago; True if it is unknown."""
    return not since or (now - datetime.fromisoformat(since)).total_seconds() < PATIENCE_S
