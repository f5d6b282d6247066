"""vLLM's own engine with Kintsugi on a GPU: `python benchmarks/gpu/engine.py PART`, as `make gpu` runs it.

- **ops**: vLLM's compiled operations against torch's, as the packed extensions must load on this torch.
- **exact**: a small model, with FlashAttention's and then, in the same process, with Triton's backend: at a
  ratio of 1 a blend answers as full prefill does; below, it reaches our kernel, whose calls are counted.
- **ttft**: the layers of an 8B model with random weights through `AsyncLLM`, chunks in a shard of this
  machine, which are read through shared memory: time to first token beside full prefill's; then the times
  between a decode's tokens, alone, beside a blend and beside the prefill of the same prompt.

Prints one JSON object per row as soon as the row is known.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import faulthandler
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "services")]

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
RATIOS = (1.0, 0.15, 0.0)
CONTEXTS = (8192, 4096, 16384, 32512)
"""The required backend first."""
CHUNKS, QUESTION, REPEATS = 8, 63, 3
DECODED = 200
"""Tokens of the answer whose decoding is watched."""
BESIDE_S = 0.5
"""When the other prompt arrives."""
SELECTOR, RATIO = "query", 0.15
ARENA_BYTES = 16 << 30
Row = dict[str, Any]

PATIENT: dict[str, Any] = {
    "quality": "off",
    "loading_controller": False,
    "lookup_deadline_ms": 30_000,
    "layer_deadline_ms": 30_000,
}


def ops(_arguments: argparse.Namespace) -> Iterator[Row]:
    import torch
    from vllm import _custom_ops  # noqa: F401
    from vllm.vllm_flash_attn import flash_attn_interface as flash

    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16, generator=generator)
    weight, made = torch.ones(4096, device="cuda", dtype=torch.bfloat16), torch.empty_like(rows)
    torch.ops._C.rms_norm(made, rows, weight, 1e-6)
    wanted = torch.nn.functional.rms_norm(rows.float(), (4096,), weight.float(), 1e-6)
    error = float((made.float() - wanted).abs().max())
    yield {"row": "norm", "max_abs_error": error, "holds": error < 0.05}
    query = torch.randn(64, 8, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
    ends = torch.tensor([0, 64], device="cuda", dtype=torch.int32)
    made = flash.flash_attn_varlen_func(
        query, query, query, 64, ends, 64, cu_seqlens_k=ends, causal=True, fa_version=3
    )
    heads_first = query.transpose(0, 1).float()
    wanted = torch.nn.functional.scaled_dot_product_attention(
        heads_first, heads_first, heads_first, is_causal=True
    )
    error = float((made.float() - wanted.transpose(0, 1)).abs().max())
    yield {"row": "attention", "max_abs_error": error, "holds": error < 0.05}


def exact(arguments: argparse.Namespace) -> Iterator[Row]:
    from kintsugi.engine.local import LocalEngine
    from kintsugi.engine.worker.attention import scattered
    from kintsugi.fusor.attention import attend_scattered
    from tests.fakes.random_models.factory import make_checkpoint_once

    calls: list[int] = []
    attend = attend_scattered

    def counted(query: Any, *given: Any, **options: Any) -> Any:
        calls.append(len(query))
        return attend(query, *given, **options)

    setattr(scattered, "attend_scattered", counted)  # noqa: B010 - imported there, not exported
    folder = make_checkpoint_once("tiny-llama")
    for backend in arguments.backends:
        options: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 30, "max_model_len": 4096}
        if backend != "default":
            options["attention_config"] = {"backend": backend}
        extra = {**PATIENT, "store": f"ram://exact-{backend}"}
        with LocalEngine.start(folder, extra_config=extra, dtype="bfloat16", **options) as running:
            config = running.llm.llm_engine.vllm_config
            yield {
                "row": f"{backend} engine",
                "runner_v2": bool(getattr(config, "use_v2_model_runner", False)),
                "async_scheduling": bool(config.scheduler_config.async_scheduling),
            }
            yield from _compared(running, calls, backend)
        gc.collect()


def _compared(running: Any, calls: list[int], backend: str) -> Iterator[Row]:
    from benchmarks.support.engines import cold, store_chunks
    from benchmarks.support.prompts import ChunkPrompt
    from kintsugi.engine.local import Prompt

    prompt = ChunkPrompt.make([300, 500, 200], 40, seed=0)
    store_chunks(running, prompt)
    plain = Prompt(prompt.token_ids, None, max_tokens=8, top_logprobs=4, ignore_eos=True)
    full = cold(running, plain)
    for ratio in RATIOS:
        calls.clear()
        blend = cold(running, dataclasses.replace(plain, params=prompt.params(ratio)))
        accounting = blend.accounting or {}
        apart = abs(full.logprobs[0] - blend.logprobs[0])
        best = sorted(full.top_logprobs[0].values())[-2:]
        is_tied = best[-1] - best[0] < 0.1
        is_same = full.token_ids[0] == blend.token_ids[0] or is_tied
        holds = accounting.get("outcome") == "blended"
        if ratio == 1.0:
            holds = holds and is_same and apart < 0.1
        elif ratio > 0 and backend in BACKENDS:
            holds = holds and len(calls) > 0
        yield {
            "row": f"{backend} r={ratio:g}",
            "same_first_token": full.token_ids[0] == blend.token_ids[0],
            "first_logprob_apart": apart,
            "kernel_calls": len(calls),
            "outcome": accounting.get("outcome"),
            "reason": accounting.get("reason"),
            "holds": holds,
        }


def model_folder(shape_name: str, layers: int) -> Path:
    """A checkpoint without weights, which vLLM makes up (`load_format="dummy"`); the fingerprint reads a
    file of one number."""
    import torch
    from safetensors.torch import save_file

    from kintsugi.models.cache import cache_folder, make_folder_once
    from tests.fakes.random_models.shapes import find_shape
    from tests.fakes.random_models.vocabulary import BOS_ID, EOS_ID, train_tokenizer

    shape = dataclasses.replace(find_shape(shape_name), layers=layers)

    def make(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = shape.config(bos_token_id=BOS_ID, eos_token_id=EOS_ID)
        config.architectures = [f"{shape.architecture.value.capitalize()}ForCausalLM"]
        config.save_pretrained(folder)
        train_tokenizer(shape.vocab, shape.max_positions).save_pretrained(folder)
        save_file({"none": torch.zeros(1)}, folder / "model.safetensors")

    return make_folder_once(cache_folder() / "checkpoints" / f"{shape_name}-{layers}-dummy", make)


@dataclasses.dataclass
class Asker:
    """Sends requests to an asynchronous engine and measures them."""

    engine: Any
    asked: int = 0

    async def put(self, context: int) -> Any:
        """Store the chunks of a prompt of about ``context`` tokens, and return the prompt."""
        from benchmarks.support.prompts import NAMESPACE, PREFIX, ChunkPrompt
        from kintsugi.core.spaces import TokenIds

        size = (context - QUESTION - len(PREFIX)) // CHUNKS
        prompt = ChunkPrompt.make([size] * CHUNKS, QUESTION, seed=context)
        chunks = [TokenIds.of(chunk) for chunk in prompt.chunks]
        outcomes = await self.engine.save(f"put-{context}", NAMESPACE, chunks)
        problems = [outcome for outcome in outcomes if not outcome.is_saved]
        assert not problems, problems[0]
        return prompt

    async def ask(self, token_ids: Any, params: Any, max_tokens: int = 1) -> tuple[list[float], Row]:
        """Return when each token arrived, in seconds from the request, and the accounting."""
        from kintsugi.core.exchange import EngineRequest
        from kintsugi.core.spaces import TokenIds

        self.asked += 1
        sampling = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
        request = EngineRequest(f"ask-{self.asked}", TokenIds.of(token_ids), params, sampling)
        began_s, times_s, accounting = time.perf_counter(), list[float](), Row()
        async for delta in self.engine.generate(request):
            times_s += [time.perf_counter() - began_s] * len(delta.token_ids)
            accounting = dict(delta.accounting or accounting)
        return times_s, accounting

    async def cold_s(self, prompt: Any, params: Any) -> tuple[float, Row]:
        """Seconds to the first token with an empty prefix cache."""
        assert await self.engine.client.reset_prefix_cache()
        times_s, accounting = await self.ask(prompt.token_ids, params)
        return times_s[0], accounting


@contextlib.asynccontextmanager
async def asker_of(folder: Path, max_model_len: int, arena_bytes: int, vllm: Row) -> AsyncIterator[Asker]:
    """An engine, and a shard in this process, whose memory the engine's processes map."""
    from kintsugi.engine.asynchronous import AsyncEngine, AsyncSpec, launch
    from kintsugi.store.shard.server import ShardServer
    from kintsugi.store.shard.shard import Shard
    from kintsugi.store.shard.tiers.ram_tier import RamTier

    with ShardServer(Shard(RamTier(arena_bytes)), "127.0.0.1:0") as store:
        options = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": max_model_len, **vllm}
        url = f"grpc://{store.address}"
        spec = AsyncSpec(str(folder), "measured", url, extra_config=PATIENT, vllm_args=options)
        engine = AsyncEngine(spec, await launch(spec, lambda binding: None))
        try:
            yield Asker(engine)
        finally:
            await engine.close()


