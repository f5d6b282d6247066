from __future__ import annotations

import math
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import xxhash

from kintsugi.core.errors import Corrupted, Unavailable, VersionMismatch
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.gateway.texts import known_chunks
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.gateway.texts.known_texts import ALIKE_TRIED_MAX, COMPARISONS_MAX

SPACE = ChunkSpace(ModelFingerprint.of({"weights": "test"}), "tenant")


def token_ids(known: KnownChunks, namespace: str, key: ChunkKey) -> tuple[int, ...] | None:
    found = known.token_ids(namespace, key)
    return None if found is None else tuple(found)


def key_of(*token_ids: int) -> ChunkKey:
    return ChunkKey.of(SPACE, token_ids)


def words(seed: int, chars: int) -> str:
    generator = random.Random(seed)
    return "".join(generator.choice("abcdefghij klmnop öü漢🙂") for _ in range(chars))


@pytest.fixture(params=["memory", "disk"])
def known(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KnownChunks]:
    chunks = KnownChunks(tmp_path / "known" if request.param == "disk" else None)
    yield chunks
    chunks.close()


def test_a_key_gives_its_tokens_in_its_namespace_alone(known: KnownChunks) -> None:
    known.remember("tenant", key_of(1, 2), (1, 2))
    assert token_ids(known, "tenant", key_of(1, 2)) == (1, 2)
    assert token_ids(known, "other", key_of(1, 2)) is None
    assert token_ids(known, "tenant", key_of(2, 1)) is None


def test_known_texts_are_found_inside_a_longer_one_of_their_namespace(known: KnownChunks) -> None:
    first, second = words(1, 700), words(2, 300)
    known.remember("tenant", key_of(1), (1,), first)
    known.remember("tenant", key_of(2), (2,), second)
    known.remember("tenant", key_of(3), (3,), "short")
    message = f"Use this:\n\n{second}\n\n{first}\n\n{second}short\nQuestion: why?"
    spans = known.find("tenant", message)
    assert [message[start:end] for start, end in spans] == [second, first, second]
    assert known.find("other", message) == []
    assert known.find("tenant", "") == known.find("tenant", first[:-1]) == []


def test_of_overlapping_texts_those_that_cover_most_are_taken(known: KnownChunks) -> None:
    text = words(3, 1000)
    for number, (start, end) in enumerate([(0, 400), (300, 900), (0, 100), (900, 1000), (0, 300)]):
        known.remember("tenant", key_of(number), (number,), text[start:end])
    assert known.find("tenant", text) == [(0, 300), (300, 900), (900, 1000)]


def test_what_is_forgotten_is_not_found(known: KnownChunks) -> None:
    text = words(4, 100)
    known.remember("tenant", key_of(1), (1,), text)
    known.remember("tenant", key_of(2), (2,), text)
    known.erase("tenant", [key_of(1)], math.inf)
    assert token_ids(known, "tenant", key_of(1)) is None
    assert known.find("tenant", text) == [(0, 100)], "another chunk has the same text"
    known.erase("tenant", [key_of(2)], math.inf)
    assert known.find("tenant", text) == []


