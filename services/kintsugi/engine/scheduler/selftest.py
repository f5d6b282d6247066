"""Checks at start that only requests with the same plan find a blend's blocks.

It uses a small separate instance of vLLM's prefix cache without KV: a plain and a forked request of the same
tokens store their blocks in it, and each looks for the other's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from kintsugi.core.errors import SelfTestFailed
from kintsugi.engine.scheduler import hashing
from kintsugi.engine.worker.support import without_states

BLOCKS = 4
"""Full blocks of the made-up prompt. The fork is after the first block."""
SALT = "self-test"


def check_names(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Check the names of blocks. Raises `SelfTestFailed` with the request that found another's blocks.

    States of recurrent layers are left out. Their blocks have the same names, but vLLM keeps only some of
    them, so no request would find all tokens of an equal request."""
    kv_cache_config = without_states(kv_cache_config)
    block, hash_block = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    caching_hash = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    kv_cache_utils.init_none_hash(caching_hash)
    hasher = kv_cache_utils.get_request_block_hasher(hash_block, caching_hash)
    num_tokens = BLOCKS * block + 1

    def found(writer: bytes | None, reader: bytes | None, grown: bool = False) -> int:
        """Return how many tokens a request forked with tag ``reader`` finds of one forked with ``writer``;
        None: not forked. ``grown``: the blocks after the fork fill while the request runs."""
        small = dataclasses.replace(kv_cache_config, num_blocks=_blocks_for(kv_cache_config, num_tokens))
        cache = KVCacheManager(
            kv_cache_config=small,
            max_model_len=max(vllm_config.model_config.max_model_len, num_tokens),
            scheduler_block_size=block,
            hash_block_size=hash_block,
            enable_caching=True,
        )
        first = block + 1 if grown else num_tokens
        request = _request(list(range(first)), hasher, writer, block // hash_block, hash_block)
        if cache.allocate_slots(request, first) is None:
            raise SelfTestFailed("check 'names': a small prefix cache has no room for its only request")
        for token_id in range(first, num_tokens):
            request.num_computed_tokens = request.num_tokens
            request.append_output_token_ids(token_id)
            cache.allocate_slots(request, 1)
        asks = _request(list(range(num_tokens)), hasher, reader, block // hash_block, hash_block)
        return int(cache.get_computed_blocks(asks)[1])

    whole, plan, other = BLOCKS * block, b"one plan", b"another plan"
    if found(None, None) != whole or found(plan, plan) != whole:
        raise SelfTestFailed("check 'names': a request does not find the blocks of an equal request")
    for writer, reader, who in (
        (plan, None, "a plain request finds blended blocks"),
        (None, plan, "a blend finds plain blocks after its fork"),
        (plan, other, "a blend finds another plan's blocks"),
    ):
        for grown in (False, True):
            if found(writer, reader, grown) > block:
                raise SelfTestFailed(f"check 'names': {who}; this vLLM names blocks in an unexpected way")


def _request(
    token_ids: list[int], hasher: Any, tag: bytes | None, first_block: int, block_size: int
) -> Request:
    request = Request(
        request_id=f"{SALT}-{tag!r}",
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=SALT,
        block_hasher=hasher,
    )
    if tag is not None:
        hashing.fork(request, first_block, tag, block_size, SALT)
    return request


def _blocks_for(kv_cache_config: KVCacheConfig, num_tokens: int) -> int:
    """Return the number of blocks for one prompt, including vLLM's null block."""
    groups = kv_cache_config.kv_cache_groups
    return 2 + int(sum(-(-num_tokens // group.kv_cache_spec.block_size) for group in groups))
