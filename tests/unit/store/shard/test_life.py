"""The life of a chunk, transition by transition: what each does, and that no other is possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kintsugi.store.shard import life
from kintsugi.store.shard.entry import ChunkEntry, Residence
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.home import Home
from kintsugi.store.shard.tiers.ram_tier import RamTier
from kintsugi.store.shard.work import Eviction, LoadStep, Promotion
from tests.contracts.store_contract import make_chunk

LAYERS = 3


class Tiers:
    """A RAM tier and two SSD tiers that nothing else uses."""

    def __init__(self, folder: Path) -> None:
        self.ram = RamTier(1 << 20)
        self.fast = DiskTier("ssd0", Home(folder / "fast"), 1 << 20)
        self.slow = DiskTier("ssd1", Home(folder / "slow"), 1 << 20)

    def reserve(self, entry: ChunkEntry) -> Residence:
        residence = self.ram.allocate(entry.manifest)
        assert residence is not None
        return residence

    def place(self, disk: DiskTier, entry: ChunkEntry) -> Residence:
        """Room on a disk that its catalog names."""
        residence = disk.allocate(entry)
        assert residence is not None
        disk.commit([(Eviction(entry, residence), residence)])
        return residence

    def in_ram(self) -> ChunkEntry:
        entry = ChunkEntry(make_chunk(range(40))[0])
        life.add_copy(entry, self.reserve(entry))
        return entry

    def on_disk(self) -> ChunkEntry:
        entry = ChunkEntry(make_chunk(range(40))[0])
        life.add_copy(entry, self.place(self.fast, entry))
        return entry

    def loading(self) -> tuple[ChunkEntry, Promotion]:
        entry = self.on_disk()
        assert entry.disk is not None
        life.acquire(entry.disk)
        return entry, life.begin_load(entry, self.reserve(entry))

    def evicted(self, entry: ChunkEntry) -> Eviction:
        """As the fast tier gives it up."""
        assert self.fast.policy.evict(lambda _: True) is entry
        assert entry.disk is not None
        return Eviction(entry, entry.disk)

    def used_bytes(self) -> list[int]:
        """Bytes taken in each tier, once the catalogs have forgotten what left."""
        self.fast.bury()
        self.slow.bury()
        return [tier.allocator.used_bytes for tier in (self.ram, self.fast, self.slow)]


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    tiers = Tiers(tmp_path)
    yield tiers
    tiers.fast.close()
    tiers.slow.close()
    tiers.ram.arena.close()


def test_a_chunk_is_written_beside_its_ram_copy(tiers: Tiers) -> None:
    entry = tiers.in_ram()
    job = life.begin_write(entry)
    life.check_present(entry)
    target = tiers.place(tiers.fast, entry)
    life.end_write(job, target)
    life.check_present(entry)
    assert entry.copies == (job.source, target)
    assert (job.source.readers, entry.writing) == (0, None)


def test_a_chunk_that_moves_to_another_disk_keeps_its_copy_until_the_new_one_is_there(tiers: Tiers) -> None:
    entry = tiers.in_ram()
    life.end_write(life.begin_write(entry), tiers.place(tiers.slow, entry))
    job = life.begin_write(entry)
    life.check_present(entry)
    assert entry.disk is not None
    assert entry.disk.tier is tiers.slow
    target = tiers.place(tiers.fast, entry)
    life.end_write(job, target)
    life.check_present(entry)
    assert entry.copies == (job.source, target)
    assert tiers.used_bytes()[2] == 0


@pytest.mark.parametrize("goes", [True, False])
def test_a_chunk_that_cannot_move_stays_where_it_is(tiers: Tiers, goes: bool) -> None:
    entry = tiers.in_ram()
    life.end_write(life.begin_write(entry), tiers.place(tiers.slow, entry))
    held = entry.copies
    job = life.begin_write(entry)
    if goes:
        life.forget(entry)
        life.end_write(job, tiers.place(tiers.fast, entry))
        assert tiers.used_bytes() == [0, 0, 0]
    else:
        life.fail_write(job)
        life.check_present(entry)
        assert entry.copies == held


def test_a_chunk_that_is_demoted_while_it_moves_has_one_copy(tiers: Tiers) -> None:
    entry = tiers.in_ram()
    life.end_write(life.begin_write(entry), tiers.place(tiers.fast, entry))
    eviction = tiers.evicted(entry)
    job = life.begin_write(entry)
    target = tiers.place(tiers.slow, entry)
    life.end_write(job, target)
    assert not life.end_demotion(eviction, None)
    life.check_present(entry)
    assert entry.copies == (job.source, target)
    assert tiers.used_bytes()[1] == 0


def test_a_chunk_that_leaves_ram_is_never_without_a_copy(tiers: Tiers) -> None:
    entry = tiers.in_ram()
    assert tiers.ram.policy.evict(lambda _: True) is entry
    job = life.begin_write(entry, leaving=True)
    assert entry.copies == (job.source,)
    target = tiers.place(tiers.fast, entry)
    life.end_write(job, target)
    life.check_present(entry)
    assert entry.copies == (target,)
    assert tiers.used_bytes()[0] == 0


def test_a_chunk_that_cannot_be_written_stays_and_may_leave_later(tiers: Tiers) -> None:
    entry = tiers.in_ram()
    assert tiers.ram.policy.evict(lambda _: True) is entry
    job = life.begin_write(entry, leaving=True)
    life.fail_write(job)
    life.check_present(entry)
    assert entry.copies == (job.source,)
    assert not entry.leaving
    assert tiers.ram.policy.evict(lambda _: True) is entry


@pytest.mark.parametrize("written", [True, False])
def test_a_chunk_that_goes_while_it_is_written_leaves_nothing(tiers: Tiers, written: bool) -> None:
    entry = tiers.in_ram()
    job = life.begin_write(entry, leaving=True)
    life.forget(entry)
    assert tiers.used_bytes()[0] > 0, "the writer still reads it"
    life.end_write(job, tiers.place(tiers.fast, entry) if written else None)
    assert entry.copies == ()
    assert tiers.used_bytes() == [0, 0, 0]


def test_what_is_read_stays_until_its_last_reader_is_done(tiers: Tiers) -> None:
    entry = tiers.in_ram()
    (residence,) = entry.copies
    life.acquire(residence)
    life.acquire(residence)
    life.forget(entry)
    life.release(residence)
    assert tiers.used_bytes()[0] > 0
    life.release(residence)
    assert tiers.used_bytes()[0] == 0


def test_a_promotion_wakes_who_waits_and_ends_with_the_last_layer(tiers: Tiers) -> None:
    entry, load = tiers.loading()
    woken: list[int] = []
    life.await_progress(load.target, lambda: woken.append(len(load.target.unloaded)))
    for layer in range(LAYERS):
        assert entry.is_loading
        life.check_present(entry)
        assert not life.advance_load(LoadStep(load, layer, layer + 1), "")
    assert woken == [LAYERS - 1]
    assert not entry.is_loading
    assert (load.source.readers, load.target.readers) == (0, 0)


def test_a_copy_that_cannot_be_read_now_stays(tiers: Tiers) -> None:
    entry, load = tiers.loading()
    assert life.advance_load(LoadStep(load, 0, 1), "it hangs")
    life.give_up_load(load)
    life.check_present(entry)
    assert entry.copies == (load.source,)
    assert load.target.condemned, "readers of the promotion lose the chunk"
    life.acquire(load.source)
    again = life.begin_load(entry, tiers.reserve(entry))
    assert not life.advance_load(LoadStep(load, 1, LAYERS), "it hangs")
    assert not life.advance_load(LoadStep(again, 0, LAYERS), "")
    life.check_present(entry)
    assert entry.ram is again.target
    assert (load.source.readers, load.target.readers) == (0, 0)


def test_a_lost_copy_takes_the_chunk_with_it_unless_ram_has_it_whole(tiers: Tiers) -> None:
    entry, load = tiers.loading()
    assert life.lose_copy(entry, load.source), "RAM has only a part"
    assert not life.advance_load(LoadStep(load, 0, LAYERS), "")
    assert not life.lose_copy(entry, load.source)
    life.check_present(entry)
    assert entry.copies == (load.target,)
    assert not life.lose_copy(entry, load.source), "it was lost before"


def test_a_chunk_that_takes_anothers_place_is_kept_for_as_long(tiers: Tiers) -> None:
    older = tiers.on_disk()
    entry = ChunkEntry(older.manifest, expires_at_s=5.0)
    life.inherit(entry, older)
    assert entry.expires_at_s == math.inf
    life.inherit(entry, ChunkEntry(older.manifest, expires_at_s=7.0))
    assert entry.expires_at_s == math.inf


def test_a_promotion_is_lost_once(tiers: Tiers) -> None:
    entry, load = tiers.loading()
    assert life.advance_load(LoadStep(load, 0, 1), "bad sector")
    life.forget(entry)
    assert not life.advance_load(LoadStep(load, 1, LAYERS), "bad sector")
    assert load.target.lost == "bad sector"
    assert tiers.used_bytes() == [0, 0, 0]


def test_a_demoted_chunk_lies_in_the_next_tier(tiers: Tiers) -> None:
    entry = tiers.on_disk()
    target = tiers.place(tiers.slow, entry)
    assert not life.end_demotion(tiers.evicted(entry), target)
    life.check_present(entry)
    assert entry.copies == (target,)
    assert tiers.used_bytes()[1] == 0


def test_a_demoted_chunk_without_room_below_has_no_copy_left(tiers: Tiers) -> None:
    assert life.end_demotion(tiers.evicted(tiers.on_disk()), None)
    beside_ram = tiers.in_ram()
    life.end_write(life.begin_write(beside_ram), tiers.place(tiers.fast, beside_ram))
    assert not life.end_demotion(tiers.evicted(beside_ram), None)
    life.check_present(beside_ram)


def test_a_chunk_that_is_loading_keeps_its_source(tiers: Tiers) -> None:
    entry, load = tiers.loading()
    assert not life.end_demotion(tiers.evicted(entry), tiers.place(tiers.slow, entry))
    life.check_present(entry)
    assert entry.disk is load.source
    assert tiers.used_bytes()[2] == 0
    tiers.evicted(entry)  # and may leave later


def test_a_copy_that_was_replaced_meanwhile_is_not_demoted(tiers: Tiers) -> None:
    entry = tiers.in_ram()
    life.end_write(life.begin_write(entry), tiers.place(tiers.fast, entry))
    eviction = tiers.evicted(entry)
    life.drop_copy(entry, eviction.source)  # damaged, say
    anew = tiers.place(tiers.fast, entry)
    life.end_write(life.begin_write(entry), anew)
    assert not life.end_demotion(eviction, tiers.place(tiers.slow, entry))
    life.check_present(entry)
    assert entry.disk is anew
    assert (tiers.fast.chunks, tiers.slow.chunks) == (1, 0)


def _write_twice(tiers: Tiers) -> None:
    entry = tiers.in_ram()
    life.begin_write(entry)
    life.begin_write(entry)


def _write_what_a_disk_has(tiers: Tiers) -> None:
    life.begin_write(tiers.loading()[0])


def _end_a_write_twice(tiers: Tiers) -> None:
    entry = tiers.in_ram()
    job = life.begin_write(entry)
    life.fail_write(job)
    life.fail_write(job)


def _end_a_write_nowhere(tiers: Tiers) -> None:
    life.end_write(life.begin_write(tiers.in_ram()), None)


def _have_two_copies_in_a_tier(tiers: Tiers) -> None:
    entry = tiers.in_ram()
    life.add_copy(entry, tiers.reserve(entry))


def _add_a_copy_to_what_is_gone(tiers: Tiers) -> None:
    entry = tiers.in_ram()
    life.forget(entry)
    life.add_copy(entry, tiers.reserve(entry))


def _forget_twice(tiers: Tiers) -> None:
    entry = tiers.in_ram()
    life.forget(entry)
    life.forget(entry)


def _read_what_was_let_go(tiers: Tiers) -> None:
    entry = tiers.in_ram()
    (residence,) = entry.copies
    life.acquire(residence)
    life.forget(entry)
    life.acquire(residence)


def _release_what_nobody_holds(tiers: Tiers) -> None:
    life.release(tiers.in_ram().copies[0])


def _condemn_twice(tiers: Tiers) -> None:
    residence = tiers.in_ram().copies[0]
    life.acquire(residence)
    life.condemn(residence)
    life.condemn(residence)


def _load_without_holding_the_source(tiers: Tiers) -> None:
    entry = tiers.on_disk()
    life.begin_load(entry, tiers.reserve(entry))


def _load_what_no_disk_has(tiers: Tiers) -> None:
    entry = tiers.in_ram()
    life.begin_load(entry, tiers.reserve(entry))


def _wait_for_what_is_there(tiers: Tiers) -> None:
    life.await_progress(tiers.in_ram().copies[0], lambda: None)


def _unpin_what_is_not_pinned(tiers: Tiers) -> None:
    life.unpin(tiers.in_ram())


@pytest.mark.parametrize(
    "illegal",
    [
        _write_twice,
        _write_what_a_disk_has,
        _end_a_write_twice,
        _end_a_write_nowhere,
        _have_two_copies_in_a_tier,
        _add_a_copy_to_what_is_gone,
        _forget_twice,
        _read_what_was_let_go,
        _release_what_nobody_holds,
        _condemn_twice,
        _load_without_holding_the_source,
        _load_what_no_disk_has,
        _wait_for_what_is_there,
        _unpin_what_is_not_pinned,
    ],
    ids=lambda illegal: illegal.__name__.strip("_"),
)
def test_an_illegal_transition_is_refused(tiers: Tiers, illegal: Callable[[Tiers], None]) -> None:
    with pytest.raises(AssertionError):
        illegal(tiers)


def test_a_chunk_without_a_copy_is_not_present(tiers: Tiers) -> None:
    entry = tiers.in_ram()
    life.drop_copy(entry, entry.copies[0])
    with pytest.raises(AssertionError, match="has a copy"):
        life.check_present(entry)
