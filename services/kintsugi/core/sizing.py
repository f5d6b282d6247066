"""The size of a corpus in the store, the memory of a service's processes, and the bandwidth above which
blending is faster than prefill.

The times are bounds from the model's shape (CacheBlend's loading controller, section 5 of the paper): a blend
takes at least as long as its computing plus the load of the first layer, and at least as long as its loading
plus the computing of the last layer. The engine's own overhead is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kintsugi.core.deploy import ServiceSpec
from kintsugi.core.errors import InvalidField, NotBlendable
from kintsugi.core.layout import Codec, KVLayout, LayerGroup, Part, PartKind

GIB = 1 << 30
SLAB_FILL_MAX = 0.9
"""Usable share of an SSD tier. Above it, the allocator fragments and eviction never stops."""
HOT_SHARE = 0.1
"""Share of the corpus that RAM holds."""
COST = 0.2
"""Share of a full prefill's token-layers that a blend computes, as `kintsugi calibrate` reports it."""
LOAD = 0.6
"""Share of their time that engines, gateways and links are busy at the peak. Above it, queues grow fast."""
GATEWAY_CPU_S = 0.005
"""CPU time of a gateway, which uses one core, for a request with known texts (`benchmarks/gateway.py`)."""
CPU_KV_CACHE_GIB = 2
"""Default size of an engine's KV cache on a CPU. vLLM would otherwise take most of the machine's memory."""
RAY_NODE_GIB = 0.75
"""Memory of Ray's own processes on a node without the head, and of the used pages of its object store."""
RAY_HEAD_GIB = 1.25
"""Memory of Ray on a single machine, with the GCS, the dashboard, Serve's controller, the directory and the
CLI."""
SHARD_GIB = 1.25
"""Memory of a shard without its chunks: 0.25 when idle; the rest is for gRPC's buffers under load."""
GATEWAY_GIB = 0.5
ENGINE_GIB = 1.75
"""Memory of an engine without weights and KV cache: 0.8 for the replica, 0.8 for vLLM's core."""
RAM_HEAP_SHARE = 0.1
"""Memory for manifests per byte of the RAM tier. 64-token chunks of a 135M model need 0.002; the bound is for
chunks of single tokens."""
LOWER_HEAP_SHARE = 0.005
"""The same per byte of SSD tiers and bucket, whose manifests are in memory, too."""
MANIFESTS_BYTES_MIN = 256 << 20
"""Memory that a shard with small tiers may use for manifests, out of `SHARD_GIB`."""
UPLOADS_GIB = 0.25
"""Chunks that wait for their upload to a bucket."""
ENGINE_DTYPES = {"float32": "bfloat16"}
"""The dtype that vLLM uses with `auto`, by a checkpoint's dtype."""


@dataclass(frozen=True)
class ModelSize:
    """The properties of a decoder that determine bytes and floating-point operations per token."""

    layout: KVLayout
    heads: int
    head_dim: int
    """Mean of the widths of a query head and of its output."""
    active_parameters: int
    """Number of weights that one token passes through in the decoder's layers, without embeddings and
    head."""

    def prefill_flops(self, num_tokens: int) -> float:
        """FLOPs of a causal prefill: two per weight and token, and attention over half a square per layer."""
        attention = 2 * num_tokens**2 * self.heads * self.head_dim * self.layout.num_layers
        return float(2 * self.active_parameters * num_tokens + attention)


