"""What a shard records of erasures, which puts it refuses, and what it applies after it was away."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kintsugi.core.errors import NotFound, ResourceExhausted, Unavailable
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.protocol.interface import Erasure, ErasureMark, ErasureRange
from kintsugi.store.shard import erasure as erasures_module
from kintsugi.store.shard.erasure import AWAY_S_MAX, Deletions, Erasures, Scope, Shared, scopes_of
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.extents import GRANULE_BYTES, Leftovers
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.contracts.store_contract import make_chunk


def key(number: int) -> ChunkKey:
    return ChunkKey(bytes([number]) * 32)


def one(number: int, at_s: float, namespace: str = "acme") -> Erasure:
    return Erasure(namespace, key(number), at_s)


@pytest.fixture
def shard() -> Iterator[Shard]:
    with closing(Shard(RamTier(1 << 20))) as shard:
        yield shard


def apply(shard: Shard, peer: str, erasures: Sequence[Erasure], next: int, **merged: ErasureMark) -> None:
    marks = {name.replace("everything", "*"): mark for name, mark in merged.items()}
    shard.apply_erasures(peer, ErasureRange(erasures, next, marks))


def test_erasures_are_listed_in_order_and_outlive_the_process(tmp_path: Path) -> None:
    first = Erasures(tmp_path / "erasures")
    first.record([one(1, 1.0), one(2, 2.0)], tiers=["tier"])
    first.record([one(3, 3.0)], learned=True)
    first.note_seen("b", 7)
    first.close()
    again = Erasures(tmp_path / "erasures")
    assert list(again.after(0, 10).erasures) == [one(1, 1.0), one(2, 2.0), one(3, 3.0)]
    page = again.after(0, 1)
    assert (list(page.erasures), page.next) == ([one(1, 1.0)], 1)
    assert again.after(page.next, 10).next == again.newest == 3
    assert (again.seen_of("b"), again.seen_of("c")) == (7, 0)
    assert (again.applied_in("tier"), again.applied_in("other")) == (2, 0)
    again.close()


def test_a_later_erasure_replaces_the_one_before_and_a_namespace_its_chunks() -> None:
    erasures = Erasures(None)
    erasures.record([one(1, 5.0), one(2, 5.0), one(1, 4.0, "other")])
    latest_s = erasures.record([one(1, 3.0)])
    (_, _, newest) = erasures.after(0, 10).erasures
    assert newest.at_s == latest_s > 5.0, "whoever asked has a clock that is late"
    erasures.record([Erasure("acme", None, 9.0)])
    assert list(erasures.after(0, 10).erasures) == [
        one(1, 4.0, "other"),
        Erasure("acme", None, 9.0),
    ]
    assert erasures.is_known(one(2, 5.0))
    assert not erasures.is_known(one(2, 10.0))
    assert not erasures.is_known(one(2, 4.0, "other"))


def test_an_erasure_covers_what_was_asked_for_until_then() -> None:
    erasures = Erasures(None)
    erasures.record([one(1, 5.0), Erasure("other", None, 7.0)])
    assert erasures.cover(("acme", key(1)), 5.0)
    assert not erasures.cover(("acme", key(1)), 5.0001)
    assert not erasures.cover(("acme", key(2)), 1.0)
    assert erasures.cover(("other", key(2)), 7.0)
    assert not erasures.cover(("other", key(2)), 7.1)


def test_two_shards_that_tell_each_other_of_erasures_come_to_an_end() -> None:
    """Both were asked for the same two erasures, in another order."""
    shards = [Erasures(None), Erasures(None)]
    for shard, times in zip(shards, ((1.0, 1.0003), (1.0003, 1.0)), strict=True):
        for at_s in times:
            shard.record([one(1, at_s)])

    def tell(teller: Erasures, hearer: Erasures) -> bool:
        told = teller.after(hearer.seen_of("teller"), 10)
        missed = [erasure for erasure in told.erasures if not hearer.is_known(erasure)]
        hearer.record(missed, learned=True)
        hearer.note_seen("teller", told.next)
        return bool(missed)

    news = [tell(shards[turn % 2], shards[1 - turn % 2]) for turn in range(6)]
    assert not any(news[2:])


def test_an_erasure_that_is_asked_for_again_is_no_other() -> None:
    first, second = Erasures(None), Erasures(None)
    for erasures in (first, first, second):
        erasures.record([one(1, 5.0)])
    (told,) = first.after(0, 10).erasures
    assert second.is_known(told)


def test_an_erasure_after_its_namespaces_is_news_to_who_saw_the_first() -> None:
    """The clock of who asked for the second is late."""
    first, second = Erasures(None), Erasures(None)
    for erasures in (first, second):
        erasures.record([Erasure("acme", None, 9.0)])
    first.record([one(1, 8.0)])
    (_, told) = first.after(0, 10).erasures
    assert not second.is_known(told)


def test_shards_record_one_erasure_with_one_time() -> None:
    """Or the one that recorded the earlier time would apply the other, and erase what was put since."""
    chunk = make_chunk(range(8))[0].key
    told: list[Erasure] = []
    for now_s in (100.0, 100.5):
        with closing(Shard(RamTier(1 << 20), wall_clock=lambda now_s=now_s: now_s)) as shard:  # type: ignore[misc]
            shard.erase(Scope.of("acme", [chunk]), 101.0)
            told += shard.erasures.after(0, 10).erasures
    assert told == [Erasure("acme", chunk, 101.0)] * 2
    with closing(Shard(RamTier(1 << 20), wall_clock=lambda: 100.0)) as shard:
        shard.erase(Scope("acme"), 1e9)
        (erasure,) = shard.erasures.after(0, 10).erasures
    assert erasure.at_s == 101.0, "a clock that is wrong by years hides no later erasure"


@pytest.mark.parametrize("learns", [False, True])
def test_a_clock_that_was_ahead_keeps_no_chunk_from_an_erasure(learns: bool) -> None:
    """Its chunks have times that no save can have had yet."""
    now_s = [100.0]
    with closing(Shard(RamTier(1 << 20), wall_clock=lambda: now_s[0])) as shard:
        now_s[0] += 2 * 86_400
        put_chunk(shard, range(8), "acme", 0.0)
        now_s[0] = 200.0
        put_chunk(shard, range(9), "acme", 0.0)
        now_s[0] = 200.5
        later = put_chunk(shard, range(10), "acme", 0.0)
        if learns:
            apply(shard, "b", [Erasure("acme", None, 200.2)], 1)
        else:
            shard.erase(Scope("acme"), 200.2)
        assert [entry.manifest.key for entry in shard.table.entries()] == [later]


def test_a_namespace_with_many_erasures_merges_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasures_module, "NAMESPACE_MAX", 8)
    erasures = Erasures(tmp_path / "erasures")
    erasures.record([one(1, 1.0, "other"), Erasure("third", None, 1.0)])
    for number in range(200):
        erasures.record([one(number, 2.0 + number, "flood")])
    assert len(erasures) <= 2 + 8
    erasures.close()
    again = Erasures(tmp_path / "erasures")
    assert again.newest == 202
    assert again.is_known(one(1, 1.0, "other"))
    assert again.is_known(one(1, 1.0, "third"))
    (name, mark), *others = again.after(0, 1000).merged.items()
    assert (name, others) == ("flood", [])
    assert again.cover(("flood", key(0)), 2.0), "a save that waited since then may be of an erased chunk"
    assert not again.cover(("flood", key(0)), mark.at_s + 0.5), "it was asked for later"
    assert not again.cover(("flood", key(250)), 2.0, mark.number), "its sender has missed none of them"
    assert not again.cover(("other", key(2)), 0.0)
    assert not again.after(mark.number, 1000).merged
    again.close()


def test_records_are_dropped_only_when_every_shard_has_applied_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(erasures_module, "ERASURES_MAX", 16)
    erasures = Erasures(None, clock=lambda: now_s)
    erasures.note_seen("b", 1)
    erasures.note_seen("c", 1)
    for number in range(16):
        erasures.record([one(1, 1.0 + number, f"tenant{number}")])
    erasures.acknowledge("b", 16)
    with pytest.raises(ResourceExhausted, match="shard c"):
        erasures.record([one(1, 20.0, "last")])
    assert (len(erasures), erasures.newest) == (16, 16)
    erasures.acknowledge("c", 16)
    erasures.record([one(1, 20.0, "last")])
    assert len(erasures) == 15
    ((name, mark),) = erasures.after(0, 100).merged.items()
    assert (name, mark) == ("*", ErasureMark(2, 2.0))
    assert erasures.cover(("anybody", key(9)), 2.0), "a put that waited for so long is refused"
    assert not erasures.cover(("anybody", key(9)), 2.0, 2), "another shard's copy is taken"
    assert not erasures.cover(("anybody", key(9)), 2.5)
    for number in range(40):  # nobody acknowledges these, until the others count as gone
        now_s += AWAY_S_MAX / 2
        erasures.record([one(1, 30.0 + number, f"later{number}")])
    assert len(erasures) <= 16


def test_a_flood_of_erasures_merges_only_what_its_caller_may_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token for `pre*` erases in many namespaces; one shard is away and has applied nothing."""
    monkeypatch.setattr(erasures_module, "ERASURES_MAX", 64)
    erasures = Erasures(tmp_path / "erasures")
    erasures.note_seen("away", 1)
    erasures.record([Erasure("team-b", key(1), 1.0, "team-b"), Erasure("other", None, 1.0)])
    for number in range(500):
        erasures.record([Erasure(f"pre{number}", key(number % 200), 2.0 + number, "pre*")])
    assert len(erasures) <= 64
    erasures.close()
    again = Erasures(tmp_path / "erasures")
    (pattern, mark), *others = again.after(0, 1000).merged.items()
    assert (pattern, others) == ("pre*", [])
    assert again.is_known(Erasure("team-b", key(1), 1.0))
    assert again.is_known(Erasure("other", None, 1.0))
    assert again.cover(("pre1", key(9)), mark.at_s)
    assert not again.cover(("team-b", key(9)), 0.5)
    assert [one.within for one in again.after(0, 2).erasures] == ["team-b", "*"]
    again.close()