def test_a_clock_that_was_ahead_keeps_no_text_from_an_erasure(
    known: KnownChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, now_s in enumerate([100_000.0, 200.0, 200.5]):
        monkeypatch.setattr(time, "time", lambda now_s=now_s: now_s)
        known.remember("tenant", key_of(number), (number,))
    assert known.erase("tenant", None, 200.2) == 2
    assert [known.knows("tenant", key_of(number)) for number in range(3)] == [False, False, True]


def test_the_least_recently_used_leave_first(tmp_path: Path) -> None:
    texts = [words(seed, 64) for seed in range(4)]
    known = KnownChunks(tmp_path, chunks_max=6)
    for number in range(3):
        known.remember("tenant", key_of(number), (number,), texts[number])
    assert token_ids(known, "tenant", key_of(0)) == (0,)
    known.remember("tenant", key_of(3), (3,), texts[3])
    assert [token_ids(known, "tenant", key_of(n)) for n in range(4)] == [(0,), None, (2,), (3,)]
    assert known.find("tenant", texts[1]) == []
    assert len(known) == 3
    known.close()


def test_one_tenant_pushes_out_nothing_of_another(tmp_path: Path) -> None:
    known = KnownChunks(tmp_path, chunks_max=100, tokens_max=100_000)
    texts = [words(seed, 64) for seed in range(10)]
    for number, text in enumerate(texts):
        known.remember("small", key_of(number), (number,), text)
    for number in range(1000):
        known.remember("greedy", key_of(number), (number,), words(number, 40))
    assert len(known) == 10 + 50, "half of the room is one tenant's at most"
    for number in range(1000):
        known.remember("also greedy", key_of(number), (number,))
        known.remember("long", key_of(number), range(900))
    assert all(known.find("small", text) == [(0, 64)] for text in texts)
    assert len(known) <= 100
    known.close()
    known = KnownChunks(tmp_path, chunks_max=100, tokens_max=100_000)
    assert all(known.find("small", text) == [(0, 64)] for text in texts)
    known.close()


def test_where_tenants_fill_all_the_largest_gives_way() -> None:
    known = KnownChunks(chunks_max=90)
    for number in range(45):
        known.remember("first", key_of(number), (number,))
        known.remember("second", key_of(number), (number,))
    for number in range(45):
        known.remember("third", key_of(number), (number,))
    held = [
        sum(known.knows(name, key_of(number)) for number in range(45))
        for name in ("first", "second", "third")
    ]
    assert held == [30, 30, 30]
    assert not known.knows("first", key_of(0))
    assert known.knows("first", key_of(44)), "the oldest left"


def test_long_chunks_count_by_their_tokens(tmp_path: Path) -> None:
    bounded = KnownChunks(tmp_path / "bounded", tokens_max=2000)
    for number in range(5):
        bounded.remember("tenant", key_of(number), range(number, number + 400))
    assert len(bounded) == 2
    assert not bounded.has_room("tenant")
    assert bounded.has_room("other")
    bounded.erase("tenant", [key_of(4)], math.inf)
    assert bounded.has_room("tenant")
    bounded.close()
    reopened = KnownChunks(tmp_path / "bounded", tokens_max=2000)
    assert len(reopened) == 1
    reopened.remember("tenant", key_of(9), range(700))
    assert [reopened.knows("tenant", key_of(number)) for number in (3, 9)] == [False, True]
    reopened.close()


def test_a_restart_keeps_what_was_known(tmp_path: Path) -> None:
    text = words(5, 2000)
    known = KnownChunks(tmp_path)
    known.remember("tenant", key_of(1), range(512), text)
    known.remember("tenant", key_of(2), (2,))
    known.close()
    known = KnownChunks(tmp_path, chunks_max=2)
    assert known.find("tenant", "x" + text) == []
    assert len(known) == 1, "the newest stays"
    known.close()
    known = KnownChunks(tmp_path)
    assert token_ids(known, "tenant", key_of(2)) == (2,)
    assert token_ids(known, "tenant", key_of(1)) is None
    known.close()


def test_a_restart_finds_texts_again(tmp_path: Path) -> None:
    text = words(6, 2000)
    known = KnownChunks(tmp_path)
    known.remember("tenant", key_of(1), range(512), text)
    known.close()
    known = KnownChunks(tmp_path)
    assert known.find("tenant", "x" + text) == [(1, 2001)]
    assert token_ids(known, "tenant", key_of(1)) == tuple(range(512))
    known.close()


def test_chunks_that_begin_alike_are_all_found(known: KnownChunks) -> None:
    header, footer = "file_path: /data/corpus/handbook/", "\n-- this page ends here --------------\n"
    texts = [f"{header}{n:02}.md\n{words(n, 100 + n % 3)}{footer if n % 2 else ''}" for n in range(60)]
    for number, text in enumerate(texts):
        known.remember("tenant", key_of(number), (number,), text)
    for shown in ([text] for text in texts):
        assert known.find("tenant", f"Use this: {shown[0]} Why?") == [(10, 10 + len(shown[0]))]
    message = "\n".join(texts)
    assert [message[start:end] for start, end in known.find("tenant", message)] == texts
    left = ALIKE_TRIED_MAX + 2
    for gone in range(59, left - 4, -1):
        known.erase("tenant", [key_of(gone)], math.inf)
        assert [message[start:end] for start, end in known.find("tenant", message)] == texts[:gone]


def test_a_use_survives_a_restart(tmp_path: Path) -> None:
    known = KnownChunks(tmp_path)
    for number in range(3):
        known.remember("tenant", key_of(number), (number,))
    assert known.token_ids("tenant", key_of(0)) is not None
    assert known.token_ids("tenant", key_of(3)) is None
    known.close()
    known = KnownChunks(tmp_path, chunks_max=4)
    assert [known.knows("tenant", key_of(number)) for number in range(3)] == [True, False, True]
    known.close()


def test_two_gateways_share_a_folder_while_one_replaces_the_other(tmp_path: Path) -> None:
    old, new = KnownChunks(tmp_path), KnownChunks(tmp_path)
    old.remember("tenant", key_of(1), (1,))
    new.remember("tenant", key_of(2), (2,), words(1, 64))
    assert [token_ids(new, "tenant", key_of(number)) for number in (1, 2)] == [(1,), (2,)]
    old.erase("tenant", [key_of(2)], math.inf)
    assert token_ids(new, "tenant", key_of(2)) is None
    old.remember("tenant", key_of(2), (2,), words(1, 64))
    assert old.find("tenant", words(1, 64)) == [(0, 64)]
    old.close()
    new.close()


def test_a_lookup_does_not_wait_for_a_write(tmp_path: Path) -> None:
    known = KnownChunks(tmp_path)
    known.remember("tenant", key_of(1), (1,))
    writer = threading.Thread(target=known.remember, args=("tenant", key_of(2), (2,)))
    with known._table._writes.transaction():
        writer.start()
        reader = threading.Thread(target=known.token_ids, args=("tenant", key_of(1)))
        reader.start()
        reader.join(10)
        assert not reader.is_alive()
    writer.join()
    assert token_ids(known, "tenant", key_of(2)) == (2,)
    known.close()


def test_a_damaged_row_is_a_miss(tmp_path: Path) -> None:
    known = KnownChunks(tmp_path)
    known.remember("tenant", key_of(1), range(512), words(7, 100))
    known.close()
    with closing(sqlite3.connect(tmp_path / "chunks.sqlite")) as database, database:
        ((tokens,),) = database.execute("SELECT tokens FROM chunk").fetchall()
        database.execute("UPDATE chunk SET tokens = ?", (tokens[:-1] + bytes([tokens[-1] ^ 1]),))
    known = KnownChunks(tmp_path)
    assert token_ids(known, "tenant", key_of(1)) is None
    assert not known.knows("tenant", key_of(1))
    known.remember("tenant", key_of(1), range(512))
    assert token_ids(known, "tenant", key_of(1)) == tuple(range(512))
    known.close()


def damage(folder: Path, change: str, *values: object) -> None:
    """Changes rows as another program or a flipped bit may."""
    with closing(sqlite3.connect(folder / "chunks.sqlite")) as database, database:
        database.execute(change, values)


@pytest.mark.parametrize("value", [b"", b"x" * 35, "x" * 36, 5])
def test_a_damaged_text_is_not_found_and_costs_nothing_else(tmp_path: Path, value: object) -> None:
    with closing(KnownChunks(tmp_path)) as known:
        known.remember("tenant", key_of(1), (1,), words(1, 100))
    damage(tmp_path, "UPDATE chunk SET text = ?", value)
    with closing(KnownChunks(tmp_path)) as known:
        assert known.find("tenant", words(1, 100)) == []
        assert token_ids(known, "tenant", key_of(1)) == (1,)
        known.remember("tenant", key_of(1), (1,), words(1, 100))
        assert known.find("tenant", words(1, 100)) == [(0, 100)]


@pytest.mark.parametrize("value", ["text", b"blob", 5, 0.5, xxhash.xxh3_64_digest(key_of(1).digest)])
def test_damaged_tokens_of_another_type_or_none_are_a_miss(tmp_path: Path, value: object) -> None:
    with closing(KnownChunks(tmp_path)) as known:
        known.remember("tenant", key_of(1), (1,))
    damage(tmp_path, "UPDATE chunk SET tokens = ?", value)
    with closing(KnownChunks(tmp_path)) as known:
        assert token_ids(known, "tenant", key_of(1)) is None


@pytest.mark.parametrize("value", ["text", b"blob", (1 << 63) - 1])
def test_a_damaged_time_of_use_leaves_times_for_others(tmp_path: Path, value: object) -> None:
    with closing(KnownChunks(tmp_path)) as known:
        known.remember("tenant", key_of(1), (1,))
    damage(tmp_path, "UPDATE chunk SET used = ?", value)
    with closing(KnownChunks(tmp_path)) as known:
        known.remember("tenant", key_of(2), (2,))
        assert token_ids(known, "tenant", key_of(2)) == (2,)


@pytest.mark.parametrize("value", [9, -9, "text", b"blob"])
def test_damaged_counts_are_an_error_that_says_what_to_do(tmp_path: Path, value: object) -> None:
    with closing(KnownChunks(tmp_path)) as known:
        known.remember("tenant", key_of(1), (1,))
        damage(tmp_path, "UPDATE total SET chunks = ?", value)
        damage(tmp_path, "UPDATE share SET chunks = ?", value)
        known.has_room("tenant")
        known.remember("tenant", key_of(2), (2,))
        assert len(known) >= 0
    damage(tmp_path, "DELETE FROM chunk")
    damage(tmp_path, "DELETE FROM share")
    damage(tmp_path, "UPDATE total SET chunks = 9")
    with pytest.raises(Corrupted, match="remove the folder"):
        KnownChunks(tmp_path)


def test_a_disk_that_fails_costs_hits_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = KnownChunks(tmp_path / "known")
    known.remember("tenant", key_of(1), (1,), words(1, 64))
    shutil.rmtree(tmp_path / "known")
    known.remember("tenant", key_of(2), (2,), words(2, 64))
    assert not known.knows("tenant", key_of(2))
    assert known.find("tenant", words(2, 64)) == []
    assert "was deleted" in caplog.text
    known.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"file/below.*gateway\.expert\.data_dir"):
        KnownChunks(tmp_path / "file" / "below")
    (tmp_path / "chunks.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(Corrupted, match="remove the folder"):
        KnownChunks(tmp_path)


def test_a_folder_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    KnownChunks(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "chunks.sqlite")) as database:
        database.execute("PRAGMA user_version=2")
    with pytest.raises(VersionMismatch, match=r"schema 2.*remove the folder"):
        KnownChunks(tmp_path)


