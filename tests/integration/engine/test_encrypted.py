"""An engine whose store holds nothing but ciphertext: it saves, finds and blends as with any other store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.core.errors import PermissionDenied
from kintsugi.core.layout import HeadRange
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey, ChunkSpace, anchors_of
from kintsugi.engine.local import LocalEngine
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.key_file import KeyFile, create_keys, destroy_keys
from kintsugi.store.protocol import watched_files
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    ask_cold,
    chunks_of,
    max_dlogprob,
    rag,
    random_tokens,
)

pytestmark = pytest.mark.engine("tiny-llama encrypted")

CHUNKS = chunks_of(96, 64, 40, seed=31)
CONTEXT = random_tokens(20, seed=6)


@pytest.fixture(scope="module")
def server() -> Iterator[ShardServer]:
    with ShardServer(Shard(RamTier(64 << 20)), "127.0.0.1:0") as server:
        yield server


@pytest.fixture(scope="module")
def key_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    create_keys(path, NAMESPACE)
    create_keys(path, "doomed")
    return path


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot, server: ShardServer, key_path: Path) -> LocalEngine:
    url = f"grpc://{server.address}?keys={key_path}"
    engine = engine_slot.get("tiny-llama", {"store": url, "context_token_ids": CONTEXT})
    assert all(one.is_saved for one in engine.save(PREFIX, CHUNKS, NAMESPACE))
    return engine


@pytest.mark.parametrize("marked", [True, False], ids=["spans", "content"])
def test_chunks_are_found_and_blended(engine: LocalEngine, marked: bool) -> None:
    prompt = rag(*CHUNKS)
    full = ask_cold(engine, prompt.token_ids)
    params = prompt.params(1.0) if marked else KintsugiParams(NAMESPACE, ratio=1.0)
    blended = ask_cold(engine, prompt.token_ids, params)
    assert blended.accounting is not None
    assert blended.accounting["outcome"] == "blended", blended.accounting
    assert blended.accounting["chunks_hit"] == len(CHUNKS)
    assert blended.token_ids == full.token_ids
    assert max_dlogprob(full, blended) <= 0.01


def test_nothing_that_is_stored_confirms_what_it_is(
    engine: LocalEngine, server: ShardServer, key_path: Path
) -> None:
    keys = KeyFile(key_path).find(NAMESPACE)
    assert keys is not None
    space = engine.space(NAMESPACE)
    assert space.name_key == keys.name_key
    guessed = ChunkSpace(space.fingerprint, NAMESPACE, space.prefix_token_ids, True, tuple(CONTEXT))
    entries = server.shard.table.page(NAMESPACE, 100, None)
    assert len(entries) == 2 * len(CHUNKS), "each with its plain copy"
    for entry in entries:
        manifest = entry.manifest
        assert manifest.key_id == keys.newest_id
        assert manifest.space_digest not in {copy.digest for copy in guessed.copies()}
        assert manifest.key not in {ChunkKey.of(copy, chunk) for copy in guessed.copies() for chunk in CHUNKS}
        assert manifest.anchors not in {anchors_of(chunk) for chunk in CHUNKS}


def test_a_flipped_bit_costs_a_prefill(engine: LocalEngine, server: ShardServer) -> None:
    prompt = rag(*CHUNKS)
    full = ask_cold(engine, prompt.token_ids)
    key = ChunkKey.of(engine.space(NAMESPACE), CHUNKS[1])
    held = server.shard.open(NAMESPACE, [key], range(1), HeadRange(0, 1)).chunks[0]
    assert held is not None
    held.frame(0)[3] ^= 0x10
    blended = ask_cold(engine, prompt.token_ids, prompt.params(1.0))
    assert blended.accounting is not None
    assert blended.accounting["restarts"] == 1
    assert "digest mismatch" in blended.accounting["reason"]
    assert blended.token_ids == full.token_ids
    assert engine.save(PREFIX, [CHUNKS[1]], NAMESPACE)[0].is_saved


def test_once_its_keys_are_destroyed_a_namespace_is_prefilled_in_full(
    engine: LocalEngine, server: ShardServer, key_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_files, "CHECK_S", 0.0)
    prompt = rag(*CHUNKS)
    assert all(one.is_saved for one in engine.save(PREFIX, CHUNKS, "doomed"))
    params = KintsugiParams("doomed", spans=prompt.spans, ratio=1.0)
    assert ask_cold(engine, prompt.token_ids, params).accounting["outcome"] == "blended"  # type: ignore[index]
    full = ask_cold(engine, prompt.token_ids)
    destroy_keys(key_path, "doomed")
    answer = ask_cold(engine, prompt.token_ids, params)
    assert answer.accounting is not None
    assert answer.accounting["outcome"] == "declined"
    assert answer.accounting["reason"].startswith("no_keys: the keys of namespace 'doomed' were destroyed")
    assert answer.token_ids == full.token_ids
    with pytest.raises(PermissionDenied, match="destroyed"):
        engine.space("doomed")
    operator = GrpcStore(server.address)
    keys = [manifest.key for manifest in operator.list("doomed")]
    assert operator.delete("doomed", keys) == 2 * len(CHUNKS)
    operator.close()
