"""Blends on the reference stack: layers of real models' shapes in plain torch, chunks in host memory."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from kintsugi.core.errors import Corrupted
from kintsugi.core.exchange import LayerFrame
from kintsugi.core.layout import ChunkManifest, Codec, HeadRange, KVLayout
from kintsugi.core.plan import BlendPlan, ChunkHit, Selection
from kintsugi.core.request import SelectorName
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.fusor.blend import BlendPass, PassRegion
from kintsugi.fusor.codecs import DTYPES, encode_frame
from kintsugi.fusor.loader import LayerLoader, placements_of
from kintsugi.fusor.sliced import PassStatus
from tests.fakes.paged_stack import VOCAB, ModelShape, PagedModel, PagedStack

T = TypeVar("T")

SPACE = ChunkSpace(ModelFingerprint(bytes(32)), "gpu", ())
CHUNKS, QUESTION = 8, 64
DEPTH, PATIENCE_S = 4, 60.0
UNIT_TOKENS = 8192

TINY = ModelShape(layers=3, hidden=32, heads=4, kv_heads=2, head_dim=16, mlp=64)
MAIN_SELECTIONS = {
    "hkvd@1 r=.15": Selection(0.15, SelectorName.HKVD, 1),
    "query r=.15": Selection(0.15, SelectorName.QUERY),
    "chunk_head r=.15": Selection(0.15, SelectorName.CHUNK_HEAD),
    "r=0": Selection(0.0),
}
SELECTIONS = {
    **MAIN_SELECTIONS,
    "hybrid r=.15": Selection(0.15, SelectorName.HYBRID, 1),
    "gradual@1 r=.15": Selection(0.15, SelectorName.HKVD_GRADUAL, 1),
}
"""Selections that cover every kind of operation. The main ones are timed at every length."""

WAIT = "called a synchronizing CUDA operation"
"""Texts of torch's warnings about waits. One warning says that torch does not detect all of them."""
WAITS_A_PASS_MAX = 0
"""A pass queries an event and does not wait."""


@dataclass(frozen=True)
class Prompt:
    """`CHUNKS` chunks of one size, and a question. All layers of a chunk are the same bytes, so
    that a model of 80 layers fits into the host's memory; every layer is copied, decoded and, where xxhash is
    installed, verified all the same."""

    token_ids: Tensor
    hits: tuple[ChunkHit, ...]
    manifests: dict[ChunkKey, ChunkManifest]
    frames: dict[ChunkKey, memoryview]
    """The bytes of each layer's frame."""

    @property
    def frame_bytes(self) -> int:
        """Bytes of one layer."""
        return sum(len(frame) for frame in self.frames.values())

    def stream(self, keys: list[ChunkKey], layers: range) -> Iterator[LayerFrame]:
        """The frames of `layers`, as a store streams them. Raises `Corrupted`."""
        for layer in layers:
            for index, key in enumerate(keys):
                manifest = self.manifests[key]
                frame = self.frames[key]
                if not manifest.frame_is_intact(layer, HeadRange(0, manifest.layout.num_kv_heads), frame):
                    raise Corrupted(f"layer {layer} of {key} is not what was made")
                yield LayerFrame(index, layer, frame)


def prompt_of(shape: ModelShape, context: int, codec: Codec, dtype: str) -> Prompt:
    generator = torch.Generator().manual_seed(context)
    token_ids = torch.randint(0, VOCAB, (context,), generator=generator)
    size = (context - QUESTION) // CHUNKS
    layout = KVLayout.uniform(shape.layers, shape.kv_heads, shape.head_dim, dtype)
    manifests, frames, hits = {}, {}, []
    for index in range(CHUNKS):
        start = index * size
        key = ChunkKey.of(SPACE, token_ids[start : start + size].tolist())
        drawn = torch.randn(2, size, shape.kv_heads, shape.head_dim, generator=generator).to(DTYPES[dtype])
        frame = encode_frame(drawn[0], drawn[1], codec)
        every_frame = [frame] * shape.layers
        manifests[key] = ChunkManifest.of(SPACE, key, (), size, layout, codec, every_frame)
        frames[key] = frame
        hits.append(ChunkHit(start, start + size, key))
    return Prompt(token_ids, tuple(hits), manifests, frames)


def loader_of(prompt: Prompt, plan: BlendPlan, model: PagedModel) -> LayerLoader:
    keys, layers = [hit.key for hit in plan.hits], range(model.shape.layers)
    return LayerLoader(
        lambda share: prompt.stream(keys[share], layers),
        placements_of(plan, prompt.manifests, 0, len(prompt.token_ids)),
        [model.rotary] * model.shape.layers,
        model.device,
        model.shape.kv_heads,
        depth=DEPTH,
        patience_s=PATIENCE_S,
    )


