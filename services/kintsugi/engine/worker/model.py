"""Finds the parts of the loaded model in vLLM: decoder layers, attention, cache groups, stored KV.

The model need not be registered: its `Attention` objects are in the compilation config's static forward
context, and the module that contains them is searched among the live objects once at start.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.utils import select_common_block_size

from kintsugi.core.errors import NotBlendable
from kintsugi.core.layout import KVLayout, LayerGroup, Part, PartKind
from kintsugi.engine.worker.attention.latent import is_latent, needs_rows
from kintsugi.engine.worker.attention.scattered import kernel_serves
from kintsugi.engine.worker.calls import LayerCalls
from kintsugi.engine.worker.ranks import LockStep
from kintsugi.engine.worker.recurrence import RecurrentKV, recurrent_kind
from kintsugi.engine.worker.rotation import UNROTATED, KeyRotation
from kintsugi.fusor.kernels.native import MassKernel
from kintsugi.fusor.latent import absorb_query
from kintsugi.fusor.stack import Hidden
from kintsugi.fusor.staging import upload
from kintsugi.models.declines import RECURRENT_STATE, Decline, DeclineReason

PLAIN_ATTENTIONS = frozenset({"Attention", "ChunkedLocalAttention"})
"""vLLM's softmax attention over K and V: over all positions, a window or a local chunk."""

LATENT_ATTENTION = "MLAAttention"
"""vLLM's attention over latents."""

ONE_BATCH_BACKENDS = frozenset({"FLASHINFER", "TRITON_FLASHINFER", "FLEX_ATTENTION", "B12X", "HPC_ATTN"})
"""Backends whose metadata holds at most `max_num_seqs` requests and lies in buffers that the next batch
overwrites (as of vLLM 0.32). A pass prepares its batches once and uses them in every layer, while other
passes prepare theirs; and a batch of scattered tokens has hundreds of pseudo-requests."""

MROPE_AXES = 3
"""Axes of a position in models with M-RoPE. Text has the same position on each axis."""


SAMPLED_IDS = 8
"""Number of token ids embedded to compare a model with its language model."""


