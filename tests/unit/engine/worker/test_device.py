"""On a GPU, a blend waits for nothing inside a layer and copies nothing from memory that is not pinned.

There is no GPU here: `PretendCuda` computes on the CPU and counts. What runs is the fusor and `VllmStack`,
over layers that call vLLM's interfaces as a model's layers do.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import get_forward_context

from kintsugi.core.layout import ChunkManifest, Codec, HeadRange, KVLayout
from kintsugi.core.plan import BlendPlan, ChunkHit, Selection
from kintsugi.core.request import SelectorName
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.engine.worker.calls import LayerCall, LayerCalls, PerToken
from kintsugi.engine.worker.memory import reserve_memory
from kintsugi.engine.worker.model import CacheGroup, Layer, LoadedModel
from kintsugi.engine.worker.rotation import KeyRotation, RotationCall
from kintsugi.engine.worker.stack import VllmStack
from kintsugi.fusor.blend import BlendPass, PassRegion
from kintsugi.fusor.codecs import encode_frame
from kintsugi.fusor.loader import LayerLoader, placements_of
from kintsugi.fusor.rope import Rotary
from kintsugi.fusor.save import SaveItem, SavePass
from kintsugi.fusor.sliced import PassStatus
from kintsugi.store.client.ram import RamStore
from tests.fakes.pretend_cuda import CUDA, PretendCuda, attend

HEADS, KV_HEADS, HEAD_DIM, BLOCK, VOCAB = 4, 2, 16, 16, 101
HIDDEN = HEADS * HEAD_DIM
PREFIX, CHUNKS, QUESTION = 5, (40, 21, 25), 6
LENGTH = PREFIX + sum(CHUNKS) + QUESTION
SPACE = ChunkSpace(ModelFingerprint(bytes(32)), "device", tuple(range(PREFIX)))
EVERY_SELECTOR = list(SelectorName)


class Backend:
    """The interface of vLLM's attention backends as far as a stack calls it, on FlashAttention's layout."""

    def __init__(self) -> None:
        self.scale = HEAD_DIM**-0.5

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor
    ) -> None:
        rows = torch.cat((key, value), -1)
        cache.transpose(1, 2)[slots // BLOCK, slots % BLOCK] = rows

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Tensor,
        metadata: Any,
        output: Tensor,
    ) -> Tensor:
        """What the backend's own kernel does with pseudo-requests."""
        by_token = cache.transpose(1, 2)
        attended = attend(
            query,
            by_token[..., :HEAD_DIM],
            by_token[..., HEAD_DIM:],
            metadata.block_table_tensor[0],
            metadata.positions.int(),
            scale=self.scale,
        )
        output.copy_(attended)
        return output


class Attention(nn.Module):
    """Writes K and V, then attends, through the forward context: as vLLM's `Attention` does."""

    def __init__(self, name: str, cache: Tensor) -> None:
        super().__init__()
        self.name, self.kv_cache = name, cache
        self.impl = self.attn_backend = Backend()
        self.num_kv_heads, self.num_heads = KV_HEADS, HEADS
        self.head_size = self.head_size_v = HEAD_DIM
        self.sliding_window = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context = get_forward_context()
        query = query.view(-1, HEADS, HEAD_DIM)
        key, value = key.view(-1, KV_HEADS, HEAD_DIM), value.view(-1, KV_HEADS, HEAD_DIM)
        self.impl.do_kv_cache_update(self, key, value, self.kv_cache, context.slot_mapping[self.name])
        output = torch.empty_like(query)
        self.impl.forward(
            self, query, key, value, self.kv_cache, context.attn_metadata[self.name], output=output
        )
        return output.view(-1, HIDDEN)


