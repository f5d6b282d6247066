"""Schedules saves of discovered segments in steps in which the engine computes nothing else.

A connector cannot add requests to vLLM's scheduler. So a save takes its cache blocks from vLLM's block pool,
as an allocation of vLLM does, and returns them when the worker is done; the blocks have no names by which
requests could find them. vLLM keeps stepping an engine without requests while the connector has work
(`has_pending_push_work`).

Segments of one space are saved together, in all copies of the space: the text before them may be longer than
they are, and is computed once for all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.spaces import ChunkKey, ChunkSpace, TokenIds, anchors_of
from kintsugi.discovery.backlog import Recurring
from kintsugi.engine.config import EngineConfig
from kintsugi.engine.protocol import JobTokens, SaveJob, StepMetadata
from kintsugi.engine.scheduler.blend_stats import BlendStats
from kintsugi.engine.scheduler.discovery import Discovery

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = init_logger(__name__)

SLICE_TOKENS = 64
"""Work per step, in tokens computed in all layers. A request that arrives meanwhile waits for it."""
AWAKE_S = 10.0
"""Time for which saves keep an engine without requests stepping. The rest waits until after the next request.
Stopping an engine may take as long."""
HOLD_S = 30.0
"""Time for which they keep it stepping to finish the current batch, which holds cache blocks."""
BATCH_TOKENS_MAX = 2048
"""Maximum tokens of the segments of a batch. A batch is computed completely before any chunk is stored."""
POOL_SHARE_MAX = 0.125
"""Maximum share of the KV cache that a batch takes."""


@dataclass(frozen=True)
class _Part:
    """One copy of a segment, as a sequence of a save pass."""

    segment: Recurring
    copy: ChunkSpace
    start: int
    """The first computed position. Earlier positions are in blocks of the copy's first part."""

    @property
    def num_positions(self) -> int:
        return len(self.copy.lead_token_ids) + len(self.segment.token_ids)

    def num_new_blocks(self, block_size: int) -> int:
        return -(-self.num_positions // block_size) - self.start // block_size


class IdleSaves:
    """Saves of discovered segments, one batch at a time. Called from the scheduler's thread only."""

    def __init__(
        self,
        discovery: Discovery,
        config: EngineConfig,
        block_sizes: Sequence[int],
        length_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``block_sizes``: tokens per block of each KV cache group. ``length_max``: maximum tokens of a
        sequence."""
        self.pool: BlockPool | None = None
        """vLLM's block pool; None until vLLM binds it."""
        self._discovery = discovery
        self._config = config
        self._block_sizes = tuple(block_sizes)
        self._length_max = length_max
        self._clock = clock
        self._busy_s = clock()
        """Time at which the engine last had a request."""
        self._blocks: Sequence[KVCacheBlock] = ()
        """Cache blocks of the current batch; empty without one."""
        self._num_segments = 0
        """Number of segments of the current batch."""
        self._has_failed = False
        """Whether the last segment failed."""
        self._is_store_suspended = False
        """Whether the store was suspended in the last step."""

    @property
    def is_pending(self) -> bool:
        """Whether the engine should keep stepping for saves alone."""
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
        """Continue or begin a batch in ``metadata`` unless the engine ``computes`` something else.

        A request that waits for blocks computes nothing. A running batch continues beside it, because the
        request may wait for the batch's blocks, but no new batch begins (``may_begin``). No batch begins
        while the store is suspended, because its chunks could not be stored; they stay in the backlog.
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
        """Make the jobs of the next segments: all segments of the first copy, then all of the next. Empty if
        no segment waits. A segment without room in the cache is dropped, and queued when it next occurs.
        """
        if self.pool is None:
            return []
        segments = self._discovery.take(BATCH_TOKENS_MAX)
        room = min(POOL_SHARE_MAX * self.pool.num_gpu_blocks, self.pool.get_num_free_blocks())
        while segments:
            parts = self._parts(segments)
            count = sum(part.num_new_blocks(size) for part in parts for size in self._block_sizes)
            if max(part.num_positions for part in parts) <= self._length_max and count <= room:
                break
            segments.pop()
        else:
            return []
        self._num_segments = len(segments)
        self._blocks = self.pool.get_new_blocks(count)
        jobs = self._jobs(parts)
        self._discovery.backlog.spend(sum(len(job.tokens.token_ids) for job in jobs))
        return jobs

    def _parts(self, segments: Sequence[Recurring]) -> list[_Part]:
        """Return every copy of every segment. In each copy, all parts but the first begin after the last
        whole block of the lead: two sequences cannot share a partly filled block."""
        whole_blocks = math.lcm(*self._block_sizes)
        parts = []
        for copy in segments[0].space.copies(self._config.plain_copies):
            shared = len(copy.lead_token_ids) // whole_blocks * whole_blocks
            parts += [
                _Part(segment, copy, shared if number else 0) for number, segment in enumerate(segments)
            ]
        return parts

    def _jobs(self, parts: Sequence[_Part]) -> list[SaveJob]:
        """Make the jobs of the parts, over the blocks of the current batch."""
        ids = iter([block.block_id for block in self._blocks])
        leads: dict[ChunkSpace, tuple[list[int], ...]] = {}
        """The block tables of each copy's first part."""
        jobs = []
        for part in parts:
            before = leads.get(part.copy, tuple([] for _ in self._block_sizes))
            tables = tuple(
                [*table[: part.start // size], *(next(ids) for _ in range(part.num_new_blocks(size)))]
                for table, size in zip(before, self._block_sizes, strict=True)
            )
            leads.setdefault(part.copy, tables)
            jobs.append(self._job(part, tables))
        return jobs

    def _job(self, part: _Part, block_ids: tuple[list[int], ...]) -> SaveJob:
        segment, copy = part.segment, part.copy
        lead = TokenIds.of(copy.lead_token_ids)
        key = ChunkKey.of(copy, segment.token_ids)
        token_ids = TokenIds.join((lead, segment.token_ids)).to_list()[part.start :]
        return SaveJob(
            JobTokens(f"discovered-{key}", token_ids, part.start, block_ids),
            copy,
            key,
            anchors_of(segment.token_ids, copy.name_key),
            len(lead),
            part.num_positions,
            ttl_s=segment.ttl_s,
            asked_at_s=segment.asked_at_s,
        )

    def end(self, outcomes: Sequence[Accounting], stats: BlendStats) -> None:
        """End the batch after the worker has finished every copy, and count its segments."""
        if not outcomes or self.pool is None:
            return
        self.pool.free_blocks(self._blocks)
        self._blocks = ()
        for number in range(self._num_segments):
            copies = outcomes[number :: self._num_segments]
            reasons = [one.reason for one in copies if one.outcome is not Outcome.SAVED]
            stats.count_segments("failed" if reasons else "saved", 1)
            if reasons and not self._has_failed:
                logger.warning(
                    "A recurring passage was not stored (%s). Answers are not affected, and it is queued "
                    "again when it next occurs; kintsugi_discovery_segments_total counts further failures",
                    reasons[0],
                )
            self._has_failed = bool(reasons)
