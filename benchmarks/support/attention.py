"""Measures the cost of a query-key pair in a blend's scattered attention, against a dense causal prefill."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from benchmarks.support.engines import cold, engine, say, store_chunks
from benchmarks.support.figures import Figure, spread
from benchmarks.support.prompts import ChunkPrompt
from kintsugi.core.request import KintsugiParams, SelectorName
from kintsugi.engine.local import LocalEngine, Prompt
from kintsugi.engine.worker.attention import scattered

SHAPE = "llama-210m"
RATIO = 0.15
UNSERVED = 1 << 30
"""More runs than any batch has. As `RUNS_MIN_PACKED`, it leaves every batch to the backend's own kernel."""


def measure(quick: bool) -> list[Figure]:
    repetitions, chunk, layers = (3, 160, 2) if quick else (9, 660, 4)
    prompt = ChunkPrompt.make([chunk] * 6, question=40, seed=1)
    with engine(SHAPE, layers=layers) as running:
        store_chunks(running, prompt)
        samples = _sample(running, prompt, layers, repetitions)
    dense = statistics.median(samples["dense"])
    ratios = {name: statistics.median(samples[name]) / dense for name in ("ours", "backend")}
    details = {name: spread(values, "ns") for name, values in samples.items()}
    figure = Figure.at_most(
        "scattered_pair_cost",
        ratios["ours"],
        None if quick else 1.2,
        detail=f"thread's CPU time per pair and layer, {details['ours']} ÷ {details['dense']}; "
        f"{ratios['backend']:.2f}× through the backend's own kernel",
    )
    return [figure]


def _sample(
    running: LocalEngine, prompt: ChunkPrompt, layers: int, repetitions: int
) -> dict[str, list[float]]:
    """CPU nanoseconds per query-key pair: `dense`; scattered by `ours` and by the `backend`'s kernel."""
    # This selector chooses before layer 0 and independently of the kernel, so all attention of the
    # pass is scattered.
    params = dataclasses.replace(prompt.params(RATIO, explain=True), selector=SelectorName.RANDOM)
    methods = {
        "dense": (None, scattered.RUNS_MIN_PACKED),
        "ours": (params, scattered.RUNS_MIN_PACKED),
        "backend": (params, UNSERVED),
    }
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for repetition in range(repetitions + 1):
        for name, (wanted, runs_min) in methods.items():
            nanoseconds = _ns_per_pair(running, prompt, wanted, runs_min, layers)
            if repetition:  # the first call of each shape prepares kernels
                samples[name].append(nanoseconds)
        say(f"attention {repetition}/{repetitions}: {[f'{v[-1]:.1f}' for v in samples.values() if v]} ns")
    return samples


def _ns_per_pair(
    running: LocalEngine, prompt: ChunkPrompt, params: KintsugiParams | None, runs_min: int, layers: int
) -> float:
    with serve_from(runs_min), _time_attention() as spent:
        generation = cold(running, Prompt(prompt.token_ids, params, max_tokens=1, ignore_eos=True))
    length = len(prompt.token_ids)
    if params is None:
        pairs = layers * length * (length + 1) // 2
    else:
        accounting = generation.accounting or {}
        assert accounting["outcome"] == "blended", accounting
        computed = accounting["recomputed_positions"].values()
        pairs = sum(position + 1 for positions in computed for position in positions)
    return sum(spent) * 1e9 / pairs


@contextlib.contextmanager
def serve_from(runs_min: int) -> Iterator[None]:
    """Inside the block our kernel serves batches of ``runs_min`` runs or more; `UNSERVED`: none."""
    before, scattered.RUNS_MIN_PACKED = scattered.RUNS_MIN_PACKED, runs_min
    try:
        yield
    finally:
        scattered.RUNS_MIN_PACKED = before


@contextlib.contextmanager
def _time_attention() -> Iterator[list[float]]:
    """CPU seconds that this thread spends in vLLM's attention layers, by call. Calls for one query do not
    count: the engine makes them for the last token, after a blend."""
    from vllm.model_executor.layers.attention import Attention

    spent: list[float] = []
    began = 0.0

    def start(module: Module, _arguments: object) -> None:
        nonlocal began
        if type(module) is Attention:
            began = time.thread_time()

    def stop(module: Module, arguments: tuple[Tensor, ...], _output: object) -> None:
        if type(module) is Attention and len(arguments[0]) > 1:
            spent.append(time.thread_time() - began)

    # On all modules, because vLLM's own cannot be found through the garbage collector.
    handles = register_module_forward_pre_hook(start), register_module_forward_hook(stop)
    try:
        yield spent
    finally:
        for handle in handles:
            handle.remove()
