"""Which shards are alive, on a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from kintsugi.core.errors import ResourceExhausted, Unavailable
from kintsugi.gateway.addresses import free_port
from kintsugi.serving import directory, store_shard
from kintsugi.serving.directory import (
    LEASE_S,
    Announcer,
    DirectoryActor,
    Membership,
    MovingDirectory,
    reachable,
)
from kintsugi.store.client.directory import SHARDS_MAX, ShardAddress


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
    members.record_heartbeat("b", "h:2", "i")
    members.record_heartbeat("a", "h:1", "i")
    assert members.current().shards == (ShardAddress("a", "h:1"), ShardAddress("b", "h:2"))


def test_the_version_grows_with_every_change_and_only_then(clock: Clock) -> None:
    members = Membership(clock=clock)
    versions = [members.current().version]
    for change in (
        lambda: members.record_heartbeat("a", "h:1", "i"),
        lambda: members.record_heartbeat("a", "h:1", "i"),
        lambda: members.record_heartbeat("a", "h:9", "i"),
        lambda: setattr(members, "replicas", 2),
        lambda: members.remove_member("a"),
        lambda: members.remove_member("a"),
    ):
        change()
        versions.append(members.current().version)
    assert versions == [0, 1, 1, 2, 3, 4, 4]
    assert members.current().replicas == 2


def test_a_silent_shard_leaves_and_comes_back_under_its_name(clock: Clock) -> None:
    members = Membership(clock=clock)
    members.record_heartbeat("a", "h:1", "i")
    members.record_heartbeat("b", "h:2", "i")
    clock.now_s += 0.9 * LEASE_S
    members.record_heartbeat("b", "h:2", "i")
    clock.now_s += 0.2 * LEASE_S
    assert [shard.shard_id for shard in members.current().shards] == ["b"]
    members.record_heartbeat("a", "h:7", "i")
    assert members.current().shards == (ShardAddress("a", "h:7"), ShardAddress("b", "h:2"))


def test_a_directory_that_was_started_anew_keeps_silent_until_all_were_heard(clock: Clock) -> None:
    members = Membership(settling=True, clock=clock)
    members.record_heartbeat("a", "h:1", "i")
    with pytest.raises(Unavailable, match="try again"):
        members.current()
    members.record_heartbeat("b", "h:2", "i")
    clock.now_s += LEASE_S
    assert len(members.current().shards) == 2


def test_the_number_of_shards_is_bounded(clock: Clock) -> None:
    members = Membership(clock=clock)
    for index in range(SHARDS_MAX):
        members.record_heartbeat(f"s{index}", f"h:{index}", "i")
    with pytest.raises(ResourceExhausted):
        members.record_heartbeat("one more", "h:1", "i")
    members.record_heartbeat("s0", "h:0", "i")
    assert len(members.current().shards) == SHARDS_MAX


RAMP_S = 120.0


def beating(
    members: Membership, clock: Clock, seconds: int, *, instance: str = "i", **shards: bool
) -> Iterator[tuple[float, ...]]:
    """Every second a heartbeat of each of the shards, empty or not; the shares after it."""
    for _ in range(seconds):
        for name, is_empty in shards.items():
            members.record_heartbeat(name, f"{name}:1", instance if name == "b" else "i", is_empty)
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
def test_a_shard_that_starts_again_ramps_if_others_had_time_to_take_its_place(
    clock: Clock, away_s: int, is_empty: bool, ramps: bool
) -> None:
    members = Membership(clock=clock, ramp_s=RAMP_S)
    list(beating(members, clock, 125, a=False, b=False))
    list(beating(members, clock, away_s, a=False))
    (shares,) = beating(members, clock, 1, instance="j", a=False, b=is_empty)
    assert bool(shares) is ramps


@pytest.mark.parametrize("away_s", [10, 130])
def test_a_shard_that_was_not_heard_of_goes_on_where_it_was(clock: Clock, away_s: int) -> None:
    """Its process is the same: nothing that it was given is gone."""
    members = Membership(clock=clock, ramp_s=RAMP_S)
    list(beating(members, clock, 125, a=False))
    began_s = clock.now_s
    *_, before = beating(members, clock, 45, a=False, b=True)
    assert before == pytest.approx((1.0, 5 / 13))
    *_, without = beating(members, clock, away_s, a=False)
    assert without == ()
    assert len(members.current().shards) == 1
    (after,) = beating(members, clock, 1, a=False, b=True)
    assert after == (pytest.approx((1.0, 6 / 13)) if away_s == 10 else ())
    assert clock.now_s - began_s == 46 + away_s


def test_the_others_are_as_old_as_they_were_before_they_were_not_heard_of(clock: Clock) -> None:
    members = Membership(clock=clock, ramp_s=RAMP_S)
    list(beating(members, clock, 125, a=False))
    clock.now_s += 2 * LEASE_S
    assert members.current().shards == ()
    (shares,) = beating(members, clock, 1, a=False, b=True)
    assert shares == pytest.approx((1.0, 1 / 13)), "a holds what is about to be b's"


@pytest.mark.parametrize("away_s", [0, 10])
def test_a_shard_that_starts_again_empty_while_it_ramps_ramps_from_the_beginning(
    clock: Clock, away_s: int
) -> None:
    members = Membership(clock=clock, ramp_s=RAMP_S)
    list(beating(members, clock, 125, a=False))
    list(beating(members, clock, 65, a=False, b=True))
    list(beating(members, clock, away_s, a=False))
    (shares,) = beating(members, clock, 1, instance="j", a=False, b=True)
    assert shares == pytest.approx((1.0, 1 / 13))


def test_without_a_ramp_a_shard_is_given_all_at_once(clock: Clock) -> None:
    members = Membership(clock=clock)
    list(beating(members, clock, 5, a=False))
    assert list(beating(members, clock, 1, a=False, b=True)) == [()]


def test_what_is_remembered_of_shards_that_left_is_bounded(clock: Clock) -> None:
    members = Membership(clock=clock, ramp_s=RAMP_S)
    list(beating(members, clock, 125, a=False, first=False))
    members.remove_member("first")
    for index in range(SHARDS_MAX):
        members.record_heartbeat(f"s{index}", "h:1", "i")
        members.remove_member(f"s{index}")
    members.record_heartbeat("first", "h:1", "j", is_empty=True)
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
    announcer.configure(2)
    announcer.close()
    (instance,) = {values[2] for values in told[:2]}
    assert told == [
        ("a", "h:1", instance, True, None),
        ("a", "h:1", instance, True, 2),
        ("a",),
    ]


def test_all_who_ask_a_new_directory_at_once_find_it_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr("ray.get_runtime_context", lambda: runtime)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    port = free_port("127.0.0.1", 29610, 64)

    async def ask() -> set[str]:
        actor = DirectoryActor({"expert": {"directory_port": port}})
        try:
            return set(await asyncio.gather(*(actor.start() for _ in range(4))))
        finally:
            if actor._server is not None:
                await actor._server.stop(0.0)

    assert asyncio.run(ask()) == {f"127.0.0.1:{port}"}


class NamedActors:
    """Ray's lookup of the directory, which does not exist until `create`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exists = False
        self.lookups = 0
        monkeypatch.setattr("ray.get_actor", self._find)
        monkeypatch.setattr("ray.get", lambda answer, timeout: answer)

    def create(self, *_: object) -> None:
        self.exists = True

    def _find(self, name: str, namespace: str) -> SimpleNamespace:
        self.lookups += 1
        if not self.exists:
            raise ValueError(f"Failed to look up actor with name {name!r}")
        return SimpleNamespace(address=SimpleNamespace(remote=lambda: "10.0.0.1:7410"))


