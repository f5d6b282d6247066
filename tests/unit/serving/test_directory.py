"""Which shards are alive, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kintsugi.client.directory import ShardAddress
from kintsugi.core.errors import ResourceExhausted, Unavailable
from kintsugi.serving import directory
from kintsugi.serving.directory import LEASE_S, SHARDS_MAX, Announcer, Configured, Membership


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_shards_come_in_the_order_of_their_names(clock: Clock) -> None:
    members = Membership(clock=clock)
    members.heard("b", "h:2")
    members.heard("a", "h:1")
    assert members.current().shards == (ShardAddress("a", "h:1"), ShardAddress("b", "h:2"))


def test_the_version_grows_with_every_change_and_only_then(clock: Clock) -> None:
    members = Membership(clock=clock)
    versions = [members.current().version]
    for change in (
        lambda: members.heard("a", "h:1"),
        lambda: members.heard("a", "h:1"),
        lambda: members.heard("a", "h:9"),
        lambda: setattr(members, "replicas", 2),
        lambda: members.left("a"),
        lambda: members.left("a"),
    ):
        change()
        versions.append(members.current().version)
    assert versions == [0, 1, 1, 2, 3, 4, 4]
    assert members.current().replicas == 2


def test_a_silent_shard_leaves_and_comes_back_under_its_name(clock: Clock) -> None:
    members = Membership(clock=clock)
    members.heard("a", "h:1")
    members.heard("b", "h:2")
    clock.now_s += 0.9 * LEASE_S
    members.heard("b", "h:2")
    clock.now_s += 0.2 * LEASE_S
    assert [shard.shard_id for shard in members.current().shards] == ["b"]
    members.heard("a", "h:7")
    assert members.current().shards == (ShardAddress("a", "h:7"), ShardAddress("b", "h:2"))


def test_a_directory_that_was_started_anew_keeps_silent_until_all_were_heard(clock: Clock) -> None:
    members = Membership(settling=True, clock=clock)
    members.heard("a", "h:1")
    with pytest.raises(Unavailable, match="ask again"):
        members.current()
    members.heard("b", "h:2")
    clock.now_s += LEASE_S
    assert len(members.current().shards) == 2


def test_the_number_of_shards_is_bounded(clock: Clock) -> None:
    members = Membership(clock=clock)
    for index in range(SHARDS_MAX):
        members.heard(f"s{index}", f"h:{index}")
    with pytest.raises(ResourceExhausted):
        members.heard("one more", "h:1")
    members.heard("s0", "h:0")
    assert len(members.current().shards) == SHARDS_MAX


RAMP_S = 120.0


def beating(members: Membership, clock: Clock, seconds: int, **shards: bool) -> Iterator[tuple[float, ...]]:
    """Every second a heartbeat of each of the shards, empty or not; the shares after it."""
    for _ in range(seconds):
        for name, is_empty in shards.items():
            members.heard(name, f"{name}:1", is_empty)
        yield members.current().shares
        clock.now_s += 1.0


def test_an_empty_shard_that_joins_others_is_given_its_chunks_step_by_step(clock: Clock) -> None:
    members = Membership(clock=clock, ramp_s=RAMP_S)
    assert set(beating(members, clock, 121, a=True, b=True)) == {()}, "they start together"
    before = members.current().version
    shares = list(beating(members, clock, 130, a=False, b=False, c=True))
    assert shares[0] == pytest.approx((1.0, 1.0, 1 / 13))
    assert shares[:120] == [(1.0, 1.0, (1 + second // 10) / 13) for second in range(120)]
    assert shares[120:] == [()] * 10
    assert members.current().version == before + 13


@pytest.mark.parametrize(
    ("away_s", "is_empty", "ramps"), [(10, True, False), (130, True, True), (130, False, False)]
)
def test_a_shard_that_returns_ramps_if_others_had_time_to_take_its_place(
    clock: Clock, away_s: int, is_empty: bool, ramps: bool
) -> None:
    members = Membership(clock=clock, ramp_s=RAMP_S)
    list(beating(members, clock, 125, a=False, b=False))
    list(beating(members, clock, away_s, a=False))
    (shares,) = beating(members, clock, 1, a=False, b=is_empty)
    assert bool(shares) is ramps


def test_without_a_ramp_a_shard_is_given_all_at_once(clock: Clock) -> None:
    members = Membership(clock=clock)
    list(beating(members, clock, 5, a=False))
    assert list(beating(members, clock, 1, a=False, b=True)) == [()]


def test_what_is_remembered_of_shards_that_left_is_bounded(clock: Clock) -> None:
    members = Membership(clock=clock, ramp_s=RAMP_S)
    list(beating(members, clock, 125, a=False, first=False))
    members.left("first")
    for index in range(SHARDS_MAX):
        members.heard(f"s{index}", "h:1")
        members.left(f"s{index}")
    members.heard("first", "h:1", is_empty=True)
    assert members.current().shares == (1.0, 1 / 13), "forgotten, so it counts as new"


def test_a_shard_says_nothing_of_the_store_before_serve_has_told_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each that joins would have the others' chunks on one shard alone, for a moment."""
    ray = pytest.importorskip("ray")
    told: list[Any] = []
    handle = SimpleNamespace(
        heartbeat=SimpleNamespace(remote=lambda *values: told.append(values)),
        leave=SimpleNamespace(remote=lambda *values: told.append(values)),
    )
    monkeypatch.setattr(directory, "ensure_directory", lambda store: handle)
    monkeypatch.setattr(directory, "HEARTBEAT_S", 600.0)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: None)
    announcer = Announcer({}, "a", "h:1", lambda: True)
    announcer.configure(Configured(2, 5.0))
    announcer.close()
    assert told == [("a", "h:1", True, None), ("a", "h:1", True, Configured(2, 5.0)), ("a",)]
