"""Conditions: what is true of an object, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kintsugi_operator.api.status import Condition, ConditionStatus

READY = "Ready"
VALID = "Valid"
KUBERAY = "KubeRayReady"
STORE = "StoreReady"
SHARDS = "ShardsUpToDate"
CALIBRATED = "Calibrated"
ROLLED_OUT = "RolledOut"
COMPLETE = "Complete"
RECONCILED = "Reconciled"
SOLE = "SoleOperator"
"""Only there while two operators look after the service."""

MESSAGE_LENGTH_MAX = 4096


def true(type_: str, reason: str, message: str = "") -> Condition:
    """A condition that holds."""
    return Condition(type_, ConditionStatus.TRUE, reason, message[:MESSAGE_LENGTH_MAX])


def false(type_: str, reason: str, message: str) -> Condition:
    """A condition that does not hold; the message says what to do or to wait for."""
    return Condition(type_, ConditionStatus.FALSE, reason, message[:MESSAGE_LENGTH_MAX])


def unknown(type_: str, reason: str, message: str = "") -> Condition:
    """A condition of which nothing is known yet."""
    return Condition(type_, ConditionStatus.UNKNOWN, reason, message[:MESSAGE_LENGTH_MAX])


def merge_conditions(
    before: Sequence[Condition], after: Sequence[Condition], generation: int, now: str
) -> tuple[Condition, ...]:
    """The conditions after a look, each with the time of its last change. One without news stays."""
    known = {one.type: one for one in before}
    for one in after:
        old = known.get(one.type)
        since = old.last_transition_time if old is not None and old.status == one.status else now
        known[one.type] = replace(one, last_transition_time=since, observed_generation=generation)
    return tuple(sorted(known.values(), key=lambda one: one.type))
