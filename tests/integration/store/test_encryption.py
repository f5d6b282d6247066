"""Encrypted namespaces: what shards hold, who can read it, and what rotation and destruction do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from kintsugi.core.errors import InvalidField, PermissionDenied
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.spaces import ChunkKey, ChunkSpace
from kintsugi.store.client.directory import ShardAddress, ShardMap
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.key_file import KeyFile, create_keys, destroy_keys, retire_keys, rotate_keys
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.registry import open_store
from kintsugi.store.client.sharded import ShardedStore
from kintsugi.store.protocol import watched_files
from kintsugi.store.protocol.interface import Buffer, ChunkStore, Found
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.contracts.store_contract import FINGERPRINT, LAYOUT, StoreContract, make_chunk, read_all
from tests.fakes.fixed_directory import FixedDirectory

EVERY_HEAD = HeadRange(0, LAYOUT.num_kv_heads)
TOKENS = range(40)


@pytest.fixture
def key_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A key file whose changes are noticed at once."""
    monkeypatch.setattr(watched_files, "CHECK_S", 0.0)
    path = tmp_path / "keys.json"
    create_keys(path, "acme")
    return path


@pytest.fixture
def server() -> Iterator[ShardServer]:
    with ShardServer(Shard(RamTier(8 << 20)), "127.0.0.1:0") as server:
        yield server


Opener = Callable[..., GrpcStore]


