"""Measures the rates of one core of a job's driver and readers, to estimate the limits of a thousand workers.

CPU seconds of this process, not wall time: the machine's other work does not count.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.support.figures import Figure
from kintsugi.core.layout import KVLayout
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, token_bytes
from kintsugi.precompute.batches import Batches
from kintsugi.precompute.chunking import Chunker, ChunkingConfig
from kintsugi.precompute.ledger import Ledger, ScannedChunk, ScannedDocument
from kintsugi.precompute.ledger_chunks import PendingChunk, pack_tokens
from kintsugi.precompute.worker import WorkerSpec
from kintsugi.store.client.registry import open_store
from kintsugi.store.protocol.interface import ChunkStore
from tests.fakes.stub_prefiller import StubPrefiller

SPACE = ChunkSpace(ModelFingerprint(bytes(32)), "rates")
LAYOUT = KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
"""The layout of an 8B model, for its large manifests. Chunks are small here, because nobody reads the
frames."""
CHUNK_TOKENS = 512
CHUNKS_PER_DOCUMENT = 4
LOOKUP_KEYS = 256


class Clock:
    """CPU seconds of a `with` block."""

    seconds = 0.0


@contextmanager
def cpu() -> Iterator[Clock]:
    clock, before_s = Clock(), time.process_time()
    yield clock
    clock.seconds = time.process_time() - before_s


def figures(folder: Path, store_url: str, model: str, texts: Sequence[str], count: int) -> list[Figure]:
    """All rates, over `count` chunks."""
    chunker = Chunker.of_model(model, ChunkingConfig())
    with cpu() as cutting:
        cut = [chunk for text in texts for chunk in chunker.chunks(text)]
    size, tokens = sum(map(len, texts)), sum(len(chunk.token_ids) for chunk in cut)
    documents = synthetic(count)
    with cpu() as recording:
        pending = recorded(folder, documents)
    assert len(pending) == count
    with cpu() as packing:
        sent = batched(pending)
    store = open_store(store_url)
    try:
        missing_s, resident_s = looked_up(store, store_url, count)
    finally:
        store.close()
    return [
        Figure("reading_core", size / cutting.seconds / 1e6, "MB/s", detail=f"chunking, {tokens} tokens"),
        Figure(
            "ledger_writer", count / recording.seconds, "chunks/s", detail="512 tokens each, four a document"
        ),
        Figure(
            "batches_packed", sent / packing.seconds, "chunks/s", detail="by the driver, Ray's part left out"
        ),
        Figure("lookups_missing", count / missing_s, "keys/s", detail="driver's CPU; nothing to send"),
        Figure(
            "lookups_resident", count / resident_s, "keys/s", detail="driver's CPU; an 8B model's manifests"
        ),
    ]


def synthetic(count: int) -> list[ScannedDocument]:
    chance = random.Random(7)
    found = []
    for first in range(0, count, CHUNKS_PER_DOCUMENT):
        chunks = []
        for _ in range(min(CHUNKS_PER_DOCUMENT, count - first)):
            ids = [chance.randrange(32_000) for _ in range(CHUNK_TOKENS)]
            key, tokens = ChunkKey.of(SPACE, ids), pack_tokens(token_bytes(ids))
            chunks.append(ScannedChunk(key.digest, tokens, CHUNK_TOKENS))
        found.append(ScannedDocument("a", first, f"d{first}", "", bytes(32), len(chunks), tuple(chunks)))
    return found


def recorded(folder: Path, documents: Sequence[ScannedDocument]) -> list[PendingChunk]:
    ledger = Ledger(folder / "rates")
    edition = ledger.open_edition("rates", SPACE, "source", "model", "cut")
    run = ledger.begin_run(edition)
    fresh = []
    for start in range(0, len(documents), 256):
        fresh += ledger.record(edition, run, "rates", documents[start : start + 256]).fresh
    ledger.close()
    return fresh


def batched(pending: Sequence[PendingChunk]) -> int:
    batches = Batches(16_384)
    batches.add(pending)
    sent = 0
    while (batch := batches.take(flush=True)) is not None:
        sent += len(batch.chunks)
    return sent


def looked_up(store: ChunkStore, url: str, count: int) -> tuple[float, float]:
    """CPU seconds for `count` missing keys, and for `count` stored ones."""
    chunks = [
        PendingChunk(ChunkKey.of(SPACE, [n]), pack_tokens(token_bytes([n])), 1) for n in range(LOOKUP_KEYS)
    ]
    keys = [chunk.key for chunk in chunks]
    rounds = max(1, count // LOOKUP_KEYS)
    with cpu() as missing:
        for _ in range(rounds):
            assert not any(store.tiers("rates", keys))
    stub = StubPrefiller(WorkerSpec("", url, SPACE, LAYOUT, "bfloat16"))
    assert set(stub.fill(chunks)) == {"filled"}
    stub.close()
    with cpu() as resident:
        for _ in range(rounds):
            assert all(store.tiers("rates", keys))
    scale = count / (rounds * LOOKUP_KEYS)
    return missing.seconds * scale, resident.seconds * scale
