"""Keeps blended blocks out of vLLM's KV events.

An event announces the tokens of a newly cached block. Routers and other caches assume that the block holds
the exact KV of these tokens. So for a request whose names are forked, only the blocks before the fork are
announced. vLLM still announces the removal of the other blocks, under names that were never announced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_block_hashes

from kintsugi.engine.scheduler.hashing import exact_tokens

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

PER_BLOCK = ("block_hashes", "extra_keys", "lookahead_token_ids")
"""Fields of an event with one entry per block. Some versions of vLLM lack some of them."""


def announce_exact_only(pool: BlockPool) -> None:
    """Stop `pool` from queueing events of blocks after their request's fork."""
    for name in ("cache_full_blocks", "emit_cached_block_events"):
        setattr(pool, name, _without_forked(pool, getattr(pool, name)))


def _without_forked(pool: BlockPool, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def announce(request: Request, *args: Any, **kwargs: Any) -> Any:
        before = len(pool.kv_event_queue)
        result = method(request, *args, **kwargs)
        if exact_tokens(request) is not None:
            added = pool.kv_event_queue[before:]
            pool.kv_event_queue[before:] = [
                kept for event in added if (kept := _exact_part(pool, request, event))
            ]
        return result

    return announce


def _exact_part(pool: BlockPool, request: Request, event: Any) -> Any | None:
    """Return `event` with only the blocks before the fork; None if there are none."""
    if not isinstance(event, BlockStored):
        return event
    num_exact = exact_tokens(request)
    assert num_exact is not None
    names = resolve_block_hashes(request.block_hashes, pool.hash_block_size, event.block_size)
    forked = {maybe_convert_block_hash(name) for name in names[num_exact // event.block_size :]}
    count = next((i for i, name in enumerate(event.block_hashes) if name in forked), len(event.block_hashes))
    if count == len(event.block_hashes):
        return event
    if count == 0:
        return None
    parts = {name: getattr(event, name, None) for name in PER_BLOCK}
    return msgspec.structs.replace(
        event,
        token_ids=event.token_ids[: count * event.block_size],
        **{name: part[:count] for name, part in parts.items() if part is not None},
    )
