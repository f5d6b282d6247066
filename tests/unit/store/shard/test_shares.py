"""Limits of RAM, SSD and pins that rules for namespaces set in a shard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kintsugi.core.errors import ResourceExhausted
from kintsugi.core.layout import ChunkManifest
from kintsugi.core.namespaces import GIB, NO_RULES, NamespaceLimits, NamespaceRules
from kintsugi.core.spaces import ChunkSpace
from kintsugi.store.shard import pins
from kintsugi.store.shard.entry import charge_of
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import PutOptions
from tests.contracts.store_contract import SPACE, make_chunk

RAM = 4 << 20


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    spec = ShardSpec(RAM, tmp_path / "data", (SsdSpec(tmp_path / "ssd", 16 << 20),))
    shard = open_shard(spec)
    yield shard
    shard.close()


@pytest.fixture
def ram_shard() -> Iterator[Shard]:
    shard = open_shard(ShardSpec(RAM))
    yield shard
    shard.close()


def limits(shard: Shard, pattern: str, **settings: Any) -> None:
    shard.set_rules(NamespaceRules(limits={pattern: NamespaceLimits(**settings)}))


def put(
    shard: Shard, namespace: str, tokens: int, options: PutOptions | None = None, wait_s: float = 5.0
) -> ChunkManifest:
    manifest, frames = make_chunk(range(tokens), ChunkSpace(SPACE.fingerprint, namespace))
    begun = shard.begin_put(manifest, options, wait_s)
    assert begun is not None
    for layer, frame in enumerate(frames):
        begun.write(layer, memoryview(frame))
    committed = shard.commit(begun)
    if committed.durable is not None:
        committed.durable.result(timeout=10)
    return manifest


CHUNK = charge_of(make_chunk(range(100), SPACE)[0])
ON_RAM = PutOptions(recompute_ms=1e-6)
"""No disk could load such a chunk in time."""


def held(shard: Shard, namespace: str) -> int:
    return len(shard.page(namespace, 1000, None))


def test_a_namespace_beyond_its_ram_loses_its_own_chunks_and_nobody_elses(ram_shard: Shard) -> None:
    limits(ram_shard, "flood", ram_gib=3.5 * CHUNK / GIB)
    other = put(ram_shard, "other", 100)
    for tokens in range(80, 100):
        put(ram_shard, "flood", tokens)
    assert ram_shard.ram.bytes_by_namespace["flood"] <= 3.5 * CHUNK
    assert 3 <= held(ram_shard, "flood") <= 4
    assert ram_shard.lookup("other", [other.key]) != [None]


def test_a_chunk_larger_than_its_namespaces_ram_is_refused(ram_shard: Shard) -> None:
    limits(ram_shard, "*", ram_gib=CHUNK / 2 / GIB)
    with pytest.raises(ResourceExhausted, match="ram_gib"):
        put(ram_shard, "any", 100)


def test_what_leaves_ram_for_its_limit_goes_to_ssd(shard: Shard) -> None:
    limits(shard, "flood", ram_gib=2.5 * CHUNK / GIB)
    for tokens in range(90, 100):
        put(shard, "flood", tokens)
    assert shard.ram.bytes_by_namespace["flood"] <= 2.5 * CHUNK
    assert held(shard, "flood") == 10


def test_a_promotion_keeps_the_limit_of_ram(shard: Shard) -> None:
    limits(shard, "flood", ram_gib=2.5 * CHUNK / GIB)
    keys = [put(shard, "flood", tokens).key for tokens in range(90, 100)]
    for key in keys:
        shard.prefetch("flood", [key])
        assert shard.ram.bytes_by_namespace["flood"] <= 2.5 * CHUNK


def test_the_limit_of_ssd_drops_the_oldest_copies(shard: Shard) -> None:
    limits(shard, "flood", ssd_gib=3.5 * CHUNK / GIB)
    other = put(shard, "other", 100)
    for tokens in range(90, 100):
        put(shard, "flood", tokens)
    (disk,) = shard.disks
    assert disk.bytes_by_namespace["flood"] <= 3.5 * CHUNK
    assert disk.bytes_by_namespace["other"] == charge_of(other)
    shard.table.check()


def test_without_ssd_chunks_stay_in_ram_and_leave_it_for_good(shard: Shard) -> None:
    limits(shard, "secret", ssd_gib=0.0)
    put(shard, "secret", 200)
    with pytest.raises(ResourceExhausted, match="ssd_gib"):
        put(shard, "secret", 98, PutOptions(durable=True))
    for tokens in range(40, 140):
        put(shard, "secret", tokens, ON_RAM)
    assert shard.drain(5.0) == 0
    (disk,) = shard.disks
    assert "secret" not in disk.bytes_by_namespace


def test_namespaces_that_share_limits_are_counted_together(ram_shard: Shard) -> None:
    limits(ram_shard, "team/*", ram_gib=3.5 * CHUNK / GIB, together=True)
    for number in range(10):
        put(ram_shard, f"team/{number}", 100)
    (use,) = ram_shard.table.namespace_uses()
    assert (use.name, use.used_bytes["ram"]) == ("team/*", 3 * CHUNK)
    assert sum(held(ram_shard, f"team/{number}") for number in range(10)) == 3


def pin_all(shard: Shard, namespace: str, count: int) -> int:
    """How many chunks may be pinned one after the other."""
    for pinned in range(count):
        try:
            shard.pin(namespace, [put(shard, namespace, 100 + pinned).key], lease_s=60)
        except ResourceExhausted:
            return pinned
    return count


def test_one_namespaces_pins_leave_room_for_anothers(ram_shard: Shard) -> None:
    """One tenant's 155 pins used up everybody's."""
    assert 0 < pin_all(ram_shard, "flood", 155) < 155
    assert pin_all(ram_shard, "other", 3) == 3


def test_leases_of_parts_count_with_their_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "PINS_MAX", 8)
    leases = pins.Leases(1 << 40, lambda: 0.0)
    entry = SimpleNamespace(charged_bytes=1, pins=0)

    def pin(namespace: str) -> str:
        return leases.grant(namespace, [entry], 60.0, NO_RULES)  # type: ignore[list-item]

    first, *_ = [pin(f"docs/-/{number}") for number in range(4)]
    for namespace in ("docs", "docs/-/another", "docs/-/0/.session"):
        with pytest.raises(ResourceExhausted, match="has 4 pins and may have 4; unpin some"):
            pin(namespace)
    assert pin("other")
    leases.end(first)
    assert pin("docs/-/another")


def test_a_chunk_counts_in_each_lease_of_it(ram_shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of chunks that were pinned already took any number of them."""
    monkeypatch.setattr(pins, "PINS_MAX", 12)
    keys = [put(ram_shard, "flood", 80 + number).key for number in range(3)]
    assert [ram_shard.pin("flood", keys, lease_s=60.0)[1] for _ in range(2)] == [3, 3]
    with pytest.raises(ResourceExhausted, match="has 6 pins and may have 6"):
        ram_shard.pin("flood", keys, lease_s=60.0)


def test_puts_that_began_together_keep_the_limit_of_ram(ram_shard: Shard) -> None:
    limits(ram_shard, "flood", ram_gib=1.5 * CHUNK / GIB)
    space = ChunkSpace(SPACE.fingerprint, "flood")
    begun = []
    for tokens in (100, 101):
        manifest, frames = make_chunk(range(tokens), space)
        one = ram_shard.begin_put(manifest)
        assert one is not None
        for layer, frame in enumerate(frames):
            one.write(layer, memoryview(frame))
        begun.append(one)
    for one in begun:
        ram_shard.commit(one)
    assert held(ram_shard, "flood") == 1


def test_a_limit_that_is_lowered_holds_from_the_next_put(ram_shard: Shard) -> None:
    for tokens in range(90, 100):
        put(ram_shard, "flood", tokens)
    limits(ram_shard, "flood", ram_gib=2.5 * CHUNK / GIB)
    put(ram_shard, "flood", 89)
    assert ram_shard.ram.bytes_by_namespace["flood"] <= 2.5 * CHUNK


def test_without_rules_nothing_is_reported(ram_shard: Shard) -> None:
    put(ram_shard, "any", 100)
    assert ram_shard.table.namespace_uses() == []
