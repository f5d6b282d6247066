"""The life of a chunk: every legal transition, and nothing else. Pure: no lock, no I/O, no waiting.

Only this module assigns to the fields of `ChunkEntry` and `Residence`, and only `EntryTable` calls it, under
its own lock; tests/unit/store/shard/test_ownership.py checks the sources for that.

A chunk is *present* from its commit until it is forgotten, and *gone* for good after that. Its state consists
of the states of its copies and of its write-back:

    RAM copy     none -> whole             add_copy: a put is committed
                 loading -> none           give_up_load: the bucket that it is read from does not answer
                 none -> loading -> whole  begin_load, advance_load: a promotion from the disk copy
                 whole -> none             drop_copy: evicted beside a disk copy, or damaged
                 whole -> leaving -> none  begin_write(leaving), end_write: evicted, and not below RAM yet
                 leaving -> whole          fail_write
    disk copy    (below RAM: on an SSD tier, or in a bucket)
                 none -> whole             end_write, recovery
                 whole -> whole elsewhere  begin_write, end_write: another tier is to hold it
                 whole -> none             drop_copy: damaged, or its upload to the bucket failed
                 whole -> evicting         its tier's policy gave it up; an `Eviction` names it
                 evicting -> none, or whole in the next tier, or whole where it was: end_demotion
    write-back   none -> writing           begin_write
                 writing -> none           end_write, fail_write
    any          -> gone                   forget: deletion, expiry, limit, quarantine, loss of the last copy

Between events, for a chunk that is present (`check_present` asserts it):

1. It has a copy, at most one in RAM and one below it, and no copy is condemned.
2. A RAM copy is loading only beside the disk copy that it is read from.
3. It is leaving RAM only while it is written, and it is written only from a whole RAM copy.

A residence that its entry has dropped is *condemned*. It is freed when it is condemned and has no readers. A
worker that ends its work on a chunk that is gone discards the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kintsugi.core.layout import HeadRange
from kintsugi.store.shard.entry import ChunkEntry, Residence
from kintsugi.store.shard.reading import HeldChunk
from kintsugi.store.shard.tiers.lower_tier import LowerTier
from kintsugi.store.shard.tiers.ram_tier import RamTier
from kintsugi.store.shard.work import Eviction, LoadStep, Promotion, WriteJob


def check_present(entry: ChunkEntry) -> None:
    """Assert the invariants of a present chunk between events."""
    assert not entry.gone
    assert entry.copies, "a chunk that is present has a copy"
    assert not any(residence.condemned for residence in entry.copies)
    assert entry.disk is not None or not entry.is_loading
    assert entry.writing is not None or not entry.leaving
    assert entry.writing is None or (entry.ram is not None and not entry.is_loading)


# Uses, lifetimes and pins


def touch(entry: ChunkEntry) -> None:
    """Count a use."""
    entry.uses += 1
    for residence in entry.copies:
        residence.tier.policy.touch(entry)


def extend(entry: ChunkEntry, expires_at_s: float) -> None:
    """Keep a chunk for longer. A chunk whose lifetime becomes infinite is ordered among the lasting chunks of
    its tiers. `expires_at_s`: Unix seconds."""
    assert expires_at_s > entry.expires_at_s
    entry.expires_at_s = expires_at_s
    if math.isinf(expires_at_s):
        for residence in entry.copies:
            residence.tier.policy.let_last(entry, entry.charged_bytes, entry.recompute_ms)


def inherit(entry: ChunkEntry, older: ChunkEntry) -> None:
    """Give a chunk that replaces another, and has no copy yet, at least the other's lifetime."""
    if older.expires_at_s > entry.expires_at_s:
        extend(entry, older.expires_at_s)


def pin(entry: ChunkEntry) -> None:
    entry.pins += 1


def unpin(entry: ChunkEntry) -> None:
    assert entry.pins > 0
    entry.pins -= 1


# Readers


def acquire(residence: Residence) -> None:
    """Hold the bytes in place until `release`."""
    assert not residence.condemned
    residence.readers += 1


def hold(entry: ChunkEntry, residence: Residence, heads: HeadRange) -> HeldChunk:
    """Hold some heads of a chunk for a reader."""
    acquire(residence)
    return HeldChunk(entry.manifest, residence, heads)


def release(residence: Residence) -> None:
    assert residence.readers > 0
    residence.readers -= 1
    _free_if_unused(residence)


def condemn(residence: Residence) -> None:
    """Free a residence that no entry holds as soon as it has no readers."""
    assert not residence.condemned
    residence.condemned = True
    residence.tier.unlink(residence)
    _free_if_unused(residence)


def _free_if_unused(residence: Residence) -> None:
    if residence.condemned and not residence.readers:
        residence.tier.free(residence)


# Copies


def add_copy(entry: ChunkEntry, residence: Residence) -> None:
    """Note that `residence` holds the bytes of `entry`, or will when they are loaded."""
    assert not entry.gone
    assert not residence.condemned
    if isinstance(residence.tier, RamTier):
        assert entry.ram is None
        entry.ram = residence
    else:
        assert entry.disk is None
        entry.disk = residence
    residence.tier.admit(entry)


