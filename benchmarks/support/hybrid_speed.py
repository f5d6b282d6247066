"""Measures the time to first token on a random hybrid of Qwen3-Next's proportions: full prefill and blends.

vLLM computes Gated DeltaNet on a CPU in bfloat16 alone, and a processor without bfloat16 multiplies matrices
in it several times slower than in float32. So a prefill takes minutes there, and measured rounds are kept.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.support.engines import cold, engine, say, store_chunks
from benchmarks.support.figures import Figure, machine, spread
from benchmarks.support.prompts import ChunkPrompt
from kintsugi.core.request import KintsugiParams, SelectorName
from kintsugi.engine.local import LocalEngine, Prompt
from kintsugi.models.cache import cache_folder, make_folder_once
from tests.fakes.random_models.factory import RECIPE, make_checkpoint_of

RATIO, SPEEDUP_MIN, ROUNDS = 0.15, 1.8, 3
LAYERS, LAYERS_QUICK = 12, 4
METHODS: dict[str, SelectorName | None] = {
    "full": None,
    "r15": SelectorName.HKVD,
    "r15_query": SelectorName.QUERY,
}
OPERATION = "cpu_gdn_attention_core"
"""vLLM's convolution and scan of a layer."""
Row = dict[str, dict[str, float]]
"""Of a round: by method, what was measured."""


def checkpoint_once(layers: int) -> Path:
    """Return the checkpoint folder. An MLP is as wide as the eleven experts that compute a token in
    Qwen3-Next."""
    config = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=128,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    folder = cache_folder() / "checkpoints" / f"delta-net-1024-{layers}l-r{RECIPE}"
    return make_folder_once(folder, lambda draft: make_checkpoint_of(config, draft))


def measure(quick: bool, records: Path | None = None, **given: Any) -> list[Figure]:
    """Return `hybrid_ttft_speedup` and the scan's share of the work."""
    layers, chunk = (LAYERS_QUICK, 80) if quick else (LAYERS, 660)
    prompt = ChunkPrompt.make([chunk] * 6, question=40, seed=1)
    kept = None if records is None or quick else records / "hybrid-ttft.json"
    rows = read_rows(kept)
    if len(rows) < (rounds := 1 if quick else ROUNDS):
        folder = checkpoint_once(layers)
        with engine(folder, max_model_len=4096 + 512, enable_prefix_caching=False) as running:
            store_chunks(running, prompt)
            while len(rows) < rounds:
                rows.append(measure_round(running, prompt))
                say(f"ttft {len(rows)}/{rounds}: {rows[-1]}")
                write_rows(kept, rows)
    return figures_of(rows, None if quick else SPEEDUP_MIN)


def measure_round(running: LocalEngine, prompt: ChunkPrompt) -> Row:
    """Answer the prompt by every method, one after the other."""
    row: Row = {}
    for name, selector in METHODS.items():
        params = None
        if selector is not None:
            params = KintsugiParams(
                prompt.params().namespace, spans=prompt.spans, ratio=RATIO, selector=selector
            )
        began_s = time.process_time()
        with timed_scan() as scan_s:
            answer = cold(running, Prompt(prompt.token_ids, params, max_tokens=1, ignore_eos=True))
        row[name] = {
            "ttft_s": answer.ttft_s,
            "cpu_s": time.process_time() - began_s,
            "scan_cpu_s": sum(scan_s),
        }
        if params is not None:
            accounting = answer.accounting or {}
            assert accounting["outcome"] == "blended", accounting
            row[name] |= {"cost": accounting["cost"], "loaded": accounting["bytes_loaded"]}
    return row


@contextlib.contextmanager
def timed_scan() -> Iterator[list[float]]:
    """Collect the CPU seconds of each call of vLLM's operation in the block."""
    namespace: Any = torch.ops.vllm
    operation, taken = getattr(namespace, OPERATION), list[float]()

    def run(*arguments: Any, **named: Any) -> None:
        began_s = time.process_time()
        operation(*arguments, **named)
        taken.append(time.process_time() - began_s)

    setattr(namespace, OPERATION, run)
    try:
        yield taken
    finally:
        setattr(namespace, OPERATION, operation)


def figures_of(rows: list[Row], bar: float | None) -> list[Figure]:
    """Return the speed-ups in time and in CPU seconds, which other work on the machine changes less."""

    def values(method: str, key: str) -> list[float]:
        return [row[method][key] for row in rows]

    figures = []
    for method in list(METHODS)[1:]:
        name = f"hybrid_ttft_speedup{method.removeprefix('r15')}"
        full, blend = values("full", "ttft_s"), values(method, "ttft_s")
        one = rows[0][method]
        detail = (
            f"{spread(full)} ÷ {spread(blend)}; cost {one['cost']:.3f} of a prefill, "
            f"{one['loaded'] / 1e6:.0f} MB loaded, {len(rows)} rounds"
        )
        value = statistics.median(full) / statistics.median(blend)
        figures.append(Figure.at_least(name, value, bar if method == "r15" else None, detail=detail))
        full, blend = values("full", "cpu_s"), values(method, "cpu_s")
        cpu = statistics.median(full) / statistics.median(blend)
        figures.append(
            Figure(f"{name}_cpu", cpu, "×", detail=f"{spread(full)} ÷ {spread(blend)} of CPU time")
        )
    for method in METHODS:
        shares = [row[method]["scan_cpu_s"] / row[method]["cpu_s"] for row in rows]
        detail = f"{spread(values(method, 'scan_cpu_s'))} of CPU time in convolution and scan"
        figures.append(Figure(f"scan_share [{method}]", statistics.median(shares), "", detail=detail))
    return figures


def read_rows(path: Path | None) -> list[Row]:
    """Return the rounds that were measured on this machine."""
    if path is None or not path.is_file():
        return []
    kept = json.loads(path.read_text())
    return list(kept["rows"]) if kept["machine"] == machine() else []


def write_rows(path: Path | None, rows: list[Row]) -> None:
    """Keep the rounds."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), "rows": rows}))
