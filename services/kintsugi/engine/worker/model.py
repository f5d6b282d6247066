"""The loaded model as vLLM holds it: decoder layers, attention, rotary embedding, cache groups.

Nothing has to register the model: its `Attention` objects are in the compilation config's static
forward context, and the module that owns them is found among the live objects, once, at start.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.model_executor.custom_op import CustomOp
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import select_common_block_size

from kintsugi.core.errors import NotBlendable
from kintsugi.core.layout import KVLayout
from kintsugi.engine.worker.native import rotation_kernel
from kintsugi.engine.worker.scattered import kernel_serves
from kintsugi.fusor.rope import Rotary

ROTARY_CLASSES = frozenset(
    {
        "RotaryEmbedding",
        "Llama3RotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        "NTKScalingRotaryEmbedding",
    }
)
"""Rotations that depend on the position alone. The others depend on the prompt's length (LongRoPE,
dynamic NTK), on several axes (MRoPE) or on the query's content, and cannot be applied to a stored key."""


@dataclass(frozen=True)
class CacheGroup:
    """One KV cache group: layers that share block tables."""

    index: int
    spec: AttentionSpec
    layer_names: tuple[str, ...]
    block_size: int
    """Tokens per block of vLLM's block tables."""
    kernel_block_size: int
    """Tokens per block that the attention kernel sees; divides `block_size`."""
    builder: Any
    """Our own attention metadata builder: the model runner's hold buffers of its captured graphs."""
    kernel_serves: bool
    """Whether scattered tokens attend through `engine.worker.scattered`."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    index: int
    name: str
    """The attention's name: the key of vLLM's per-layer dictionaries."""
    module: nn.Module
    attention: Any
    rotary_module: nn.Module
    rotary: Rotary
    group: CacheGroup


@dataclass(frozen=True)
class LoadedModel:
    """Everything that a pass needs of the model."""

    vllm_config: VllmConfig
    root: nn.Module
    """The whole model, its head included."""
    trunk: nn.Module
    """Owns the layers and embeds tokens."""
    layers: tuple[Layer, ...]
    device: torch.device
    dtype: torch.dtype
    num_kv_heads: int
    """KV heads that this rank holds."""
    head_dim: int
    projection_share: float
    disabled_ops: tuple[CustomOp, ...] = ()
    """Operations with a fused kernel that vLLM has replaced by plain ones."""

    @contextlib.contextmanager
    def custom_ops_on(self) -> Iterator[None]:
        """Run vLLM's fused kernels. Where vLLM compiles a model it leaves them off, because the compiler
        fuses the plain operations; our layer calls are not compiled."""
        plain = [op._forward_method for op in self.disabled_ops]
        for op in self.disabled_ops:
            op._forward_method = op.forward_cuda
        try:
            yield
        finally:
            for op, method in zip(self.disabled_ops, plain, strict=True):
                op._forward_method = method

    @property
    def layout(self) -> KVLayout:
        """The KV over all ranks."""
        return KVLayout(
            num_layers=len(self.layers),
            num_kv_heads=self.vllm_config.model_config.get_total_num_kv_heads(),
            head_dim=self.head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
        )


def find_model(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: dict[str, Tensor]
) -> LoadedModel:
    """Raises `NotBlendable` where the architecture is not one of decoder layers that we can drive."""
    context = vllm_config.compilation_config.static_forward_context
    attentions = {name: context[name] for name in kv_caches if name in context}
    for name, attention in attentions.items():
        if type(attention).__name__ != "Attention":
            raise NotBlendable("attention", f"{name} is a {type(attention).__name__}, not plain attention")
    owner = _owner_of(list(attentions.values()))
    names = {id(module): name for name, module in owner.named_modules()}
    device = next(iter(kv_caches.values())).device
    groups = _cache_groups(vllm_config, kv_cache_config, attentions, device)
    kernel = rotation_kernel(device)
    layers, trunks = [], set()
    for name, attention in attentions.items():
        index, layer_path, trunk_path = _layer_path(names[id(attention)])
        trunks.add(trunk_path)
        module = owner.get_submodule(layer_path)
        rotary_module = _rotary_of(module, layer_path)
        rotary = Rotary.from_table(rotary_module.cos_sin_cache, rotary_module.is_neox_style, kernel)
        layers.append(Layer(index, name, module, attention, rotary_module, rotary, groups[name]))
    if len(trunks) != 1:
        raise NotBlendable("architecture", f"decoder layers lie in several places: {sorted(trunks)}")
    trunk = owner.get_submodule(trunks.pop())
    if not hasattr(trunk, "embed_input_ids"):
        raise NotBlendable("architecture", f"{type(trunk).__name__} has no embed_input_ids")
    layers.sort(key=lambda layer: layer.index)
    if [layer.index for layer in layers] != list(range(len(layers))):
        raise NotBlendable(
            "architecture", "not every decoder layer has one attention with a cache of its own"
        )
    return _assemble(vllm_config, owner, trunk, layers)


def _assemble(vllm_config: VllmConfig, root: nn.Module, trunk: nn.Module, layers: list[Layer]) -> LoadedModel:
    shapes = {(layer.attention.num_kv_heads, layer.attention.head_size) for layer in layers}
    if len(shapes) != 1:
        raise NotBlendable("architecture", f"KV heads differ between layers: {sorted(shapes)}")
    ((num_kv_heads, head_dim),) = shapes
    return LoadedModel(
        vllm_config=vllm_config,
        root=root,
        trunk=trunk,
        layers=tuple(layers),
        device=next(trunk.parameters()).device,
        dtype=vllm_config.model_config.dtype,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        projection_share=_projection_share(vllm_config, layers[0]),
        disabled_ops=_disabled_ops(vllm_config, [layer.module for layer in layers]),
    )


def _disabled_ops(vllm_config: VllmConfig, modules: list[nn.Module]) -> tuple[CustomOp, ...]:
    """The modules' operations that vLLM has disabled; none on a CPU, where the fused kernels do not run."""
    disabled = vllm_config.compilation_config.disabled_custom_ops
    ops = [op for module in modules for op in module.modules() if isinstance(op, CustomOp)]
    if next(modules[0].parameters()).device.type != "cuda":
        return ()
    return tuple(
        op for op in ops if op.name in disabled and type(op).forward_cuda is not CustomOp.forward_cuda
    )


