"""Finds features of an engine's configuration that rule blending out, before the model is inspected."""

from __future__ import annotations

import dataclasses
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

from kintsugi.core.layout import KVLayout
from kintsugi.engine.plugin import CONNECTOR
from kintsugi.engine.protocol import BlendJob


def find_unsupported(vllm_config: VllmConfig) -> str | None:
    """Return `reason: detail` of the first feature that rules blending out; None if there is none."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    checks = (
        (callable(model.hf_overrides), "hf_overrides: code cannot be part of a fingerprint; pass a mapping"),
        (parallel.pipeline_parallel_size > 1, "pipeline_parallel: layers lie on several workers"),
        (parallel.data_parallel_size > 1, "data_parallel: ranks must step together, and a blend steps alone"),
        (
            getattr(parallel, "decode_context_parallel_size", 1) > 1,
            "context_parallel: a sequence's KV lies on several workers",
        ),
        (
            vllm_config.lora_config is not None,
            "lora: layers apply the adapters of the running batch to all tokens",
        ),
        (
            "per_token_head" in cache_dtype,
            f"kv_cache_dtype: the scales of {cache_dtype} lie in vLLM's cache, and passes also use other "
            "caches; choose auto or fp8",
        ),
        (vllm_config.speculative_config is not None, "speculative_decoding: the draft's KV is not blended"),
        (
            bool(getattr(vllm_config.cache_config, "use_replayssm", False)),
            "replay_ssm: recurrent states are stored as ring buffers of past inputs; start vLLM without "
            "use_replayssm",
        ),
    )
    return next((reason for holds, reason in checks if holds), None)


NAMED_BY_BLOCKS = ("OffloadingConnector",)
"""vLLM's connectors that find KV by the request's block hashes, as the prefix cache does. Blended KV that
they store is found only by the same blend."""


def find_wrapper(connector: KVConnectorBase_V1) -> str | None:
    """Return `reason: detail` if a `MultiConnector` creates this connector together with one that could store
    blended KV as exact, or after one that would see a request before its blocks are renamed; else None.

    Call it in the constructor of ``connector``, while the creator's frame is on the stack. There is no other
    sign: a wrapper passes each child a configuration as if it were alone.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        maker = frame.f_locals.get("self")
        if isinstance(maker, KVConnectorBase_V1) and maker is not connector:
            parts = maker._kv_transfer_config.kv_connector_extra_config.get("connectors", ())
            first, *others = [part["kv_connector"] for part in parts] or [""]
            if first == CONNECTOR and set(others) <= set(NAMED_BY_BLOCKS):
                return None
            return (
                f"multi_connector: {type(maker).__name__} passes blocks to its other connectors, too, and "
                "one that stores them by their tokens would store blended KV as exact; list "
                f"{CONNECTOR} first, and only {' or '.join(NAMED_BY_BLOCKS)} after it"
            )
        frame = frame.f_back
    return None


def without_states(kv_cache_config: KVCacheConfig) -> KVCacheConfig:
    """Return the configuration without the groups of recurrent layers."""
    kept = [group for group in kv_cache_config.kv_cache_groups if not is_state(group.kv_cache_spec)]
    return dataclasses.replace(kv_cache_config, kv_cache_groups=kept)


def is_state(spec: KVCacheSpec) -> bool:
    """Return whether layers keep a recurrent state."""
    return any(isinstance(one, MambaSpec) for one in _specs_of(spec))


def find_foreign(job: BlendJob, layout: KVLayout) -> str | None:
    """Return `reason: detail` if a chunk of the job holds other tensors than ``layout``, the model's; else
    None."""
    foreign = next((key for key, manifest in job.manifests.items() if manifest.layout != layout), None)
    if foreign is None:
        return None
    return (
        f"chunk_layout: chunk {foreign} holds tensors of other widths than this model's layers store; delete "
        "it and put it again"
    )


def has_windows(kv_cache_config: KVCacheConfig) -> bool:
    """Return whether some cache group frees blocks of a running request.

    A windowed layer whose group is kept in full (vLLM without its hybrid manager) has a full spec.
    """
    return not all(_keeps_everything(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)


def find_local_chunk(kv_cache_config: KVCacheConfig) -> int | None:
    """Return the smallest chunk size of layers with chunked local attention, as in Llama 4; None without."""
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in _specs_of(group.kv_cache_spec)]
    sizes = [getattr(spec, "attention_chunk_size", None) for spec in specs]
    return min((size for size in sizes if size), default=None)


def find_chunk_reach(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return the maximum tokens of a chunk together with the text before it: the model's maximum, or less if
    a layer attends within local chunks. A chunk's tokens beyond such a border would attend to less."""
    length_max: int = vllm_config.model_config.max_model_len
    return min(length_max, find_local_chunk(kv_cache_config) or length_max)


def _specs_of(spec: KVCacheSpec) -> list[KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]


def _keeps_everything(spec: KVCacheSpec) -> bool:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(_keeps_everything(one) for one in spec.kv_cache_specs.values())
    # Subclasses have other policies.
    return type(spec) in (FullAttentionSpec, MLAAttentionSpec)
