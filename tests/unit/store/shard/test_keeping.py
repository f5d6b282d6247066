"""What stays and what goes: TTL, pins, limits, placement, scrubbing. Time is injected."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest

from kintsugi.core.errors import InvalidField, ResourceExhausted
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.namespaces import GIB, NamespaceLimits, NamespaceRules
from kintsugi.store.shard import pins as pins_module
from kintsugi.store.shard.entry import ChunkEntry, charge_of
from kintsugi.store.shard.eviction.room import NoRoomYet, choose_tier, hides_s
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.lower_tier import Unrecorded
from kintsugi.store.shard.tiers.ram_tier import PutOptions, RamTier
from kintsugi.store.shard.workers import keeper as keeper_module
from kintsugi.store.shard.workers.keeper import Keeper
from tests.contracts.store_contract import SPACE, make_chunk


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shard(clock: Clock) -> Iterator[Shard]:
    shard = Shard(RamTier(1 << 20), wall_clock=clock, clock=clock)
    shard.set_rules(NamespaceRules(limits={"small": NamespaceLimits(ram_gib=200_000 / GIB)}))
    yield shard
    shard.close()


def put(
    shard: Shard, tokens: int, options: PutOptions | None = None, namespace: str = "acme"
) -> ChunkManifest:
    space = type(SPACE)(SPACE.fingerprint, namespace)
    manifest, frames = make_chunk(range(tokens), space)
    begun = shard.begin_put(manifest, options)
    assert begun is not None
    for layer, frame in enumerate(frames):
        begun.write(layer, memoryview(frame))
    assert shard.commit(begun).inserted
    return manifest


def test_parts_of_a_namespace_share_its_limit(shard: Shard) -> None:
    first = put(shard, 40, namespace="small")
    size = charge_of(first)
    fits = 200_000 // size
    for number in range(fits):
        put(shard, 40, namespace=f"small/-/{number}")
    held = {entry.manifest.namespace for entry in shard.table.entries()}
    assert len(held) == fits, "the limit is the base's"


def test_a_chunk_expires_and_gives_its_room_back(shard: Shard, clock: Clock) -> None:
    manifest = put(shard, 40, PutOptions(ttl_s=10))
    clock.now_s += 9
    assert shard.lookup("acme", [manifest.key]) != [None]
    clock.now_s += 2
    Keeper(shard).turn()
    assert len(shard) == 0
    assert shard.ram.allocator.used_bytes == 0
    assert shard.table.counters.expired == 1


def test_chunks_with_a_lifetime_leave_before_those_without(shard: Shard) -> None:
    """However often they were used."""
    lasting = put(shard, 300)
    passing = [put(shard, tokens, PutOptions(ttl_s=1000)) for tokens in (301, 302)]
    shard.lookup("acme", [one.key for one in passing] * 3)
    for tokens in (400, 401, 402):
        put(shard, tokens, PutOptions(ttl_s=1000))
    assert shard.lookup("acme", [lasting.key]) != [None]
    assert shard.lookup("acme", [one.key for one in passing]) == [None, None]


def test_a_pin_keeps_a_chunk_until_its_lease_ends(shard: Shard, clock: Clock) -> None:
    pinned = put(shard, 300, PutOptions(ttl_s=10))
    shard.pin("acme", [pinned.key], lease_s=100)
    clock.now_s += 50
    for tokens in range(400, 420):
        put(shard, tokens)
    assert shard.lookup("acme", [pinned.key]) != [None]
    clock.now_s += 51
    Keeper(shard).turn()
    assert shard.lookup("acme", [pinned.key]) == [None]


def test_an_unpinned_chunk_may_leave(shard: Shard) -> None:
    pinned = put(shard, 300)
    lease_id, count = shard.pin("acme", [pinned.key], lease_s=100)
    assert (count, shard.table.unpin(lease_id), shard.table.unpin(lease_id)) == (1, 1, 0)
    for tokens in range(400, 420):
        put(shard, tokens)
    assert shard.lookup("acme", [pinned.key]) == [None]


def test_pins_are_bounded(shard: Shard) -> None:
    keys = [put(shard, tokens).key for tokens in (300, 301, 302, 303)]
    with pytest.raises(ResourceExhausted, match="unpin"):
        shard.pin("acme", keys, lease_s=10)
    with pytest.raises(InvalidField, match="lease_s"):
        shard.pin("acme", keys, lease_s=1e9)


def test_a_namespace_over_its_limit_evicts_its_own(shard: Shard) -> None:
    other = put(shard, 300)
    first = put(shard, 150, namespace="small")
    second = put(shard, 160, namespace="small")
    assert [entry.manifest for entry in shard.page("small", 10, None)] == [second]
    assert shard.lookup("acme", [other.key]) != [None]
    assert first.chunk_bytes + second.chunk_bytes > 200_000
    with pytest.raises(ResourceExhausted, match="ram_gib"):
        put(shard, 400, namespace="small")


def test_puts_that_begin_together_keep_their_limit(shard: Shard) -> None:
    space = type(SPACE)(SPACE.fingerprint, "small")
    chunks = [make_chunk(range(tokens), space) for tokens in (150, 160)]
    puts = [shard.begin_put(manifest) for manifest, _ in chunks]
    for begun, (_, frames) in zip(puts, chunks, strict=True):
        assert begun is not None
        begun.write(0, memoryview(b"".join(frames)))
    for begun in puts:
        assert begun is not None
        assert shard.commit(begun).inserted
    assert [entry.manifest for entry in shard.page("small", 10, None)] == [chunks[1][0]]
    late, frames = make_chunk(range(170), space)
    begun = shard.begin_put(late)
    assert begun is not None
    begun.write(0, memoryview(b"".join(frames)))
    assert put(shard, 150, namespace="small")
    shard.pin("small", [chunks[0][0].key], lease_s=10)
    with pytest.raises(NoRoomYet, match="in use"):
        shard.commit(begun)
    shard.delete("small", [chunks[0][0].key])
    assert shard.ram.allocator.used_bytes == 0


def test_leases_that_hold_nothing_take_no_place(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins_module, "PINS_MAX", 1)
    manifest = put(shard, 40)
    for _ in range(3):
        assert shard.pin("acme", [make_chunk(range(9))[0].key], lease_s=10)[1] == 0
    assert shard.pin("acme", [manifest.key], lease_s=10)[1] == 1


def test_what_is_being_read_stays(shard: Shard) -> None:
    chunks = [put(shard, tokens) for tokens in (600, 601)]
    reading = shard.open("acme", [m.key for m in chunks], range(3), HeadRange(0, 4))
    with pytest.raises(NoRoomYet, match="try again"):
        put(shard, 602)
    shard.delete("acme", [chunks[0].key])
    assert shard.ram.chunks == 1
    assert shard.ram.allocator.used_bytes > chunks[0].chunk_bytes + chunks[1].chunk_bytes - 1
    shard.table.close(reading)
    put(shard, 602)


def test_an_aborted_put_leaves_nothing(shard: Shard) -> None:
    manifest, frames = make_chunk(range(40))
    begun = shard.begin_put(manifest)
    assert begun is not None
    begun.write(0, memoryview(frames[0]))
    with pytest.raises(InvalidField, match="comes next"):
        begun.write(2, memoryview(frames[2]))
    with pytest.raises(InvalidField, match="ends after"):
        begun.write(1, memoryview(frames[1])[:-1])
    with pytest.raises(InvalidField, match="the last layer is 2"):
        begun.write(1, memoryview(b"".join(frames)))
    with pytest.raises(InvalidField, match="last layer"):
        shard.commit(begun)
    assert shard.ram.allocator.used_bytes == 0
    assert len(shard) == 0


def test_of_two_puts_of_a_key_one_wins(shard: Shard) -> None:
    manifest, frames = make_chunk(range(40))
    puts = [shard.begin_put(manifest), shard.begin_put(manifest)]
    outcomes = []
    for begun in puts:
        assert begun is not None
        for layer, frame in enumerate(frames):
            begun.write(layer, memoryview(frame))
        outcomes.append(shard.commit(begun).inserted)
    assert outcomes == [True, False]
    assert shard.ram.allocator.used_bytes == 3 * 12288


def test_the_scrubber_finds_a_flipped_bit_at_a_bounded_rate(shard: Shard) -> None:
    manifests = [put(shard, tokens) for tokens in (300, 301, 302)]
    reading = shard.open("acme", [manifests[1].key], range(3), HeadRange(0, 4))
    held = reading.chunks[0]
    assert held is not None
    held.frame(2)[9] ^= 1
    shard.table.close(reading)
    keeper = Keeper(shard, scrub_bytes_per_s=manifests[0].chunk_bytes)
    keeper.turn()
    assert keeper.scrubbed_chunks == 1
    for _ in range(4):
        keeper.turn()
    assert shard.table.counters.quarantined == 1
    assert shard.lookup("acme", [m.key for m in manifests])[1] is None


SPEEDS = [("ssd0", 1e9), ("ssd1", 1e8)]


@pytest.mark.parametrize(
    ("limit_s", "durable", "tier"),
    [
        (0.0, False, "ssd0"),
        (0.1, False, "ssd1"),
        (0.01, False, "ssd0"),
        (0.0005, False, "ram"),
        (0.0005, True, "ssd0"),
    ],
)
def test_a_put_goes_to_the_cheapest_tier_that_hides(limit_s: float, durable: bool, tier: str) -> None:
    assert choose_tier(SPEEDS, 2_000_000, limit_s, durable) == tier


def test_a_load_hides_behind_the_ratio_of_a_prefill_not_behind_all_of_it(shard: Shard) -> None:
    """2 MB come from the slow tier in 20 ms."""
    prefill_ms, tiers = 100.0, {}
    for ratio in (0.15, 0.25, 1.0):
        tiers[ratio] = choose_tier(SPEEDS, 2_000_000, hides_s(ratio, prefill_ms), durable=False)
    assert tiers == {0.15: "ssd0", 0.25: "ssd1", 1.0: "ssd1"}
    for ratio in (0.0, 1.1, float("nan")):
        with pytest.raises(InvalidField, match="ratio"):
            shard.set_ratio(ratio)


def test_a_recompute_cost_that_is_none_is_refused() -> None:
    for cost_ms in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidField, match="recompute_ms"):
            PutOptions(recompute_ms=cost_ms)


def test_a_durable_put_needs_an_ssd_tier() -> None:
    assert choose_tier([], 1, 0.0, durable=False) == "ram"
    with pytest.raises(InvalidField, match="--ssd"):
        choose_tier([], 1, 0.0, durable=True)


def is_there(shard: Shard, manifest: ChunkManifest) -> bool:
    return shard.lookup("acme", [manifest.key]) != [None]


def test_the_longer_of_two_puts_counts(shard: Shard, clock: Clock) -> None:
    manifest = put(shard, 40, PutOptions(ttl_s=10))
    assert shard.begin_put(manifest, PutOptions(ttl_s=2)) is None
    clock.now_s += 9
    assert shard.begin_put(manifest, PutOptions(ttl_s=5)) is None
    clock.now_s += 4
    assert is_there(shard, manifest), "5 s from the second put"
    clock.now_s += 1
    assert not is_there(shard, manifest)


def test_a_put_over_a_discovered_chunk_makes_it_last(shard: Shard, clock: Clock) -> None:
    """It loses its lifetime, and its place before those that were put."""
    discovered = put(shard, 300, PutOptions(ttl_s=1000))
    assert shard.begin_put(discovered, PutOptions()) is None
    others = [put(shard, tokens, PutOptions(ttl_s=1000)) for tokens in (301, 302)]
    for tokens in (400, 401, 402):
        put(shard, tokens, PutOptions(ttl_s=1000))
    assert is_there(shard, discovered)
    assert not any(is_there(shard, other) for other in others)
    clock.now_s += 1e9
    Keeper(shard).turn()
    assert is_there(shard, discovered)


def test_a_discovered_copy_does_not_end_what_was_put_for_good(shard: Shard, clock: Clock) -> None:
    manifest = put(shard, 40)
    assert shard.begin_put(manifest, PutOptions(ttl_s=1)) is None
    assert shard.retain("acme", [manifest.key], 1.0) == [True]
    clock.now_s += 2
    assert is_there(shard, manifest)


def test_of_two_puts_at_a_time_the_longer_lifetime_counts(shard: Shard, clock: Clock) -> None:
    manifest, frames = make_chunk(range(40))
    begun = [shard.begin_put(manifest, PutOptions(ttl_s=ttl_s)) for ttl_s in (5, 50)]
    for one in begun:
        assert one is not None
        for layer, frame in enumerate(frames):
            one.write(layer, memoryview(frame))
    assert [shard.commit(one).inserted for one in begun if one is not None] == [True, False]
    clock.now_s += 49
    assert is_there(shard, manifest)
    clock.now_s += 1
    assert not is_there(shard, manifest)


def test_a_lifetime_is_a_time_on_the_clock_wherever_that_jumps(shard: Shard, clock: Clock) -> None:
    """Set back, a clock keeps chunks for as much longer; set forward, they go as much earlier. Nothing else
    happens to them, and an extension counts from where the clock is."""
    early, late = put(shard, 40, PutOptions(ttl_s=10)), put(shard, 41, PutOptions(ttl_s=1000))
    clock.now_s -= 500
    Keeper(shard).turn()
    assert shard.retain("acme", [early.key, late.key], 20.0) == [True, True]
    clock.now_s += 509
    assert is_there(shard, early), "20 s from the earlier time were less than it had"
    clock.now_s += 100
    Keeper(shard).turn()
    assert [is_there(shard, one) for one in (early, late)] == [False, True]


def test_an_expired_chunk_is_not_retained(shard: Shard, clock: Clock) -> None:
    manifest = put(shard, 40, PutOptions(ttl_s=10))
    clock.now_s += 10
    assert shard.retain("acme", [manifest.key], 10.0) == [False]
    assert len(shard) == 0


def test_free_memory_is_returned_now_and_then(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[None] = []
    monkeypatch.setattr(keeper_module, "return_free_pages", lambda: returned.append(None))
    keeper = Keeper(shard, turn_s=4.0)
    counts = []
    for _ in range(7):
        keeper.turn()
        counts.append(len(returned))
    assert counts == [0, 0, 1, 1, 1, 2, 2]


def test_what_could_not_be_recorded_is_recorded_later() -> None:
    unrecorded = Unrecorded()
    first, second = (ChunkEntry(make_chunk(range(size))[0]) for size in (40, 50))
    written: list[set[ChunkEntry]] = []

    def fail(entries: Collection[ChunkEntry]) -> None:
        unrecorded.add(second)
        raise OSError("the disk is full")

    unrecorded.record(lambda entries: written.append(set(entries)))
    unrecorded.add(first)
    with pytest.raises(OSError, match="full"):
        unrecorded.record(fail)
    for _ in range(2):
        unrecorded.record(lambda entries: written.append(set(entries)))
    assert written == [{first, second}]
