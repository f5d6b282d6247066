"""Every eviction policy keeps its books; the better ones are better where they claim to be."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.plugins import EVICTION_POLICIES
from kintsugi.store.shard.eviction.policy import POLICIES, LifetimePolicy, Lru, policy_factory
from tests.fakes.cache_replay import TraceAccess, replay
from tests.fakes.plugins import code_of, install

names = pytest.mark.parametrize("name", sorted(POLICIES))


@names
@pytest.mark.parametrize("seed", range(3))
def test_what_is_evicted_was_there_and_may_go(name: str, seed: int) -> None:
    chance = random.Random(seed)
    policy = policy_factory(name)(1000)
    present: set[int] = set()
    for step in range(5000):
        action = chance.random()
        if action < 0.4:
            policy.admit(step, chance.randint(1, 50), chance.choice([0.0, 1.0, 20.0]))
            present.add(step)
        elif action < 0.6 and present:
            policy.touch(chance.choice(sorted(present)))
        elif action < 0.7 and present:
            gone = chance.choice(sorted(present))
            policy.remove(gone)
            present.discard(gone)
        else:
            pinned = {item for item in present if chance.random() < 0.3}
            victim = policy.evict(lambda item: item not in pinned)  # noqa: B023
            if victim is None:
                assert present == pinned
            else:
                assert victim in present - pinned
                present.discard(victim)
    while present:
        victim = policy.evict(lambda _: True)
        assert victim in present
        present.remove(victim)
    assert policy.evict(lambda _: True) is None


@names
def test_an_item_that_is_not_there_is_ignored(name: str) -> None:
    policy = policy_factory(name)(10)
    policy.touch("absent")
    policy.remove("absent")
    assert policy.evict(lambda _: True) is None


def test_s3fifo_survives_a_scan_that_empties_lru() -> None:
    hot = [TraceAccess(f"hot{i}") for i in range(10)]
    trace = [a for round_ in range(50) for a in [*hot, *(TraceAccess(f"{round_}-{i}") for i in range(100))]]
    assert replay(trace, Lru(60), 60).hits == 0
    assert replay(trace, policy_factory("s3fifo")(60), 60).hit_ratio > 0.05


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(InvalidField, match="s3fifo"):
        policy_factory("fifo")


def test_what_loses_its_lifetime_leaves_with_the_lasting() -> None:
    passing = {"a", "b", "c"}
    policy: LifetimePolicy[str] = LifetimePolicy(lambda item: item in passing, lambda: Lru(100))
    for item in ("lasting", "a", "b", "c"):
        policy.admit(item, 10, 0.0)
    assert policy.evict(lambda _: True) == "a"
    passing.discard("a")
    policy.let_last("a", 10, 0.0)
    assert policy.evict(lambda _: True) == "b", "one that was given up does not come back"
    passing.discard("c")
    policy.let_last("c", 10, 0.0)
    policy.let_last("lasting", 10, 0.0)
    policy.touch("lasting")
    assert [policy.evict(lambda _: True) for _ in range(3)] == ["c", "lasting", None]
    policy.admit("c", 10, 0.0)
    policy.remove("c")
    assert policy.evict(lambda _: True) is None


def test_the_policy_of_the_how_to_page_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = code_of("eviction.md", "from kintsugi.store.shard.eviction.policy import Item")
    install(tmp_path, monkeypatch, EVICTION_POLICIES, "oldest", "oldest_policy:Oldest", code)
    page: dict[str, Any] = {}
    exec(code_of("eviction.md", "from kintsugi.store.shard.eviction.policy import policy_factory"), page)
    page["test_the_oldest_leaves_first"]()
    with pytest.raises(InvalidField, match="lru, oldest, s3fifo"):
        policy_factory("newest")
