"""Finds what happened to an object, from its statuses before and after a reconciliation. Each
change becomes an Event.

The status is the memory: a restarted operator repeats no Event, and an object at rest has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kintsugi_operator.api.status import (
    BlendServiceStatus,
    Condition,
    ConditionStatus,
    CorpusPrecomputeStatus,
)
from kintsugi_operator.observed import conditions as c
from kintsugi_operator.observed.refusals import STALLS_AFTER_S


@dataclass(frozen=True)
class Change:
    """Something that happened to an object."""

    reason: str
    """One word in CamelCase."""
    message: str
    is_warning: bool = False


REASONS = {
    (c.VALID, "InvalidSpec"): ("SpecRefused", True),
    (c.KUBERAY, "Missing"): ("KubeRayMissing", True),
    (c.KUBERAY, "TooOld"): ("KubeRayTooOld", True),
    (c.SHARDS, "Upgrading"): ("ShardUpgradeStarted", False),
    (c.SHARDS, "RestartNeeded"): ("ShardRestartNeeded", True),
    (c.ROLLED_OUT, "Starting"): ("RolloutStarted", False),
    (c.READY, "Serving"): ("Serving", False),
    (c.READY, "ServingWithoutStore"): ("ServingWithoutStore", True),
    (c.READY, "Draining"): ("Draining", False),
    (c.READY, "NoService"): ("ServiceMissing", True),
    (c.COMPLETE, "Running"): ("FillStarted", False),
    (c.COMPLETE, "Suspended"): ("FillSuspended", False),
    (c.COMPLETE, "Filled"): ("Filled", False),
    (c.COMPLETE, "Failed"): ("FillFailed", True),
}
"""The Event's reason for a condition's type and reason, and whether it is a warning."""
LOST = {c.READY: "NotReady", c.STORE: "StoreDegraded"}
"""The Event's reason when a condition turns false."""
REGAINED = {
    c.VALID: "SpecAccepted",
    c.RECONCILED: "Applied",
    c.KUBERAY: "KubeRayFound",
    c.STORE: "StoreReady",
    c.SHARDS: "ShardsUpgraded",
    c.READY: "ServiceFound",
}
"""The Event's reason when a condition is true again."""

S = BlendServiceStatus | CorpusPrecomputeStatus


def list_changes(before: S, after: S) -> tuple[Change, ...]:
    """The changes between two statuses of one object."""
    known = {one.type: one for one in before.conditions}
    return (
        *_list_model_changes(before, after),
        *(change for one in after.conditions if (change := _describe_change(known.get(one.type), one))),
    )


def _list_model_changes(before: S, after: S) -> Iterator[Change]:
    if isinstance(before, BlendServiceStatus) and isinstance(after, BlendServiceStatus):
        old, new = before.rollout.active, after.rollout.active
        if old and new and old != new:
            message = f"revision {new} of model {after.model} serves instead of {old} of {before.model}"
            yield Change("ModelChanged", message)


def _describe_change(before: Condition | None, now: Condition) -> Change | None:
    if before is not None and (before.status, before.reason) == (now.status, now.reason):
        return None
    if (now.type, now.reason) == (c.READY, "InvalidSpec"):
        return None  # `Valid` has the Event
    if c.is_false(now) and now.reason in STALLS_AFTER_S and now.type != c.KUBERAY:
        return Change(now.reason, now.message, is_warning=True)
    if (told := REASONS.get((now.type, now.reason))) is not None:
        return Change(told[0], now.message or _describe_state(now), told[1])
    was = before.status if before is not None else ConditionStatus.UNKNOWN
    if was is ConditionStatus.TRUE and c.is_false(now) and now.type in LOST:
        return Change(LOST[now.type], now.message, is_warning=True)
    if was is ConditionStatus.FALSE and now.status is ConditionStatus.TRUE and now.type in REGAINED:
        return Change(REGAINED[now.type], now.message or _describe_state(now))
    return None


def _describe_state(condition: Condition) -> str:
    return f"{condition.type} is {condition.status}: {condition.reason}"