def test_a_flood_of_deletions_refuses_only_copies_that_its_caller_may_delete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(erasures_module, "DELETIONS_MAX", 8)
    deletions = Deletions(lambda: 1000.0)
    deletions.note([("team-b", key(1)), ("team-b", key(2))], "team-b")
    for number in range(100):
        deletions.note([(f"pre{number}", key(1))], "pre*")
    assert deletions.cover(("team-b", key(1)))
    assert not deletions.cover(("team-b", key(3)))
    assert deletions.cover(("pre1", key(9))), "it may have been among the first"
    assert not deletions.cover(("other", key(1)))


def test_a_shard_that_missed_a_flood_gives_up_that_namespaces_older_chunks(shard: Shard) -> None:
    for asked_at_s, tokens in ((1.0, range(8)), (5.0, range(9))):
        for namespace in ("acme", "acme/-/part", "other"):
            put_chunk(shard, tokens, namespace, asked_at_s)
    apply(shard, "b", [], 9, acme=ErasureMark(3, 2.0))
    assert sorted((one.manifest.namespace, one.manifest.asked_at_s) for one in shard.table.entries()) == [
        ("acme", 5.0),
        ("acme/-/part", 5.0),
        ("other", 1.0),
        ("other", 5.0),
    ]
    told = shard.erasures.after(0, 10)
    assert told.merged["acme"].at_s == 2.0, "it tells others, who may have missed the same"
    with pytest.raises(NotFound):
        put_chunk(shard, range(10), "acme", 1.5)
    apply(shard, "c", [], 9, everything=ErasureMark(3, 2.0))
    assert {one.manifest.asked_at_s for one in shard.table.entries()} == {5.0}


