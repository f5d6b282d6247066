"""Has discovered segments saved in steps in which the engine computes nothing else.

A connector cannot add requests to vLLM's scheduler. So a save takes its cache blocks from vLLM's block pool,
as an allocation of vLLM does, and gives them back once the worker is done; nobody finds them by name. One
segment is saved at a time, in all copies that its space has. vLLM goes on stepping an engine without requests
while the connector has work (`has_pending_push_work`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.request import Op
from kintsugi.core.spaces import ChunkKey, ChunkSpace, anchor_of
from kintsugi.core.tokens import TokenIds
from kintsugi.discovery.backlog import Recurring
from kintsugi.engine.config import EngineConfig
from kintsugi.engine.protocol import JobTokens, SaveJob, StepMetadata
from kintsugi.engine.scheduler.discovery import Discovery
from kintsugi.engine.scheduler.metrics import BlendStats
from kintsugi.engine.scheduler.spans import other_lead

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = init_logger(__name__)

SLICE_TOKENS = 64
"""Work per step, in full-width tokens: what a request that comes meanwhile may have to wait for."""
AWAKE_S = 10.0
"""How long saves keep an engine stepping that has no requests; what is left waits for the next one. An engine
that is told to stop may wait as long."""
HOLD_S = 30.0
"""How long they keep it stepping for the save in hand, whose cache blocks nobody else can use meanwhile."""
POOL_SHARE_MAX = 0.125
"""Share of the KV cache that one save may take."""


class IdleSaves:
    """Called from the scheduler's thread only."""

    def __init__(
        self,
        discovery: Discovery,
        config: EngineConfig,
        block_sizes: Sequence[int],
        length_max: int,
        prior_text: tuple[int, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``block_sizes``: tokens per block of each KV cache group. ``length_max``: the most tokens that the
        model takes. ``prior_text``: see `scheduler.gate.prior_text_of`."""
        self.pool: BlockPool | None = None
        """vLLM's, once it is there."""
        self._discovery = discovery
        self._config = config
        self._block_sizes = tuple(block_sizes)
        self._length_max = length_max
        self._prior_text = prior_text
        self._clock = clock
        self._busy_s = clock()
        """When the engine last had a request."""
        self._blocks: Sequence[KVCacheBlock] = ()
        """Cache blocks of the save in hand; none where there is none."""
        self._has_failed = False
        """Whether the last save failed."""
        self._is_store_suspended = False
        """Whether the store was suspended in the last step."""

    @property
    def is_pending(self) -> bool:
        """Whether the engine should go on stepping for saves alone."""
        quiet_s = self._clock() - self._busy_s
        if self.pool is None:
            return False
        if self._blocks:
            return quiet_s < HOLD_S
        return quiet_s < AWAKE_S and self._discovery.backlog.is_due and not self._is_store_suspended

    def wake(self) -> None:
        """Keep the engine stepping for as long as after a request."""
        self._busy_s = self._clock()

    def step(self, computes: bool, may_begin: bool, metadata: StepMetadata, is_store_suspended: bool) -> None:
        """Let the worker go on with a save if the engine ``computes`` nothing else, or begin one.

        A request that waits for blocks computes nothing. A save that has begun goes on beside it, because the
        request may wait for the save's own blocks; none begins (``may_begin``). Nor does one while the store
        is suspended: it would be computed and not be stored. What waits stays in the backlog.
        """
        self._is_store_suspended = is_store_suspended
        if computes or not may_begin:
            self.wake()
        if computes:
            return
        if not self._blocks and may_begin and not is_store_suspended:
            metadata.discovered = self._begin()
        if self._blocks:
            metadata.idle_tokens = SLICE_TOKENS

    def _begin(self) -> list[SaveJob]:
        """The jobs of the next segment, one for each copy; none if no segment waits. A segment that finds no
        room in the cache is dropped, and queued again at its next sight."""
        erasures_seen = self._discovery.erasures_seen
        if self.pool is None or erasures_seen is None or (segment := self._discovery.take()) is None:
            return []
        copies = segment.space.copies(self._config.plain_copies)
        sizes = [len(copy.lead_token_ids) + len(segment.token_ids) for copy in copies]
        counts = [-(-size // block) for size in sizes for block in self._block_sizes]
        if max(sizes) > self._length_max or sum(counts) > min(
            POOL_SHARE_MAX * self.pool.num_gpu_blocks, self.pool.get_num_free_blocks()
        ):
            return []
        self._blocks = self.pool.get_new_blocks(sum(counts))
        ids = iter([block.block_id for block in self._blocks])
        tables = [[next(ids) for _ in range(count)] for count in counts]
        groups = len(self._block_sizes)
        jobs = [
            self._job(segment, copy, tuple(tables[groups * index : groups * (index + 1)]), erasures_seen)
            for index, copy in enumerate(copies)
        ]
        self._discovery.backlog.spend(sum(job.computed_tokens for job in jobs))
        return jobs

    def _job(
        self, segment: Recurring, copy: ChunkSpace, block_ids: tuple[list[int], ...], erasures_seen: str
    ) -> SaveJob:
        lead = TokenIds.of(copy.lead_token_ids)
        key = ChunkKey.of(copy, segment.token_ids)
        return SaveJob(
            JobTokens(f"discovered-{key}", TokenIds.join((lead, segment.token_ids)).to_list(), 0, block_ids),
            copy,
            key,
            anchor_of(segment.token_ids, copy.name_key),
            len(lead),
            len(lead) + len(segment.token_ids),
            tier="",
            ttl_s=segment.ttl_s,
            other_lead=other_lead(Op.SAVE, copy, self._prior_text, self._config),
            erasures_seen=erasures_seen,
        )

    def end(self, outcomes: Sequence[Accounting], stats: BlendStats) -> None:
        """The worker is done with every copy of the segment."""
        if not outcomes or self.pool is None:
            return
        self.pool.free_blocks(self._blocks)
        self._blocks = ()
        reasons = [one.reason for one in outcomes if one.outcome is not Outcome.SAVED]
        stats.count_segments("failed" if reasons else "saved", 1)
        if reasons and not self._has_failed:
            logger.warning(
                "A passage that recurs was not stored (%s). Answers go on without it, and its next sight "
                "queues it again; kintsugi_discovery_segments_total counts further failures",
                reasons[0],
            )
        self._has_failed = bool(reasons)
