"""Decides which of several operators owns a service. An operator that does not own a service writes to it
only what this module decides.

The service's status names its owner by the Lease that the owner's leader holds. An operator of single
namespaces takes precedence over one of the whole cluster. Otherwise the first owner stays until its Lease
expires.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from kintsugi_operator.api.status import BlendServiceStatus, Condition, OperatorStatus
from kintsugi_operator.observed import conditions as c

CLUSTER, NAMESPACE = "Cluster", "Namespace"
"""Values of `OperatorStatus.scope`."""


class Claim(StrEnum):
    """What an operator does about the ownership of a service."""

    KEEP = "keep"
    TAKE = "take"
    LEAVE = "leave"


def decide_claim(me: OperatorStatus, owner: OperatorStatus) -> Claim:
    """Decide about a service whose owner still runs."""
    if owner == me:
        return Claim.KEEP
    if owner.lease in ("", me.lease):
        return Claim.TAKE
    return Claim.TAKE if (me.scope, owner.scope) == (NAMESPACE, CLUSTER) else Claim.LEAVE


def take_over(status: BlendServiceStatus, me: OperatorStatus) -> BlendServiceStatus:
    """The status of a service that `me` owns from now on."""
    return replace(status, operator=me, conditions=_conditions_without_sole(status))


def leave_to_owner(
    status: BlendServiceStatus, me: OperatorStatus, generation: int, now: str
) -> BlendServiceStatus:
    """The status of a service that another operator owns, with the condition that says so."""
    owner = status.operator
    said = c.false(
        c.SOLE,
        "OwnedByAnother",
        f"operator {owner.lease} (scope {owner.scope}) owns this service, and {me.lease} (scope {me.scope}) "
        "ignores it: remove one of them",
    )
    # Keep the message of any operator: otherwise several operators would overwrite it in turn for ever.
    whose = f"operator {owner.lease} (scope {owner.scope}) owns"
    if any(one.type == said.type and one.message.startswith(whose) for one in status.conditions):
        return status
    return replace(status, conditions=c.merge_conditions(status.conditions, [said], generation, now))


def forget_operator(status: BlendServiceStatus, me: OperatorStatus) -> BlendServiceStatus:
    """Return the status after this operator's removal, so that another may own the service."""
    if status.operator.lease == me.lease:
        return replace(status, operator=OperatorStatus())
    if any(one.type == c.SOLE and f" {me.lease} (scope" in one.message for one in status.conditions):
        return replace(status, conditions=_conditions_without_sole(status))
    return status


def _conditions_without_sole(status: BlendServiceStatus) -> tuple[Condition, ...]:
    return tuple(one for one in status.conditions if one.type != c.SOLE)
