"""Lets vLLM empty its prefix cache while blends and saves hold cache blocks.

vLLM empties it for `/reset_prefix_cache`, `/pause`, `/sleep` and weight updates, and before that preempts
the requests that run. It cannot preempt a request that waits for a connector, and fails. Here such requests
lose what they have computed: vLLM prefills them in full afterwards, because their blocks may hold another
model's KV, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING

from kintsugi.core.accounting import CACHE_RESET, Accounting, Outcome
from kintsugi.core.request import Op
from kintsugi.engine.scheduler.requests import RequestState, is_parked

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

NULL_BLOCK = 0
"""Id of the block that stands for blocks outside a window. No request holds it."""


def give_up_on_reset(pool: BlockPool, give_up: Callable[[int], bool]) -> None:
    """Call ``give_up`` with the number of used blocks when vLLM resets `pool` and some are used. If it
    returns True, all blocks lose their names, and the reset succeeds although the used blocks are freed
    later."""
    reset = pool.reset_prefix_cache

    @wraps(reset)
    def reset_or_give_up() -> bool:
        num_used = pool.num_gpu_blocks - pool.get_num_free_blocks() - 1  # less the null block
        if num_used and give_up(num_used):
            pool.evict_blocks({block.block_id for block in pool.blocks})
            return True
        return bool(reset())

    pool.reset_prefix_cache = reset_or_give_up


def give_up(states: Iterable[RequestState], others: Iterable[int], num_used: int, has_windows: bool) -> bool:
    """Make vLLM compute all parked requests in full, if all of the pool's ``num_used`` blocks are held
    by them or are ``others``, the ids of blocks that no request holds. Returns whether this is so.

    The worker fails what is in flight. A request whose blend has ended is computed again in the blocks that
    it holds.
    """
    parked = [state for state in states if is_parked(state.request)]
    held = {block for state in parked for ids in state.block_ids for block in ids} | set(others)
    if len(held - {NULL_BLOCK}) != num_used:
        return False
    if has_windows and not all(state.in_flight for state in parked):
        return False  # vLLM has freed the blocks before the window, so nothing can be computed there
    for state in parked:
        if not has_windows:
            state.request.num_computed_tokens = 0
            # A prefix cache hit would add blocks to those that the request still holds.
            state.request.skip_reading_prefix_cache = True
        if not state.in_flight and state.params.op is Op.BLEND:
            reason = f"{CACHE_RESET}: vLLM emptied its cache before the request ran"
            state.accounting = state.complete(Accounting(Outcome.FAILED, reason=reason))
    return True
