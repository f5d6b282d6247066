"""Finds out what Kubernetes or KubeRay refuses, so that users need not inspect each pod.

Every kind of refusal has a reason of its own, which the condition and its Event show. A refusal that
does not resolve itself stalls the object after `PROMPT_S`, one that a cluster's autoscaler or a slow start
may resolve after `SLOW_S`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from kintsugi_operator.objects.names import LABEL_PART, LABEL_REVISION
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed.views import Refusal, is_leaving, is_pod_ready, label_of

PROMPT_S, SLOW_S = 60.0, 600.0
CREATE_S = 120.0
"""A pod that takes longer to create its containers, or a RayService without a status, lacks something."""
STALLS_AFTER_S = {
    # Refusals by the API server, of requests of the operator or of KubeRay.
    "QuotaExceeded": PROMPT_S,
    "LimitRangeExceeded": PROMPT_S,
    "WebhookDenied": PROMPT_S,
    "WebhookFailed": PROMPT_S,
    "PodSecurityViolated": PROMPT_S,
    "PriorityClassMissing": PROMPT_S,
    "RuntimeClassMissing": PROMPT_S,
    "ServiceAccountMissing": PROMPT_S,
    "NamespaceTerminating": PROMPT_S,
    "Forbidden": PROMPT_S,
    "NameInUse": PROMPT_S,
    "VolumeKept": PROMPT_S,
    "InvalidObject": PROMPT_S,
    "NotApplied": PROMPT_S,
    "PodsRefused": PROMPT_S,
    # Refusals by the scheduler, the volumes and the nodes.
    "NodeNotMatched": PROMPT_S,
    "TaintNotTolerated": PROMPT_S,
    "Unschedulable": SLOW_S,
    "ClaimMissing": PROMPT_S,
    "VolumeUnbound": SLOW_S,
    "VolumeLost": PROMPT_S,
    "Evicted": PROMPT_S,
    # Refusals by the kubelet.
    "ImageNotPulled": PROMPT_S,
    "ImageNameInvalid": PROMPT_S,
    "MountMissing": PROMPT_S,
    "ConfigMissing": PROMPT_S,
    "ContainerFailed": PROMPT_S,
    "OutOfMemory": PROMPT_S,
    "Crashing": PROMPT_S,
    # Of KubeRay and Ray Serve.
    "Missing": PROMPT_S,
    "TooOld": PROMPT_S,
    "KubeRaySilent": PROMPT_S,
    "DeployFailed": SLOW_S,
}
"""Seconds for which a condition is false before its reason stalls the object."""

_MESSAGES = (
    (r"exceeded quota|failed quota", "QuotaExceeded"),
    (r"admission webhook .* denied", "WebhookDenied"),
    (r"failed calling webhook", "WebhookFailed"),
    (r"violates PodSecurity", "PodSecurityViolated"),
    (
        r"(maximum|minimum) (cpu|memory|storage|ephemeral-storage).* usage per|max limit to request",
        "LimitRangeExceeded",
    ),
    (r"no PriorityClass", "PriorityClassMissing"),
    (r"RuntimeClass.* not found", "RuntimeClassMissing"),
    (r"error looking up service account", "ServiceAccountMissing"),
    (r"being terminated", "NamespaceTerminating"),
    (r"cannot (get|create|patch|delete) resource", "Forbidden"),
    (r"does not belong to this service", "NameInUse"),
    (r"a volume cannot shrink|keeps storage class", "VolumeKept"),
    (r"is invalid|\(422\)", "InvalidObject"),
)
"""Reasons, and patterns of the API server's messages that show them."""
_UNSCHEDULABLE = (
    (r'persistentvolumeclaim "[^"]*" not found', "ClaimMissing"),
    (r"unbound immediate PersistentVolumeClaims", "VolumeUnbound"),
    (r"Insufficient", "Unschedulable"),
    (r"node affinity/selector", "NodeNotMatched"),
    (r"untolerated taint", "TaintNotTolerated"),
)
_PULLING = {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "RegistryUnavailable"}
_CREATING = {"ContainerCreating", "PodInitializing"}
"""Waiting reasons of an init container, or of a pod without one."""
_WAITING = {"InvalidImageName": "ImageNameInvalid", "CreateContainerConfigError": "ConfigMissing"}


def classify(message: str, otherwise: str, kinds: Sequence[tuple[str, str]] = _MESSAGES) -> str:
    """The reason for an API server's message."""
    return next((reason for pattern, reason in kinds if re.search(pattern, message)), otherwise)


