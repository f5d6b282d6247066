"""One vLLM engine at a time, kept for all tests that ask for the same one.

vLLM keeps its KV connector in a process-wide variable, so two engines cannot live side by side.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from kintsugi.core.request import KintsugiParams, SelectorName
from kintsugi.core.spaces import Span
from kintsugi.engine.local import Generation, LocalEngine, Prompt
from kintsugi.models.cache import cache_folder, make_folder_once
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.registry import open_store
from tests.fakes.random_models.factory import RECIPE, make_checkpoint_of, make_checkpoint_once
from tests.heap import freeze_imports
from tests.model_configs import DECLINED, FAMILIES, SEEDS, config_of
from tests.waiting import wait_until

NAMESPACE = "acme"
PREFIX = [0]
"""The factory's BOS."""
VOCAB = 1000
READY_S = 60.0
"""Longest time until an engine that has started discovers."""

UNCALIBRATED = {"quality": "off", "loading_controller": False}
"""Random weights have no quality to calibrate, and tiny models nothing to gain: blend what is asked for."""

PATIENT = {"lookup_deadline_ms": 60_000, "layer_deadline_ms": 60_000}
"""A busy machine is no reason to decline: tests that mean a deadline set it."""


def is_posed() -> bool:
    """Whether this process poses as one with a GPU (`KINTSUGI_POSED=1`)."""
    return "tests.fakes.posed_gpu" in sys.modules


def engine_dtype() -> str:
    """Dtype of engines in tests that compare a blend with vLLM itself: bfloat16 where the CPU has AVX-512.

    Without AVX-512, how torch rounds a bfloat16 product depends on its number of rows: two full prefills of
    one prompt, split at different tokens, differ by up to 0.1 in a log probability. Only float32 shows there
    whether a blend is exact. So it is where a GPU is posed.
    """
    import torch

    is_float32 = is_posed() or torch.backends.cpu.get_cpu_capability() == "AVX2"
    return "float32" if is_float32 else "bfloat16"


needs_fp8_kv = pytest.mark.skipif(
    engine_dtype() == "float32", reason="vLLM's fp8 KV cache on a CPU needs AVX-512 or AMX"
)


def folder_of(name: str) -> Path:
    """The checkpoint of a named shape, or of a family of `tests.model_configs`; made on first use."""
    if name not in FAMILIES | DECLINED:
        return make_checkpoint_once(name)
    digest = blake3(config_of(name).to_json_string().encode()).hexdigest(length=8)
    seed = SEEDS.get(name, 0)
    final = cache_folder() / "checkpoints" / f"{name}-{digest}-seed{seed}-r{RECIPE}"
    return make_folder_once(final, lambda draft: make_checkpoint_of(config_of(name), draft, seed))


def posed_arguments() -> dict[str, Any]:
    """vLLM's arguments where this process poses: attention that needs no compiled extension, and vLLM's own
    operations in torch."""
    if not is_posed():
        return {}
    native = {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}
    return {
        "attention_config": {"backend": "TRITON_ATTN"},
        "compilation_config": {"custom_ops": ["none"]},
        "kernel_config": {"ir_op_priority": native},
    }


@dataclass
class EngineSlot:
    """Starts engines on demand and closes the one before."""

    wanted: tuple[Any, ...] | None = None
    engine: LocalEngine | None = None
    is_vllm_imported: bool = False

    def get(self, shape: str, extra_config: dict[str, object] | None = None, **vllm_args: Any) -> LocalEngine:
        wanted = (shape, repr(extra_config), repr(sorted(vllm_args.items())))
        if self.wanted != wanted:
            self.close()
            arguments = {
                "dtype": engine_dtype(),
                "max_model_len": 4096,
                "block_size": 32,
                "kv_cache_memory_bytes": 128 << 20,
                **posed_arguments(),
                **vllm_args,
            }
            config = {"store": f"ram://{shape}", **PATIENT, **UNCALIBRATED, **(extra_config or {})}
            self.engine = LocalEngine.start(folder_of(shape), extra_config=config, **arguments)
            self.wanted = wanted
        assert self.engine is not None
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            if not self.is_vllm_imported:
                freeze_imports()
                self.is_vllm_imported = True
        self.engine, self.wanted = None, None


