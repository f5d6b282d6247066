"""What a pass changes about vLLM's model while it runs, and what its attention builders are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import SiluAndMul

from kintsugi.core.plan import BlendPlan, ChunkHit, Selection
from kintsugi.core.request import SelectorName
from kintsugi.core.spaces import ChunkKey
from kintsugi.engine.worker import memory
from kintsugi.engine.worker.model import LoadedModel, _disabled_ops, _without_graphs

CUDA = torch.device("cuda")


class OnGpu(nn.Module):
    """A decoder layer whose weights lie on a GPU, as far as anybody asks."""

    def __init__(self) -> None:
        super().__init__()
        self.act = SiluAndMul()

    def parameters(self, recurse: bool = True) -> Any:
        return iter([SimpleNamespace(device=CUDA)])


@pytest.fixture
def config() -> Any:
    """vLLM's, with the operations disabled as for a model that it compiles."""
    config = VllmConfig()
    config.compilation_config.custom_ops = ["none"]
    with set_current_vllm_config(config):
        yield config


def model_of(config: VllmConfig, ops: tuple[CustomOp, ...] = ()) -> LoadedModel:
    layers: Any = (None,) * 8
    return LoadedModel(config, nn.Module(), nn.Module(), layers, CUDA, torch.bfloat16, 2, 16, 0.2, ops)


def test_layer_calls_run_the_fused_operations_and_the_engine_does_not(config: VllmConfig) -> None:
    layer = OnGpu()
    plain = layer.act._forward_method
    assert plain != layer.act.forward_cuda
    ops = _disabled_ops(config, [layer])
    assert ops == (layer.act,)
    with model_of(config, ops).custom_ops_on():
        assert layer.act._forward_method == layer.act.forward_cuda
    assert layer.act._forward_method is plain
    with pytest.raises(RuntimeError, match="within"), model_of(config, ops).custom_ops_on():
        raise RuntimeError("within")
    assert layer.act._forward_method is plain


def test_operations_that_vllm_has_enabled_are_left_alone(config: VllmConfig) -> None:
    layer = OnGpu()
    config.compilation_config.disabled_custom_ops.clear()
    assert _disabled_ops(config, [layer]) == ()


def test_a_cpu_keeps_its_own_operations(config: VllmConfig) -> None:
    assert _disabled_ops(config, [nn.Sequential(SiluAndMul(), nn.Linear(1, 1))]) == ()


def test_builders_are_told_of_no_graphs() -> None:
    """FlashAttention 3 sizes a buffer by `max_num_seqs` with them, and more runs than that are an error."""
    config = VllmConfig()
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    assert _without_graphs(config).compilation_config.cudagraph_mode is CUDAGraphMode.NONE
    assert config.compilation_config.cudagraph_mode is CUDAGraphMode.FULL


def job_of(tokens: int, selection: Selection) -> Any:
    hits = (ChunkHit(0, tokens - 10, ChunkKey(bytes(32))),)
    return SimpleNamespace(plan=BlendPlan(hits, selection), tokens=SimpleNamespace(token_ids=range(tokens)))


def test_the_memory_of_a_pass_is_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(model_config=SimpleNamespace(get_hidden_size=lambda: 100))
    model = model_of(config)
    layer_bytes, hidden = 2 * 990 * 2 * 16 * 2, 4 * 1000 * 100 * 2
    hkvd = memory.pass_bytes(model, job_of(1000, Selection(0.15)), prefetch_layers=4)
    assert hkvd == (4 + 3) * layer_bytes + hidden
    # The question's pass keeps every layer up to the last one it asks.
    asking = Selection(0.15, SelectorName.QUERY, query_layers=(2, 5))
    assert memory.pass_bytes(model, job_of(1000, asking), prefetch_layers=4) == hkvd + 6 * layer_bytes


def test_a_cpu_reserves_nothing() -> None:
    assert memory.reserve_memory(torch.device("cpu")) == float("inf")


def test_a_gpu_reserves_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (8 << 30, 80 << 30))
    monkeypatch.setattr(memory, "min_over_ranks", lambda number: number - 1)
    monkeypatch.setattr(torch, "empty", lambda size, **_options: allocated.append(size))
    assert memory.reserve_memory(CUDA) == (2 << 30) - 1
    assert allocated == [(2 << 30) - 1]
