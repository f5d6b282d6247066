"""Which shards are alive, on a clock that the test moves."""

from __future__ import annotations

import pytest

from kintsugi.client.directory import ShardAddress
from kintsugi.core.errors import ResourceExhausted, Unavailable
from kintsugi.serving.directory import LEASE_S, SHARDS_MAX, Membership


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