def list_refusals(
    pods: Sequence[Manifest],
    claims: Sequence[Manifest],
    clusters: Sequence[Manifest],
    services: Sequence[Manifest],
    now: datetime,
) -> dict[str, Refusal]:
    """Return the first refusal of each part of a service: of a revision by its name, of the store and the
    corpora by their part."""
    found: dict[str, Refusal] = {}
    for describe, objects in (
        (_describe_cluster, clusters),
        (_describe_pod_of, pods),
        (_describe_claim, claims),
        (_describe_service, services),
    ):
        for one in sorted(objects, key=lambda one: str(one["metadata"]["name"])):
            part = label_of(one, LABEL_REVISION) or label_of(one, LABEL_PART)
            if part not in found and not is_leaving(one) and (why := describe(one, now)):
                found[part] = why
    return found


def _describe_cluster(cluster: Manifest, now: datetime) -> Refusal | None:
    """Pods that KubeRay could not create."""
    for one in (cluster.get("status") or {}).get("conditions") or []:
        if (one["type"], one["status"]) == ("ReplicaFailure", "True"):
            message = one.get("message", "")
            return Refusal(classify(message, "PodsRefused"), f"KubeRay cannot create pods: {message}")
    return None


def _describe_pod_of(pod: Manifest, now: datetime) -> Refusal | None:
    why = describe_pod(pod, now)
    return Refusal(why.reason, f"pod {pod['metadata']['name']}: {why.message}") if why else None


def _describe_claim(claim: Manifest, now: datetime) -> Refusal | None:
    phase, name = (claim.get("status") or {}).get("phase"), claim["metadata"]["name"]
    if phase == "Lost":
        return Refusal("VolumeLost", f"claim {name} has lost its volume: restore it, or delete the claim")
    if phase == "Pending" and _age_s(claim, now) >= CREATE_S:
        class_ = claim["spec"].get("storageClassName") or "the default one, if any"
        text = f"claim {name} is not bound: its storage class is {class_} (see kubectl describe pvc {name})"
        return Refusal("VolumeUnbound", text)
    return None


def _describe_service(service: Manifest, now: datetime) -> Refusal | None:
    status, name = service.get("status"), service["metadata"]["name"]
    if not status:
        text = f"KubeRay ignores RayService {name}: check that its operator runs and watches this namespace"
        return Refusal("KubeRaySilent", text) if _age_s(service, now) >= CREATE_S else None
    for which in ("pendingServiceStatus", "activeServiceStatus"):
        applications = (status.get(which) or {}).get("applicationStatuses") or {}
        for application in applications.values():
            if application.get("status") == "DEPLOY_FAILED":
                return Refusal("DeployFailed", f"Ray Serve: {application.get('message', '')}"[:1024])
    return None


def describe_pod(pod: Manifest, now: datetime) -> Refusal | None:
    """Return why a pod does not start; None for one that runs, terminates or may still start. The same
    refusal always has the same text, because each change of the text causes a write."""
    status = pod.get("status") or {}
    if is_leaving(pod) or is_pod_ready(pod):
        return None
    if status.get("reason") == "Evicted":
        return Refusal("Evicted", f"its node evicted it: {status.get('message', '')}")
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            message = condition.get("message", "")
            reason = classify(message, "Unschedulable", _UNSCHEDULABLE)
            return Refusal(reason, f"it cannot be scheduled: {message}")
    is_slow = _age_s(pod, now) >= CREATE_S
    first, others = status.get("initContainerStatuses") or [], status.get("containerStatuses") or []
    # The containers wait for a worker's init container, which waits for the head.
    others = [one for one in others if _waiting_of(one).get("reason") != "PodInitializing"]
    return next(filter(None, (_describe_waiting(one, is_slow) for one in (*first, *others))), None)


def _waiting_of(container: Mapping[str, Any]) -> Mapping[str, Any]:
    return (container.get("state") or {}).get("waiting") or {}


def _describe_waiting(container: Mapping[str, Any], is_slow: bool) -> Refusal | None:
    waiting = _waiting_of(container)
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if not reason or (reason in _CREATING and not is_slow):
        return None
    if reason in _CREATING:
        text = "a Secret, ConfigMap or claim that it mounts may be missing (see kubectl describe pod)"
        return Refusal("MountMissing", text)
    if reason in _PULLING:
        return Refusal("ImageNotPulled", f"image {container.get('image', '')} cannot be pulled")
    ended = ((container.get("lastState") or {}).get("terminated") or {}).get("reason", "")
    if reason == "CrashLoopBackOff":
        kind = "OutOfMemory" if ended == "OOMKilled" else "Crashing"
        return Refusal(kind, f"it crashes repeatedly ({ended or 'see its log'})")
    return Refusal(_WAITING.get(reason, "ContainerFailed"), f"{reason}: {message}")


def _age_s(manifest: Manifest, now: datetime) -> float:
    """Age of an object; 0 if it is unknown."""
    created = manifest["metadata"].get("creationTimestamp")
    return (now - datetime.fromisoformat(created)).total_seconds() if created else 0.0


def join_problems(errors: Iterable[Exception]) -> Refusal:
    """The refusals of the operator's own requests as one. The first one gives the reason."""
    texts = list(map(str, errors))
    return Refusal(classify(texts[0], "NotApplied"), "; ".join(texts))