@pytest.fixture(params=[True, False], ids=["same-host", "grpc"])
def opened(request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Opens clients of a shard, with the keys of a file or without any."""
    with ExitStack() as stack:

        def open_client(server: ShardServer, path: Path | None = None) -> GrpcStore:
            keys = None if path is None else KeyFile(path)
            store = GrpcStore(server.address, GrpcOptions(same_host=request.param, keys=keys))
            stack.callback(store.close)
            return store

        yield open_client


class _PlainManifests(GrpcStore):
    """Gives out what was put for what is stored, so that the contract can compare them."""

    def __init__(self, address: str, options: GrpcOptions) -> None:
        super().__init__(address, options)
        self._as_given: dict[ChunkKey, ChunkManifest] = {}

    def put(
        self,
        manifest: ChunkManifest,
        frames: Sequence[Buffer],
        recompute_ms: float = 0.0,
        ttl_s: float = 0.0,
    ) -> bool:
        self._as_given.setdefault(manifest.key, manifest)
        return super().put(manifest, frames, recompute_ms, ttl_s)

    def _as_put(self, stored: ChunkManifest) -> ChunkManifest:
        if stored.namespace != "acme":
            return stored
        put = self._as_given[stored.key]
        assert stored.is_encrypted
        tagged = replace(put, key_id=stored.key_id, salt=stored.salt, digests=stored.digests)
        assert stored == tagged
        assert stored.digests != put.digests
        return put

    def find(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Found | None]:
        found = super().find(namespace, keys)
        return [None if one is None else replace(one, manifest=self._as_put(one.manifest)) for one in found]

    def _resolve_manifests(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkManifest | None]:
        return [None if one is None else one.manifest for one in super().find(namespace, keys)]

    def list_found(self, namespace: str, limit: int, after: ChunkKey | None = None) -> list[Found]:
        found = super().list_found(namespace, limit, after)
        return [replace(one, manifest=self._as_put(one.manifest)) for one in found]


class TestEncryptedStore(StoreContract):
    @pytest.fixture(params=[True, False], ids=["same-host", "grpc"])
    def store(
        self, server: ShardServer, key_path: Path, request: pytest.FixtureRequest
    ) -> Iterator[ChunkStore]:
        options = GrpcOptions(same_host=request.param, keys=KeyFile(key_path))
        store = _PlainManifests(server.address, options)
        yield store
        store.close()


def as_written(frames: Sequence[bytes]) -> list[tuple[int, int, bytes | None]]:
    return [(0, layer, frame) for layer, frame in enumerate(frames)]


def test_a_shard_never_sees_what_it_stores(server: ShardServer, opened: Opener, key_path: Path) -> None:
    manifest, frames = make_chunk(TOKENS)
    opened(server, key_path).put(manifest, frames)
    held = server.shard.open("acme", [manifest.key], range(3), EVERY_HEAD).chunks[0]
    assert held is not None
    for layer, frame in enumerate(frames):
        stored = bytes(held.frame(layer))
        assert len(stored) == len(frame)
        assert not any(frame[i : i + 8] in stored for i in range(0, len(frame), 8))


def test_a_rank_decrypts_its_own_heads(server: ShardServer, opened: Opener, key_path: Path) -> None:
    store, (manifest, frames) = opened(server, key_path), make_chunk(TOKENS)
    store.put(manifest, frames)
    for heads in (HeadRange(0, 1), HeadRange(1, 3), HeadRange(3, 4)):
        start, stop = manifest.head_range_bytes(heads)
        expected = as_written([frame[start:stop] for frame in frames])
        assert read_all(store, [manifest.key], heads) == expected
        assert read_all(store, [manifest.key], heads, range(2, 3)) == expected[2:]


def test_no_two_puts_have_the_same_bytes(server: ShardServer, opened: Opener, key_path: Path) -> None:
    store, (manifest, frames) = opened(server, key_path), make_chunk(TOKENS)
    seen = []
    for _ in range(2):
        store.put(manifest, frames)
        seen += store.lookup("acme", [manifest.key])
        store.delete("acme", [manifest.key])
    first, second = seen
    assert first is not None
    assert second is not None
    assert first.salt != second.salt
    assert first.digests != second.digests


@pytest.mark.parametrize("keys", ["none", "others"])
def test_without_its_key_a_chunk_is_not_read(
    server: ShardServer, opened: Opener, key_path: Path, tmp_path: Path, keys: str
) -> None:
    manifest, frames = make_chunk(TOKENS)
    ours = opened(server, key_path)
    ours.put(manifest, frames)
    other_path = tmp_path / "others.json"
    create_keys(other_path, "acme")
    stranger = opened(server, other_path if keys == "others" else None)
    assert stranger.list("acme")[0].key == manifest.key
    if keys == "others":
        assert stranger.lookup("acme", [manifest.key]) == [None]
        assert stranger.tiers("acme", [manifest.key]) == [None]
        assert stranger.retain("acme", [manifest.key]) == [False]
    (lost,) = stranger.stream("acme", [manifest.key], range(3), EVERY_HEAD, 5.0)
    assert "key" in lost.reason or lost.reason == "absent"  # type: ignore[union-attr]
    assert server.shard.table.counters.quarantined == 0
    assert read_all(ours, [manifest.key]) == as_written(frames)


def test_an_unencrypted_chunk_does_not_count_in_a_namespace_with_keys(
    server: ShardServer, opened: Opener, key_path: Path
) -> None:
    """Whoever reaches the shard could have put it there."""
    manifest, frames = make_chunk(TOKENS)
    forger, ours = opened(server), opened(server, key_path)
    forger.put(manifest, frames)
    assert ours.lookup("acme", [manifest.key]) == [None]
    (anchored,) = ours.lookup_anchors("acme", manifest.space_digest, manifest.anchors)
    assert ours.lookup("acme", anchored.keys) == [None], "what it names by its content is no hit either"
    assert read_all(ours, [manifest.key]) == [(0, 0, None)]
    assert ours.put(manifest, frames), "it is replaced"
    assert read_all(ours, [manifest.key]) == as_written(frames)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_flipped_bit_is_found_and_quarantined(
    server: ShardServer, opened: Opener, key_path: Path, layer: int
) -> None:
    store, (manifest, frames) = opened(server, key_path), make_chunk(TOKENS)
    store.put(manifest, frames)
    held = server.shard.open("acme", [manifest.key], range(3), EVERY_HEAD).chunks[0]
    assert held is not None
    held.frame(layer)[5] ^= 1
    assert server.shard.verify("acme", [manifest.key]) == {manifest.key: True}, "a shard cannot tell"
    expected = [*as_written(frames)[:layer], (0, layer, None)]
    assert read_all(store, [manifest.key]) == expected
    assert store.lookup("acme", [manifest.key]) == [None]
    assert server.shard.table.counters.quarantined == 1


@pytest.mark.parametrize("changed", ["dtype", "digests", "salt"])
def test_a_forged_manifest_is_found_out(
    server: ShardServer, opened: Opener, key_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    store, (manifest, frames) = opened(server, key_path), make_chunk(TOKENS)
    store.put(manifest, frames)
    (stored,) = store.lookup("acme", [manifest.key])
    assert stored is not None
    values = {
        "dtype": {"layout": replace(LAYOUT, dtype="float16")},
        "digests": {"digests": stored.digests[16:32] + stored.digests[:16] + stored.digests[32:]},
        "salt": {"salt": os.urandom(16)},
    }[changed]
    forged = replace(stored, **values)  # type: ignore[arg-type]
    monkeypatch.setattr(store, "_resolve_manifests", lambda namespace, keys: [forged])
    monkeypatch.setattr(store, "_look_up_again", lambda manifest: forged)
    assert read_all(store, [manifest.key])[0] == (0, 0, None)


def test_a_chunk_that_was_put_again_is_read_by_its_new_tags(
    server: ShardServer, opened: Opener, key_path: Path
) -> None:
    """Another client replaced it, and this one remembers the manifest of the first put."""
    manifest, frames = make_chunk(TOKENS)
    ours, theirs = opened(server, key_path), opened(server, key_path)
    ours.put(manifest, frames)
    assert read_all(ours, [manifest.key]) == as_written(frames)
    theirs.delete("acme", [manifest.key])
    theirs.put(manifest, frames)
    assert read_all(ours, [manifest.key]) == as_written(frames)
    assert server.shard.table.counters.quarantined == 0


def test_damage_to_an_earlier_put_does_not_remove_a_later_one(
    server: ShardServer, opened: Opener, key_path: Path
) -> None:
    store, (manifest, frames) = opened(server, key_path), make_chunk(TOKENS)
    store.put(manifest, frames)
    (first,) = store.lookup("acme", [manifest.key])
    assert first is not None
    store.delete("acme", [manifest.key])
    store.put(manifest, frames)
    assert server.shard.verify("acme", [manifest.key], [first.salt]) == {manifest.key: True}
    (second,) = store.lookup("acme", [manifest.key])
    assert second is not None
    assert server.shard.verify("acme", [manifest.key], [second.salt]) == {manifest.key: False}
    assert store.lookup("acme", [manifest.key]) == [None]


def test_rotation_keeps_every_chunk_and_encrypts_with_the_new_key(
    server: ShardServer, opened: Opener, key_path: Path
) -> None:
    store = opened(server, key_path)
    (old, old_frames), (new, new_frames) = make_chunk(TOKENS), make_chunk(range(50))
    store.put(old, old_frames)
    name_key = store.name_key("acme")
    rotate_keys(key_path, "acme")
    store.put(new, new_frames)
    assert store.name_key("acme") == name_key
    found = [one.key_id for one in store.lookup("acme", [old.key, new.key]) if one is not None]
    assert len(set(found)) == 2
    assert read_all(store, [old.key]) == as_written(old_frames)
    assert read_all(store, [new.key]) == as_written(new_frames)

    assert retire_keys(key_path, "acme") == ((found[0],), found[1])
    assert [one is None for one in store.lookup("acme", [old.key, new.key])] == [True, False]
    assert store.tiers("acme", [old.key]) == [None]
    assert read_all(store, [old.key]) == [(0, 0, None)]
    assert read_all(store, [new.key]) == as_written(new_frames)
    assert store.put(old, old_frames), "what nobody can read is replaced"
    assert not store.put(old, old_frames)
    assert read_all(store, [old.key]) == as_written(old_frames)


def test_a_namespace_whose_keys_were_destroyed_is_refused(
    server: ShardServer, opened: Opener, key_path: Path
) -> None:
    store, (manifest, frames) = opened(server, key_path), make_chunk(TOKENS)
    store.put(manifest, frames)
    stream = store.stream("acme", [manifest.key], range(3), EVERY_HEAD, 5.0)
    key_ids, _ = destroy_keys(key_path, "acme")
    (left,) = opened(server).list("acme")
    assert (left.key_id,) == key_ids
    with pytest.raises(PermissionDenied, match=r"destroyed at .*kintsugi keys create"):
        next(stream)
    with pytest.raises(PermissionDenied, match="destroyed"):
        store.put(manifest, frames)
    with pytest.raises(PermissionDenied, match="destroyed"):
        store.name_key("acme")
    assert store.delete("acme", [manifest.key]) == 1, "bytes that nobody can read can still be freed"


def test_another_namespace_stays_as_it_was(server: ShardServer, opened: Opener, key_path: Path) -> None:
    space = ChunkSpace(FINGERPRINT, "open")
    store, (manifest, frames) = opened(server, key_path), make_chunk(TOKENS, space)
    store.put(manifest, frames)
    assert store.name_key("open") == b""
    assert store.lookup("open", [manifest.key]) == [manifest]
    assert read_all(store, [manifest.key], namespace="open") == as_written(frames)


def test_an_encrypted_chunk_survives_a_restart(tmp_path: Path, opened: Opener, key_path: Path) -> None:
    spec = ShardSpec(8 << 20, tmp_path / "data", (SsdSpec(tmp_path / "ssd", 8 << 20),))
    manifest, frames = make_chunk(TOKENS)
    with closing(open_shard(spec)) as shard, ShardServer(shard, "127.0.0.1:0") as server:
        opened(server, key_path).put(manifest, frames)
    with closing(open_shard(spec)) as shard, ShardServer(shard, "127.0.0.1:0") as server:
        assert read_all(opened(server, key_path), [manifest.key]) == as_written(frames)
    files = [path for folder in ("data", "ssd") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert any(path.name == "slab" for path in files)
    assert not any(frames[0][:16] in path.read_bytes() for path in files)


def test_replicas_hold_one_encryption_and_stand_in_for_each_other(key_path: Path) -> None:
    manifest, frames = make_chunk(TOKENS)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(ShardServer(Shard(RamTier(8 << 20), shard_id=f"s{i}"), "127.0.0.1:0"))
            for i in range(2)
        ]
        addresses = tuple(ShardAddress(one.shard.shard_id, one.address) for one in servers)
        store = ShardedStore(FixedDirectory(ShardMap(1, addresses, 2)), GrpcOptions(keys=KeyFile(key_path)))
        stack.callback(store.close)
        store.put(manifest, frames)
        first, second = (
            one.shard.open("acme", [manifest.key], range(3), EVERY_HEAD).chunks[0] for one in servers
        )
        assert first is not None
        assert second is not None
        assert first.manifest == second.manifest
        first.frame(1)[0] ^= 1
        second.frame(2)[0] ^= 1
        items = read_all(store, [manifest.key])
        assert items[0] == (0, 0, frames[0])
        assert items[-1] == (0, 2, None), "each replica has a damaged layer"
        store.put(manifest, frames)
        destroy_keys(key_path, "acme")
        assert store.delete("acme", [manifest.key]) == 1


def test_a_store_is_opened_with_the_keys_that_its_url_names(server: ShardServer, key_path: Path) -> None:
    store = open_store(f"grpc://{server.address}?keys={key_path}")
    manifest, frames = make_chunk(TOKENS)
    store.put(manifest, frames)
    (found,) = store.lookup("acme", [manifest.key])
    assert found is not None
    assert found.is_encrypted
    store.close()
    with pytest.raises(InvalidField, match="cannot be read"):
        open_store(f"grpc://{server.address}?keys={key_path}.none")


def test_a_store_without_keys_takes_nothing_that_is_encrypted(
    server: ShardServer, opened: Opener, key_path: Path
) -> None:
    store, (manifest, frames) = opened(server, key_path), make_chunk(TOKENS)
    store.put(manifest, frames)
    (stored,) = store.lookup("acme", [manifest.key])
    assert stored is not None
    with pytest.raises(InvalidField, match="key_id"):
        RamStore().put(stored, frames)
