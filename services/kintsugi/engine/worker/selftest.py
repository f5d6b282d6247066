"""Start-up self-test: where blending is exact, it must equal the engine's own prefill.

It checks made-up tokens in unused cache blocks:

1. **Full ratio**: a blend that recomputes everything equals the engine's own prefill. 2. **Own prefix**: a
chunk directly after the prefix of its own prefill, without recomputation, equals the engine's own prefill,
too. This is exact by construction, and exercises save, store format, loading and merging. 3. **Scattered
tokens**: the same chunk with a random half of its tokens recomputed, which is also exact. On a GPU these
tokens attend through our own kernel. 4. **Shifted keys**: K and V of layer 0 do not depend on context, so at
another offset loaded ones equal fresh ones.

On a GPU, all variants of that kernel run first, so that no request waits for compilation or meets a variant
that does not run on the GPU.

A wrong offset, swapped K and V or a wrong RoPE base fails at least one check.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger

from kintsugi.core.errors import SelfTestFailed
from kintsugi.core.layout import ChunkManifest, Codec, HeadRange
from kintsugi.core.plan import BlendPlan, ChunkHit, Selection
from kintsugi.core.request import SelectorName
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.engine.worker.anatomy import free_blocks, run_forward, sample_token_ids
from kintsugi.engine.worker.attention.scattered import run_variants
from kintsugi.engine.worker.model import LoadedModel
from kintsugi.engine.worker.ranks import rank_and_size
from kintsugi.engine.worker.stack import VllmStack
from kintsugi.fusor.blend import BlendPass, PassRegion
from kintsugi.fusor.loader import LayerLoader, describe_shortage, placements_of
from kintsugi.fusor.save import SaveItem, SavePass
from kintsugi.fusor.sliced import PassStatus, SlicedWork
from kintsugi.store.client.ram import RamStore

logger = init_logger(__name__)

PREFIX, CHUNK, QUESTION, SHIFT = 5, 41, 7, 29
"""Tokens of the made-up prompt's parts, and the shift of check 4. Odd numbers, so that nothing is aligned."""

TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 1e-3}
"""Maximum relative L2 error of hidden states and keys by dtype. Measured noise is several times smaller, and
the defects named above cause errors near 1."""


@dataclass(frozen=True)
class _Fixture:
    """The made-up prompt with its saved chunk."""

    model: LoadedModel
    token_ids: Tensor
    blocks: tuple[list[int], ...]
    manifest: ChunkManifest
    store: RamStore


def self_test(model: LoadedModel) -> None:
    """Run the self-test. Raises `SelfTestFailed` with the failed check and its error."""
    try:
        with torch.inference_mode(), model.custom_ops_on():
            if model.device.type == "cuda":
                _run_kernels(model)
            _run_checks(model)
    except torch.OutOfMemoryError as error:
        raise SelfTestFailed(describe_shortage(error)) from None


