"""How one revision of the engines replaces another: a pure state machine.

::

    Idle ──spec asks for another──▶ Starting ──engines ready──▶ Calibrating ──report──▶ Warming
      ▲                                │                            │                     │
      │                                └── no calibration wanted ───┴──────────▶          │
      │                                                             │ failed              │ corpora filled
      └──────────── the old one is retired ◀── the Service switches ◀┼────────────────────┘
                                                                    ▼
                                                                 Blocked  (the old one serves on)

The first revision serves at once, in full prefill, and is calibrated meanwhile: there is nothing better to
serve. A newly requested revision replaces the pending one; requesting the active one again ends the rollout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from kintsugi_operator.api.status import RolloutStatus
from kintsugi_operator.observed.views import JobState, Observed

RETIRE_AFTER_S = 120.0
"""Time in which old engines finish their requests: more than their drain time."""
RETIRING_MAX = 4


class Phase(StrEnum):
    """The phase of a change of revision."""

    IDLE = "Idle"
    STARTING = "Starting"
    CALIBRATING = "Calibrating"
    WARMING = "Warming"
    BLOCKED = "Blocked"


@dataclass(frozen=True)
class Rollout:
    """Revisions by name. Times are seconds on the clock that `step` gets."""

    active: str = ""
    pending: str = ""
    phase: Phase = Phase.IDLE
    retiring: tuple[str, ...] = ()
    retiring_since_s: float = 0.0

    @property
    def wanted(self) -> tuple[str, ...]:
        """Revisions whose engines have to run."""
        return tuple(dict.fromkeys(one for one in (self.active, self.pending, *self.retiring) if one))

    @property
    def calibrated(self) -> str:
        """The revision to calibrate: the pending one, or else the active one."""
        return self.pending or self.active


def recover_rollout(rollout: Rollout, observed: Observed) -> Rollout:
    """The rollout where a status was lost: the Service's selector tells which revision serves."""
    if rollout.active or not observed.selected or observed.selected not in observed.revisions:
        return rollout
    others = tuple(sorted(set(observed.revisions) - {observed.selected}))[:RETIRING_MAX]
    return replace(rollout, active=observed.selected, retiring=others)


def step(rollout: Rollout, asked: str, calibrate: bool, observed: Observed, now_s: float) -> Rollout:
    """The next state, at most one phase further. Repeated with the same input, it comes to rest."""
    rollout = _retire_due(recover_rollout(rollout, observed), now_s)
    if not rollout.active:
        return replace(rollout, active=asked, pending="", phase=Phase.IDLE)
    if asked == rollout.active:
        return _replace_pending(rollout, "", Phase.IDLE) if rollout.pending else rollout
    if asked != rollout.pending:
        return _replace_pending(rollout, asked, Phase.STARTING)
    return _advance_pending(rollout, calibrate, observed, now_s)


def _advance_pending(rollout: Rollout, calibrate: bool, observed: Observed, now_s: float) -> Rollout:
    """One step of the pending revision towards serving."""
    service = observed.services.get(rollout.pending)
    is_ready = service is not None and service.is_ready
    job = observed.calibrations.get(rollout.pending)
    state = job.state if job is not None else JobState.ABSENT
    if calibrate and state is JobState.FAILED:
        return replace(rollout, phase=Phase.BLOCKED)
    if not is_ready:
        return replace(rollout, phase=Phase.STARTING)
    if calibrate and state is not JobState.SUCCEEDED:
        return replace(rollout, phase=Phase.CALIBRATING)
    if not is_warm(observed, rollout.pending):
        return replace(rollout, phase=Phase.WARMING)
    return Rollout(
        active=rollout.pending,
        retiring=_bound_retiring((rollout.active, *rollout.retiring), rollout.pending),
        retiring_since_s=now_s,
    )


def is_warm(observed: Observed, revision: str) -> bool:
    """Whether every corpus of the service has been filled for a revision. Suspended and failed corpora do not
    hold a rollout up."""
    return all(one.is_suspended or (one.revision == revision and one.is_finished) for one in observed.corpora)


def _replace_pending(rollout: Rollout, pending: str, phase: Phase) -> Rollout:
    """Make another revision the pending one. The former has served nobody and is removed at once."""
    retiring = tuple(one for one in rollout.retiring if one != pending)
    return replace(rollout, pending=pending, phase=phase, retiring=retiring)


def _retire_due(rollout: Rollout, now_s: float) -> Rollout:
    if rollout.retiring and now_s - rollout.retiring_since_s >= RETIRE_AFTER_S:
        return replace(rollout, retiring=(), retiring_since_s=0.0)
    return rollout


def _bound_retiring(retiring: tuple[str, ...], but: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one for one in retiring if one != but))[:RETIRING_MAX]


def from_status(status: RolloutStatus, since_s: float) -> Rollout:
    """The rollout of a status; `since_s` is `retiringSince` on the clock that `step` gets."""
    phase = Phase(status.phase) if status.phase in set(Phase) else Phase.IDLE
    return Rollout(status.active, status.pending, phase, status.retiring, since_s)
