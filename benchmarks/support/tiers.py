"""Compares loading from disk with loading from memory, in a real shard: a blend should hide both."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.store import served
from benchmarks.support.engines import cold, engine, say, store_chunks
from benchmarks.support.figures import Figure, spread
from benchmarks.support.prompts import NAMESPACE, ChunkPrompt
from kintsugi.core.layout import HeadRange
from kintsugi.core.spaces import ChunkKey
from kintsugi.engine.local import LocalEngine, Prompt
from kintsugi.store.client.grpc_store import GrpcStore

SHAPE = "llama-210m"
MIB = 1 << 20
CHUNKS, QUESTION = 6, 40


def ttft_ssd_vs_ram(quick: bool) -> list[Figure]:
    """RAM has room for one prompt's chunks: reading another prompt's chunks evicts them, and a blend loads
    them again."""
    repetitions, tokens = (3, 160) if quick else (7, 512)
    prompt, other = (ChunkPrompt.make([tokens] * CHUNKS, QUESTION, seed=seed) for seed in (41, 42))
    size_mib = CHUNKS * tokens * 32 // 1024 + 2  # 32 KiB a token; no room for a seventh
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder), f"{size_mib}MiB", f"{4 * size_mib}MiB", policy="lru") as shard,
    ):
        store = GrpcStore(shard.address)
        with engine(SHAPE, extra={"store": f"grpc://{shard.address}", "loading_controller": True}) as running:
            store_chunks(running, prompt)
            mine = [manifest.key for manifest in store.list(NAMESPACE)]
            store_chunks(running, other)
            others = [manifest.key for manifest in store.list(NAMESPACE) if manifest.key not in mine]
            samples = _sample(running, store, prompt, mine, others, repetitions)
        store.close()
    ratio = statistics.median(samples["ssd"]) / statistics.median(samples["ram"])
    detail = f"{spread(samples['ssd'])} ÷ {spread(samples['ram'])}"
    return [Figure.at_most("ttft_ssd_vs_ram", ratio, 1.1, detail=detail)]


def _sample(
    running: LocalEngine,
    store: GrpcStore,
    prompt: ChunkPrompt,
    mine: Sequence[ChunkKey],
    others: Sequence[ChunkKey],
    repetitions: int,
) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {"ssd": [], "ram": []}
    for repetition in range(repetitions + 1):
        _read(store, others)
        for tier in samples:
            found = store.tiers(NAMESPACE, mine)
            assert all((name == "ram") == (tier == "ram") for name in found), found
            answer = cold(running, Prompt(prompt.token_ids, prompt.params(), max_tokens=1, ignore_eos=True))
            accounting = answer.accounting or {}
            assert accounting["outcome"] == "blended", accounting
            if repetition:  # the first of each teaches
                samples[tier].append(answer.ttft_s)
        say(f"tiers {repetition}/{repetitions}: {samples}")
    return samples


def _read(store: GrpcStore, keys: Sequence[ChunkKey]) -> None:
    manifests = [manifest for manifest in store.lookup(NAMESPACE, keys) if manifest is not None]
    layout = manifests[0].layout
    for _ in store.stream(
        NAMESPACE, keys, range(layout.num_layers), HeadRange(0, layout.num_kv_heads), deadline_s=30.0
    ):
        pass
