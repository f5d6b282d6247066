"""What a shard remembers of erasures, who is told, and what a shard that was away obeys."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from kintsugi.core.spaces import ChunkKey
from kintsugi.store.protocol.interface import Erasure
from kintsugi.store.shard.erasure import records as erasures_module
from kintsugi.store.shard.erasure.forgetting import MARKS_MAX, add_marks, find_mark
from kintsugi.store.shard.erasure.records import Erasures
from kintsugi.store.shard.erasure.scope import Scope, scopes_of
from kintsugi.store.shard.erasure.shared import Shared
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.leftovers import GRANULE_BYTES, Leftovers
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


def test_erasures_are_listed_in_order_and_outlive_the_process(tmp_path: Path) -> None:
    first = Erasures(tmp_path / "erasures")
    first.record([one(1, 1.0), one(2, 2.0)])
    first.record([one(3, 3.0)], peer="b", seen=7)
    first.close()
    again = Erasures(tmp_path / "erasures")
    assert list(again.after(0, 10, learned=True).erasures) == [one(1, 1.0), one(2, 2.0), one(3, 3.0)]
    assert list(again.after(0, 10, learned=False).erasures) == [one(1, 1.0), one(2, 2.0)]
    page = again.after(0, 1, learned=False)
    assert (list(page.erasures), page.next) == ([one(1, 1.0)], 1)
    assert again.after(page.next, 10, learned=False).next == again.newest == 3
    assert (again.seen_of("b"), again.seen_of("c")) == (7, 0)
    again.close()


def test_a_later_erasure_replaces_the_one_before_and_a_namespace_its_chunks() -> None:
    erasures = Erasures(None)
    erasures.record([one(1, 5.0), one(2, 5.0), one(1, 4.0, "other")])
    erasures.record([one(1, 3.0)])
    (_, _, newest) = erasures.after(0, 10, learned=True).erasures
    assert newest.at_s > 5.0, "whoever asked has a clock that is late"
    erasures.record([Erasure("acme", None, 9.0)])
    assert list(erasures.after(0, 10, learned=True).erasures) == [
        one(1, 4.0, "other"),
        Erasure("acme", None, 9.0),
    ]
    assert erasures.is_known(one(2, 5.0))
    assert not erasures.is_known(one(2, 10.0))
    assert not erasures.is_known(one(2, 4.0, "other"))


def test_two_shards_that_tell_each_other_of_erasures_come_to_an_end() -> None:
    """Both were asked for the same two erasures, in another order."""
    shards = [Erasures(None), Erasures(None)]
    for shard, times in zip(shards, ((1.0, 1.0003), (1.0003, 1.0)), strict=True):
        for at_s in times:
            shard.record([one(1, at_s)])

    def tell(teller: Erasures, hearer: Erasures) -> bool:
        told = teller.after(hearer.seen_of("teller"), 10, learned=True)
        missed = [erasure for erasure in told.erasures if not hearer.is_known(erasure)]
        hearer.record(missed, peer="teller", seen=told.next)
        return bool(missed)

    news = [tell(shards[turn % 2], shards[1 - turn % 2]) for turn in range(6)]
    assert not any(news[2:])


def test_an_erasure_that_is_asked_for_again_is_no_other() -> None:
    first, second = Erasures(None), Erasures(None)
    for erasures in (first, first, second):
        erasures.record([one(1, 5.0)])
    (told,) = first.after(0, 10, learned=True).erasures
    assert second.is_known(told)


def test_an_erasure_after_its_namespaces_is_news_to_who_saw_the_first() -> None:
    """The clock of who asked for the second is late."""
    first, second = Erasures(None), Erasures(None)
    for erasures in (first, second):
        erasures.record([Erasure("acme", None, 9.0)])
    first.record([one(1, 8.0)])
    (_, told) = first.after(0, 10, learned=True).erasures
    assert not second.is_known(told)


def test_an_erased_namespace_makes_room_instead_of_taking_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasures_module, "ERASURES_MAX", 4)
    erasures = Erasures(None)
    erasures.record([one(1, 1.0, "other"), *(one(number, 2.0) for number in range(3))])
    erasures.record([Erasure("acme", None, 3.0)])
    assert erasures.forgotten == {}
    assert erasures.is_known(one(1, 1.0, "other"))


def test_shards_record_one_erasure_with_one_time() -> None:
    """Or the one that recorded the earlier time would obey the other, and erase what was put since."""
    chunk, told = make_chunk(range(8))[0].key, []
    for now_s in (100.0, 100.5):
        with closing(Shard(RamTier(1 << 20), wall_clock=lambda now_s=now_s: now_s)) as shard:  # type: ignore[misc]
            shard.erase(Scope.of("acme", [chunk]), 101.0)
            told += shard.erasures.after(0, 10, learned=False).erasures
    assert told == [Erasure("acme", chunk, 101.0)] * 2
    with closing(Shard(RamTier(1 << 20), wall_clock=lambda: 100.0)) as shard:
        shard.erase(Scope("acme"), 1e9)
        (erasure,) = shard.erasures.after(0, 10, learned=False).erasures
    assert erasure.at_s <= 200.0, "a clock that is wrong by years hides no later erasure"


def test_the_oldest_are_forgotten_and_that_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasures_module, "ERASURES_MAX", 3)
    erasures = Erasures(tmp_path / "erasures")
    for number in range(5):
        erasures.record([one(number, float(number))])
    assert (len(erasures), erasures.forgotten) == (3, {"acme": 2})
    erasures.close()
    again = Erasures(tmp_path / "erasures")
    assert (len(again), again.forgotten, again.newest) == (3, {"acme": 2}, 5)
    again.close()


def test_a_flood_of_erasures_costs_the_namespace_that_sends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasures_module, "ERASURES_MAX", 40)
    erasures = Erasures(tmp_path / "erasures")
    erasures.record([one(1, 1.0, "other"), Erasure("third", None, 1.0)])
    for number in range(200):
        erasures.record([one(number, 2.0 + number, "flood")])
    for number in range(100):
        erasures.record([one(1, 300.0, f"many/{number}")])
    assert len(erasures) <= 40
    erasures.close()
    again = Erasures(tmp_path / "erasures")
    assert again.newest == 302
    assert again.is_known(one(1, 1.0, "other"))
    assert again.is_known(one(1, 1.0, "third"))
    assert not again.is_known(one(0, 2.0, "flood"))
    assert not again.cover(("other", key(1)), 1), "a copy that saw its erasure is taken"
    assert again.cover(("flood", key(250)), 1), "nobody knows whether it was erased"
    assert {"other", "third"}.isdisjoint(again.forgotten)
    again.close()


def test_marks_are_bounded_and_join_a_tenants_namespaces_first() -> None:
    marks = add_marks({"old": 1}, {2 + number: f"tenant/{number}" for number in range(MARKS_MAX)})
    assert marks == {"old": 1, "tenant/*": MARKS_MAX + 1}
    assert find_mark(marks, "tenant/7") == MARKS_MAX + 1
    assert find_mark(marks, "tenant/7/-/acme") == MARKS_MAX + 1, "erased with what it is a part of"
    assert find_mark(marks, "tenant") == 0
    many = add_marks({}, {number: f"tenant{number}" for number in range(1, 2 * MARKS_MAX)})
    assert len(many) <= MARKS_MAX
    assert all(find_mark(many, f"tenant{number}") >= number for number in range(1, 2 * MARKS_MAX))
    assert find_mark(many, "unheard") < MARKS_MAX * 2 - 1, "who saw the later ones keeps what it holds"


def test_a_folder_of_an_earlier_version_forgot_something_of_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasures_module, "ERASURES_MAX", 3)
    value = struct.Struct("<dQ?")
    with lmdb.open(str(tmp_path)) as old, old.begin(write=True) as transaction:
        transaction.put(b"\0forgotten", struct.pack("<Q", 7))
        transaction.put(b"\0peer\0b", struct.pack("<Q", 5))
        for number in range(3):
            transaction.put(b"acme\0" + key(number).digest, value.pack(1.0, 8 + number, False))
    erasures = Erasures(tmp_path)
    assert (erasures.forgotten, erasures.newest, erasures.seen_of("b")) == ({"*": 7}, 10, 5)
    erasures.record([one(4, 2.0)])
    erasures.close()
    with lmdb.open(str(tmp_path)) as back, back.begin() as transaction:
        highest = transaction.get(b"\0forgotten")
        assert highest == struct.pack("<Q", 8), "an earlier version takes it for everybody's"
        stored = {name: data for name, data in transaction.cursor() if name != b"\0forgotten"}
        sizes = {8 if name.startswith(b"\0peer\0") else value.size for name in stored}
        assert {len(data) for data in stored.values()} == sizes, "an earlier version can read each"
    again = Erasures(tmp_path)
    assert again.forgotten == {"*": 7, "acme": 8}
    again.close()


def test_a_shard_that_missed_a_flood_gives_up_that_namespace_alone(shard: Shard) -> None:
    for namespace in ("acme", "team/a", "other"):
        manifest, frames = make_chunk(range(8))
        manifest = replace(manifest, namespace=namespace)
        put = shard.begin_put(manifest)
        assert put is not None
        for layer, frame in enumerate(frames):
            put.write(layer, memoryview(frame))
        shard.commit(put)
    shard.obey("b", [], seen=9, forgotten={"acme": 3, "team/*": 4, "other": 0})
    assert {entry.manifest.namespace for entry in shard.table.entries()} == {"other"}
    shard.obey("b", [], seen=20, forgotten={"other": 9})
    assert len(shard) == 1, "it had seen those"


def test_a_shard_that_was_away_obeys_once(shard: Shard) -> None:
    manifests = [make_chunk(range(8 + i)) for i in range(3)]

    def put(index: int) -> None:
        manifest, frames = manifests[index]
        put = shard.begin_put(manifest)
        assert put is not None
        for layer, frame in enumerate(frames):
            put.write(layer, memoryview(frame))
        shard.commit(put)

    def held() -> list[bool]:
        return [entry is not None for entry in shard.lookup("acme", [m.key for m, _ in manifests])]

    for index in range(3):
        put(index)
    missed = [Erasure("acme", manifests[0][0].key, 1.0)]
    shard.obey("b", missed, seen=1, forgotten={})
    assert held() == [False, True, True]
    put(0)
    shard.obey("b", missed, seen=1, forgotten={})
    shard.obey("c", missed, seen=4, forgotten={})
    assert held() == [True, True, True], "what was put again stays"
    shard.erase(Scope.of("acme", [manifests[1][0].key]), 2.0)
    put(1)
    shard.obey("b", [Erasure("acme", manifests[1][0].key, 2.0)], seen=2, forgotten={})
    assert held() == [True, True, True], "it had erased this itself"
    shard.obey("b", [], seen=9, forgotten={"*": 2})
    assert held() == [True, True, True], "it has seen those that are forgotten"
    shard.obey("b", [], seen=20, forgotten={"*": 12})
    assert held() == [False, False, False], "nobody knows what it missed"


def test_scopes_cover_what_was_erased() -> None:
    some = [one(1, 1.0), one(2, 1.0), one(1, 1.0, "b"), Erasure("b", None, 2.0), one(2, 3.0, "b")]
    assert scopes_of(some) == [Scope.of("acme", [key(1), key(2)]), Scope("b")]


def test_an_erased_namespace_covers_its_parts() -> None:
    erasures = Erasures(None)
    erasures.record([Erasure("docs/-/a", None, 1.0)])
    erasures.record([Erasure("docs", None, 2.0)])
    for namespace in ("docs", "docs/-/a", "docs/-/a/.b", "docs/-/c"):
        assert erasures.cover((namespace, key(1)), 1), "a copy that did not see the second is not taken"
        assert not erasures.cover((namespace, key(1)), 2)
        assert erasures.is_known(one(1, 2.0, namespace))
    assert not erasures.cover(("docs/a", key(1)), 0)
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
    shared, runs = Shared(), []
    began, go_on = threading.Event(), threading.Event()

    def work() -> None:
        runs.append(len(runs))
        if len(runs) == 1:
            began.set()
            assert go_on.wait(10)

    threads = [threading.Thread(target=shared.run, args=(work,)) for _ in range(5)]
    threads[0].start()
    assert began.wait(10)
    for thread in threads[1:]:
        thread.start()
    while shared._asked < len(threads):
        pass
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert runs == [0, 1], "the first was under way; one more does for all others"
