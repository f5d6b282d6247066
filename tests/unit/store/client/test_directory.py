"""Placement and the circuit breaker: pure decisions."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kintsugi.core.errors import InvalidField, KintsugiError, Unavailable
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.client.directory import (
    FileDirectory,
    GrpcDirectory,
    ShardAddress,
    ShardMap,
    map_from_wire,
    map_to_wire,
    why_not_believed,
)
from kintsugi.store.protocol import watched_files
from kintsugi.store.protocol.breaker import FAILURES_MAX, CircuitBreaker

SHARDS = tuple(ShardAddress(f"shard-{i}", f"10.0.0.{i}:7400") for i in range(5))
KEYS = [ChunkKey(i.to_bytes(32, "little")) for i in range(2000)]


def test_chunks_spread_evenly_and_only_those_of_a_lost_shard_move() -> None:
    before = {key: ShardMap(1, SHARDS).owners(key)[0] for key in KEYS}
    for shard in SHARDS:
        assert 300 < sum(owner == shard for owner in before.values()) < 500
    after = {key: ShardMap(1, SHARDS[1:]).owners(key)[0] for key in KEYS}
    assert all(after[key] == owner for key, owner in before.items() if owner != SHARDS[0])


def test_placement_follows_the_id_not_the_address() -> None:
    moved = tuple(ShardAddress(shard.shard_id, "elsewhere:1") for shard in SHARDS)
    here, there = (ShardMap(1, shards, replicas=5) for shards in (SHARDS, moved))
    for key in KEYS[:50]:
        assert [s.shard_id for s in here.owners(key)] == [s.shard_id for s in there.owners(key)]


def test_placement_never_changes() -> None:
    """Chunks would be missed until they were sent to their new owners."""
    found = [ShardMap(1, SHARDS, replicas=5).owners(key) for key in KEYS[:4]]
    assert ["".join(one.shard_id[-1] for one in owners) for owners in found] == [
        "31042",
        "42103",
        "32410",
        "34120",
    ]
    shards = ShardMap(1, SHARDS, shares=(0.5,) * 5)
    assert "".join(shards.owners(key)[0].shard_id[-1] for key in KEYS[:16]) == "0433120411013443"
    assert shards.owners(KEYS[0], in_full=True) == ShardMap(1, SHARDS).owners(KEYS[0])


@pytest.mark.parametrize("shares", [(), (0.3, 1.0, 0.6, 1.0, 0.1)])
def test_many_keys_have_the_owners_that_each_has_alone(shares: tuple[float, ...]) -> None:
    shards = ShardMap(1, SHARDS, replicas=2, shares=shares)
    assert shards.owners_of_each(KEYS[:100]) == [shards.owners(key) for key in KEYS[:100]]
    assert shards.owners_of_each([]) == []
    assert ShardMap(1).owners(KEYS[0]) == []


def test_replicas_are_distinct() -> None:
    owners = ShardMap(1, SHARDS, replicas=3).owners(KEYS[0])
    assert len({owner.shard_id for owner in owners}) == 3


def test_a_shard_that_is_given_more_takes_chunks_from_those_who_had_them_alone() -> None:
    """Until it is given a chunk, the owner is who it would be without the shard."""
    without = ShardMap(1, SHARDS[1:])
    given: set[ChunkKey] = set()
    for thirteenths in range(1, 14):
        share = thirteenths / 13
        shards = ShardMap(1, SHARDS, shares=(share, 1.0, 1.0, 1.0, 1.0))
        owners = {key: shards.owners(key)[0] for key in KEYS}
        mine = {key for key, owner in owners.items() if owner == SHARDS[0]}
        assert all(owner == without.owners(key)[0] for key, owner in owners.items() if key not in mine)
        assert given <= mine
        assert abs(len(mine) - share * len(KEYS) / 5) < 60
        given = mine
    assert {key: ShardMap(1, SHARDS).owners(key) for key in KEYS} == {
        key: ShardMap(1, SHARDS, shares=(1.0,) * 5).owners(key) for key in KEYS
    }


def test_replicas_are_as_many_even_where_no_shard_is_given_much() -> None:
    few = ShardMap(1, SHARDS[:2], replicas=2, shares=(0.01, 0.01))
    for key in KEYS[:100]:
        assert {owner.shard_id for owner in few.owners(key)} == {"shard-0", "shard-1"}


def test_shares_and_origin_travel_with_their_map() -> None:
    shards = ShardMap(3, SHARDS[:2], 2, (0.25, 1.0), "head:6379", 7)
    assert map_from_wire(map_to_wire(shards)) == shards


KNOWN = ShardMap(5, SHARDS[:3], directory="ours", epoch=10)


@pytest.mark.parametrize(
    ("new", "known", "refusal"),
    [
        (ShardMap(1, (), directory="any"), None, ""),
        (ShardMap(1, SHARDS[3:], directory="other"), ShardMap(9, (), directory="ours"), ""),
        (ShardMap(6, SHARDS[3:], directory="ours", epoch=10), KNOWN, ""),
        (ShardMap(0, (), directory="ours", epoch=11), KNOWN, ""),
        (ShardMap(4, SHARDS, directory="ours", epoch=10), KNOWN, "older"),
        (ShardMap(99, SHARDS, directory="ours", epoch=9), KNOWN, "older"),
        (ShardMap(1, SHARDS[2:], directory="other", epoch=1), KNOWN, ""),
        (ShardMap(99, SHARDS[3:], directory="other", epoch=99), KNOWN, "other is not ours"),
        (ShardMap(99, (), directory="other", epoch=99), KNOWN, "other is not ours"),
        (ShardMap(99, SHARDS[3:]), KNOWN, "without a name is not ours"),
        (ShardMap(1, SHARDS[:1]), KNOWN, ""),
        (ShardMap(1, SHARDS[3:]), ShardMap(5, SHARDS[:3]), ""),
    ],
)
def test_a_map_is_believed_only_from_its_directory(
    new: ShardMap, known: ShardMap | None, refusal: str
) -> None:
    why = why_not_believed(new, known)
    assert (refusal in why) if refusal else not why


def test_a_map_file_is_read_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "CHECK_S", 0.0)
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"version": 1, "shards": [{"shard_id": "a", "address": "h:1"}]}))
    directory = FileDirectory(file)
    assert directory.current().shards == (ShardAddress("a", "h:1"),)
    file.write_text("{")
    assert directory.current().version == 1
    fresh = tmp_path / "fresh.json"
    fresh.write_text(json.dumps({"version": 2, "replicas": 2}))
    fresh.rename(file)
    assert directory.current() == ShardMap(2, (), 2)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[]", "mapping"),
        ("{", "JSON"),
        ('{"version": 1, "shard": []}', "shards"),
        ('{"version": 1, "replicas": 0}', "replicas"),
        ('{"version": 1, "shards": [{"shard_id": "a", "address": ""}], "shares": [0.0]}', "above 0"),
        ('{"version": 1, "shards": [{"shard_id": "a", "address": ""}], "shares": [NaN]}', "above 0"),
        ('{"version": 1, "shares": [1.0]}', "has 1 values for 0 shards"),
        (
            '{"version": 1, "shards": [{"shard_id": "a", "address": ""}, {"shard_id": "a", "address": ""}]}',
            "same",
        ),
    ],
)
def test_a_file_that_is_no_map_is_refused(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "map.json"
    file.write_text(text)
    with pytest.raises(KintsugiError, match=match):
        FileDirectory(file)
    with pytest.raises(InvalidField, match="cannot be read"):
        FileDirectory(tmp_path / "absent.json")


def test_the_breaker_opens_probes_once_and_closes() -> None:
    now = [0.0]
    breaker = CircuitBreaker(clock=lambda: now[0])
    for _ in range(FAILURES_MAX - 1):
        breaker.record_failure()
    assert breaker.allows()
    breaker.record_failure()
    assert not breaker.allows()
    now[0] = 5.0
    assert breaker.allows()
    assert not breaker.allows()
    breaker.record_failure()
    now[0] = 9.0
    assert not breaker.allows()
    now[0] = 10.0
    assert breaker.allows()
    breaker.record_success()
    assert breaker.allows()
    assert breaker.allows()


def test_probes_that_somebody_waits_for_become_rarer_until_one_succeeds() -> None:
    now_s = 0.0
    breaker = CircuitBreaker(lambda: now_s, backs_off=True)

    def seconds_to_next_probe() -> int:
        nonlocal now_s
        for waited_s in range(1, 100):
            now_s += 1.0
            if breaker.allows():
                return waited_s
        raise AssertionError("it never probes")

    for _ in range(2 * FAILURES_MAX):  # calls that were under way together
        breaker.record_failure()
    waits = []
    for _ in range(6):
        waits.append(seconds_to_next_probe())
        breaker.record_failure()
    assert waits == [5, 10, 20, 40, 40, 40]
    seconds_to_next_probe()
    breaker.record_success()
    for _ in range(FAILURES_MAX):
        breaker.record_failure()
    assert seconds_to_next_probe() == 5


def test_closing_a_directory_ends_the_wait_for_its_first_map() -> None:
    directory = GrpcDirectory("127.0.0.1:1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(directory.current)
        directory.close()
        with pytest.raises(Unavailable, match="no shard map") as caught:
            waiting.result(5.0)
    assert str(caught.value).count("check that it runs, and that this is its address (kintsugi status)") == 1
