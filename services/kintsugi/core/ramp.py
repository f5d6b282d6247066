"""How much of its chunks a shard is given that joins a running store with nothing in it."""

from __future__ import annotations

RAMP_STEPS = 12
"""A step moves chunks, and each that moves is a miss: few enough to name, enough to be gradual."""


def share_at(age_s: float, ramp_s: float) -> float:
    """In (0, 1]: a step more every ``ramp_s / RAMP_STEPS``, all from ``ramp_s`` on. Ages start at 0."""
    assert age_s >= 0
    if age_s >= ramp_s:
        return 1.0
    return (1 + int(RAMP_STEPS * age_s / ramp_s)) / (RAMP_STEPS + 1)