def put_chunk(shard: Shard, tokens: Sequence[int], namespace: str, asked_at_s: float) -> ChunkKey:
    manifest, frames = make_chunk(tokens)
    put = shard.begin_put(replace(manifest, namespace=namespace, asked_at_s=asked_at_s))
    assert put is not None
    for layer, frame in enumerate(frames):
        put.write(layer, memoryview(frame))
    shard.commit(put)
    return manifest.key


def test_a_shard_that_was_away_applies_erasures_by_their_times(shard: Shard) -> None:
    def held() -> list[float]:
        return sorted(entry.manifest.asked_at_s for entry in shard.table.entries())

    old, new = (put_chunk(shard, range(8 + number), "acme", 1.0 + number) for number in range(2))
    missed = [Erasure("acme", old, 1.5), Erasure("acme", new, 1.5)]
    for peer, number in (("b", 2), ("b", 2), ("c", 9)):
        apply(shard, peer, missed, number)
        assert held() == [2.0], "what was put later stays"
    with pytest.raises(NotFound, match="save it again"):
        put_chunk(shard, range(8), "acme", 1.5)
    put_chunk(shard, range(8), "acme", 1.6)
    assert held() == [1.6, 2.0]
    assert shard.erasures.newest == 2, "it records each erasure once"


def test_a_put_that_an_erasure_overtakes_is_refused(shard: Shard) -> None:
    manifest, frames = make_chunk(range(8))
    early, late = (
        shard.begin_put(replace(manifest, namespace=name, asked_at_s=at_s))
        for name, at_s in (("early", 1.0), ("late", 3.0))
    )
    assert early is not None
    assert late is not None
    for namespace in ("early", "late"):
        shard.erasures.record([Erasure(namespace, None, 2.0)])
    for put in (early, late):
        for layer, frame in enumerate(frames):
            put.write(layer, memoryview(frame))
    with pytest.raises(NotFound):
        shard.commit(early)
    assert shard.commit(late).inserted