def blend(prompt: Prompt, stack: PagedStack, selection: Selection) -> BlendPass:
    """Run one blend to its end."""
    work = BlendPass(
        PassRegion(prompt.token_ids, 0, 1),
        BlendPlan(prompt.hits, selection),
        stack,
        lambda plan: loader_of(prompt, plan, stack.model),
        UNIT_TOKENS,
    )
    while work.status is PassStatus.RUNNING:
        work.advance(float("inf"))
    work.close()
    if work.status is not PassStatus.DONE:
        raise RuntimeError(f"the blend failed: {work.tally.failure}")
    return work


def seconds_of(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the fastest of `repeats` runs after a warm-up, in seconds by the host's clock. The device is
    idle before and after each run."""
    times = []
    for _ in range(repeats + 1):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_waits(run: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    """The result of `run`, and how often torch saw the host wait for the device in it; None on a CPU."""
    if device.type == "cpu":
        return run(), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return result, sum(WAIT in str(warning.message) for warning in caught)


def dtype_on(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"


def scene_of(shape: ModelShape, context: int, device: torch.device) -> tuple[Prompt, PagedStack]:
    """A prompt, and a model with room for it and for the token after it."""
    dtype = dtype_on(device)
    model = PagedModel(shape, context + 1, device, DTYPES[dtype])
    return prompt_of(shape, context, Codec.RAW, dtype), PagedStack(model, context + 1)


def measure_pass(
    shape: ModelShape, context: int, selections: dict[str, Selection], device: torch.device, repeats: int
) -> Iterator[dict[str, Any]]:
    """Blends of one prompt against its dense prefill."""
    prompt, stack = scene_of(shape, context, device)
    dense_s = seconds_of(lambda: stack.prefill(prompt.token_ids, UNIT_TOKENS), device, repeats)
    for name, selection in selections.items():
        run = partial(blend, prompt, stack, selection)
        blend_s = seconds_of(run, device, repeats)
        before = _start_watching_memory(device)
        done, waits = count_waits(run, device)
        tally = done.tally
        yield {
            "context": context,
            "layers": shape.layers,
            "selection": name,
            "dense_ms": dense_s * 1e3,
            "blend_ms": blend_s * 1e3,
            "speedup": dense_s / blend_s,
            "cost": tally.token_layers / (context * shape.layers),
            "load_wait_ms": tally.load_wait_s * 1e3,
            "loaded_gb_s": tally.bytes_loaded / blend_s / 1e9,
            "waits_a_pass": waits,
            "holds": waits is None or waits <= WAITS_A_PASS_MAX,
            "peak_mib": (torch.cuda.max_memory_allocated(device) - before) / 2**20 if before else None,
        }


def _start_watching_memory(device: torch.device) -> int:
    """Bytes allocated now; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def measure_exactness(shape: ModelShape, context: int, device: torch.device) -> dict[str, Any]:
    """A blend that recomputes everything against the dense prefill: the largest difference in the cache. It
    holds if it is at most twice that of two dense prefills in units of other sizes, or rounding alone."""
    prompt, dense = scene_of(shape, context, device)
    blended, again = PagedStack(dense.model, context + 1), PagedStack(dense.model, context + 1)
    dense.prefill(prompt.token_ids, UNIT_TOKENS)
    again.prefill(prompt.token_ids, context // 3)
    blend(prompt, blended, Selection(1.0))
    others = (blended.keys.float(), again.keys.float())
    difference, noise = (float((dense.keys.float() - keys).abs().max()) for keys in others)
    largest = float(dense.keys.float().abs().max())
    rounding = 2 * torch.finfo(dense.keys.dtype).eps * largest
    return {
        "r1_max_abs_difference": difference,
        "noise": noise,
        "largest_key": largest,
        "holds": difference <= max(2 * noise, rounding),
    }


def measure_loading(
    shape: ModelShape, context: int, codec: Codec, device: torch.device, threads: int
) -> dict[str, Any]:
    """Loading alone, computing alone, and both at once, which is the longer of the two if they overlap."""
    model = PagedModel(shape, context, device, torch.bfloat16)
    prompt = prompt_of(shape, context, codec, "bfloat16")
    plan = BlendPlan(prompt.hits, Selection(0.0))
    side = 4096 if device.type == "cuda" else 64
    left = torch.randn(side, side, device=device)

    def compute(times: int) -> None:
        for _ in range(times):
            left @ left

    def load(times: int) -> None:
        loader = loader_of(prompt, plan, model)
        for layer in range(shape.layers):
            while loader.take(layer, 1.0) is None:
                pass
            compute(times)
        loader.close()

    load_s = seconds_of(lambda: load(0), device, 2)
    one_s = seconds_of(lambda: compute(20), device, 2) / 20
    times = max(1, round(load_s / shape.layers / one_s))
    return {
        "codec": codec.name.lower(),
        "threads": threads,
        "context": context,
        "load_ms": load_s * 1e3,
        "gb_s": prompt.frame_bytes * shape.layers / load_s / 1e9,
        "compute_ms": seconds_of(lambda: compute(times * shape.layers), device, 2) * 1e3,
        "both_ms": seconds_of(lambda: load(times), device, 2) * 1e3,
    }
