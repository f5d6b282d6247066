"""How one revision of the engines replaces another."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi_operator.api.status import RolloutStatus
from kintsugi_operator.desired.rollout import RETIRE_AFTER_S, RETIRING_MAX, Phase, step, wanted_revisions
from kintsugi_operator.objects.deployed import EngineRevision
from kintsugi_operator.observed.conditions import timestamp
from kintsugi_operator.observed.views import CorpusView, JobState, JobView, Observed, RayServiceView
from tests.unit.operator.specs import NOW, spec_of

READY = RayServiceView(is_ready=True)
DONE = JobView(JobState.SUCCEEDED)
OLD = RolloutStatus(active="old")


def moved(
    rollout: RolloutStatus, observed: Observed, asked: str = "new", calibrate: bool = True
) -> RolloutStatus:
    return step(rollout, asked, calibrate, observed, NOW)


def test_the_first_revision_serves_at_once() -> None:
    assert moved(RolloutStatus(), Observed()) == RolloutStatus(active="new")


def test_another_model_starts_beside_the_old() -> None:
    rollout = moved(OLD, Observed())
    assert (rollout.active, rollout.pending, rollout.phase) == ("old", "new", Phase.STARTING)
    assert wanted_revisions(rollout) == ("old", "new")


def test_it_serves_once_ready_calibrated_and_warm() -> None:
    rollout = moved(OLD, Observed())
    assert moved(rollout, Observed()).phase == Phase.STARTING
    up = Observed(services={"new": READY})
    rollout = moved(rollout, up)
    assert rollout.phase == Phase.CALIBRATING
    corpus = CorpusView("old", is_finished=True)
    measured = Observed(services={"new": READY}, calibrations={"new": DONE}, corpora=(corpus,))
    rollout = moved(rollout, measured)
    assert (rollout.phase, rollout.active) == (Phase.WARMING, "old")
    filled = CorpusView("new", is_finished=True)
    warm = Observed(services={"new": READY}, calibrations={"new": DONE}, corpora=(filled,))
    rollout = moved(rollout, warm)
    assert (rollout.active, rollout.pending, rollout.phase) == ("new", "", Phase.IDLE)
    assert rollout.retiring == ("old",)


def test_the_old_engines_end_what_they_began() -> None:
    rollout = RolloutStatus(active="new", retiring=("old",), retiring_since=timestamp(NOW))
    almost, due = NOW + timedelta(seconds=RETIRE_AFTER_S - 1), NOW + timedelta(seconds=RETIRE_AFTER_S)
    assert step(rollout, "new", True, Observed(), almost).retiring == ("old",)
    assert step(rollout, "new", True, Observed(), due).retiring == ()


def test_a_failed_calibration_leaves_the_old_one_serving() -> None:
    rollout = RolloutStatus(active="old", pending="new", phase=Phase.CALIBRATING)
    failed = Observed(services={"new": READY}, calibrations={"new": JobView(JobState.FAILED)})
    rollout = moved(rollout, failed)
    assert (rollout.active, rollout.phase) == ("old", Phase.BLOCKED)
    assert moved(rollout, failed) == rollout
    # Without the job, or without asking for one, it goes on.
    assert moved(rollout, Observed(services={"new": READY})).phase == Phase.CALIBRATING
    assert moved(rollout, failed, calibrate=False).active == "new"


def test_going_back_ends_it() -> None:
    rollout = RolloutStatus(active="old", pending="new", phase=Phase.BLOCKED)
    assert moved(rollout, Observed(), asked="old") == OLD


def test_a_third_model_replaces_the_second() -> None:
    rollout = RolloutStatus(active="old", pending="new", phase=Phase.CALIBRATING)
    rollout = moved(rollout, Observed(services={"new": READY}), asked="newest")
    assert rollout == RolloutStatus(active="old", pending="newest", phase=Phase.STARTING)


@pytest.mark.parametrize(
    ("corpus", "waits"),
    [
        (CorpusView("old", is_finished=True), True),
        (CorpusView("new", is_finished=False), True),
        (CorpusView("new", is_finished=True), False),
        (CorpusView("old", is_finished=False, is_suspended=True), False),
    ],
)
def test_corpora_are_waited_for(corpus: CorpusView, waits: bool) -> None:
    rollout = RolloutStatus(active="old", pending="new", phase=Phase.WARMING)
    observed = Observed(services={"new": READY}, calibrations={"new": DONE}, corpora=(corpus,))
    assert (moved(rollout, observed).active == "old") is waits


def test_a_lost_status_is_found_again_in_the_cluster() -> None:
    """The gateway's Service knows who serves; the engines of that revision go on."""
    revision = EngineRevision.of(spec_of())
    observed = Observed(selected="old", revisions={"old": revision})
    assert moved(RolloutStatus(), observed, asked="old") == OLD
    assert moved(RolloutStatus(), observed).active == "old"


revisions = st.sampled_from(["a", "b", "c"])
views = st.builds(RayServiceView, is_ready=st.booleans())
jobs = st.builds(JobView, state=st.sampled_from(JobState))
seen = st.builds(
    Observed,
    services=st.dictionaries(revisions, views),
    calibrations=st.dictionaries(revisions, jobs),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(revisions, st.booleans(), seen), max_size=12))
def test_whoever_serves_was_ready_and_allowed_to(history: list[tuple[str, bool, Any]]) -> None:
    """In any order of events: nothing unready takes over, and the number of engines is bounded."""
    rollout, now = RolloutStatus(), NOW
    for asked, calibrate, observed in history:
        now += timedelta(seconds=10)
        before, rollout = rollout, step(rollout, asked, calibrate, observed, now)
        assert rollout.active
        assert rollout.pending != rollout.active
        assert len(wanted_revisions(rollout)) <= 2 + RETIRING_MAX
        if before.active and rollout.active != before.active:
            assert observed.services[rollout.active].is_ready
            assert before.active in rollout.retiring
            assert not calibrate or observed.calibrations[rollout.active].state is JobState.SUCCEEDED


@settings(max_examples=40, deadline=None)
@given(revisions, revisions, st.booleans(), seen)
def test_it_comes_to_rest(active: str, asked: str, calibrate: bool, observed: Observed) -> None:
    rollout = RolloutStatus(active=active)
    for _ in range(6):
        rollout = step(rollout, asked, calibrate, observed, NOW)
    assert step(rollout, asked, calibrate, observed, NOW) == rollout