def test_engines_and_gateways_wait_for_a_directory_that_no_shard_has_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actors = NamedActors(monkeypatch)
    monkeypatch.setattr(directory, "START_TIMEOUT_S", 0.0)
    with pytest.raises(Unavailable, match="no shard has created the directory"):
        reachable("shards://0.0.0.0:7410")
    monkeypatch.setattr(directory, "START_TIMEOUT_S", 60.0)
    monkeypatch.setattr("time.sleep", actors.create)
    assert reachable("shards://0.0.0.0:7410?token_file=t") == "shards://10.0.0.1:7410?token_file=t"
    assert actors.lookups == 3
    assert reachable("shards://127.0.0.1:7410") == "shards://127.0.0.1:7410"


def test_the_first_shard_on_all_interfaces_creates_the_directory_whose_address_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asked for the address first, so no store on several hosts started."""
    actors, opened = NamedActors(monkeypatch), []
    monkeypatch.setattr(directory, "START_TIMEOUT_S", 0.0)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.2")
    for name in ("write_json_lines", "keep_replica_on_loopback", "claim_shard", "CatchingUp", "Replicator"):
        monkeypatch.setattr(store_shard, name, Mock())
    monkeypatch.setattr(directory, "open_directory", lambda url: (opened.append(url), Mock()))
    monkeypatch.setattr(store_shard, "serve_shard", Mock(return_value=Mock(address="0.0.0.0:7400")))
    monkeypatch.setattr(store_shard, "ensure_directory", actors.create)
    monkeypatch.setattr(store_shard, "Announcer", lambda *_: actors.create())
    shard = store_shard.StoreShard({"expert": {"host": "0.0.0.0", "insecure": True}})
    assert opened == ["shards://10.0.0.1:7410"]
    shard._stopped = True


@pytest.mark.parametrize(("host", "follows"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_shard_follows_the_directory_to_another_head(
    monkeypatch: pytest.MonkeyPatch, host: str, follows: bool
) -> None:
    """A head that is replaced has another address, and a shard would never hear of new shards."""
    NamedActors(monkeypatch).create()
    monkeypatch.setattr("ray.get", lambda answer, timeout: "10.0.0.1:7410")
    opened: list[tuple[str, Mock]] = []

    def open_directory(url: str) -> tuple[Mock, object]:
        opened.append((url, Mock()))
        return opened[-1][1], None

    monkeypatch.setattr(directory, "open_directory", open_directory)
    followed = MovingDirectory(f"shards://{host}:7410?tls_name=s")
    for address in ("10.0.0.1:7410", "10.0.0.9:7410", "10.0.0.9:7410"):
        followed.move(address)
    first = f"shards://{'10.0.0.1' if follows else host}:7410?tls_name=s"
    assert [url for url, _ in opened] == [first, *["shards://10.0.0.9:7410?tls_name=s"] * follows]
    followed.current()
    last = opened[-1][1]
    assert last.current.called
    assert not last.close.called
    followed.close()
    assert all(one.close.called for _, one in opened)