def _run_kernels(model: LoadedModel) -> None:
    """Run every variant of the kernel for scattered tokens in each layer that it serves."""
    started, served = time.perf_counter(), [layer for layer in model.layers if layer.group.kernel_serves]
    length_max: int = model.vllm_config.model_config.max_model_len
    # Layers of one kind use the same variants.
    for layer in {_kernel_kind(layer.attention): layer for layer in served}.values():
        block_size = layer.group.block_size
        run_variants(layer.attention, model.dtype, -(-length_max // block_size) * block_size)
    if served:
        torch.cuda.synchronize(model.device)  # so that an error on the device is raised here
        logger.info("The kernel for scattered tokens was ready in %.2f s", time.perf_counter() - started)


def _kernel_kind(attention: Any) -> tuple[object, ...]:
    """Return what a layer's variants of the kernel depend on."""
    sizes = (attention.num_heads, attention.num_kv_heads, attention.head_size, attention.kv_cache.stride())
    impl = attention.impl
    limits = (getattr(impl, name, None) for name in ("sliding_window", "logits_soft_cap", "scale"))
    return (*sizes, *map(str, limits), getattr(impl, "sinks", None) is None)


def _run_checks(model: LoadedModel) -> None:
    started = time.perf_counter()
    fixture = _prepare(model)
    reference = _own_prefill(fixture)
    for name, ratio in (("full ratio", 1.0), ("own prefix", 0.0), ("scattered tokens", 0.5)):
        _check(model, name, _run_blend(fixture, ratio), reference)
    _check_shifted_keys(fixture)
    logger.info("Blending self-test passed in %.2f s", time.perf_counter() - started)


def _check(model: LoadedModel, name: str, got: Tensor, expected: Tensor) -> None:
    error = float((got.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-9))
    if not error <= TOLERANCE[model.dtype]:
        raise SelfTestFailed(
            f"check {name!r}: relative error {error:.3g} exceeds {TOLERANCE[model.dtype]:.3g}; "
            "this model, backend or vLLM version computes something that the plugin does not expect"
        )


def _prepare(model: LoadedModel) -> _Fixture:
    length = PREFIX + CHUNK + QUESTION + 1
    token_ids = sample_token_ids(model, length)
    blocks = free_blocks(model, length + SHIFT)
    stack = VllmStack(model, [blocks], [PREFIX + CHUNK])
    item = SaveItem(token_ids[: PREFIX + CHUNK], 0, PREFIX, PREFIX + CHUNK)
    save = SavePass([item], stack, length, Codec.RAW)
    _finish(save)
    (frames,) = save.frames
    space = ChunkSpace(ModelFingerprint(bytes(32)), "self-test", tuple(token_ids[:PREFIX].tolist()))
    key = ChunkKey.of(space, token_ids[PREFIX : PREFIX + CHUNK].tolist())
    manifest = ChunkManifest.of(space, key, (), CHUNK, model.layout, Codec.RAW, frames)
    store = RamStore()
    store.put(manifest, frames)
    return _Fixture(model, token_ids, blocks, manifest, store)


def _own_prefill(fixture: _Fixture) -> Tensor:
    """Return the last token's hidden state, computed by the engine's own forward pass."""
    last = len(fixture.token_ids) - 1
    _forward(fixture, torch.arange(last))
    return _forward(fixture, torch.tensor([last]))


def _run_blend(fixture: _Fixture, ratio: float) -> Tensor:
    """Return the last token's hidden state after a blend of all tokens before it."""
    last = len(fixture.token_ids) - 1
    hit = ChunkHit(PREFIX, PREFIX + CHUNK, fixture.manifest.key)
    work = BlendPass(
        PassRegion(fixture.token_ids[:last], 0, int(fixture.token_ids[last])),
        BlendPlan((hit,), Selection(ratio, SelectorName.RANDOM)),
        VllmStack(fixture.model, [fixture.blocks], [last]),
        lambda plan: _open_loader(fixture, plan, last),
        unit_tokens_max=16,
    )
    _finish(work)
    return _forward(fixture, torch.tensor([last]))


def _check_shifted_keys(fixture: _Fixture) -> None:
    model, start = fixture.model, PREFIX + SHIFT
    hit = ChunkHit(start, start + CHUNK, fixture.manifest.key)
    loader = _open_loader(fixture, BlendPlan((hit,), Selection(0.0)), start + CHUNK)
    try:
        loaded = loader.take(0, timeout_s=30.0)
    finally:
        loader.close()
    if loaded is None:
        raise SelfTestFailed("check 'shifted keys': nothing was loaded")
    stack, positions = VllmStack(model, [fixture.blocks], [start + CHUNK]), torch.arange(start, start + CHUNK)
    hidden = stack.embed(fixture.token_ids[PREFIX : PREFIX + CHUNK], positions)
    fresh = stack.project_kv(0, hidden, stack.batch(positions))
    _check(model, "shifted keys: K", loaded.key, fresh.key)
    _check(model, "shifted keys: V", loaded.value, fresh.value)


def _open_loader(fixture: _Fixture, plan: BlendPlan, end: int) -> LayerLoader:
    layout = fixture.manifest.layout
    rank, world_size = rank_and_size()
    heads = HeadRange.of_rank(layout.num_kv_heads, rank, world_size)
    keys = [hit.key for hit in plan.hits]
    return LayerLoader(
        lambda share: fixture.store.stream("self-test", keys[share], range(layout.num_layers), heads, 30.0),
        placements_of(plan, {fixture.manifest.key: fixture.manifest}, 0, end),
        [layer.rotation.rotary for layer in fixture.model.layers],
        fixture.model.device,
        len(heads),
        depth=2,
        patience_s=60.0,
    )


def _finish(work: SlicedWork) -> None:
    while work.status is PassStatus.RUNNING:
        work.advance(float("inf"))
    work.close()
    if work.status is not PassStatus.DONE:
        raise SelfTestFailed("a pass over chunks in memory did not finish")


def _forward(fixture: _Fixture, positions: Tensor) -> Tensor:
    """Run the engine's own forward pass over ``positions``. Returns the last one's final hidden state."""
    model = fixture.model
    stack = VllmStack(model, [fixture.blocks], [len(fixture.token_ids)])
    output = run_forward(model, stack, fixture.token_ids[positions], positions)
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden[-1]