def random_tokens(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB) for _ in range(count)]


@dataclass
class Rag:
    """A prompt of chunks: prefix, pieces, question. A piece is a chunk's tokens, or a gap between."""

    pieces: Sequence[tuple[str, list[int]]]
    """(`chunk` or `gap`, tokens), in order."""
    question: list[int] = field(default_factory=lambda: random_tokens(17, 99))
    prefix: Sequence[int] = tuple(PREFIX)

    @property
    def token_ids(self) -> list[int]:
        return [*self.prefix, *(token for _, tokens in self.pieces for token in tokens), *self.question]

    @property
    def spans(self) -> tuple[Span, ...]:
        spans, at = [], len(self.prefix)
        for kind, tokens in self.pieces:
            if kind == "chunk":
                spans.append(Span(at, at + len(tokens)))
            at += len(tokens)
        return tuple(spans)

    def params(
        self, ratio: float | None = 1.0, selector: SelectorName | None = None, explain: bool = False
    ) -> KintsugiParams:
        return KintsugiParams(NAMESPACE, spans=self.spans, ratio=ratio, selector=selector, explain=explain)


def chunks_of(*sizes: int, seed: int = 0) -> list[list[int]]:
    return [random_tokens(size, seed=1000 * seed + index) for index, size in enumerate(sizes)]


def rag(*chunks: list[int]) -> Rag:
    return Rag([("chunk", chunk) for chunk in chunks])


def saved(engine: LocalEngine, *sizes: int) -> Rag:
    """A prompt of chunks that the store holds."""
    chunks = chunks_of(*sizes, seed=20)
    for generation in engine.save(PREFIX, chunks, NAMESPACE):
        assert generation.accounting is not None
        assert generation.accounting["outcome"] == "saved", generation.accounting
    return rag(*chunks)


def require_blended(generation: Generation) -> dict[str, Any]:
    assert generation.accounting is not None
    assert generation.accounting["outcome"] == "blended", generation.accounting
    return generation.accounting


def ask(
    engine: LocalEngine, token_ids: Sequence[int], params: KintsugiParams | None = None, max_tokens: int = 8
) -> Generation:
    prompt = Prompt(token_ids, params, max_tokens, top_logprobs=5, ignore_eos=True)
    return engine.generate([prompt])[0]


def ask_cold(
    engine: LocalEngine, token_ids: Sequence[int], params: KintsugiParams | None = None, max_tokens: int = 8
) -> Generation:
    engine.reset_prefix_cache()
    return ask(engine, token_ids, params, max_tokens)


def when_discovering(engine: LocalEngine) -> LocalEngine:
    """The engine, as soon as it counts segments, without a limit on what it saves."""
    discovery = engine._scheduler.discovery
    discovery.backlog.share = 10.0
    wait_until(lambda: discovery.is_ready, "discovery is not ready", within_s=READY_S)
    return engine


def save_discovered(engine: LocalEngine) -> None:
    """Step the idle engine until it has saved the discovered segments that it may save now."""
    saves = engine._scheduler.idle_saves
    saves.wake()
    for _ in range(100_000):
        if not saves.is_pending:
            return
        engine.llm.llm_engine.step()
        saves.wake()
    raise AssertionError("discovered segments were not saved")


def max_dlogprob(one: Generation, other: Generation) -> float:
    """Largest difference of a logprob that both report, over the tokens before they part."""
    worst = 0.0
    for mine, theirs, a, b in zip(
        one.top_logprobs, other.top_logprobs, one.token_ids, other.token_ids, strict=True
    ):
        worst = max([worst, *(abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys())])
        if a != b:
            break
    return worst


def ram_store(shape: str) -> RamStore:
    """The store of an engine that `EngineSlot` started."""
    store = open_store(f"ram://{shape}")
    assert isinstance(store, RamStore)
    return store
