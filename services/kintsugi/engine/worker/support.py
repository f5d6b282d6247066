"""What of an engine's configuration cannot be blended, known before the model is looked at."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs

from kintsugi.engine.worker.hooks import find_missing_hooks


def find_unsupported(vllm_config: VllmConfig) -> str | None:
    """`reason: detail` for the first thing that rules blending out, None where nothing does."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    missing = find_missing_hooks()
    checks = (
        (bool(missing), f"vllm_version: this vLLM lacks {', '.join(map(str, missing))}"),
        (callable(model.hf_overrides), "hf_overrides: code cannot be part of a fingerprint; give a mapping"),
        (parallel.pipeline_parallel_size > 1, "pipeline_parallel: layers lie on several workers"),
        (parallel.data_parallel_size > 1, "data_parallel: ranks step together, a blend would not"),
        (
            getattr(parallel, "decode_context_parallel_size", 1) > 1,
            "context_parallel: a sequence's KV lies on several workers",
        ),
        (model.use_mla, "mla: latent KV has no separate keys to rotate"),
        (model.is_multimodal_model, "multimodal: chunk KV is over token ids alone"),
        (
            vllm_config.lora_config is not None,
            "lora: its layers apply the adapters of the running batch, whichever tokens pass through them",
        ),
        (vllm_config.speculative_config is not None, "speculative_decoding: the draft's KV is not blended"),
    )
    return next((reason for holds, reason in checks if holds), None)


def has_windows(kv_cache_config: KVCacheConfig) -> bool:
    """Whether some cache group lets go of tokens of a running request.

    A windowed layer whose group is kept in full (vLLM without its hybrid manager) has a full spec.
    """
    return not all(_keeps_everything(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)


def _keeps_everything(spec: KVCacheSpec) -> bool:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(_keeps_everything(one) for one in spec.kv_cache_specs.values())
    # Subclasses are other policies.
    return type(spec) is FullAttentionSpec