def test_no_save_can_be_asked_for_far_ahead_of_the_shards_clock(shard: Shard) -> None:
    put_chunk(shard, range(8), "acme", time.time() + 1e6)
    (entry,) = shard.table.entries()
    assert entry.manifest.asked_at_s < time.time() + 10
    assert shard.erase(Scope("acme"), entry.manifest.asked_at_s).chunks == 1


def test_scopes_cover_what_was_erased() -> None:
    some = [one(1, 1.0), one(2, 1.0), one(1, 1.0, "b"), Erasure("b", None, 2.0), one(2, 2.0, "b")]
    assert scopes_of(some) == [
        Scope("acme", frozenset([key(1), key(2)]), 1.0),
        Scope("b", frozenset([key(1)]), 1.0),
        Scope("b", None, 2.0),
    ]


def test_an_erased_namespace_covers_its_parts() -> None:
    erasures = Erasures(None)
    erasures.record([Erasure("docs/-/a", None, 1.0)])
    erasures.record([Erasure("docs", None, 2.0)])
    for namespace in ("docs", "docs/-/a", "docs/-/a/.b", "docs/-/c"):
        assert erasures.cover((namespace, key(1)), 2.0)
        assert not erasures.cover((namespace, key(1)), 2.1)
        assert erasures.is_known(one(1, 2.0, namespace))
    assert not erasures.cover(("docs/a", key(1)), 0.0)
    assert Scope("docs").covers(("docs/-/a", key(1)))
    assert not Scope.of("docs", [key(1)]).covers(("docs/-/a", key(1)))


def test_leftovers_are_free_runs_that_were_written() -> None:
    size = 10 * GRANULE_BYTES
    leftovers = Leftovers(size)
    assert leftovers.within(0, size) == []
    leftovers.note(GRANULE_BYTES + 5, 10)
    leftovers.note(3 * GRANULE_BYTES - 1, 2)
    assert leftovers.within(0, size) == [(GRANULE_BYTES, 3 * GRANULE_BYTES)]
    assert leftovers.within(2 * GRANULE_BYTES + 7, 9) == [(2 * GRANULE_BYTES + 7, 9)]
    assert leftovers.within(4 * GRANULE_BYTES, GRANULE_BYTES) == []
    leftovers.clear(0, size)
    assert leftovers.within(0, size) == []
    assert Leftovers(size, 1).within(0, size) == [(0, GRANULE_BYTES)]


def test_work_is_shared_by_those_who_wait_for_it() -> None:
    shared = Shared()
    runs: list[int] = []
    first, *others = (shared.join() for _ in range(5))
    late: list[bool] = []

    def work() -> None:
        runs.append(len(runs))
        if len(runs) == 1:
            late.append(shared.run(shared.join(), work))

    assert shared.run(first, work)
    assert runs == [0]
    assert late == [False], "it came when the run had begun, and does not wait for its end"
    assert all(shared.run(one, work) for one in others)
    assert shared.run(6, work)
    assert runs == [0, 1], "one more run does for whoever came during the first"
    shared.close()
    with pytest.raises(Unavailable):
        shared.run(shared.join(), work)
