"""A worker without Ray: what it asks the store, and what it says when its engine does not start."""

from __future__ import annotations

import pytest

pytest.importorskip("semantic_text_splitter", reason="install the extra `precompute`")
pytest.importorskip("inscriptis", reason="install the extra `precompute`")

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.layout import KVLayout
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, token_bytes
from kintsugi.precompute.ledger_chunks import PendingChunk, pack_tokens
from kintsugi.precompute.worker import FILLED, PRESENT, NotStarted, Worker, WorkerSpec
from kintsugi.store.client.registry import open_store
from tests.fakes.stub_prefiller import StubPrefiller

SPACE = ChunkSpace(ModelFingerprint(bytes(32)), "acme")
LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=8, dtype="bfloat16")


def spec(name: str) -> WorkerSpec:
    return WorkerSpec("model", f"ram://{name}", SPACE, LAYOUT, "bfloat16")


def batch(*chunks: list[int]) -> list[PendingChunk]:
    return [PendingChunk(ChunkKey.of(SPACE, ids), pack_tokens(token_bytes(ids)), len(ids)) for ids in chunks]


def test_only_what_the_store_lacks_is_prefilled_and_its_tokens_arrive_whole() -> None:
    started: list[WorkerSpec] = []

    def factory(asked: WorkerSpec) -> StubPrefiller:
        started.append(asked)
        return StubPrefiller(asked)

    worker = Worker(spec("worker-lacks"), factory)
    assert worker.fill(batch([1, 2, 3], [4, 5]))[0] == [FILLED, FILLED]
    assert worker.fill(batch([4, 5], [6]))[0] == [PRESENT, FILLED]
    assert len(started) == 1
    store = open_store("ram://worker-lacks")
    found = store.lookup("acme", [ChunkKey.of(SPACE, [1, 2, 3])])
    assert [manifest and manifest.num_tokens for manifest in found] == [3]


def test_no_engine_starts_where_nothing_is_missing() -> None:
    def never(asked: WorkerSpec) -> StubPrefiller:
        raise AssertionError("the engine was started")

    Worker(spec("worker-nothing"), StubPrefiller).fill(batch([7]))
    assert Worker(spec("worker-nothing"), never).fill(batch([7]))[0] == [PRESENT]


def test_an_engine_that_does_not_start_is_told_from_a_store_that_is_away() -> None:
    def unable(asked: WorkerSpec) -> StubPrefiller:
        raise Unavailable("vLLM did not start: no such argument")

    def wrong(asked: WorkerSpec) -> StubPrefiller:
        raise InvalidField("model", "its tokenizer is another")

    with pytest.raises(NotStarted, match="no such argument"):
        Worker(spec("worker-unable"), unable).fill(batch([8]))
    with pytest.raises(InvalidField, match="another"):
        Worker(spec("worker-wrong"), wrong).fill(batch([9]))