def drop_copy(entry: ChunkEntry, residence: Residence) -> None:
    """Drop a copy of an entry. If it was the last one, the caller adds another or forgets the chunk."""
    if residence is entry.ram:
        entry.ram = None
    else:
        assert residence is entry.disk
        entry.disk = None
    residence.tier.remove(entry)
    condemn(residence)


def forget(entry: ChunkEntry) -> None:
    """Drop every copy; the chunk is gone."""
    assert not entry.gone
    for residence in entry.copies:
        drop_copy(entry, residence)
    entry.gone = True


def order_again(entry: ChunkEntry, residence: Residence) -> None:
    """Return a copy that its tier's policy had given up to the order of eviction."""
    residence.tier.policy.admit(entry, entry.charged_bytes, entry.recompute_ms)


# Write-back


def begin_write(entry: ChunkEntry, leaving: bool = False, now_s: float = 0.0) -> WriteJob:
    """Hold the RAM copy while it is written to disk. `leaving`: it is dropped afterwards. The new disk copy
    replaces an existing one: the chunk moves. `now_s`: on a monotonic clock."""
    assert entry.ram is not None
    assert not entry.is_loading
    assert not leaving or not entry.is_below_ram
    assert entry.writing is None
    assert not entry.gone
    acquire(entry.ram)
    job = WriteJob(entry, entry.ram)
    entry.writing = job.done
    entry.leaving = leaving
    if entry.disk is not None:
        entry.moved_s = now_s
    return job


def end_write(job: WriteJob, target: Residence | None) -> None:
    """Note that the catalog names `target`; None for a chunk that was gone before it was written."""
    entry = job.entry
    assert target is not None or entry.gone
    leaving = _end_job(job)
    if not entry.gone and target is not None:
        if entry.disk is not None:
            drop_copy(entry, entry.disk)
        add_copy(entry, target)
        if leaving:
            drop_copy(entry, job.source)
    elif target is not None:
        condemn(target)
    release(job.source)


def fail_write(job: WriteJob) -> None:
    """Note that a chunk could not be written. It stays in RAM."""
    if _end_job(job) and not job.entry.gone:
        order_again(job.entry, job.source)
    release(job.source)


def _end_job(job: WriteJob) -> bool:
    """End a write-back. Returns whether the chunk was leaving RAM."""
    entry = job.entry
    assert entry.writing is job.done
    assert entry.gone or entry.ram is job.source
    entry.writing = None
    leaving, entry.leaving = entry.leaving, False
    return leaving


# Promotion


def begin_load(entry: ChunkEntry, target: Residence) -> Promotion:
    """Begin to fill `target`, a new residence in RAM, from the disk copy. The caller has acquired the disk
    copy."""
    source = entry.disk
    assert source is not None
    assert source.readers > 0
    assert isinstance(source.tier, LowerTier)
    target.unloaded.update(range(len(target.offsets)))
    acquire(target)
    add_copy(entry, target)
    return Promotion(entry, source, source.tier, target)


def advance_load(step: LoadStep, lost: str) -> bool:
    """Note that a step has ended. Returns whether this step has lost the chunk. `lost`: why the frames
    could not be read, or empty."""
    load, target = step.load, step.load.target
    assert load.entry.gone or load.entry.ram is target or target.condemned
    target.unloaded.difference_update(range(step.start, step.stop))
    newly_lost = bool(lost) and not target.lost
    target.lost = target.lost or lost
    if not target.unloaded:
        release(load.source)
        release(target)
    waiters, target.waiters = target.waiters, []
    for waiter in waiters:
        waiter()
    return newly_lost


def give_up_load(load: Promotion) -> None:
    """End a promotion because the copy below RAM cannot be read now. Its readers lose the chunk; the entry
    keeps the copy below RAM. Running steps of the promotion are not interrupted."""
    assert load.target.lost
    if load.entry.ram is load.target:
        drop_copy(load.entry, load.target)


def lose_copy(entry: ChunkEntry, residence: Residence) -> bool:
    """Note that the bytes of a copy below RAM are lost. Returns whether the chunk is lost, too, because RAM
    does not hold all of it."""
    if residence is not entry.disk:
        return False
    if entry.ram is None or entry.is_loading:
        return True
    drop_copy(entry, residence)
    return False


def await_progress(residence: Residence, callback: Callable[[], None]) -> None:
    """Call `callback` once, at the next progress of the promotion that fills the residence."""
    assert residence.unloaded
    residence.waiters.append(callback)


# Demotion


def is_in_ram_alone(entry: ChunkEntry) -> bool:
    """Return whether a present chunk is neither on a disk nor being written to one."""
    return not entry.gone and entry.disk is None and entry.writing is None


def cancel_demotion(eviction: Eviction) -> None:
    """Keep a copy that its tier gave up. It may leave later."""
    if eviction.entry.disk is eviction.source:
        order_again(eviction.entry, eviction.source)


def end_demotion(eviction: Eviction, target: Residence | None) -> bool:
    """Drop a copy that its tier gave up. Returns whether the chunk had no other copy. `target`: its copy in
    the next tier, named by that tier's catalog, if there is one."""
    entry, source = eviction.entry, eviction.source
    if entry.disk is source and not entry.is_loading:
        drop_copy(entry, source)
        if target is not None:
            add_copy(entry, target)
        return not entry.copies
    if target is not None:
        condemn(target)
    cancel_demotion(eviction)  # a promotion may be reading the copy
    return False
