"""What is erased at one gateway is in no file, in no memory of the shard, and in no answer of another."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kintsugi.core.errors import NotFound, Unavailable
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway import erasing
from kintsugi.precompute.database import Database
from kintsugi.sdk.client import Client
from kintsugi.sdk.types import DocumentChunk, Key
from kintsugi.serving import catching_up
from kintsugi.serving.catching_up import CatchingUp
from kintsugi.store.client.directory import ShardAddress, ShardMap
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.shard import erasure as records
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from tests.contracts.store_contract import make_chunk
from tests.fakes.fixed_directory import FixedDirectory
from tests.fakes.marked_service import CORPUS, MIB, PHRASE, MarkedService, running
from tests.fakes.stub_backend import StubDelays
from tests.integration.serving.gateways import Setup
from tests.integration.serving.gateways import running as running_stub

QUESTION = "\nQuestion: what do marmots guard?\nAnswer:"
PLAIN = ["A passage that nobody has marked, and that stays where it is. " * 5 + str(i) for i in range(3)]


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MarkedService]:
    monkeypatch.setattr(erasing, "FOLLOW_PERIOD_S", 0.05)
    monkeypatch.setattr(erasing, "FOLLOWED_S", 1.0)
    with running(tmp_path) as service:
        yield service


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline_s = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return condition()


def test_nothing_is_left_of_a_chunk_a_document_and_a_namespace(service: MarkedService) -> None:
    chunks, documents, namespace = ([service.mark(10 * part + i) for i in range(4)] for part in range(3))
    marks = [*chunks, *documents, *namespace]
    with (
        service.client("docs") as mine,
        service.client("docs", 1) as theirs,
        service.client("tenant") as other,
    ):
        kept = mine.put_chunks(PLAIN)
        puts = mine.put_chunks([mark.text for mark in (*chunks, *documents)])
        other_puts = other.put_chunks([mark.text for mark in namespace])
        service.record("docs", {"one": documents[:2], "two": documents[1:]})
        service.record("tenant", {"three": namespace})
        for client, some in ((theirs, chunks), (theirs, documents), (other, namespace)):
            assert client.generate([mark.text for mark in some], QUESTION).accounting["chunks_hit"] == 4
        forms = {line.split(" in ")[0] for line in service.find_residue(marks)}
        assert forms == {"tokens", "compressed tokens", "digest of the text"}, "else nothing was looked for"

        assert all(mine.delete_chunk(put.key) for put in puts[:4])
        with ThreadPoolExecutor(3) as threads:
            first = threads.submit(mine.delete_document, f"{CORPUS}-docs", "one")
            third = threads.submit(other.erase_namespace)
            one, tenant = first.result(60), third.result(60)
        assert one.deleted
        assert tenant.deleted
        assert {place.place.split(" ")[0] for place in tenant.places} == {
            *("shard", "ledger", "known", "caches"),
        }
        assert tenant.asked_at_s <= tenant.gone_at_s <= time.time()
        assert mine.get_chunk(puts[4].key) is None, "no other document has it"
        assert mine.get_chunk(puts[5].key) is not None, "the second document has it, too"
        assert mine.generate([DocumentChunk(f"{CORPUS}-docs", "two", 0)], QUESTION)
        assert mine.delete_document(f"{CORPUS}-docs", "two").deleted
        assert not mine.delete_document(f"{CORPUS}-docs", "two").deleted, "it can be repeated"

        assert service.find_residue(marks) == []
        for client, erased in ((mine, puts), (theirs, puts), (other, other_puts)):
            assert not [put for put in erased if client.get_chunk(put.key) is not None]
            with pytest.raises(NotFound):
                client.generate([Key(erased[0].key)], QUESTION)
        for one_gateway in service.gateways:
            for name in ("docs", "tenant"):
                assert one_gateway.gateway.known.find(name, "\n".join(mark.text for mark in marks)) == []
        assert {chunk.key for chunk in mine.list_chunks()} == {put.key for put in kept}
        assert theirs.generate(PLAIN, QUESTION).accounting["chunks_hit"] == 3
        assert list(other.list_chunks()) == []


def test_another_gateway_forgets_what_it_did_not_erase_and_keeps_what_came_later(
    service: MarkedService,
) -> None:
    mark = service.mark(1)
    with service.client("docs") as mine, service.client("docs", 1) as theirs:
        (put,) = theirs.put_chunks([mark.text])
        known = service.gateways[1].gateway.known
        key = ChunkKey.from_hex(put.key)
        assert known.knows("docs", key)
        mine.delete_chunk(put.key)
        assert eventually(lambda: not known.knows("docs", key))
        mine.put_chunks([mark.text])
        mine.delete_chunk(put.key)
        (again,) = mine.put_chunks([mark.text])
        assert again.new
        seen = service.gateways[0].gateway.known
        newest = service.gateways[1].gateway.known
        assert eventually(lambda: seen.cursor == newest.cursor == current_cursor(service))
        assert mine.generate([Key(put.key)], QUESTION).accounting["chunks_hit"] == 1


def current_cursor(service: MarkedService) -> str:
    return f'{{"{service.shard.shard_id}": {service.shard.erasures.newest}}}'


def test_a_chunk_that_is_being_saved_is_erased_once_it_is_saved() -> None:
    setup = Setup(delays=StubDelays(save_s=0.2))
    with running_stub(setup) as gateway, closing(gateway_client(gateway.address)) as client:
        puts = client.put_chunks([f"{PHRASE} {i}" for i in range(3)], wait=False)
        assert gateway.eventually(lambda: bool(gateway.backend.seen.saves))
        client.erase_namespace()
        assert gateway.store.stats().chunks == 0
        assert {put.state for put in puts} == {"accepted"}


def gateway_client(address: str) -> Client:
    return Client(address, "docs")


SECRET = PHRASE.encode() * 8


def files_with_secret(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if SECRET[:40] in path.read_bytes()}


def test_a_database_keeps_nothing_of_deleted_rows(tmp_path: Path) -> None:
    database = Database(tmp_path / "one.sqlite", "CREATE TABLE IF NOT EXISTS row (value BLOB);", 1)
    with database.transaction() as db:
        db.execute("INSERT INTO row VALUES ('kept')")
        db.execute("INSERT INTO row VALUES (?)", (SECRET,))
    assert files_with_secret(tmp_path) == {"one.sqlite-wal"}
    with database.transaction() as db:
        db.execute("DELETE FROM row WHERE value=?", (SECRET,))
    database.scrub()
    assert files_with_secret(tmp_path) == set()
    with database.open_read() as db:
        assert db.execute("SELECT value FROM row").fetchall() == [("kept",)]
    database.close()


def test_a_log_that_somebody_reads_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kintsugi.precompute.database.BUSY_S", 0.1)
    database = Database(tmp_path / "one.sqlite", "CREATE TABLE IF NOT EXISTS row (value BLOB);", 1)
    with database.transaction() as db:
        db.execute("INSERT INTO row VALUES (?)", (SECRET,))
    with closing(sqlite3.connect(tmp_path / "one.sqlite")) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM row").fetchone() == (1,)
        with database.transaction() as db:
            db.execute("DELETE FROM row")
        with pytest.raises(Unavailable, match="erase again"):
            database.scrub()
    database.scrub()
    assert files_with_secret(tmp_path) == set()
    database.close()


def test_one_erasure_beside_saves_at_two_gateways_is_made_once(service: MarkedService) -> None:
    """Saves were running at both when it was asked for. Each gateway follows it, and erases nothing."""
    stop, put = threading.Event(), list[list[str]]([[], []])
    for one in service.gateways:
        one.gateway.backend.delays = StubDelays(save_s=0.2)  # type: ignore[attr-defined]

    def ingest(number: int) -> None:
        with service.client("docs", number) as client:
            while not stop.wait(0.02):
                text = service.mark(1000 * number + len(put[number])).text
                put[number] += [one.key for one in client.put_chunks([text], wait=False)]

    with ThreadPoolExecutor(2) as threads, service.client("docs") as client:
        running = [threads.submit(ingest, number) for number in range(2)]
        assert eventually(lambda: len(service.shard) > 4)
        receipt = client.erase_namespace()
        after = [len(keys) for keys in put]
        time.sleep(1.5)
        stop.set()
        for ingesting in running:
            ingesting.result(10)
        assert eventually(lambda: all(one.gateway._saver.is_idle for one in service.gateways), 60.0)
        later = {key for keys, count in zip(put, after, strict=True) for key in keys[count:]}
        stored = {chunk.key for chunk in client.list_chunks()}
    assert receipt.deleted
    assert service.shard.erasures.newest == 1
    assert later <= stored, "what was put after the erasure stays"
    times = [entry.manifest.asked_at_s for entry in service.shard.table.entries()]
    assert min(times) > receipt.asked_at_s


def test_a_shard_that_was_away_applies_erasures_before_it_is_asked(tmp_path: Path) -> None:
    def open_one(name: str) -> Shard:
        return open_shard(ShardSpec(MIB, tmp_path / name, (SsdSpec(tmp_path / f"{name}-disk", MIB),)))

    chunks = [make_chunk(range(8 + i)) for i in range(2)]
    keys = [manifest.key for manifest, _ in chunks]
    with (
        closing(open_one("b")) as away,
        ShardServer(away, "127.0.0.1:0") as server,
        closing(GrpcStore(server.address, GrpcOptions(ack="durable"))) as store,
    ):
        for chunk in chunks:
            store.put(*chunk)
    with closing(open_one("a")) as here, ShardServer(here, "127.0.0.1:0") as server:
        with closing(GrpcStore(server.address)) as store:
            store.erase("acme", keys[:1], time.time())
        with closing(open_one("b")) as back:
            mine = ShardAddress(back.shard_id, "127.0.0.1:1")
            shards = ShardMap(1, (ShardAddress(here.shard_id, server.address), mine))
            following = CatchingUp(back, FixedDirectory(shards))
            following.ask_all()
            assert [entry is not None for entry in back.lookup("acme", keys)] == [False, True]
            assert back.erasures.seen_of(here.shard_id) == 1
            files = [path for path in tmp_path.glob("b*/**/*") if path.is_file()]
            erased, _ = chunks[0]
            assert not [path for path in files if erased.digests[:16] in path.read_bytes()]
            following.close()


def test_a_flood_that_a_shard_missed_costs_it_no_other_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "NAMESPACE_MAX", 20)
    (manifest, frames), erased = make_chunk(range(8)), make_chunk(range(9))
    with (
        closing(open_shard(ShardSpec(MIB, tmp_path / "a"))) as here,
        closing(open_shard(ShardSpec(MIB, tmp_path / "b"))) as away,
        ShardServer(here, "127.0.0.1:0") as flooded,
        ShardServer(away, "127.0.0.1:0") as server,
        closing(GrpcStore(flooded.address)) as flooder,
        closing(GrpcStore(server.address)) as store,
    ):
        store.put(manifest, frames)
        store.put(*erased)
        flooder.erase("acme", [erased[0].key], time.time())
        for number in range(5):
            made_up = [ChunkKey(bytes([number, i]) * 16) for i in range(10)]
            flooder.erase("flood", made_up, time.time())
        ((namespace, mark),) = flooder.list_erasures(here.shard_id, 1).merged.items()
        assert namespace == "flood"
        assert not flooder.list_erasures(here.shard_id, mark.number).merged, "none is newer"
        shards = ShardMap(1, (ShardAddress(here.shard_id, flooded.address),))
        following = CatchingUp(away, FixedDirectory(shards))
        following.ask_all()
        assert store.lookup("acme", [manifest.key, erased[0].key]) == [manifest, None]
        following.close()


def test_a_shard_that_can_no_longer_follow_erasures_fails_visibly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catching_up, "PERIOD_S", 0.01)
    with closing(open_shard(ShardSpec(MIB))) as shard:
        following = CatchingUp(shard, FixedDirectory(ShardMap(1, ())))
        following.start()
        monkeypatch.setattr(following, "_find_others", lambda: 1 / 0)
        assert eventually(lambda: isinstance(shard.failure, ZeroDivisionError))
        following.close()


def test_a_shard_of_a_large_store_asks_a_few_others_at_a_time_and_all_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    with closing(open_shard(ShardSpec(MIB))) as shard:
        others = tuple(ShardAddress(f"shard-{number}", "127.0.0.1:1") for number in range(20))
        mine = ShardAddress(shard.shard_id, "127.0.0.1:1")
        following = CatchingUp(shard, FixedDirectory(ShardMap(1, (mine, *others))))
        monkeypatch.setattr(following, "_ask", lambda address: asked.append(address.shard_id))
        counts = []
        for _ in range(6):
            following.turn()
            counts.append(len(asked))
        names = sorted(one.shard_id for one in others)
        assert counts == [8, 16, 20, 28, 36, 40]
        assert sorted(asked[:20]) == sorted(asked[20:]) == names
        asked.clear()
        following.ask_all()
        assert sorted(asked) == names, "before it serves, it asks all"
        following.close()


def test_a_peer_that_does_not_answer_keeps_nobody_from_serving(tmp_path: Path) -> None:
    with closing(open_shard(ShardSpec(MIB))) as shard:
        gone = FixedDirectory(ShardMap(1, (ShardAddress("gone", "127.0.0.1:1"),)))
        following = CatchingUp(shard, gone, GrpcOptions(call_timeout_s=1.0))
        following.start()
        assert shard.erasures.seen_of("gone") == 0
        following.close()
