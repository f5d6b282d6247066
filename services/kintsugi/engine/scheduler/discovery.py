"""Finds segments that recur in prompts, and saves them while the engine is idle. See docs/adr/0013.

Passages of a request are *discovered* if its namespace's rules allow it. A lookup thread finds the segments
together with the stored chunks, and the segments are counted when the lookup ends. If the request names
chunks, only the text between them is cut. Recurring segments wait in a backlog until the engine computes
nothing else.

A connector cannot add requests to vLLM's scheduler. So a save takes its cache blocks from vLLM's block pool,
as an allocation of vLLM does, and returns them when the worker is done; the blocks have no names by which
requests could find them. vLLM keeps stepping an engine without requests while the connector has work
(`has_pending_push_work`). Segments of one space are saved together, in all copies of the space: the text
before them may be longer than they are, and is computed once for all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import blake3
from vllm.config import VllmConfig
from vllm.logger import init_logger

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.errors import KintsugiError
from kintsugi.core.namespaces import SALT, base_of, narrow
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey, ChunkSpace, Span, TokenIds, anchors_of
from kintsugi.discovery.backlog import Backlog, Recurring
from kintsugi.discovery.segments import TOKENS_MIN, find_segments
from kintsugi.discovery.sightings import Sightings
from kintsugi.discovery.token_classes import TokenClasses
from kintsugi.engine.config import EngineConfig
from kintsugi.engine.protocol import JobTokens, SaveJob, StepMetadata
from kintsugi.engine.scheduler.hashing import Salts
from kintsugi.engine.scheduler.matching import Match, match_content, match_spans, outside
from kintsugi.engine.scheduler.stats import BlendStats
from kintsugi.models.prompt_form import load_tokenizer
from kintsugi.store.protocol.interface import ChunkStore

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = init_logger(__name__)

SIGHTS = 2
"""Number of prompts in which a segment must occur before it is saved."""
TTL_S = 86_400.0
"""Maximum lifetime of a discovered chunk, and how long counted segments are remembered."""
QUESTION_TOKENS_MIN = 6
"""Minimum number of text tokens after the last segment that count as the question. The label of an answer,
such as `Answer:`, has fewer."""
SLICE_TOKENS = 64
"""Work per step, in tokens computed in all layers. A request that arrives meanwhile waits for it."""
AWAKE_S = 10.0
"""Time for which saves keep an idle engine stepping. Later saves wait until after the next request. Stopping
an engine may be delayed by this time."""
HOLD_S = 30.0
"""Time for which saves keep an idle engine stepping to finish the current batch, which holds cache blocks."""
BATCH_TOKENS_MAX = 2048
"""Maximum tokens of the segments of a batch. A batch is computed completely before any chunk is stored."""
POOL_SHARE_MAX = 0.125
"""Maximum share of the KV cache that a batch takes."""


class Discovery:
    """Finds and counts an engine's recurring segments. All methods except `match` are called from the
    scheduler's thread."""

    def __init__(
        self,
        namespace: str,
        salts: Salts,
        load_classes: Callable[[], TokenClasses] = TokenClasses.none,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start ``load_classes`` on a thread. No prompt is discovered before it ends, or if it fails.
        ``namespace``: that of requests without one; empty: such requests are left to vLLM."""
        self.backlog = Backlog()
        self._namespace = namespace
        self._salts = salts
        self._sightings = Sightings(TTL_S, clock)
        self._has_told_of_room = False
        self._under_way: dict[str, int] = {}
        """Hashes of running discovered prompts, by request id."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="kintsugi-classes")
        self._classes: Future[TokenClasses] = thread.submit(load_classes)
        self._classes.add_done_callback(_report_failure)
        thread.shutdown(wait=False)

    def name_params(self, cache_salt: str | None) -> KintsugiParams | None:
        """Return the parameters of a request without a namespace; None if such requests are left to vLLM."""
        namespace = self._namespace
        if not namespace:
            return None
        if cache_salt is not None:
            # A salt may have any length; the value of a part is limited.
            namespace = narrow(namespace, {SALT: blake3.blake3(cache_salt.encode()).hexdigest()})
        return KintsugiParams(namespace, discover=True)

    def covers(self, params: KintsugiParams) -> bool:
        """Whether a request with these parameters is discovered."""
        return self.is_ready and params.is_discovered

    @property
    def is_ready(self) -> bool:
        """Whether prompts are discovered: the tokens' classes are loaded, and the store's erasures are
        known."""
        # While erasures are not known, a seen text may already be erased.
        if self._salts.cursor is None:
            return False
        # A lookup that waited for the classes would miss its deadline, and the store would be suspended.
        return self._classes.done() and self._classes.exception() is None

    def match(
        self,
        store: ChunkStore,
        space: ChunkSpace,
        prompt: TokenIds,
        shared: ChunkSpace | None,
        everywhere: bool,
        tokens_multiple: int = 1,
        named: Sequence[Span] = (),
    ) -> Match:
        """Match the prompt as `match_content` does, and add the segments without a stored chunk, each cut at
        its end to a multiple of ``tokens_multiple``. Unless ``everywhere``, chunks are searched only at the
        starts of segments, which takes a tenth of the time. Chunks that the request has ``named`` are looked
        up by their keys, and only the text between them is cut. Called on a lookup thread."""
        classes = self._classes.result()
        first = space.first_place(prompt)
        segments: list[Span] = []
        places: dict[int, int] = {}
        for start, end in _texts_between(named, first or 0, len(prompt)):
            found = find_segments(prompt, classes, start, end)
            segments += found
            places |= {span.start: end for span in found}
        segments_end = segments[-1].end if segments else 0
        match = match_content(store, space, prompt, shared, None if everywhere and not named else places)
        if named:
            match = match_spans(store, space, named, prompt, shared).with_others(match)
        if first is None and space.prefix_token_ids:
            # The first segment may contain a BOS, which occurs nowhere else; vLLM's prefix cache finds this
            # segment anyway.
            segments = [span for span in segments if span.start]
        keyed = []
        for span in outside(segments, match.spans):
            end = span.end - span.num_tokens % tokens_multiple
            if end - span.start >= TOKENS_MIN:
                keyed.append(Span(span.start, end, ChunkKey.of(space, prompt[span.start : end])))
        asks_behind = classes.count_text(prompt.to_array()[segments_end:]) >= QUESTION_TOKENS_MIN
        return replace(match, segments=tuple(keyed), asks_behind=asks_behind)

    def sight(
        self,
        request_id: str,
        params: KintsugiParams,
        space: ChunkSpace,
        prompt: TokenIds,
        match: Match,
    ) -> Match:
        """Count the match's segments, queue the recurring ones, and return the match with the counts.

        Equal prompts that run at the same time count once: a client may request `n` answers.
        """
        salt = self._salts.of(params.namespace, params.shared)
        prompt_hash = hash((salt, prompt.data))
        is_repeated = prompt_hash in self._under_way.values()
        self._under_way[request_id] = prompt_hash
        if is_repeated:
            return match
        self.backlog.earn(len(prompt))
        # A prompt may contain a segment many times.
        distinct = {span.key: span for span in match.segments if span.key is not None}
        refused = self.backlog.num_refused
        owner = base_of(params.namespace)
        counts = self._sightings.count(owner, salt, [key.digest for key in distinct])
        ttl_s = min(TTL_S, params.ttl_s or TTL_S)
        asked_at_s = self._salts.times.now(params.namespace)
        recurring = [
            Recurring(space, prompt[span.start : span.end], params.shared, salt, ttl_s, asked_at_s)
            for span, count in zip(distinct.values(), counts, strict=True)
            if count >= SIGHTS
        ]
        queued = sum(map(self.backlog.add, recurring))
        self._report_short_of_room()
        return replace(
            match,
            segments_counted=len(distinct),
            segments_queued=queued,
            segments_refused=self.backlog.num_refused - refused,
        )

    def _report_short_of_room(self) -> None:
        """Log one warning if counted or waiting segments were dropped for lack of memory."""
        if self._has_told_of_room or not (self._sightings.num_given_up or self.backlog.num_refused):
            return
        self._has_told_of_room = True
        logger.warning(
            "Requests contain more distinct passages, or parts of namespaces, than discovery has memory "
            "for: some recurring passages are saved late or not at all. Answers are not affected. Allow "
            "discovery in fewer namespaces (privacy rules, discover: false); "
            'kintsugi_discovery_segments_total{event="refused"} counts segments that the full backlog refused'
        )

    def take(self, tokens_max: int) -> list[Recurring]:
        """Return the next segments to save together (`Backlog.take`); an empty list if none wait or saving
        has used up its share. Drops segments of namespaces in which chunks were erased since they were
        queued."""
        while self.backlog.is_due:
            segments = self.backlog.take(tokens_max)
            first = segments[0]
            if self._salts.of(first.space.namespace, first.shared) == first.salt:
                return segments
        return []

    def request_ended(self, request_id: str) -> None:
        self._under_way.pop(request_id, None)


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

    @property
    def block_ids(self) -> list[int]:
        """Ids of the cache blocks of the current batch."""
        return [block.block_id for block in self._blocks]

    def wake(self) -> None:
        """Keep the engine stepping for the same time as after a request."""
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
        """Make the jobs of the next segments: first one copy of all segments, then the next copy of all.
        Empty if no segment waits. A segment without room in the cache is dropped, and queued when it next
        occurs.
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
        ids = iter(self.block_ids)
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


def _report_failure(classes: Future[TokenClasses]) -> None:
    if defect := classes.exception():
        logger.error("Discovery is off: the tokens' classes could not be loaded", exc_info=defect)


def _texts_between(named: Sequence[Span], start: int, end: int) -> list[tuple[int, int]]:
    """Return start and end of each text between ``start`` and ``end`` that lies outside the ``named`` spans
    and is long enough for a segment. The spans are ascending and disjoint."""
    starts = [start, *(max(start, span.end) for span in named)]
    ends = [*(span.start for span in named), end]
    return [(first, last) for first, last in zip(starts, ends, strict=True) if last - first >= TOKENS_MIN]


def load_token_classes(vllm_config: VllmConfig) -> TokenClasses:
    """Return the classes of the model's tokens; none if it has no tokenizer. Takes up to a second."""
    model = vllm_config.model_config
    try:
        tokenizer = load_tokenizer(
            model.tokenizer,
            {"revision": model.tokenizer_revision, "trust_remote_code": model.trust_remote_code},
        )
    except KintsugiError as error:
        logger.warning("Segments are cut without separators, because no tokenizer could be loaded: %s", error)
        return TokenClasses.none()
    return TokenClasses.of_tokenizer(tokenizer)