class HeadsKV:
    """The KV that vLLM's `Attention` stores per token: K and V of each KV head."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self.heads = int(attention.num_kv_heads)
        """KV heads of this rank."""
        self.key_width = self.query_width = int(attention.head_size)
        self.value_width = int(attention.head_size_v)

    @property
    def token_width(self) -> int:
        """Elements that are stored per token, of all heads."""
        return self.heads * (self.key_width + self.value_width)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tensors that a chunk stores for each head."""
        return (Part(PartKind.K, self.key_width), Part(PartKind.V, self.value_width))

    def tell_apart(self, query: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, K and V, `[tokens, heads, width]`, from the arguments of the attention."""
        key, value = self._key_and_value(second, third)
        count = len(query)
        return (
            query.view(count, -1, self.query_width),
            key.view(count, self.heads, self.key_width),
            value.view(count, self.heads, self.value_width),
        )

    def _key_and_value(self, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
        return second, third

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write rotated K and V, `[tokens, heads, width]`, into slots of the layer's cache."""
        attention = self._attention
        attention.impl.do_kv_cache_update(attention, key, value, attention.kv_cache, slots)


class LatentKV(HeadsKV):
    """The KV that vLLM's `MLAAttention` stores per token: the latent in place of V and the rotary key in
    place of K, shared by all heads and ranks."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self.heads = int(attention.num_kv_heads)
        self.key_width = int(attention.qk_rope_head_dim)
        self.value_width = int(attention.kv_lora_rank)
        self.query_width = int(attention.qk_nope_head_dim) + self.key_width

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(PartKind.LATENT, self.value_width), Part(PartKind.ROTARY, self.key_width))

    def _key_and_value(self, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
        return third, second

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        attention = self._attention
        attention.impl.do_kv_cache_update(
            value[:, 0], key, attention.kv_cache, slots, attention.kv_cache_dtype, attention._k_scale
        )

    def absorb(self, query: Tensor) -> Tensor:
        """Absorb a query as `fusor.latent.absorb_query` does, with the weights as vLLM stores them."""
        attention = self._attention
        if not getattr(attention, "is_amx_bmm_enabled", False):
            return absorb_query(query, attention.W_UK_T)
        width: int = attention.qk_nope_head_dim
        nope, rotary = query[..., :width], query[..., width:]
        absorbed = query.new_empty(query.shape[1], len(query), self.value_width)
        packed, scale = attention.impl._w_uk_packed, attention.impl._w_scale
        # `vllm._custom_ops.bmm_cpu` calls this. Older versions lack both, and have no packed weights either.
        torch.ops._C.bmm_cpu(absorbed, nope.transpose(0, 1), packed, True, scale)
        return torch.cat((rotary, absorbed.transpose(0, 1)), -1)


def kv_of(attention: Any) -> HeadsKV | RecurrentKV:
    """Return the description of what a layer stores per token: an attention's KV, or a recurrent layer's
    inputs."""
    recurrent = recurrent_kind(attention)
    if recurrent is not None:
        return recurrent(attention)
    return LatentKV(attention) if is_latent(attention) else HeadsKV(attention)


@dataclass(frozen=True)
class CacheGroup:
    """Layers with common block tables and KV of one shape."""

    index: int
    tables: int
    """Index of vLLM's KV cache group, whose block tables the layers share. Layers of one vLLM group may
    differ in shape, and attention metadata is made for one shape."""
    spec: AttentionSpec | MambaSpec
    layer_names: tuple[str, ...]
    block_size: int
    """Tokens per block of vLLM's block tables."""
    kernel_block_size: int
    """Tokens per block of the attention kernel; divides `block_size`."""
    builder: Any
    """A separate attention metadata builder: the model runner's builders hold buffers of its captured
    graphs."""
    kernel_serves: bool
    """Whether scattered tokens attend through `engine.worker.attention.scattered`."""
    needs_latent_rows: bool = False
    """Whether tokens after cached ones attend through `engine.worker.attention.latent`."""

    @property
    def is_recurrent(self) -> bool:
        """Whether the layers keep a state."""
        return isinstance(self.spec, MambaSpec)

    def build_metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return the backend's metadata of one batch, which stays valid when later batches are built."""
        prefill_backend = getattr(self.builder, "_prefill_backend", None)
        if prefill_backend is not None:
            # For latent attention, whose builder keeps only the metadata built last, while passes run side by
            # side.
            self.builder._prefill_backend = prefill_backend.clone()
        return self.builder.build(0, common)


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    index: int
    name: str
    """Name of its attention, the key in vLLM's dictionaries per layer."""
    module: nn.Module
    attention: Any
    """vLLM's attention, or its recurrent layer."""
    group: CacheGroup
    calls: range
    """Its calls in `LayerCalls`: the one of `module`, then those of modules that mix no tokens, such as the
    MLPs that Nemotron-H counts as layers."""
    rotation: KeyRotation = UNROTATED

    @property
    def kv(self) -> HeadsKV | RecurrentKV:
        """What it stores per token."""
        return kv_of(self.attention)


@dataclass(frozen=True)
class LoadedModel:
    """The loaded model as passes use it."""

    vllm_config: VllmConfig
    root: nn.Module
    """The whole model, including its head."""
    layers: tuple[Layer, ...]
    device: torch.device
    dtype: torch.dtype
    projection_share: float
    calls: LayerCalls
    """The model's calls of its layers."""
    kv_heads: tuple[int, ...]
    """Number of KV heads of each layer over all ranks."""
    disabled_ops: tuple[CustomOp, ...] = ()
    """Operations with a fused kernel that vLLM has disabled."""
    mass_kernel: MassKernel | None = None
    """The kernel that sums the question's attention, if it supports this processor."""
    lock_step: LockStep = field(default_factory=LockStep)
    zeroes_blocks: bool = False
    """Whether stale bytes of a block may read as NaN, because layers of another dtype used it. Then vLLM
    zeroes new blocks, except those that a connector fills."""

    @contextlib.contextmanager
    def custom_ops_on(self) -> Iterator[None]:
        """Enable vLLM's fused kernels in the block. vLLM disables them in compiled models, where the compiler
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
    def sees_order_alone(self) -> bool:
        """As in `fusor.stack.DecoderStack`. In layers with local chunks of attention (Llama 4), a blend lies
        within one chunk."""
        return not any(
            self.layers[index].attention.sliding_window is not None
            or getattr(self.layers[index].attention.impl, "alibi_slopes", None) is not None
            for index in self.attending
        )

    @property
    def attending(self) -> tuple[int, ...]:
        """As in `fusor.stack.DecoderStack`."""
        return tuple(index for index, layer in enumerate(self.layers) if not layer.group.is_recurrent)

    @property
    def kv_width(self) -> int:
        """Elements of K and V per token in the widest layer on this rank."""
        return max(kv_of(layer.attention).token_width for layer in self.layers)

    @cached_property
    def layout(self) -> KVLayout:
        """Layout of the KV over all ranks."""
        groups = [
            LayerGroup(1, heads, kv_of(layer.attention).parts)
            for layer, heads in zip(self.layers, self.kv_heads, strict=True)
        ]
        return KVLayout.of_groups(groups, str(self.dtype).removeprefix("torch."))

    def forward(self, token_ids: Tensor, positions: Tensor) -> Any:
        """Run the model's forward pass as vLLM's runner does. Both arguments are int64 `[tokens]` on the
        host."""
        positions = upload(positions, self.device)
        if self.vllm_config.model_config.uses_mrope:
            positions = positions.expand(MROPE_AXES, -1).contiguous()
        return self.root(
            input_ids=upload(token_ids, self.device),
            positions=positions,
            intermediate_tensors=None,
            inputs_embeds=None,
        )

    def embed(self, token_ids: Tensor, positions: Tensor) -> Hidden:
        """Return the input of layer 0 and the model's other values per token, from int64 `[tokens]`."""
        context = set_forward_context({}, self.vllm_config, num_tokens=len(token_ids), skip_compiled=True)
        with context:
            return self.calls.embed(self.forward, token_ids, positions)

    def run_layer(self, layer: Layer, hidden: Hidden) -> None:
        """Call a layer's modules, and set ``hidden`` to their output."""
        for call in layer.calls:
            self.calls.calls[call].run(self.calls.modules[call], hidden)


def find_layers(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: dict[str, Tensor]
) -> LoadedModel:
    """Find the model of the caches; `anatomy.learn_model` then adds calls and rotations. Raises
    `NotBlendable` if it does not consist of decoder layers that we can run."""
    context = vllm_config.compilation_config.static_forward_context
    attentions = {name: context[name] for name in kv_caches if name in context}
    for name in kv_caches:
        _require_attention(name, context.get(name))
    owner, outer = _owners_of(list(attentions.values()))
    _require_text_embeddings(owner, outer)
    names = {id(module): name for name, module in owner.named_modules()}
    device = next(owner.parameters()).device
    groups = _cache_groups(vllm_config, kv_cache_config, attentions, device)
    paths = {name: _layer_path(names[id(attention)]) for name, attention in attentions.items()}
    lists = {path for path, _ in paths.values()}
    if len(lists) != 1:
        raise _architecture(f"decoder layers in several places ({', '.join(sorted(lists))})")
    modules = tuple(owner.get_submodule(lists.pop()).children())
    order = sorted(attentions, key=lambda name: paths[name][1])
    firsts = [paths[name][1] for name in order]
    _require_one_each(firsts, [groups[name].is_recurrent for name in order])
    if firsts[0] > 0:
        raise _architecture("a first layer without attention or recurrence")
    layers = [
        Layer(index, name, modules[first], attentions[name], groups[name], range(first, end))
        for index, (name, (first, end)) in enumerate(
            zip(order, pairwise([*firsts, len(modules)]), strict=True)
        )
    ]
    _require_blendable_states(vllm_config, layers)
    return LoadedModel(
        vllm_config=vllm_config,
        root=owner,
        layers=tuple(layers),
        device=device,
        dtype=vllm_config.model_config.dtype,
        projection_share=_projection_share(vllm_config, layers[0]),
        calls=LayerCalls(modules, (), ()),
        kv_heads=(),
        disabled_ops=_disabled_ops(vllm_config, modules),
        zeroes_blocks=bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False)),
    )


