"""Several shards as one store: the contract, lost shards, replicas."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.client.directory import GrpcDirectory, ShardAddress, ShardMap
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.client.registry import open_store
from kintsugi.store.client.sharded import ShardedStore
from kintsugi.store.protocol.breaker import FAILURES_MAX, OPEN_S
from kintsugi.store.protocol.interface import ChunkLost, LayerFrame
from kintsugi.store.shard import reports as reports_module
from kintsugi.store.shard import service as service_module
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.contracts.store_contract import FINGERPRINT, StoreContract, make_chunk, make_report, read_all
from tests.fakes.directory_server import serving_directory
from tests.fakes.fixed_directory import FixedDirectory

SEE_SHARDS = "see which shards answer: kintsugi status --url URL"


def serve(stack: ExitStack, shard_id: str, listen: str = "127.0.0.1:0") -> ShardServer:
    return stack.enter_context(ShardServer(Shard(RamTier(8 << 20), shard_id=shard_id), listen))


def shard_map(servers: list[ShardServer], replicas: int = 1) -> ShardMap:
    addresses = tuple(ShardAddress(server.shard.shard_id, server.address) for server in servers)
    return ShardMap(1, addresses, replicas)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def servers(stack: ExitStack) -> list[ShardServer]:
    return [serve(stack, f"shard-{i}") for i in range(3)]


@pytest.fixture(params=[1, 2], ids=["single", "replicated"])
def store(request: pytest.FixtureRequest, servers: list[ShardServer]) -> Iterator[ShardedStore]:
    store = ShardedStore(FixedDirectory(shard_map(servers, request.param)))
    yield store
    store.close()


class TestShardedStore(StoreContract):
    def test_stats_count_what_is_held(  # type: ignore[override]
        self, store: ShardedStore, request: pytest.FixtureRequest
    ) -> None:
        manifest, frames = make_chunk(range(40))
        store.put(manifest, frames)
        replicas = request.node.callspec.params["store"]
        assert store.stats().chunks == replicas
        assert store.stats().bytes_used >= replicas * manifest.chunk_bytes


def fill(store: ShardedStore, count: int = 24) -> list[tuple[ChunkManifest, list[bytes]]]:
    chunks = [make_chunk(range(start, start + 40)) for start in range(0, 100 * count, 100)]
    for manifest, frames in chunks:
        assert store.put(manifest, frames)
    return chunks


def test_what_a_silent_shard_owns_is_not_called_missing(stack: ExitStack) -> None:
    """Who prefills what is missing would prefill it all again."""
    with ExitStack() as doomed:
        servers = [serve(doomed, "shard-0"), serve(stack, "shard-1")]
        single = stack.enter_context(closing(ShardedStore(FixedDirectory(shard_map(servers)))))
        twice = stack.enter_context(closing(ShardedStore(FixedDirectory(shard_map(servers, replicas=2)))))
        keys = [manifest.key for manifest, _ in fill(single)]
        for manifest, frames in (make_chunk(range(start, start + 40)) for start in range(0, 2400, 100)):
            twice.put(manifest, frames)
        assert single.tiers("acme", keys) == twice.tiers("acme", keys) == ["ram"] * len(keys)
    owned = [key for key in keys if shard_map(servers).owners(key)[0].shard_id == "shard-1"]
    assert single.tiers("acme", owned) == ["ram"] * len(owned)
    with pytest.raises(Unavailable, match=f"owns chunk .* and does not answer; {SEE_SHARDS}"):
        single.tiers("acme", keys)
    assert twice.tiers("acme", keys) == ["ram"] * len(keys)
    with pytest.raises(Unavailable, match="does not answer"):
        single.retain("acme", keys)
    assert twice.retain("acme", keys) == [True] * len(keys)
    nowhere = stack.enter_context(closing(ShardedStore(FixedDirectory(ShardMap(1, ())))))
    with pytest.raises(Unavailable, match="shard map is empty"):
        nowhere.tiers("acme", keys)


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_silent_shard_holds_is_neither_deleted_nor_left_out(stack: ExitStack, replicas: int) -> None:
    with ExitStack() as doomed:
        lost = serve(doomed, "shard-0")
        servers = [lost, serve(stack, "shard-1"), serve(stack, "shard-2")]
        address, held = lost.address, lost.shard
        store = stack.enter_context(closing(ShardedStore(FixedDirectory(shard_map(servers, replicas)))))
        keys = [manifest.key for manifest, _ in fill(store)]
        assert [manifest.key for manifest in store.list("acme")] == sorted(keys)
    silent = f"{address} does not answer .1 of 3 shards.: "
    with pytest.raises(Unavailable, match=silent + f".* list again; {SEE_SHARDS}"):
        store.list("acme")
    with pytest.raises(Unavailable, match=silent + f".* delete them again; {SEE_SHARDS}"):
        store.delete("acme", keys)
    for server in servers[1:]:
        assert server.shard.lookup("acme", keys) == [None] * len(keys), "what answers has done it"
    assert any(held.lookup("acme", keys))


def test_where_there_is_no_shard_nothing_is_said_to_be_gone(stack: ExitStack) -> None:
    nowhere = stack.enter_context(closing(ShardedStore(FixedDirectory(ShardMap(1, ())))))
    for ask in (lambda: nowhere.list("acme"), lambda: nowhere.delete("acme", [ChunkKey(bytes(32))])):
        with pytest.raises(Unavailable, match=r"shard map is empty; start a shard .kintsugi store serve"):
            ask()


def test_a_shard_does_not_share_the_port_of_another(stack: ExitStack, servers: list[ShardServer]) -> None:
    with pytest.raises(Unavailable, match="cannot listen on"):
        serve(stack, "another", servers[0].address)


def test_where_no_shard_answers_the_error_names_the_command_that_says_which_do(stack: ExitStack) -> None:
    with ExitStack() as doomed:
        servers = [serve(doomed, "shard-0"), serve(doomed, "shard-1")]
        store = stack.enter_context(closing(ShardedStore(FixedDirectory(shard_map(servers)))))
    asked: list[tuple[str, Callable[[], object]]] = [
        ("no shard answers", lambda: store.erasures("")),
        ("no shard answers", lambda: store.get_report(FINGERPRINT, "any")),
        ("no shard took the report", lambda: store.put_report(FINGERPRINT, "any", b"{}")),
        ("none of the 1 shards that own chunk [0-9a-f]+ answers", lambda: store.put(*make_chunk(range(40)))),
    ]
    for problem, ask in asked:
        with pytest.raises(Unavailable, match=f"^{problem}; {SEE_SHARDS}$"):
            ask()


def test_what_a_new_shard_is_not_yet_given_stays_in_view(stack: ExitStack) -> None:
    servers = [serve(stack, f"shard-{i}") for i in range(3)]
    old = shard_map(servers[:2])
    directory = FixedDirectory(old)
    store = stack.enter_context(closing(ShardedStore(directory)))
    chunks = fill(store, 48)
    keys = [manifest.key for manifest, _ in chunks]
    whole = shard_map(servers)
    in_view = []
    for share in (0.25, 0.5, 1.0):
        directory.shards = replace(whole, version=2, shares=(1.0, 1.0, share))
        moved = [directory.shards.owners(key) != old.owners(key) for key in keys]
        found = store.lookup("acme", keys)
        assert [manifest is None for manifest in found] == moved
        listed = [manifest.key for manifest in store.list("acme")]
        assert listed == sorted(manifest.key for manifest in found if manifest is not None)
        for page in (1, 5):
            assert paged(store, page) == listed
        in_view.append(len(keys) - sum(moved))
    assert len(keys) > in_view[0] > in_view[1] > in_view[2]
    for manifest, frames in chunks:
        store.put(manifest, frames)
    assert all(store.lookup("acme", keys))
    assert [manifest.key for manifest in store.list("acme")] == sorted(keys)
    assert store.delete("acme", keys[:5]) == 5
    directory.shards = old
    assert store.lookup("acme", keys[:5]) == [None] * 5, "what the others held of them is gone, too"


def paged(store: ShardedStore, limit: int) -> list[ChunkKey]:
    """All keys, so many at a time."""
    keys: list[ChunkKey] = []
    while page := store.list("acme", limit, keys[-1] if keys else None):
        assert len(page) <= limit
        keys += [manifest.key for manifest in page]
        if len(page) < limit:
            break
    return keys


def test_a_lost_shard_costs_its_own_chunks_and_comes_back(stack: ExitStack) -> None:
    with ExitStack() as doomed:
        lost = serve(doomed, "shard-0")
        servers = [lost, serve(stack, "shard-1"), serve(stack, "shard-2")]
        address = lost.address
        store = stack.enter_context(closing(ShardedStore(FixedDirectory(shard_map(servers)))))
        chunks = fill(store)
        keys = [manifest.key for manifest, _ in chunks]
        assert all(store.lookup("acme", keys))
        mine = [key for key in keys if shard_map(servers).owners(key)[0].shard_id == "shard-0"]
        assert mine
        assert [shard.answers for shard in store.stats().shards] == [True] * 3
    assert [shard.address for shard in store.stats().shards if not shard.answers] == [address]
    found = store.lookup("acme", keys)
    assert [key for key, manifest in zip(keys, found, strict=True) if manifest is None] == mine
    items = list(store.stream("acme", keys, range(3), HeadRange(0, 4), deadline_s=2.0))
    assert {keys[item.chunk] for item in items if isinstance(item, ChunkLost)} == set(mine)
    assert sum(isinstance(item, LayerFrame) for item in items) == 3 * (len(keys) - len(mine))
    for _ in range(4):  # the circuit opens
        store.lookup("acme", keys)
    began_s = time.monotonic()
    store.lookup("acme", keys)
    assert time.monotonic() - began_s < 0.1
    with pytest.raises(Unavailable, match="own"):
        store.put(*next(chunk for chunk in chunks if chunk[0].key == mine[0]))
    serve(stack, "shard-0", address)
    deadline_s = time.monotonic() + 30
    returned = next(chunk for chunk in chunks if chunk[0].key == mine[0])
    while time.monotonic() < deadline_s:
        try:
            assert store.put(*returned)
            break
        except Unavailable:
            time.sleep(0.1)
    assert store.lookup("acme", [mine[0]]) == [returned[0]]


def test_a_shard_that_leaves_the_map_and_returns_is_used_again(servers: list[ShardServer]) -> None:
    directory = FixedDirectory(shard_map(servers))
    store = ShardedStore(directory)
    chunks = fill(store)
    keys = [manifest.key for manifest, _ in chunks]
    gone = servers[0].shard.shard_id
    mine = [key for key in keys if directory.shards.owners(key)[0].shard_id == gone]
    assert 0 < len(mine) < len(keys)
    directory.shards = shard_map(servers[1:])
    began_s = time.monotonic()
    found = store.lookup("acme", keys)
    items = list(store.stream("acme", keys, range(3), HeadRange(0, 4), deadline_s=5.0))
    assert time.monotonic() - began_s < 2.0, "nobody waits for a shard that is not in the map"
    assert [key for key, manifest in zip(keys, found, strict=True) if manifest is None] == mine
    assert {keys[item.chunk] for item in items if isinstance(item, ChunkLost)} == set(mine)
    moved = next(chunk for chunk in chunks if chunk[0].key == mine[0])
    assert store.put(*moved), "its new owner takes it"
    directory.shards = shard_map(servers)
    assert all(store.lookup("acme", keys))
    assert read_all(store, mine)[0] == (0, 0, moved[1][0])
    store.close()


def _fail(*_: object) -> None:
    raise Unavailable("not now")


def _list(store: ShardedStore, namespace: str) -> object:
    return store.list(namespace)


def _stream(store: ShardedStore, namespace: str) -> object:
    return list(store.stream(namespace, [ChunkKey(bytes(32))], range(1), HeadRange(0, 4), deadline_s=5.0))


@pytest.mark.parametrize("refused", [_list, _stream])
def test_who_is_refused_while_a_shard_comes_back_keeps_nobody_else_from_it(
    stack: ExitStack, refused: Callable[[ShardedStore, str], object]
) -> None:
    """A refusal is an answer: what a caller sends must not close the way to a shard for all others."""
    server = serve(stack, "shard-0")
    store = stack.enter_context(closing(ShardedStore(FixedDirectory(shard_map([server])))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.shard, "page", _fail)
        for _ in range(FAILURES_MAX):
            with pytest.raises(Unavailable):
                store.list("acme")
    (shard,) = store._shards.values()
    assert not shard.breaker.is_closed
    shard.breaker._clock = lambda: time.monotonic() + OPEN_S  # when the next call probes
    with pytest.raises(InvalidField):
        refused(store, "not a namespace")
    assert store.list("acme") == []


def test_a_crowded_shard_is_read_around(servers: list[ShardServer], monkeypatch: pytest.MonkeyPatch) -> None:
    store = ShardedStore(FixedDirectory(shard_map(servers)), GrpcOptions(same_host=False))
    (chunk,) = fill(store, count=1)
    key = chunk[0].key
    with monkeypatch.context() as patch:
        patch.setattr(service_module, "STREAM_BYTES_MAX", 0)
        for _ in range(FAILURES_MAX + 1):
            (item,) = store.stream("acme", [key], range(3), HeadRange(0, 4), deadline_s=5.0)
            assert isinstance(item, ChunkLost)
    assert read_all(store, [key])[0] == (0, 0, chunk[1][0]), "its breaker is closed"
    store.close()


def read_with_a_stale_first_shard(
    stack: ExitStack, stale: bytes | None, written: bytes
) -> tuple[bytes | None, Shard]:
    """Put `written` while shard 0, first in the map, is away; bring it back with the `stale` report, and
    read. Returns the report that was read, and the shard."""
    with ExitStack() as doomed:
        away = serve(doomed, "shard-0")
        servers = [away, serve(stack, "shard-1"), serve(stack, "shard-2")]
        before = stack.enter_context(closing(ShardedStore(FixedDirectory(shard_map(servers)))))
        if stale is not None:
            before.put_report(FINGERPRINT, "gate", stale)
    before.put_report(FINGERPRINT, "gate", written)
    returned = serve(stack, "shard-0")
    if stale is not None:
        returned.shard.reports.put(FINGERPRINT, "gate", stale)
    after = stack.enter_context(closing(ShardedStore(FixedDirectory(shard_map([returned, *servers[1:]])))))
    return after.get_report(FINGERPRINT, "gate"), returned.shard


def test_a_shard_that_missed_evidence_is_given_it(stack: ExitStack) -> None:
    older = make_report("2026-01-01T00:00:00+00:00")
    newer = make_report("2026-01-03T00:00:00+00:00").to_bytes()
    found, returned = read_with_a_stale_first_shard(stack, older.to_bytes(), newer)
    assert found == newer
    assert returned.reports.get(FINGERPRINT, "gate") == newer


def test_an_empty_shard_is_given_the_report(stack: ExitStack) -> None:
    report = make_report("2026-01-01T00:00:00+00:00").to_bytes()
    found, returned = read_with_a_stale_first_shard(stack, None, report)
    assert found == report
    assert returned.reports.get(FINGERPRINT, "gate") == report


def test_a_shard_without_room_for_a_report_does_not_keep_others_from_giving_it(
    servers: list[ShardServer], store: ShardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = make_report("2026-01-01T00:00:00+00:00").to_bytes()
    servers[1].shard.reports.put(FINGERPRINT, "gate", report)
    monkeypatch.setattr(reports_module, "REPORTS_MAX", 0)
    assert store.get_report(FINGERPRINT, "gate") == report


def test_replicas_serve_what_a_lost_shard_held(stack: ExitStack) -> None:
    with ExitStack() as doomed:
        servers = [serve(doomed, "shard-0"), serve(stack, "shard-1"), serve(stack, "shard-2")]
        store = stack.enter_context(closing(ShardedStore(FixedDirectory(shard_map(servers, replicas=2)))))
        chunks = fill(store)
        keys = [manifest.key for manifest, _ in chunks]
        stream = store.stream("acme", keys, range(3), HeadRange(0, 4), deadline_s=5.0)
        first = next(stream)
        assert isinstance(first, LayerFrame)
        stream.close()
    assert all(store.lookup("acme", keys))
    assert {(chunk, layer): data for chunk, layer, data in read_all(store, keys)} == {
        (chunk, layer): frames[layer] for chunk, (_, frames) in enumerate(chunks) for layer in range(3)
    }


def first_map(address: str) -> ShardMap:
    """What a new client of a directory is told."""
    directory = GrpcDirectory(address)
    try:
        return directory.current()
    finally:
        directory.close()


def test_a_directory_over_grpc_is_followed(
    stack: ExitStack, servers: list[ShardServer], caplog: pytest.LogCaptureFixture
) -> None:
    known = FixedDirectory(shard_map(servers[:1]))
    address = stack.enter_context(serving_directory(known))
    directory = GrpcDirectory(address)
    assert directory.current() == known.shards
    known.shards = shard_map(servers)
    deadline_s = time.monotonic() + 10
    while directory.current() != known.shards:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    known.shards = ShardMap(
        9, (ShardAddress("stranger", "127.0.0.1:9"),), directory="another service", epoch=9
    )
    deadline_s = time.monotonic() + 10
    while "a shard map was rejected" not in caplog.text:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert directory.current() == shard_map(servers)
    known.shards = shard_map(servers)
    directory.close()
    deadline_s = time.monotonic() + 10
    while first_map(address) != known.shards:  # all watchers share what was read last
        assert time.monotonic() < deadline_s
    store = open_store(f"shards://{address}")
    manifest, frames = make_chunk(range(40))
    assert store.put(manifest, frames)
    assert store.lookup("acme", [manifest.key]) == [manifest]
    store.close()


def test_prefetch_and_pins_reach_the_shards_that_own_a_chunk(
    servers: list[ShardServer], store: ShardedStore
) -> None:
    chunks = fill(store)
    keys = [manifest.key for manifest, _ in chunks]
    assert store.prefetch("acme", [*keys, ChunkKey(bytes(32))]) == len(keys)
    pinned = store.pin("acme", [*keys[:5], ChunkKey(bytes(32))], lease_s=30.0)
    assert pinned.chunks == 5
    held = [entry.manifest.key for server in servers for entry in server.shard.table.entries() if entry.pins]
    assert set(held) == set(keys[:5])
    assert store.unpin(pinned.lease_id) == len(held)
    assert not any(entry.pins for server in servers for entry in server.shard.table.entries())
    assert store.unpin(pinned.lease_id) == 0
    with pytest.raises(InvalidField, match="what pin returned"):
        store.unpin("no such lease")


@pytest.mark.parametrize("shards", [1, 3])
def test_a_closed_client_says_so(servers: list[ShardServer], shards: int) -> None:
    store = ShardedStore(FixedDirectory(shard_map(servers[:shards])))
    assert store.stats().chunks == 0
    store.close()
    with pytest.raises(Unavailable, match="closed"):
        store.stats()


def test_closing_ends_calls_that_wait(servers: list[ShardServer], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, release = threading.Event(), threading.Event()

    def dawdle(*_: object) -> None:
        asked.set()
        release.wait(60.0)

    for server in servers:
        monkeypatch.setattr(server.shard, "page", dawdle)
    store = ShardedStore(FixedDirectory(shard_map(servers)))
    with ThreadPoolExecutor(1) as pool:
        listing = pool.submit(store.list, "acme")
        try:
            assert asked.wait(10.0)
            began_s = time.monotonic()
            store.close()
            with pytest.raises(Unavailable):
                listing.result(10.0)
            assert time.monotonic() - began_s < 5.0, "a call's own deadline is 10 s"
        finally:
            release.set()


def test_stats_name_every_shard_also_one_that_does_not_answer(servers: list[ShardServer]) -> None:
    addresses = [ShardAddress(server.shard.shard_id, server.address) for server in servers]
    silent = ShardAddress("gone", "127.0.0.1:1")
    store = ShardedStore(FixedDirectory(ShardMap(1, (*addresses, silent), 4)))
    try:
        manifest, frames = make_chunk(range(40))
        store.put(manifest, frames)
        shards = {shard.address: shard for shard in store.stats().shards}
        assert list(shards) == [*(one.address for one in addresses), silent.address]
        assert not shards.pop(silent.address).answers
        for shard in shards.values():
            assert (shard.answers, shard.draining, shard.chunks) == (True, False, 1)
            (tier,) = shard.tiers
            assert (tier.name, tier.chunks, tier.failure) == ("ram", 1, "")
            assert tier.bytes_used >= manifest.chunk_bytes
    finally:
        store.close()
