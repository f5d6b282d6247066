"""How one revision of the engines replaces another."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi_operator.api.status import RolloutStatus
from kintsugi_operator.desired.rollout import (
    RETIRE_AFTER_S,
    RETIRING_MAX,
    Phase,
    is_warm,
    step,
    wanted_revisions,
)
from kintsugi_operator.objects.deployed import EngineRevision
from kintsugi_operator.observed.conditions import timestamp
from kintsugi_operator.observed.views import CorpusView, Observed, RayServiceView
from tests.unit.operator.specs import NOW, spec_of

READY = RayServiceView(is_ready=True)
OLD = RolloutStatus(active="old")


SERVING = {"old": READY}


def moved(rollout: RolloutStatus, observed: Observed, asked: str = "new") -> RolloutStatus:
    """The next state while the old revision serves, unless the observation says otherwise."""
    seen = dataclasses.replace(observed, services={**SERVING, **observed.services})
    return step(rollout, asked, seen, NOW)


def test_the_first_revision_serves_at_once() -> None:
    assert moved(RolloutStatus(), Observed()) == RolloutStatus(active="new")


def test_another_model_starts_beside_the_old() -> None:
    rollout = moved(OLD, Observed())
    assert (rollout.active, rollout.pending, rollout.phase) == ("old", "new", Phase.STARTING)
    assert wanted_revisions(rollout) == ("old", "new")


@pytest.mark.parametrize("service", [None, RayServiceView()])
def test_a_revision_that_never_served_is_replaced_at_once(service: RayServiceView | None) -> None:
    """Its engines may hold the only GPU."""
    services = {"old": service} if service is not None else {}
    rollout = RolloutStatus(active="old", pending="other", phase=Phase.STARTING)
    assert step(rollout, "new", Observed(services=services), NOW) == RolloutStatus(active="new")
    assert step(rollout, "old", Observed(services=services), NOW) == OLD


def test_a_revision_that_may_come_back_is_not_replaced_at_once() -> None:
    down = Observed(services={"old": RayServiceView(may_recover=True)})
    assert moved(OLD, down) == RolloutStatus(active="old", pending="new", phase=Phase.STARTING)


def test_it_serves_once_ready_and_warm() -> None:
    rollout = moved(OLD, Observed())
    assert moved(rollout, Observed()).phase == Phase.STARTING
    corpus = CorpusView("old", is_finished=True)
    rollout = moved(rollout, Observed(services={"new": READY}, corpora=(corpus,)))
    assert (rollout.phase, rollout.active) == (Phase.WARMING, "old")
    filled = CorpusView("new", is_finished=True)
    rollout = moved(rollout, Observed(services={"new": READY}, corpora=(filled,)))
    assert (rollout.active, rollout.pending, rollout.phase) == ("new", "", Phase.IDLE)
    assert rollout.retiring == ("old",)


def test_the_old_engines_end_what_they_began() -> None:
    rollout = RolloutStatus(active="new", retiring=("old",), retiring_since=timestamp(NOW))
    almost, due = NOW + timedelta(seconds=RETIRE_AFTER_S - 1), NOW + timedelta(seconds=RETIRE_AFTER_S)
    assert step(rollout, "new", Observed(), almost).retiring == ("old",)
    assert step(rollout, "new", Observed(), due).retiring == ()


def test_going_back_ends_it() -> None:
    rollout = RolloutStatus(active="old", pending="new", phase=Phase.WARMING)
    assert moved(rollout, Observed(), asked="old") == OLD


def test_a_third_model_replaces_the_second() -> None:
    rollout = RolloutStatus(active="old", pending="new", phase=Phase.WARMING)
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
    observed = Observed(services={"new": READY}, corpora=(corpus,))
    assert (moved(rollout, observed).active == "old") is waits


def test_a_lost_status_is_found_again_in_the_cluster() -> None:
    """The gateway's Service knows who serves; the engines of that revision go on."""
    revision = EngineRevision.of(spec_of())
    observed = Observed(selected="old", revisions={"old": revision})
    assert moved(RolloutStatus(), observed, asked="old") == OLD
    assert moved(RolloutStatus(), observed).active == "old"


revisions = st.sampled_from(["a", "b", "c"])
views = st.builds(RayServiceView, is_ready=st.booleans())
corpora = st.builds(CorpusView, revisions, is_finished=st.booleans(), is_suspended=st.booleans())
seen = st.builds(
    Observed,
    services=st.dictionaries(revisions, views),
    corpora=st.lists(corpora, max_size=2).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(revisions, seen), max_size=12))
def test_whoever_serves_was_ready_and_warm(history: list[tuple[str, Observed]]) -> None:
    """In any order of events: nothing unready takes over from what serves, and the number of engines is
    bounded."""
    rollout, now = RolloutStatus(), NOW
    for asked, observed in history:
        now += timedelta(seconds=10)
        before, rollout = rollout, step(rollout, asked, observed, now)
        assert rollout.active
        assert rollout.pending != rollout.active
        assert len(wanted_revisions(rollout)) <= 2 + RETIRING_MAX
        former = observed.services.get(before.active)
        if former is not None and former.is_protected and rollout.active != before.active:
            assert observed.services[rollout.active].is_ready
            assert before.active in rollout.retiring
            assert is_warm(observed, rollout.active)


@settings(max_examples=40, deadline=None)
@given(revisions, revisions, seen)
def test_it_comes_to_rest(active: str, asked: str, observed: Observed) -> None:
    rollout = RolloutStatus(active=active)
    for _ in range(6):
        rollout = step(rollout, asked, observed, NOW)
    assert step(rollout, asked, observed, NOW) == rollout
