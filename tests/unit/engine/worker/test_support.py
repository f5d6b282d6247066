"""What rules blending out is known from vLLM's configuration alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import Supports

pytest.importorskip("vllm")

from kintsugi.engine.worker.support import (
    find_chunk_reach,
    find_local_chunk,
    find_unsupported,
    has_windows,
    without_states,
)


def config(**changes: Any) -> Any:
    """A stand-in for `VllmConfig` of a plain model on one worker; `changes` name one attribute each."""
    values = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, data_parallel_size=1, decode_context_parallel_size=1
        ),
        model_config=SimpleNamespace(use_mla=False, hf_overrides={}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
        lora_config=None,
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        owner: Any = values
        for parent in parents:
            owner = getattr(owner, parent)
        assert hasattr(owner, name)
        setattr(owner, name, value)
    return values


def test_a_plain_model_on_one_worker_is_supported() -> None:
    assert find_unsupported(config()) is None


def test_latent_attention_is_supported() -> None:
    assert find_unsupported(config(model_config__use_mla=True)) is None


RULED_OUT: dict[str, tuple[dict[str, Any], str | None]] = {
    "pipeline_parallel": ({"parallel_config__pipeline_parallel_size": 2}, None),
    "data_parallel": ({"parallel_config__data_parallel_size": 2}, None),
    "context_parallel": ({"parallel_config__decode_context_parallel_size": 2}, None),
    "hf_overrides": ({"model_config__hf_overrides": lambda config: config}, None),
    "speculative_decoding": ({"speculative_config": object()}, "speculative decoding"),
    "lora": ({"lora_config": object()}, "LoRA"),
    "kv_cache_dtype": ({"cache_config__cache_dtype": "fp8_per_token_head"}, None),
}


@pytest.mark.parametrize("reason", RULED_OUT)
def test_what_is_ruled_out_is_declined_by_name(reason: str, supports: Supports) -> None:
    changes, feature = RULED_OUT[reason]
    declined = find_unsupported(config(**changes))
    assert declined is not None
    assert declined.startswith(f"{reason}: ")
    if feature is not None:
        supports("every", feature, "declined")


def test_windows_are_seen_in_the_cache_groups() -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    common = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    full = SimpleNamespace(kv_cache_spec=FullAttentionSpec(**common))
    latent = SimpleNamespace(kv_cache_spec=MLAAttentionSpec(**common))
    windowed = SimpleNamespace(kv_cache_spec=SlidingWindowSpec(**common, sliding_window=200))
    groups: Any = SimpleNamespace(kv_cache_groups=[full, latent])
    assert not has_windows(groups)
    groups.kv_cache_groups.append(windowed)
    assert has_windows(groups)


def test_groups_of_states_are_left_out_of_the_check_of_names() -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    state = MambaSpec(block_size=16, shapes=((4, 8),), dtypes=(torch.float32,))
    attending, recurrent = (
        KVCacheGroupSpec(["layers.1.attn"], full),
        KVCacheGroupSpec(["layers.0.mixer"], state),
    )
    groups = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[recurrent, attending])
    assert without_states(groups).kv_cache_groups == [attending]
    assert has_windows(groups)  # blends begin at the first token


def test_local_chunks_are_seen_in_the_cache_groups() -> None:
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        UniformTypeKVCacheSpecs,
    )

    common = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    full = FullAttentionSpec(**common)
    groups: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=full)])
    config: Any = SimpleNamespace(model_config=SimpleNamespace(max_model_len=48))
    assert find_local_chunk(groups) is None
    assert find_chunk_reach(config, groups) == 48
    local = ChunkedLocalAttentionSpec(**common, attention_chunk_size=64)
    both = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": local, "b": full})
    groups.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=both))
    assert find_local_chunk(groups) == 64
    assert find_chunk_reach(config, groups) == 48
    # Without vLLM's hybrid manager, such a layer keeps everything and still attends within its chunk.
    kept = FullAttentionSpec(**common, attention_chunk_size=32)
    groups.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=kept))
    assert find_local_chunk(groups) == 32
    assert find_chunk_reach(config, groups) == 32
