"""Two tensor-parallel workers over a real shard: run by `test_tensor_parallel.py` in a process of its own.

Prints one JSON object: what each check saw. The workers are processes, so faults are put into the shard.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
# Two workers on one machine: without it vLLM finds fewer NUMA nodes than workers, and gives up.
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if (os.cpu_count() or 1) > 1 else "0|0"

import torch

from kintsugi.core.exchange import LayerFrame
from kintsugi.core.layout import ChunkManifest, HeadRange, digests_of
from kintsugi.core.request import SelectorName
from kintsugi.core.spaces import ChunkKey
from kintsugi.engine.auditing import find_stored_copies
from kintsugi.engine.local import Generation, LocalEngine
from kintsugi.store.client.registry import open_store
from kintsugi.store.protocol.interface import ChunkStore
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.fakes.random_models.factory import make_checkpoint_once
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    UNCALIBRATED,
    Rag,
    ask_cold,
    chunks_of,
    engine_dtype,
    max_dlogprob,
    rag,
    random_tokens,
)

SIZES = (33, 100, 257, 64)
QUERY_LAYERS = (1, 2)
"""The fusor's choice in four layers."""
RANKS = 2
ATTENDING = (SelectorName.QUERY, SelectorName.HYBRID)
"""Selectors that look at attention, of which each rank has a part."""


def answer(full: Generation, blended: Generation) -> dict[str, Any]:
    return {
        "same_tokens": full.token_ids == blended.token_ids,
        "max_abs_dlogprob": max_dlogprob(full, blended),
        "accounting": blended.accounting,
    }


def damage(shard: Shard, manifest: ChunkManifest, layer: int, rank: int) -> None:
    """Flip a byte of a head that only `rank` reads, so that it alone finds the digest wrong."""
    heads = HeadRange.of_rank(manifest.layout.num_kv_heads, rank, RANKS)
    reading = shard.open(NAMESPACE, [manifest.key], range(manifest.layout.num_layers), heads)
    held = reading.chunks[0]
    assert held is not None
    start, _ = manifest.head_range_bytes(heads)
    shard.ram.frame(held.residence, layer, start, start + 1)[0] ^= 1
    shard.table.close(reading)


def checks(engine: LocalEngine, shard: Shard, address: str) -> dict[str, Any]:
    chunks = chunks_of(*SIZES, seed=3)
    saves = engine.save(PREFIX, chunks, NAMESPACE)
    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids, max_tokens=32)
    seen: dict[str, Any] = {"saved": [generation.accounting for generation in saves]}
    seen["full ratio"] = answer(full, ask_cold(engine, prompt.token_ids, prompt.params(1.0), max_tokens=32))
    alone = rag(chunks[2])
    seen["own prefix"] = answer(
        ask_cold(engine, alone.token_ids), ask_cold(engine, alone.token_ids, alone.params(0.0))
    )
    gaps = Rag([("gap", random_tokens(9, 7)), ("chunk", chunks[3]), ("gap", [5, 6]), ("chunk", chunks[1])])
    for name, ratio in (("ratio .15", 0.15), ("ratio 0", 0.0)):
        blended = ask_cold(engine, prompt.token_ids, prompt.params(ratio), max_tokens=32)
        seen[name] = answer(full, blended)
    for selector in ATTENDING:
        params = prompt.params(0.15, selector, explain=True)
        seen[selector.value] = answer(full, ask_cold(engine, prompt.token_ids, params, max_tokens=32))
    seen["gaps"] = answer(
        ask_cold(engine, gaps.token_ids), ask_cold(engine, gaps.token_ids, gaps.params(1.0))
    )
    seen["audits"] = audits(engine, address, prompt)
    (manifest,) = [m for m in listed(shard) if m.num_tokens == SIZES[2]]
    damage(shard, manifest, layer=2, rank=1)
    survived = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    # Quarantined by now: the same prompt misses it from the start.
    expected = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    seen["lost on one rank"] = answer(expected, survived)
    seen["after the loss"] = expected.accounting
    seen["nothing left behind"] = answer(
        ask_cold(engine, prompt.token_ids), ask_cold(engine, prompt.token_ids)
    )
    seen["out of memory on one rank"] = out_of_memory_on_one_rank(engine, prompt)
    seen["weights changed on one rank"] = changed_on_one_rank(engine, prompt)
    return seen


