"""What of an engine's configuration cannot be blended, known before the model is looked at."""

from __future__ import annotations

import sys

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from kintsugi.engine.worker.hooks import describe_missing
from kintsugi.models.layers import RECURRENT_STATE, Decline, DeclineReason


def find_unsupported(vllm_config: VllmConfig) -> str | None:
    """`reason: detail` for the first thing that rules blending out, None where nothing does."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    missing, cache_dtype = describe_missing(), str(vllm_config.cache_config.cache_dtype)
    checks = (
        (missing is not None, str(missing)),
        (callable(model.hf_overrides), "hf_overrides: code cannot be part of a fingerprint; give a mapping"),
        (parallel.pipeline_parallel_size > 1, "pipeline_parallel: layers lie on several workers"),
        (parallel.data_parallel_size > 1, "data_parallel: ranks step together, a blend would not"),
        (
            getattr(parallel, "decode_context_parallel_size", 1) > 1,
            "context_parallel: a sequence's KV lies on several workers",
        ),
        (
            vllm_config.lora_config is not None,
            "lora: its layers apply the adapters of the running batch, whichever tokens pass through them",
        ),
        (
            "per_token_head" in cache_dtype,
            f"kv_cache_dtype: the scales of {cache_dtype} lie in vLLM's cache, and passes compute in others, "
            "too; choose auto or fp8",
        ),
        (vllm_config.speculative_config is not None, "speculative_decoding: the draft's KV is not blended"),
    )
    return next((reason for holds, reason in checks if holds), None)


def find_wrapper(connector: KVConnectorBase_V1) -> str | None:
    """`reason: detail` where another connector makes this one, as `MultiConnector` does; None otherwise.

    Call it while `connector` is made: what it is made by is then still running. Nothing else tells: a wrapper
    hands its children a configuration as if each were alone.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        maker = frame.f_locals.get("self")
        if isinstance(maker, KVConnectorBase_V1) and maker is not connector:
            return (
                f"multi_connector: {type(maker).__name__} also shows blocks to its other connectors, and one "
                "that keeps them by their tokens would keep blended KV as exact; name KintsugiConnector "
                "itself as kv_connector"
            )
        frame = frame.f_back
    return None


def find_recurrent(kv_cache_config: KVCacheConfig) -> str | None:
    """`reason: detail` where a layer keeps a state beside or instead of KV; None where none does.

    The loaded model tells the worker the same. The scheduler has to know by itself: vLLM finds cached states
    by rules of their own, so that proving the names of blocks would fail first, with a reason that helps
    nobody.
    """
    for group in kv_cache_config.kv_cache_groups:
        if any(isinstance(spec, MambaSpec) for spec in _specs_of(group.kv_cache_spec)):
            feature = f"{RECURRENT_STATE} ({group.layer_names[0]})"
            return str(Decline(DeclineReason.RECURRENT, None, feature))
    return None


def has_windows(kv_cache_config: KVCacheConfig) -> bool:
    """Whether some cache group lets go of tokens of a running request.

    A windowed layer whose group is kept in full (vLLM without its hybrid manager) has a full spec.
    """
    return not all(_keeps_everything(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)


def find_local_chunk(kv_cache_config: KVCacheConfig) -> int | None:
    """The least number of positions within which some layer attends, counted from multiples of it (chunked
    local attention, as in Llama 4); None where no layer does."""
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in _specs_of(group.kv_cache_spec)]
    sizes = [getattr(spec, "attention_chunk_size", None) for spec in specs]
    return min((size for size in sizes if size), default=None)


def find_chunk_reach(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """The most tokens that a chunk and what it is prefilled behind may have: those that the model takes, or
    fewer where a layer attends within a local chunk. Beyond its border, a chunk's tokens would see less."""
    length_max: int = vllm_config.model_config.max_model_len
    return min(length_max, find_local_chunk(kv_cache_config) or length_max)


def _specs_of(spec: KVCacheSpec) -> list[KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]


def _keeps_everything(spec: KVCacheSpec) -> bool:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(_keeps_everything(one) for one in spec.kv_cache_specs.values())
    # Subclasses are other policies.
    return type(spec) in (FullAttentionSpec, MLAAttentionSpec)
