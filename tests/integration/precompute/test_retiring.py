"""Deleting what nobody has any more from shards of which one does not answer."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

pytest.importorskip("semantic_text_splitter", reason="install the extra `precompute`")
pytest.importorskip("inscriptis", reason="install the extra `precompute`")

from kintsugi.core.errors import Unavailable
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, token_bytes
from kintsugi.precompute import job as job_module
from kintsugi.precompute.job import Job
from kintsugi.precompute.ledger import Ledger, ScannedChunk, ScannedDocument
from kintsugi.precompute.ledger_chunks import pack_tokens
from kintsugi.precompute.spec import JobSpec
from kintsugi.precompute.warm import forget
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.registry import open_store
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.contracts.store_contract import make_chunk
from tests.fakes.random_models.factory import make_checkpoint_once

CHUNKS = 12


def forget_replaced(ledger: Ledger, url: str) -> int:
    """Delete all editions but the newest, as a job does that retires them. Returns the deleted chunks."""
    with closing(open_store(url)) as store:
        return forget(ledger, store, ledger.editions("tea")[:-1])


def complete_edition(ledger: Ledger, space: ChunkSpace, keys: Sequence[ChunkKey]) -> None:
    chunks = tuple(
        ScannedChunk(key.digest, pack_tokens(token_bytes([number])), 1) for number, key in enumerate(keys)
    )
    edition = ledger.open_edition("tea", space, "src", "model", "cut")
    run = ledger.begin_run(edition)
    ledger.record(
        edition, run, space.namespace, [ScannedDocument("a", 0, "a", "", bytes(keys[0].digest), 1, chunks)]
    )
    ledger.end_run(run, 0, 0.0, complete=True)


def test_retiring_goes_on_where_a_silent_shard_stopped_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "state")
    old, new = (
        ChunkSpace(ModelFingerprint(bytes([n]) * 32), name) for n, name in enumerate(("acme", "other"))
    )
    chunks = [make_chunk(range(start, start + 40)) for start in range(0, 100 * CHUNKS, 100)]
    keys = [manifest.key for manifest, _ in chunks]
    with ExitStack() as stack, ExitStack() as doomed:
        lost = doomed.enter_context(ShardServer(Shard(RamTier(8 << 20), shard_id="lost"), "127.0.0.1:0"))
        stays = stack.enter_context(ShardServer(Shard(RamTier(8 << 20), shard_id="stays"), "127.0.0.1:0"))
        shards = [{"shard_id": server.shard.shard_id, "address": server.address} for server in (lost, stays)]
        (tmp_path / "map.json").write_text(json.dumps({"version": 1, "replicas": 1, "shards": shards}))
        url = f"shardfile://{tmp_path}/map.json"
        store = open_store(url)
        for manifest, frames in chunks:
            store.put(manifest, frames)
        store.close()
        complete_edition(ledger, old, keys)
        complete_edition(ledger, new, [ChunkKey.of(new, [1])])
        address, held = lost.address, lost.shard
        doomed.close()
        for _ in range(2):
            with pytest.raises(Unavailable, match=f"{address} does not answer"):
                forget_replaced(ledger, url)
        assert stays.shard.lookup("acme", keys) == [None] * CHUNKS
        assert 0 < CHUNKS - held.lookup("acme", keys).count(None) < CHUNKS
        assert len(ledger.editions("tea")) == 2, "what is not deleted is not forgotten"
        stack.enter_context(ShardServer(held, address))
        assert _retired(ledger, url) == CHUNKS
        assert held.lookup("acme", keys) == [None] * CHUNKS
        assert [edition.namespace for edition in ledger.editions("tea")] == ["other"]
        assert forget_replaced(ledger, url) == 0


def _retired(ledger: Ledger, url: str) -> int:
    """Once the shard is connected to again."""
    deadline_s = time.monotonic() + 30
    while True:
        try:
            return forget_replaced(ledger, url)
        except Unavailable:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)


class Returning(RamStore):
    """Away for the first calls."""

    def __init__(self, away: int) -> None:
        super().__init__()
        self.away = away
        self.deleted: list[ChunkKey] = []

    def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        self.away -= 1
        if self.away >= 0:
            raise Unavailable("a shard does not answer")
        self.deleted += keys
        return len(keys)


def test_a_job_waits_for_a_shard_to_delete_what_is_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_module, "STORE_WAIT_S", (0.0,))
    ledger = Ledger(tmp_path / "state")
    model = str(make_checkpoint_once("tiny-llama"))
    job = Job(JobSpec("nowhere", model, "grpc://127.0.0.1:1", "acme", "tea"), ledger)
    space = job.facts.space
    keys = [ChunkKey.of(space, [number]) for number in range(CHUNKS)]
    complete_edition(ledger, space, keys)
    (edition,) = ledger.editions("tea")
    ledger.empty(edition.id)
    store = Returning(3)
    job._store = store
    job._delete_orphans()
    assert sorted(store.deleted) == sorted(keys)
    assert job.progress.chunks_invalidated == CHUNKS