def model_size(config: Mapping[str, Any], dtype: str = "auto") -> ModelSize:
    """Read a checkpoint's `config.json`; `dtype` is vLLM's. Raises `InvalidField`, `NotBlendable`.

    Counts gated MLPs of three matrices, as all supported decoders have.
    """
    values = text_config(config)
    hidden = _positive(values, "hidden_size")
    listed = _listed_layers(values)
    layers = _positive(values, "num_hidden_layers", len(listed) or None)
    heads = _positive(values, "num_attention_heads")
    stored = engine_dtype(config, dtype)
    if values.get("kv_lora_rank"):
        layout, head_dim, projections = _latent_size(values, hidden, heads, layers, stored)
    else:
        kv_heads = _positive(values, "num_key_value_heads", heads)
        head_dim = _positive(values, "head_dim", hidden // heads or 1)
        projections = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
        kinds = _layer_kinds(values, listed, layers)
        parts = (Part(PartKind.K, head_dim), Part(PartKind.V, head_dim))
        attending = LayerGroup(1, kv_heads, parts)
        recurrent = {kind: _recurrent_layer(values, kind, hidden) for kind in {*kinds}}
        groups = [recurrent[kind] or attending for kind in kinds] or [attending] * layers
        layout = KVLayout.of_groups(groups, stored)
    width = _positive(values, "intermediate_size", 4 * hidden)
    if values.get("num_experts_per_tok"):
        width = _positive(values, "moe_intermediate_size", width)
    experts = _positive(values, "num_experts_per_tok", 1)
    return ModelSize(layout, heads, head_dim, layers * (projections + 3 * hidden * width * experts))


_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Nemotron-H's letters of its layers."""


def _listed_layers(values: Mapping[str, Any]) -> Sequence[str]:
    """Return the configuration's list of layers; empty without one."""
    names = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    return next((values[name] for name in names if values.get(name)), ())


def _layer_kinds(values: Mapping[str, Any], listed: Sequence[str], layers: int) -> list[str]:
    """Return the kind of each layer that mixes tokens; empty if the configuration does not name them."""
    interval = values.get("full_attention_interval")
    if interval and not listed:  # Qwen3-Next
        listed = [("linear" if (layer + 1) % interval else "full") + "_attention" for layer in range(layers)]
    kinds = [_PATTERN.get(one, one) for one in listed]
    return [kind for kind in kinds if kind not in ("mlp", "moe")]


def _recurrent_layer(values: Mapping[str, Any], kind: str, hidden: int) -> LayerGroup | None:
    """Return what a layer of this kind stores; None for one that attends."""
    gates = 0
    if kind == "conv":
        width = hidden
    elif kind == "linear_attention" and "linear_num_value_heads" in values:
        heads = _positive(values, "linear_num_value_heads")
        keys = _positive(values, "linear_num_key_heads") * _positive(values, "linear_key_head_dim")
        width, gates = 2 * keys + heads * _positive(values, "linear_value_head_dim"), 2 * heads
    elif kind in ("mamba", "linear_attention") and "mamba_n_heads" in values:
        width, gates = _mamba2_widths(
            values, "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"
        )
    elif kind in ("mamba", "linear_attention") and "mamba_num_heads" in values:  # Nemotron-H
        width, gates = _mamba2_widths(
            values, "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"
        )
    else:
        return None
    parts = (Part(PartKind.INPUT, width), *((Part(PartKind.GATE, gates),) if gates else ()))
    return LayerGroup(1, 1, parts)


def _mamba2_widths(
    values: Mapping[str, Any], heads: str, head_dim: str, groups: str, state: str
) -> tuple[int, int]:
    """Return the widths of a Mamba-2 layer's inputs and gates, from the fields of these names."""
    gates = _positive(values, heads)
    states = _positive(values, groups, 1) * _positive(values, state)
    return gates * _positive(values, head_dim) + 2 * states, gates


def _latent_size(
    values: Mapping[str, Any], hidden: int, heads: int, layers: int, dtype: str
) -> tuple[KVLayout, int, int]:
    """Return layout, head width and parameters per layer of multi-head latent attention (DeepSeek-V3)."""
    if any(values.get(name) for name in ("index_topk", "compress_ratios")):
        raise NotBlendable("indexed_attention", "its layers attend to tokens that an index chooses")
    rank, rotary = _positive(values, "kv_lora_rank"), _positive(values, "qk_rope_head_dim")
    nope, out = _positive(values, "qk_nope_head_dim"), _positive(values, "v_head_dim")
    parts = (Part(PartKind.LATENT, rank), Part(PartKind.ROTARY, rotary))
    queries = heads * (nope + rotary)
    narrow = values.get("q_lora_rank")
    query = (hidden + queries) * narrow if narrow else hidden * queries
    rest = hidden * (rank + rotary) + rank * heads * (nope + out) + heads * out * hidden
    layout = KVLayout.of_groups([LayerGroup(layers, 1, parts)], dtype)
    return layout, (nope + rotary + out) // 2, query + rest


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoder's part of a configuration, which multimodal models keep in `text_config`."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _positive(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name)
    value = default if value is None else value
    if value is None:
        raise InvalidField(name, "is missing in config.json; name the checkpoint folder of a decoder")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidField(name, f"{value!r} in config.json is not a positive number")
    return value


def engine_dtype(config: Mapping[str, Any], dtype: str = "auto") -> str:
    """Return the element type in which vLLM runs a checkpoint with the argument `dtype`."""
    if dtype != "auto":
        return dtype
    places = (config, text_config(config))
    stored = (place.get(name) for place in places for name in ("dtype", "torch_dtype"))
    found = str(next(filter(None, stored), "bfloat16"))
    return ENGINE_DTYPES.get(found, found)


@dataclass(frozen=True)
class SizingWorkload:
    """The corpus and the prompts to compute sizes for."""

    corpus_tokens: int
    chunk_tokens: int = 512
    chunks_per_prompt: int = 6
    replication: int = 1

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt that come from chunks."""
        return self.chunk_tokens * self.chunks_per_prompt


@dataclass(frozen=True)
class CodecSize:
    """A corpus in one codec. Bytes are of all shards together, replicas included."""

    codec: Codec
    bytes_per_token: float
    corpus_bytes: int
    ram_bytes: int
    """Bytes for the share of the corpus that RAM holds."""
    ssd_bytes: int
    """Bytes for the whole corpus, in tiers that are filled to `SLAB_FILL_MAX`."""
    prompt_bytes: int
    """Bytes loaded for one prompt."""


@dataclass(frozen=True)
class FleetSize:
    """The processes that answer a rate of requests, each busy for `LOAD` of the time."""

    engines: int
    """Number of engines for the prefill of prompts; decoding is not counted."""
    gateways: int
    shards: int
    ram_bytes_per_shard: int
    ssd_bytes_per_shard: int
    engine_link_bytes_per_s: float
    """Mean rate at which each engine loads."""
    shard_link_bytes_per_s: float
    """Mean rate at which each shard sends."""


def fleet_size(
    size: CodecSize, work: SizingWorkload, requests_per_s: float, full_s: float, bytes_per_s: float
) -> FleetSize:
    """Return the fleet for requests that all hit. ``full_s``: seconds of one full prefill; ``bytes_per_s``:
    of each shard's and each engine's link. Raises `InvalidField`."""
    if not 0 < requests_per_s < math.inf:
        raise InvalidField("requests_per_s", f"{requests_per_s} is not positive")
    sent = requests_per_s * size.prompt_bytes
    links = sent / bytes_per_s / LOAD
    engines = math.ceil(max(requests_per_s * COST * full_s / LOAD, links))
    shards = max(math.ceil(links), work.replication)
    return FleetSize(
        engines=engines,
        gateways=math.ceil(requests_per_s * GATEWAY_CPU_S / LOAD),
        shards=shards,
        ram_bytes_per_shard=math.ceil(size.ram_bytes / shards),
        ssd_bytes_per_shard=math.ceil(size.ssd_bytes / shards),
        engine_link_bytes_per_s=sent / engines,
        shard_link_bytes_per_s=sent / shards,
    )


def codec_size(layout: KVLayout, codec: Codec, work: SizingWorkload) -> CodecSize:
    """Return the sizes of a corpus that is cut into whole chunks."""
    chunk_bytes = layout.chunk_bytes(codec, work.chunk_tokens)
    chunks = -(-work.corpus_tokens // work.chunk_tokens)
    corpus_bytes = chunks * (chunk_bytes + layout.digests_bytes) * work.replication
    return CodecSize(
        codec=codec,
        bytes_per_token=chunk_bytes / work.chunk_tokens,
        corpus_bytes=corpus_bytes,
        ram_bytes=round(corpus_bytes * HOT_SHARE),
        ssd_bytes=round(corpus_bytes / SLAB_FILL_MAX),
        prompt_bytes=chunk_bytes * work.chunks_per_prompt,
    )


def manifests_bytes_max(ram_bytes: float, lower_bytes: float) -> int:
    """Return the memory that a shard may use for the manifests of its chunks. ``lower_bytes``: size of the
    SSD tiers and the bucket."""
    return max(MANIFESTS_BYTES_MIN, int(ram_bytes * RAM_HEAP_SHARE + lower_bytes * LOWER_HEAP_SHARE))


def shard_memory_gib(ram_gib: float, lower_gib: float = 0.0, has_bucket: bool = False) -> float:
    """Return the memory in GiB of a shard's process with full tiers. ``lower_gib``: size of the SSD tiers and
    the bucket. The catalogs' pages are not counted: the kernel takes them back when it needs them."""
    heap_gib = ram_gib * RAM_HEAP_SHARE + lower_gib * LOWER_HEAP_SHARE
    return SHARD_GIB + ram_gib + heap_gib + UPLOADS_GIB * has_bucket


def service_memory_gib(spec: ServiceSpec, weights_gib: float) -> dict[str, float]:
    """Return the memory in GiB that a service on one machine needs with full tiers and caches, by part.

    ``weights_gib``: size of the checkpoint, which only engines on a CPU keep in memory.
    """
    engines, store = spec.engines, spec.store
    engine_gib = ENGINE_GIB
    if not engines.gpus:
        cache_bytes = engines.vllm.get("kv_cache_memory_bytes")
        cache_gib = cache_bytes / GIB if isinstance(cache_bytes, int) else CPU_KV_CACHE_GIB
        engine_gib += cache_gib + weights_gib
    lower_gib = sum(tier.gib for tier in store.tiers) + store.bucket_gib * bool(store.bucket_url)
    shard_gib = shard_memory_gib(store.ram_gib, lower_gib, bool(store.bucket_url))
    return {
        "engines": engines.most * engine_gib,
        "shards": (store.expert.shards_max or store.shards) * shard_gib,
        "gateways": spec.gateway.replicas * GATEWAY_GIB,
        "Ray": RAY_HEAD_GIB,
    }


@dataclass(frozen=True)
class LoadingPace:
    """Two bandwidths for loading one prompt's chunks, in bytes per second."""

    pays_bytes_per_s: float
    """Above it a blend takes less time than a full prefill; below it loading loses."""
    hides_bytes_per_s: float
    """Above it loading is hidden by the blend's own computation, and more bandwidth does not help."""


def pace_to_hide_loading(prompt_bytes: int, layers: int, full_s: float, cost: float) -> LoadingPace:
    """Return the bandwidths for a prompt whose full prefill takes `full_s` seconds."""
    first_layer = prompt_bytes / layers
    last_layer_s = cost * full_s / layers
    behind_compute = first_layer / (full_s * (1 - cost))
    return LoadingPace(
        pays_bytes_per_s=max(prompt_bytes / (full_s - last_layer_s), behind_compute),
        hides_bytes_per_s=prompt_bytes / (cost * full_s),
    )


def blend_s(prompt_bytes: int, layers: int, full_s: float, cost: float, bytes_per_s: float) -> float:
    """Return the minimum time in seconds of a blend that loads over one link."""
    computing_s = cost * full_s
    loading_s = prompt_bytes / bytes_per_s
    return max(loading_s + computing_s / layers, loading_s / layers + computing_s)