def test_a_text_made_to_match_everywhere_costs_a_bounded_number_of_comparisons() -> None:
    known = KnownChunks()
    for number in range(40):
        known.remember("tenant", key_of(number), (number,), "a" * (1000 + number))
    hostile = "a" * 200_000
    began_s = time.process_time()
    spans = known.find("tenant", hostile)
    elapsed_s = time.process_time() - began_s
    assert 0 < len(spans) <= COMPARISONS_MAX
    assert elapsed_s < 1.0, "milliseconds, on a machine with nothing else to do"


def test_a_long_text_is_searched_in_milliseconds() -> None:
    known = KnownChunks()
    texts = [words(seed, 2000) for seed in range(200)]
    for number, text in enumerate(texts):
        known.remember("tenant", key_of(number), (number,), text)
    message = "\n\n".join(texts[:10])
    known.find("tenant", message)
    began_s = time.process_time()
    for _ in range(20):
        assert len(known.find("tenant", message)) == 10
    assert (time.process_time() - began_s) / 20 < 0.003


def test_eviction_asks_indexes_however_many_namespaces_there_are() -> None:
    known = KnownChunks()
    with known._table._writes.open_read() as database:
        plan = database.execute(f"EXPLAIN QUERY PLAN {known_chunks._LARGEST}", (1, 1)).fetchall()
    scans = [line for *_, line in plan if line.startswith("SCAN share")]
    assert len(scans) == 2
    assert all("USING" in line and "INDEX" in line for line in scans)
    known.close()