async def ttft(arguments: argparse.Namespace) -> AsyncIterator[Row]:
    folder = model_folder(arguments.shape, arguments.layers)
    longest = max(arguments.contexts) + DECODED
    async with asker_of(folder, longest, arguments.arena_bytes, json.loads(arguments.vllm)) as asker:
        for index, context in enumerate(arguments.contexts):
            prompt = await asker.put(context)
            async for row in _first_tokens(asker, prompt, context, arguments):
                yield row
            if index == 0:
                yield await _between_tokens(asker, prompt)


def _ways(prompt: Any) -> dict[str, Any]:
    from kintsugi.core.request import KintsugiParams, Op, SelectorName

    chosen = dataclasses.replace(prompt.params(RATIO), selector=SelectorName(SELECTOR))
    full = KintsugiParams(chosen.namespace, Op.OFF)
    return {"full": full, f"{SELECTOR} r={RATIO:g}": chosen, "r=0": prompt.params(0.0)}


async def _first_tokens(
    asker: Asker, prompt: Any, context: int, arguments: argparse.Namespace
) -> AsyncIterator[Row]:
    ways = _ways(prompt)
    for params in ways.values():
        await asker.cold_s(prompt, params)  # compiles what these sizes need
    runs = [
        {name: await asker.cold_s(prompt, params) for name, params in ways.items()} for _ in range(REPEATS)
    ]
    seconds = {name: statistics.median(run[name][0] for run in runs) for name in ways}
    for name in list(ways)[1:]:
        accounting = runs[-1][name][1]
        yield {
            "row": f"{context} {name}",
            "shape": arguments.shape,
            "layers": arguments.layers,
            "context": context,
            "selection": name,
            "full_ms": seconds["full"] * 1e3,
            "blend_ms": seconds[name] * 1e3,
            "speedup": seconds["full"] / seconds[name],
            **{key: accounting.get(key) for key in ("transport", "load_wait_ms", "bytes_loaded", "reason")},
            "device_used_mib": _device_used_mib(),
            "holds": all(run[name][1].get("outcome") == "blended" for run in runs),
        }


