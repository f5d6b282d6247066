"""Has discovered segments saved in steps in which the engine computes nothing else.

A connector cannot add requests to vLLM's scheduler. So a save takes its cache blocks from vLLM's block pool,
as an allocation of vLLM does, and gives them back once the worker is done; nobody finds them by name. vLLM
goes on stepping an engine without requests while the connector has work (`has_pending_push_work`).

Segments of one space are saved together, in all copies that the space has: what they are prefilled behind may
be longer than they are, and is computed once for all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.spaces import ChunkKey, ChunkSpace, anchors_of
from kintsugi.core.tokens import TokenIds
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
"""Work per step, in full-width tokens: what a request that comes meanwhile may have to wait for."""
AWAKE_S = 10.0
"""How long saves keep an engine stepping that has no requests; what is left waits for the next one. An engine
that is told to stop may wait as long."""
HOLD_S = 30.0
"""How long they keep it stepping for the batch in hand, whose cache blocks nobody else can use meanwhile."""
BATCH_TOKENS_MAX = 2048
"""Tokens of the segments that are saved together. What has begun is done before anything of it is stored."""
POOL_SHARE_MAX = 0.125
"""Share of the KV cache that a batch may take."""


@dataclass(frozen=True)
class _Part:
    """One copy of a segment, as a sequence of a save pass."""

    segment: Recurring
    copy: ChunkSpace
    start: int
    """The first position that it computes. Those before it are in blocks of the copy's first part."""

    @property
    def num_positions(self) -> int:
        return len(self.copy.lead_token_ids) + len(self.segment.token_ids)

    def num_new_blocks(self, block_size: int) -> int:
        return -(-self.num_positions // block_size) - self.start // block_size


class IdleSaves:
    """Called from the scheduler's thread only."""

    def __init__(
        self,
        discovery: Discovery,
        config: EngineConfig,
        block_sizes: Sequence[int],
        length_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``block_sizes``: tokens per block of each KV cache group. ``length_max``: the most tokens that the
        model takes."""
        self.pool: BlockPool | None = None
        """vLLM's, once it is there."""
        self._discovery = discovery
        self._config = config
        self._block_sizes = tuple(block_sizes)
        self._length_max = length_max
        self._clock = clock
        self._busy_s = clock()
        """When the engine last had a request."""
        self._blocks: Sequence[KVCacheBlock] = ()
        """Cache blocks of the batch in hand; none where there is none."""
        self._num_segments = 0
        """Segments of the batch in hand."""
        self._has_failed = False
        """Whether the last segment failed."""
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
        """Let the worker go on with a batch if the engine ``computes`` nothing else, or begin one.

        A request that waits for blocks computes nothing. A batch that has begun goes on beside it, because
        the request may wait for the batch's own blocks; none begins (``may_begin``). Nor does one while the
        store is suspended: it would be computed and not be stored. What waits stays in the backlog.
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
        """The jobs of the next segments: first of all in one copy, then of all in the next. None if no
        segment waits. One that finds no room in the cache is dropped, and queued again at its next sight.
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
        """Every copy of every segment. All but a copy's first begin where the last whole block of its lead
        ends: tokens of two sequences cannot share a block."""
        whole_blocks = math.lcm(*self._block_sizes)
        parts = []
        for copy in segments[0].space.copies(self._config.plain_copies):
            shared = len(copy.lead_token_ids) // whole_blocks * whole_blocks
            parts += [
                _Part(segment, copy, shared if number else 0) for number, segment in enumerate(segments)
            ]
        return parts

    def _jobs(self, parts: Sequence[_Part]) -> list[SaveJob]:
        """The parts as jobs, over the blocks in hand."""
        ids = iter([block.block_id for block in self._blocks])
        leads: dict[ChunkSpace, tuple[list[int], ...]] = {}
        """The tables of each copy's first part."""
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
            tier="",
            ttl_s=segment.ttl_s,
            asked_at_s=segment.asked_at_s,
        )

    def end(self, outcomes: Sequence[Accounting], stats: BlendStats) -> None:
        """The worker is done with every copy of the batch's segments."""
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
                    "A passage that recurs was not stored (%s). Answers go on without it, and its next sight "
                    "queues it again; kintsugi_discovery_segments_total counts further failures",
                    reasons[0],
                )
            self._has_failed = bool(reasons)
