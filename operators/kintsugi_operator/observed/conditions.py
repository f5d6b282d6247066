"""The conditions of objects, each with its reason and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from kintsugi_operator.api.status import Condition, ConditionStatus
from kintsugi_operator.observed.refusals import STALLS_AFTER_S

READY = "Ready"
VALID = "Valid"
KUBERAY = "KubeRayReady"
STORE = "StoreReady"
SHARDS = "ShardsUpToDate"
ROLLED_OUT = "RolledOut"
BLENDING = "Blending"
COMPLETE = "Complete"
RECONCILED = "Reconciled"
RECONCILING = "Reconciling"
STALLED = "Stalled"

STALLS = {
    (VALID, "InvalidSpec"),
    (SHARDS, "RestartNeeded"),
    (COMPLETE, "Failed"),
}
"""Type and reason of false conditions that only a person can resolve."""
UNSETTLED = (KUBERAY, RECONCILED, STORE, SHARDS, ROLLED_OUT, READY)
"""Conditions that are in progress while they are not true."""
NOT_STARTED = {(COMPLETE, "Waiting"), (COMPLETE, "Starting")}
"""A corpus counts as settled once its job runs, as kstatus treats a Job."""

MESSAGE_LENGTH_MAX = 4096


def timestamp(moment: datetime) -> str:
    """A time in Kubernetes' format."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def true(type_: str, reason: str, message: str = "") -> Condition:
    """A condition that is true."""
    return Condition(type_, ConditionStatus.TRUE, reason, message[:MESSAGE_LENGTH_MAX])


def false(type_: str, reason: str, message: str) -> Condition:
    """A condition that is false. The message says what to do or to wait for."""
    return Condition(type_, ConditionStatus.FALSE, reason, message[:MESSAGE_LENGTH_MAX])


def merge_conditions(
    before: Sequence[Condition], after: Sequence[Condition], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """The conditions after a reconciliation, each with the time of its last change. Conditions that are
    missing from `after` stay. `Reconciling` and `Stalled` are derived from the others."""
    known = {one.type: one for one in before}

    def put(one: Condition) -> None:
        old = known.get(one.type)
        since = old.last_transition_time if old is not None and old.status == one.status else timestamp(now)
        known[one.type] = replace(one, last_transition_time=since, observed_generation=generation)

    for one in after:
        put(one)
    others = [one for one in known.values() if one.type not in (RECONCILING, STALLED)]
    for one in summarise_progress(others, now):
        put(one)
    return tuple(sorted(known.values(), key=lambda one: one.type))


def summarise_progress(conditions: Sequence[Condition], now: datetime) -> tuple[Condition, Condition]:
    """Derive `Reconciling` and `Stalled`, from which kstatus (used by helm 4 and Flux) reads an object's
    progress.

    At most one of them is true, because kstatus reads the first that it finds.
    """
    stall = next((one for one in conditions if _is_stalled(one, now)), None)
    if stall is not None:
        return false(RECONCILING, "Stalled", f"see {stall.type}"), true(STALLED, stall.reason, stall.message)
    busy = next((one for one in conditions if _is_under_way(one)), None)
    if busy is None:
        return false(RECONCILING, "Settled", ""), false(STALLED, "Settled", "")
    message = f"{busy.type} is {busy.status}: {busy.message}"
    return true(RECONCILING, busy.reason, message), false(STALLED, "InProgress", "")


def _is_stalled(condition: Condition, now: datetime) -> bool:
    """Whether only a person can make a condition true, as far as the time since it became false can tell."""
    if not is_false(condition):
        return False
    if (condition.type, condition.reason) in STALLS:
        return True
    after_s = STALLS_AFTER_S.get(condition.reason)
    since = condition.last_transition_time
    if after_s is None or not since:
        return False
    return (now - datetime.fromisoformat(since)).total_seconds() >= after_s


def is_false(condition: Condition) -> bool:
    """Whether a condition is false. An unknown condition is not false."""
    return condition.status is ConditionStatus.FALSE


def _is_under_way(condition: Condition) -> bool:
    if condition.type in UNSETTLED:
        return condition.status is not ConditionStatus.TRUE
    return (condition.type, condition.reason) in NOT_STARTED