def _require_attention(name: str, layer: Any) -> None:
    """Raise `NotBlendable` for a cache of unsupported attention, with its kind as the reason."""
    kind, kinds = type(layer).__name__, {base.__name__ for base in type(layer).__mro__}
    is_plain = kind in PLAIN_ATTENTIONS
    if is_plain and layer.kv_sharing_target_layer_name is None:
        return
    if recurrent_kind(layer) is not None:
        return
    is_indexed = bool(getattr(layer, "use_sparse", False))
    if kind == LATENT_ATTENTION and not is_indexed and getattr(layer, "sliding_window", None) is None:
        return
    digits = next((part for part in name.split(".") if part.isdigit()), None)
    if is_plain:
        reason, feature = DeclineReason.SHARED_KV, f"the KV of {layer.kv_sharing_target_layer_name}"
    elif "index" in name.lower() or "index" in kind.lower() or is_indexed:
        reason, feature = DeclineReason.INDEXED, "attention to tokens that an index chooses"
    elif LATENT_ATTENTION in kinds:
        reason, feature = DeclineReason.MLA, "multi-head latent attention of another kind than DeepSeek-V3's"
    elif "MambaBase" in kinds:
        reason, feature = DeclineReason.RECURRENT, RECURRENT_STATE
    else:
        reason, feature = DeclineReason.ATTENTION, "an unknown kind of attention"
    raise Decline(reason, None if digits is None else int(digits), f"{feature} ({kind})").error()