async def _between_tokens(asker: Asker, prompt: Any) -> Row:
    """The longest time between a decode's tokens: alone, beside a blend, beside the same prompt's prefill."""
    ways = _ways(prompt)
    decoded, worst_ms = list(range(5, 69)), dict[str, float]()
    for name in ("alone", f"{SELECTOR} r={RATIO:g}", "full"):
        assert await asker.engine.client.reset_prefix_cache()
        async with asyncio.TaskGroup() as group:
            decode = group.create_task(asker.ask(decoded, ways["full"], DECODED))
            await asyncio.sleep(BESIDE_S)
            if name in ways:
                group.create_task(asker.ask(prompt.token_ids, ways[name]))
        times_s = decode.result()[0]
        worst_ms[name] = max(later - earlier for earlier, later in pairwise(times_s)) * 1e3
    alone, blend, full = worst_ms.values()
    return {
        "row": "itl",
        "alone_ms": alone,
        "beside_blend_ms": blend,
        "beside_full_ms": full,
        "share": blend / full,
    }


def _device_used_mib() -> float | None:
    """Memory that all processes use on the device."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return float((total - free) / 2**20)


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {"ops": ops, "exact": exact, "ttft": ttft}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), help="`default`: vLLM's choice")
    parser.add_argument("--shape", default="mistral-7b-layers", help="as in tests.fakes.random_models.shapes")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--arena-bytes", type=int, default=ARENA_BYTES)
    parser.add_argument("--vllm", default='{"gpu_memory_utilization": 0.85}', help="more of vLLM's arguments")
    parser.add_argument("--stuck-s", type=float, default=0.0, help="print all stacks and end after so long")
    arguments = parser.parse_args()
    if arguments.stuck_s:
        faulthandler.dump_traceback_later(arguments.stuck_s, exit=True)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from kintsugi.engine import plugin

    # With an installed Kintsugi, vLLM calls this; here only its sources are present.
    plugin.register()
    rows = PARTS[arguments.part](arguments)
    if arguments.part == "ttft":
        asyncio.run(_print_all(rows))
        return
    for row in rows:
        print(json.dumps(row), flush=True)


async def _print_all(rows: AsyncIterator[Row]) -> None:
    async for row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
