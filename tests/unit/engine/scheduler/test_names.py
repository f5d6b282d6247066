"""The start-up proof of block names, on vLLM's own prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import CacheConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from kintsugi.core.errors import SelfTestFailed
from kintsugi.engine.scheduler import hashing
from kintsugi.engine.scheduler.selftest import check_names

VLLM_CONFIG: Any = SimpleNamespace(
    cache_config=CacheConfig(block_size=16),
    model_config=SimpleNamespace(max_model_len=4096),
    parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    kv_transfer_config=object(),
)
FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=32
)


def config_of(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=1000, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)])
def test_names_keep_blended_blocks_apart(specs: tuple[Any, ...]) -> None:
    check_names(VLLM_CONFIG, config_of(*specs))


def test_a_short_model_is_proved_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up prompt has 65 tokens."""
    monkeypatch.setattr(VLLM_CONFIG.model_config, "max_model_len", 32)
    check_names(VLLM_CONFIG, config_of(FULL))


def no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "fork", lambda request, *_: hashing.set_salt(request, request.cache_salt))


def the_same_tag_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = hashing.fork
    monkeypatch.setattr(hashing, "fork", lambda r, first, tag, *rest: fork(r, first, b"", *rest))


def a_fork_that_ends_with_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = hashing.fork

    def names_only_whats_there(request: Any, *arguments: Any) -> None:
        ordinary = request._block_hasher
        fork(request, *arguments)
        request._block_hasher = ordinary

    monkeypatch.setattr(hashing, "fork", names_only_whats_there)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (no_fork, "a plain request finds blended blocks"),
        (the_same_tag_for_all, "finds another plan's"),
        (a_fork_that_ends_with_the_prompt, "a plain request finds blended blocks"),
    ],
)
def test_a_defect_is_found(
    monkeypatch: pytest.MonkeyPatch, damage: Callable[[pytest.MonkeyPatch], None], found: str
) -> None:
    damage(monkeypatch)
    with pytest.raises(SelfTestFailed, match=found):
        check_names(VLLM_CONFIG, config_of(FULL))