def _owner_of(attentions: list[nn.Module]) -> nn.Module:
    """The smallest live model that contains all `attentions`. Cost: one pass over the live objects."""
    wanted = {id(attention) for attention in attentions}
    best: tuple[int, nn.Module] | None = None
    for candidate in gc.get_objects():
        # type(), not isinstance(): that would run the code of lazy proxies that claim another class.
        if not (issubclass(type(candidate), nn.Module) and hasattr(candidate, "compute_logits")):
            continue
        modules = {id(module) for module in candidate.modules()}
        if wanted <= modules and (best is None or len(modules) < best[0]):
            best = (len(modules), candidate)
    if best is None:
        raise NotBlendable("architecture", "no loaded model owns the attention layers that vLLM registered")
    return best[1]


def _layer_path(path: str) -> tuple[int, str, str]:
    """`model.layers.3.self_attn.attn` -> (3, `model.layers.3`, `model`)."""
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if at is None or at < 2:
        raise NotBlendable("architecture", f"attention at {path!r} does not lie in a list of decoder layers")
    return int(parts[at]), ".".join(parts[: at + 1]), ".".join(parts[: at - 1])


def _rotary_of(module: nn.Module, path: str) -> Any:
    found = [child for name, child in module.named_modules() if name.split(".")[-1] == "rotary_emb"]
    if len(found) != 1:
        raise NotBlendable("rope", f"{path} has {len(found)} rotary embeddings; exactly one is supported")
    rotary = found[0]
    if type(rotary).__name__ not in ROTARY_CLASSES:
        raise NotBlendable(
            "rope", f"{type(rotary).__name__} does not depend on the position alone, or is not known to"
        )
    return rotary


def _cache_groups(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, attentions: dict[str, Any], device: torch.device
) -> dict[str, CacheGroup]:
    """Cache group of each layer, by layer name."""
    groups: dict[str, CacheGroup] = {}
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        names = tuple(name for name in group.layer_names if name in attentions)
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.kv_cache_specs[names[0]]
        backends = {attentions[name].attn_backend for name in names}
        if len(backends) != 1 or not isinstance(spec, AttentionSpec):
            raise NotBlendable("attention", f"cache group {index} mixes attention backends or has no cache")
        backend = backends.pop()
        shared = CacheGroup(
            index=index,
            spec=spec,
            layer_names=names,
            block_size=spec.block_size,
            kernel_block_size=_kernel_block_size(backend, spec),
            builder=backend.get_builder_cls()(spec, list(names), _without_graphs(vllm_config), device),
            kernel_serves=all(kernel_serves(attentions[name], device) for name in names),
        )
        groups.update(dict.fromkeys(names, shared))
    return groups


def _kernel_block_size(backend: Any, spec: AttentionSpec) -> int:
    takes_specs = "kv_cache_specs" in inspect.signature(select_common_block_size).parameters
    specs = ([spec],) if takes_specs else ()  # vLLM 0.31 and before ask the backend alone
    return int(select_common_block_size(spec.block_size, [backend], *specs))


def _without_graphs(vllm_config: VllmConfig) -> VllmConfig:
    """The same configuration without CUDA graphs. With them, builders size buffers for `max_num_seqs`
    requests; scattered tokens are more pseudo-requests than that, and are never captured."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    return config


def _projection_share(vllm_config: VllmConfig, layer: Layer) -> float:
    """Multiplications of the fused Q, K and V projection ÷ those of the whole layer, attention apart.

    From the shapes in the config: a CPU backend repacks weights, and experts are not all used.
    """
    config, attention = vllm_config.model_config.hf_text_config, layer.attention
    ranks = vllm_config.parallel_config.tensor_parallel_size
    hidden = vllm_config.model_config.get_hidden_size()
    query = attention.num_heads * ranks * attention.head_size
    kv = attention.num_kv_heads * ranks * attention.head_size
    experts = getattr(config, "num_experts_per_tok", None) or 1
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    fused, output, mlp = hidden * (query + 2 * kv), query * hidden, 3 * hidden * width * experts
    share: float = fused / (fused + output + mlp)
    return share
