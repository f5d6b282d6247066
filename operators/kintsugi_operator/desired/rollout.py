"""How one revision of the engines replaces another: a pure state machine.

::

    Idle ──spec asks for another──▶ Starting ──engines ready──▶ Warming
      ▲                                                            │ corpora filled
      └──── the old one is retired ◀── the Service switches ◀──────┘

The first revision serves at once, and so does one that replaces a revision with nothing to lose
(`observed.protection`): it never served, or has been down for long. A revision whose model has no report
serves by full prefill until its engines have learned from the prompts they serve. A newly requested revision
replaces the pending one; requesting the active one again ends the rollout.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from enum import StrEnum

from kintsugi_operator.api.status import RolloutStatus
from kintsugi_operator.observed.conditions import timestamp
from kintsugi_operator.observed.views import Observed

RETIRE_AFTER_S = 120.0
"""Time for old engines to finish their requests: more than their drain time."""
RETIRING_MAX = 4


class Phase(StrEnum):
    """The phase of a change of revision."""

    IDLE = "Idle"
    STARTING = "Starting"
    WARMING = "Warming"


def wanted_revisions(rollout: RolloutStatus) -> tuple[str, ...]:
    """Revisions whose engines have to run."""
    return tuple(dict.fromkeys(one for one in (rollout.active, rollout.pending, *rollout.retiring) if one))


def step(rollout: RolloutStatus, requested: str, observed: Observed, now: datetime) -> RolloutStatus:
    """Return the next state, at most one phase further. Repeated calls with the same input reach a state that
    no longer changes. The caller sets `since`."""
    rollout = _retire_due(_recover_active(rollout, observed), now)
    if not rollout.active:
        return replace(rollout, active=requested, pending="", phase=Phase.IDLE)
    if requested == rollout.active:
        return _replace_pending(rollout, "", Phase.IDLE) if rollout.pending else rollout
    active = observed.services.get(rollout.active)
    if active is None or not active.is_protected:
        return replace(_replace_pending(rollout, requested, Phase.IDLE), active=requested, pending="")
    if requested != rollout.pending:
        return _replace_pending(rollout, requested, Phase.STARTING)
    return _advance_pending(rollout, observed, now)


def _recover_active(rollout: RolloutStatus, observed: Observed) -> RolloutStatus:
    """Restore a lost status: the gateway's Service selects the revision that serves."""
    is_lost = not rollout.active and observed.selected in observed.revisions
    return replace(rollout, active=observed.selected) if is_lost else rollout


def _advance_pending(rollout: RolloutStatus, observed: Observed, now: datetime) -> RolloutStatus:
    """Advance the pending revision by at most one phase."""
    service = observed.services.get(rollout.pending)
    if service is None or not service.is_ready:
        return replace(rollout, phase=Phase.STARTING)
    if not is_warm(observed, rollout.pending):
        return replace(rollout, phase=Phase.WARMING)
    others = (one for one in (rollout.active, *rollout.retiring) if one != rollout.pending)
    return RolloutStatus(
        active=rollout.pending,
        phase=Phase.IDLE,
        retiring=tuple(dict.fromkeys(others))[:RETIRING_MAX],
        retiring_since=timestamp(now),
    )


def is_warm(observed: Observed, revision: str) -> bool:
    """Whether every corpus of the service has been filled for a revision. Suspended and failed corpora do not
    delay a rollout."""
    return all(one.is_suspended or (one.revision == revision and one.is_finished) for one in observed.corpora)


def _replace_pending(rollout: RolloutStatus, pending: str, phase: Phase) -> RolloutStatus:
    """Make another revision the pending one. The former one has served no request and is removed at once."""
    retiring = tuple(one for one in rollout.retiring if one != pending)
    since = rollout.retiring_since if retiring else ""
    return replace(rollout, pending=pending, phase=phase, retiring=retiring, retiring_since=since)


def _retire_due(rollout: RolloutStatus, now: datetime) -> RolloutStatus:
    """Remove the retiring revisions when their time is over."""
    if not rollout.retiring or not rollout.retiring_since:
        return replace(rollout, retiring=(), retiring_since="")
    age_s = (now - datetime.fromisoformat(rollout.retiring_since)).total_seconds()
    return replace(rollout, retiring=(), retiring_since="") if age_s >= RETIRE_AFTER_S else rollout