class RotaryModule(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        rotated = [
            self.rotary.rotate(part.view(len(part), -1, HEAD_DIM), positions).flatten(1)
            for part in (query, key)
        ]
        return rotated[0], rotated[1]


class DecoderLayer(nn.Module):
    def __init__(self, weights: list[Tensor], attention: Attention, rotary: RotaryModule) -> None:
        super().__init__()
        self.weights, self.attention, self.rotary = weights, attention, rotary

    def forward(self, positions: Tensor, states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = states if residual is None else states + residual
        projected, output, up, down = self.weights
        query, key, value = (norm(residual) @ projected).split(
            [HIDDEN, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], -1
        )
        query, key = self.rotary(positions, query, key)
        residual = residual + self.attention(query, key, value) @ output
        return torch.nn.functional.silu(norm(residual) @ up) @ down, residual


class Model(nn.Module):
    def __init__(self, embedding: Tensor, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.layers = embedding, layers

    def forward(self, input_ids: Tensor, positions: Tensor, **_others: None) -> Tensor:
        states, residual = self.embedding[input_ids], None
        for layer in self.layers:
            states, residual = layer(positions, states, residual)
        return states if residual is None else states + residual


CALL = LayerCall(
    pytree.tree_structure(((0, 0, 0), {})),
    (PerToken(0, 0), PerToken(0), PerToken(0)),
    1,
    2,
    pytree.tree_structure((0, 0)),
    0,
    1,
)
"""How `Model` calls a layer: positions, states, residual."""


def rotation_of(rotary: Rotary, module: RotaryModule) -> KeyRotation:
    layout = pytree.tree_structure(((0, 0, 0), {}))
    return KeyRotation(rotary, RotationCall(module, 2, 0, 1, layout, (), torch.empty(0)))


def norm(stream: Tensor) -> Tensor:
    return stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + 1e-6)


def model_of(num_layers: int, device: torch.device, kernel_serves: bool) -> LoadedModel:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[0] ** 0.5).to(device)

    angles = torch.arange(LENGTH + 1)[:, None] * 100.0 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    rotary = Rotary(angles.cos().to(device), angles.sin().to(device), is_neox=True)
    names = tuple(f"layer.{index}" for index in range(num_layers))
    builder = SimpleNamespace(build=lambda _prefix, common: common)
    spec: Any = None
    group = CacheGroup(0, 0, spec, names, BLOCK, BLOCK, builder, kernel_serves)
    blocks = -(-LENGTH // BLOCK) + 2
    layers = []
    for index, name in enumerate(names):
        cache = torch.zeros(blocks, KV_HEADS, BLOCK, 2 * HEAD_DIM, device=device)
        attention, rotary_module = Attention(name, cache), RotaryModule(rotary)
        sizes = ((HIDDEN, HIDDEN + 2 * KV_HEADS * HEAD_DIM), (HIDDEN, HIDDEN), (HIDDEN, 128), (128, HIDDEN))
        module = DecoderLayer([random(*size) for size in sizes], attention, rotary_module)
        layers.append(
            Layer(
                index,
                name,
                module,
                attention,
                group,
                range(index, index + 1),
                rotation_of(rotary, rotary_module),
            )
        )
    modules = [layer.module for layer in layers]
    config: Any = VllmConfig()
    config.model_config = SimpleNamespace(uses_mrope=False)
    return LoadedModel(
        config,
        Model(random(VOCAB, HIDDEN), modules),
        tuple(layers),
        device,
        torch.float32,
        0.2,
        LayerCalls(tuple(modules), (CALL,) * num_layers, ((0, 0),)),
        (KV_HEADS,) * num_layers,
    )


@dataclasses.dataclass
class Scene:
    """A prompt whose chunks a store holds, and what has to be known to blend it."""

    store: RamStore
    manifests: dict[ChunkKey, ChunkManifest]
    hits: tuple[ChunkHit, ...]
    chunks: tuple[range, ...]
    token_ids: Tensor


def scene_of(num_layers: int, codec: Codec, missed: int | None = None) -> Scene:
    """``missed``: a chunk, by its place, that is not hit."""
    generator = torch.Generator().manual_seed(5)
    token_ids = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
    layout, store = KVLayout.uniform(num_layers, KV_HEADS, HEAD_DIM, "float32"), RamStore()
    manifests, hits, chunks, start = {}, [], [], PREFIX
    for place, size in enumerate(CHUNKS):
        key = ChunkKey.of(SPACE, token_ids[start : start + size].tolist())
        frames = [
            encode_frame(key, value, codec)
            for key, value in torch.randn(num_layers, 2, size, KV_HEADS, HEAD_DIM, generator=generator)
        ]
        manifests[key] = ChunkManifest.of(SPACE, key, (), size, layout, codec, frames)
        store.put(manifests[key], frames)
        chunks.append(range(start, start + size))
        if place != missed:
            hits.append(ChunkHit(start, start + size, key))
        start += size
    return Scene(store, manifests, tuple(hits), tuple(chunks), token_ids)


def blend(scene: Scene, model: LoadedModel, selection: Selection, unit: int) -> BlendPass:
    def open_loader(plan: BlendPlan) -> LayerLoader:
        keys, every_head = [hit.key for hit in plan.hits], HeadRange(0, KV_HEADS)
        layers = range(len(model.layers))
        return LayerLoader(
            lambda share: scene.store.stream("device", keys[share], layers, every_head, 9.0),
            placements_of(plan, scene.manifests, 0, LENGTH),
            [layer.rotation.rotary for layer in model.layers],
            model.device,
            KV_HEADS,
            depth=2,
            patience_s=20.0,
        )

    blocks = (list(range(1, -(-LENGTH // BLOCK) + 2)),)
    work = BlendPass(
        PassRegion(scene.token_ids, 0, 7),
        BlendPlan(scene.hits, selection, chunks=scene.chunks),
        VllmStack(model, [blocks], [LENGTH + 1]),
        open_loader,
        unit,
    )
    while work.status is PassStatus.RUNNING:
        work.advance(float("inf"))
    work.close()
    assert work.status is PassStatus.DONE, work.tally.failure
    return work


@pytest.fixture(autouse=True)
def vllm_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank, and a configuration."""
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=1, rank_in_group=0))
    with set_current_vllm_config(VllmConfig()):
        yield


def caches(model: LoadedModel) -> Tensor:
    return torch.stack(
        [getattr(layer.attention.kv_cache, "on_host", layer.attention.kv_cache) for layer in model.layers]
    )


def counted(
    num_layers: int, selection: Selection, codec: Codec, unit: int, missed: int | None
) -> tuple[Counter[str], Counter[str], Tensor]:
    """What waited, what was copied from pageable memory, and the caches."""
    scene = scene_of(num_layers, codec, missed)
    with PretendCuda() as device:
        model = model_of(num_layers, CUDA, kernel_serves=True)
        device.clear()
        blend(scene, model, selection, unit)
        return device.syncs, device.pageable, caches(model)


def per_layer(few: Counter[str], many: Counter[str], layers: int) -> dict[str, float]:
    """What each place does per layer: the difference between two depths, so that what happens once a pass is
    not in it."""
    return {place: (many[place] - few[place]) / layers for place in many if many[place] != few[place]}


def check(selection: Selection, codec: Codec, unit: int, missed: int | None = None) -> None:
    (few_waits, few_copies, _), (waits, copies, on_device) = (
        counted(layers, selection, codec, unit, missed) for layers in (3, 5)
    )
    assert per_layer(few_waits, waits, 2) == {}
    assert per_layer(few_copies, copies, 2) == {}
    # Not once a pass, either.
    assert (copies, waits) == ({}, {})
    model = model_of(5, torch.device("cpu"), kernel_serves=True)
    blend(scene_of(5, codec, missed), model, selection, unit)
    torch.testing.assert_close(on_device, caches(model), atol=1e-5, rtol=1e-4)
    assert float(on_device.abs().max()) > 0.1


@pytest.mark.parametrize("selector", EVERY_SELECTOR)
def test_no_layer_waits_and_the_device_computes_what_a_cpu_does(selector: SelectorName) -> None:
    check(Selection(0.3, selector, 1, query_layers=(0, 1)), Codec.INT8, 30)


def test_a_question_that_passes_without_gaps_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kintsugi.fusor.gaps.KEPT_TOKENS", 4)
    check(Selection(0.3, SelectorName.HYBRID, 1, query_layers=(0, 2)), Codec.RAW, 30, missed=1)


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.FP8_SINKS, Codec.INT4])
def test_no_codec_waits(codec: Codec) -> None:
    check(Selection(0.3), codec, 1000)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_nothing_waits_where_nothing_is_selected(ratio: float) -> None:
    check(Selection(ratio), Codec.RAW, 30)


def test_a_pass_waits_only_while_the_device_has_nothing_to_do() -> None:
    """The host waits whenever it is ahead; the loading controller must not learn from that."""
    with PretendCuda():
        model = model_of(3, CUDA, kernel_serves=True)
        assert blend(scene_of(3, Codec.RAW), model, Selection(0.3), 30).tally.load_wait_s == 0.0


def test_passes_load_on_one_stream_for_which_memory_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU keeps freed memory for the stream that it was allocated on."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1 << 20, 1 << 30))
    scene = scene_of(3, Codec.INT8)
    with PretendCuda() as device:
        model = model_of(3, CUDA, kernel_serves=True)
        device.clear()
        assert reserve_memory(CUDA, CacheConfig(gpu_memory_utilization=0.5)) == int(0.6 * (1 << 20))
        (reserved_on,) = device.streams
        for _ in range(2):
            blend(scene, model, Selection(0.3), 1000)
        assert set(device.streams) == {reserved_on, device.stream}
        assert reserved_on is not device.stream


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.INT8])
def test_a_save_waits_for_nothing(codec: Codec) -> None:
    token_ids = torch.arange(30) % VOCAB
    item = SaveItem(token_ids, 0, 5, 30)

    def frames_on(device: torch.device) -> list[list[memoryview]]:
        model = model_of(3, device, kernel_serves=True)
        counting.clear()
        save = SavePass([item], VllmStack(model, [([1, 2],)], [30]), 100, codec)
        while save.status is PassStatus.RUNNING:
            save.advance(float("inf"))
        return save.frames

    with PretendCuda() as counting:
        on_device = frames_on(CUDA)
        assert (counting.syncs, counting.pageable) == ({}, {})
    assert on_device == frames_on(torch.device("cpu"))


def test_where_the_kernel_does_not_serve_selecting_waits_once() -> None:
    """The backend's metadata needs the runs of what was selected."""
    scene = scene_of(5, Codec.RAW)
    with PretendCuda() as device:
        model = model_of(5, CUDA, kernel_serves=False)
        device.clear()
        blend(scene, model, Selection(0.3), 1000)
        waits = [place.split()[1] for place in device.syncs.elements()]
    assert waits == ["_prepare"]