def _require_one_each(places: list[int], recurrent: list[bool]) -> None:
    """Raise `NotBlendable` if some decoder layer has several attentions or recurrences. Both arguments are
    sorted by decoder layer."""
    twice = next((one for one, other in pairwise(places) if one == other), None)
    if twice is None:
        return
    kinds = [kind for place, kind in zip(places, recurrent, strict=True) if place == twice]
    reason = DeclineReason.RECURRENT if any(kinds) else DeclineReason.ARCHITECTURE
    feature = "an attention beside a recurrence" if any(kinds) else "several attentions"
    raise Decline(reason, twice, feature).error()


def _require_blendable_states(vllm_config: VllmConfig, layers: list[Layer]) -> None:
    """Raise `NotBlendable` for recurrent layers in a configuration that cannot blend them."""
    recurrent = [layer for layer in layers if layer.group.is_recurrent]
    if not recurrent:
        return
    if len(recurrent) == len(layers):
        raise Decline(DeclineReason.RECURRENT, None, "no layer that attends, only recurrent ones").error()
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        feature = "recurrent layers, whose inputs are not split over tensor-parallel ranks"
        raise Decline(DeclineReason.RECURRENT, None, feature).error()


def _architecture(feature: str) -> NotBlendable:
    return Decline(DeclineReason.ARCHITECTURE, None, feature).error()


def _disabled_ops(vllm_config: VllmConfig, modules: Sequence[nn.Module]) -> tuple[CustomOp, ...]:
    """Return the modules' operations whose fused kernels are disabled; none on a CPU, where these kernels do
    not run."""
    disabled = vllm_config.compilation_config.disabled_custom_ops
    ops = [op for module in modules for op in module.modules() if isinstance(op, CustomOp)]
    if next(modules[0].parameters()).device.type != "cuda":
        return ()
    return tuple(
        op for op in ops if op.name in disabled and type(op).forward_cuda is not CustomOp.forward_cuda
    )