def audits(engine: LocalEngine, address: str, prompt: Rag) -> list[dict[str, Any] | None]:
    """Audit two chunks, and the second again with a zeroed head that only rank 1 reads when it blends."""
    store = open_store(f"grpc://{address}")
    try:
        chunks = find_stored_copies(store, engine.space(NAMESPACE), prompt.token_ids, prompt.spans)[:2]
        sound = [one.accounting for one in engine.generate([chunk.prompt for chunk in chunks])]
        kept = zero_last_head(store, chunks[1].key)
        (damaged,) = engine.generate([chunks[1].prompt])
        store.delete(NAMESPACE, [chunks[1].key])
        assert store.put(*kept)
    finally:
        store.close()
    return [*sound, damaged.accounting]


def zero_last_head(store: ChunkStore, key: ChunkKey) -> tuple[ChunkManifest, list[bytes]]:
    """Returns what was stored before."""
    (manifest,) = store.lookup(NAMESPACE, [key])
    assert manifest is not None
    layout, heads = manifest.layout, HeadRange(0, manifest.layout.num_kv_heads)
    stream = store.stream(NAMESPACE, [key], range(layout.num_layers), heads, 20.0)
    frames = [bytes(frame.data) for frame in stream if isinstance(frame, LayerFrame)]
    size = layout.head_bytes(manifest.codec, manifest.num_tokens)
    zeroed = [frame[:-size] + bytes(size) for frame in frames]
    digests = b"".join(digests_of(frame, size) for frame in zeroed)
    assert store.delete(NAMESPACE, [key]) == 1
    assert store.put(dataclasses.replace(manifest, digests=digests), zeroed)
    return manifest, frames


def out_of_memory_on_one_rank(engine: LocalEngine, prompt: Rag) -> dict[str, Any]:
    """A blend and a save in whose layer 2 rank 1 has no memory left between two all-reduces, and what
    follows."""
    full = ask_cold(engine, prompt.token_ids)
    engine.llm.collective_rpc(run_out_of_memory)
    failed = answer(full, ask_cold(engine, prompt.token_ids, prompt.params(0.15)))
    blended = ask_cold(engine, prompt.token_ids, prompt.params(0.15))
    engine.llm.collective_rpc(run_out_of_memory_between_calls)
    between = answer(full, ask_cold(engine, prompt.token_ids, prompt.params(0.15)))
    engine.llm.collective_rpc(run_out_of_memory)
    chunk = random_tokens(60, 91)
    saves = [engine.save(PREFIX, [chunk], NAMESPACE)[0].accounting for _ in range(2)]
    return {"failed": failed, "between": between, "blended": blended.accounting, "saves": saves}


def run_out_of_memory(worker: Any) -> None:
    """Let rank 1 fail once in the MLP of layer 2, after attention's all-reduce and before the MLP's own."""
    mlp = worker.get_model().model.layers[2].mlp

    def fail(_hidden: Any) -> Any:
        del mlp.forward
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    if worker.rank == 1:
        mlp.forward = fail


def run_out_of_memory_between_calls(worker: Any) -> None:
    """Let rank 1 fail once where it compares loaded with fresh KV, after which the ranks sum their parts."""
    from kintsugi.fusor import blend as module

    blend: Any = module
    own = blend._square_distances

    def fail(*_arguments: Any) -> Any:
        blend._square_distances = own
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    if worker.rank == 1:
        blend._square_distances = fail


def changed_on_one_rank(engine: LocalEngine, prompt: Rag) -> list[dict[str, Any] | None]:
    """What two requests are told once rank 1 alone has seen a write to its weights; nothing blends then."""
    engine.llm.collective_rpc(write_on_one_rank)
    return [ask_cold(engine, prompt.token_ids, prompt.params(0.0)).accounting for _ in range(2)]


def write_on_one_rank(worker: Any) -> None:
    weight = next(worker.get_model().parameters())
    if worker.rank == 1:
        weight.copy_(weight.clone())


def listed(shard: Shard) -> list[ChunkManifest]:
    return [entry.manifest for entry in shard.page(NAMESPACE, 100, None)]


def main(shape: str) -> None:
    with ShardServer(Shard(RamTier(64 << 20)), "127.0.0.1:0") as server:
        engine = LocalEngine.start(
            make_checkpoint_once(shape),
            extra_config={
                "store": f"grpc://{server.address}",
                "layer_deadline_ms": 20_000,
                **UNCALIBRATED,
            },
            dtype=engine_dtype(),
            max_model_len=2048,
            block_size=32,
            kv_cache_memory_bytes=64 << 20,
            tensor_parallel_size=RANKS,
            distributed_executor_backend="mp",
        )
        with engine:
            print("RESULT " + json.dumps(checks(engine, server.shard, server.address)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