def _owners_of(attentions: list[nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return the smallest and the largest live model that contain all ``attentions``: the language model, and
    the model that vLLM runs, which in a multimodal model also has encoders. Cost: one pass over the live
    objects."""
    wanted = {id(attention) for attention in attentions}
    owners: list[tuple[int, nn.Module]] = []
    for candidate in gc.get_objects():
        # type() instead of isinstance(), which would run the code of lazy proxies.
        if not (issubclass(type(candidate), nn.Module) and hasattr(candidate, "compute_logits")):
            continue
        modules = {id(module) for module in candidate.modules()}
        if wanted <= modules:
            owners.append((len(modules), candidate))
    if not owners:
        raise _architecture("attention layers that belong to no loaded model")
    owners.sort(key=lambda owner: owner[0])
    return owners[0][1], owners[-1][1]


@torch.inference_mode()
def _require_text_embeddings(owner: nn.Module, outer: nn.Module) -> None:
    """Raise `NotBlendable` if the model that vLLM runs embeds text differently from its language model, which
    is the part that a blend runs."""
    if owner is outer:
        return
    token_ids = torch.arange(SAMPLED_IDS, device=next(owner.parameters()).device)
    embeds: list[Any] = [getattr(model, "embed_input_ids", None) for model in (owner, outer)]
    ours, theirs = (None if embed is None else embed(token_ids) for embed in embeds)
    if ours is None or theirs is None or not torch.equal(ours, theirs):
        feature = "embeddings of text that its language model alone does not compute"
        raise Decline(DeclineReason.MULTIMODAL, None, feature).error()


def _layer_path(path: str) -> tuple[str, int]:
    """`model.layers.3.self_attn.attn` -> (`model.layers`, 3)."""
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if at is None or at < 1:
        raise _architecture(f"an attention at {path!r}, which is not in a list of decoder layers")
    return ".".join(parts[:at]), int(parts[at])


def _cache_groups(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, attentions: dict[str, Any], device: torch.device
) -> dict[str, CacheGroup]:
    """Return the cache group of each layer by name."""
    groups: list[CacheGroup] = []
    for tables, group in enumerate(kv_cache_config.kv_cache_groups):
        names = [name for name in group.layer_names if name in attentions]
        for spec, alike in _layers_by_spec(group.kv_cache_spec, names).items():
            backends = {_backend_of(attentions[name]) for name in alike}
            if len(backends) != 1 or not isinstance(spec, (AttentionSpec, MambaSpec)):
                feature = f"a cache group ({tables}) that mixes attention backends or has no cache"
                raise Decline(DeclineReason.ATTENTION, None, feature).error()
            backend = backends.pop()
            _require_lasting_metadata(backend.get_name())
            made = CacheGroup(
                index=len(groups),
                tables=tables,
                spec=spec,
                layer_names=tuple(alike),
                block_size=spec.block_size,
                kernel_block_size=_kernel_block_size(backend, spec),
                builder=backend.get_builder_cls()(
                    _in_one_block(spec), alike, _without_graphs(vllm_config), device
                ),
                kernel_serves=_all_attend(spec, alike, lambda one: kernel_serves(attentions[one], device)),
                needs_latent_rows=_all_attend(spec, alike, lambda one: needs_rows(attentions[one])),
            )
            groups.append(made)
    return {name: group for group in groups for name in group.layer_names}


def _backend_of(layer: Any) -> Any:
    """Return vLLM's backend of an attention or a recurrent layer."""
    return layer.get_attn_backend() if recurrent_kind(layer) is not None else layer.attn_backend


def _all_attend(spec: KVCacheSpec, names: list[str], holds: Callable[[str], bool]) -> bool:
    """Return whether the layers are attentions, and ``holds`` is true for each name."""
    return isinstance(spec, AttentionSpec) and all(map(holds, names))


def _require_lasting_metadata(backend: str) -> None:
    """Raise `NotBlendable` for a backend whose metadata is invalid after the next batch."""
    if backend in ONE_BATCH_BACKENDS:
        limits = "whose metadata serves one batch of at most max_num_seqs requests"
        feature = f"the attention backend {backend}, {limits}"
        raise Decline(DeclineReason.BACKEND, None, feature).error()


def _layers_by_spec(spec: KVCacheSpec, names: list[str]) -> dict[KVCacheSpec, list[str]]:
    """Return the layers of one of vLLM's cache groups by spec."""
    found: dict[KVCacheSpec, list[str]] = {}
    for name in names:
        own = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        found.setdefault(own, []).append(name)
    return found


def _kernel_block_size(backend: Any, spec: AttentionSpec | MambaSpec) -> int:
    if isinstance(spec, MambaSpec):
        return int(spec.block_size)
    takes_specs = "kv_cache_specs" in inspect.signature(select_common_block_size).parameters
    specs = ([spec],) if takes_specs else ()  # vLLM 0.31 and before ask the backend alone
    return int(select_common_block_size(spec.block_size, [backend], *specs))


def _in_one_block(spec: AttentionSpec | MambaSpec) -> AttentionSpec | MambaSpec:
    """Return the spec of a pass, which keeps the state of a recurrent layer in one block."""
    if not isinstance(spec, MambaSpec):
        return spec
    return replace(spec, mamba_cache_mode="none", num_prefill_checkpoint_blocks=0)


def _without_graphs(vllm_config: VllmConfig) -> VllmConfig:
    """Return the configuration without CUDA graphs and cached states. With graphs, builders size their
    buffers for `max_num_seqs` requests; scattered tokens make more pseudo-requests, and are never
    captured."""
    config = copy.copy(vllm_config)
    config.cache_config = copy.copy(vllm_config.cache_config)
    config.cache_config.mamba_cache_mode = "none"
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    return config


def _projection_share(vllm_config: VllmConfig, layer: Layer) -> float:
    """Return the multiplications of the fused Q, K and V projection ÷ those of the whole layer, not counting
    attention.

    Computed from the config's shapes: a CPU backend repacks weights, and not all experts are used.
    """
    config, attention = vllm_config.model_config.hf_text_config, layer.attention
    ranks = vllm_config.parallel_config.tensor_parallel_size
    hidden = vllm_config.model_config.get_hidden_size()
    if isinstance(layer.kv, RecurrentKV):
        width = layer.kv.output_width
        fused, output = hidden * (layer.kv.key_width + layer.kv.value_width + width), width * hidden
    elif isinstance(layer.kv, LatentKV):
        fused, output = _latent_projections(attention, hidden, attention.num_heads * ranks)
    else:
        heads = attention.num_heads * ranks
        query = heads * attention.head_size
        kv = attention.num_kv_heads * ranks * (attention.head_size + attention.head_size_v)
        fused, output = hidden * (query + kv), query * hidden
    experts = getattr(config, "num_experts_per_tok", None) or 1
    names = ("moe_intermediate_size", "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
    width = next((getattr(config, name) for name in names if getattr(config, name, None)), 4 * hidden)
    share: float = fused / (fused + output + 3 * hidden * width * experts)
    return share


def _latent_projections(attention: Any, hidden: int, heads: int) -> tuple[int, int]:
    """Return the multiplications per token before latent attention, and those of the head and output
    projections."""
    queries, rank = heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim), attention.q_lora_rank
    query = hidden * queries if rank is None else (hidden + queries) * rank
    raised = attention.kv_lora_rank * heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    return query + hidden * attention.head_size, raised + heads * attention.v_head_dim * hidden
