"""The scheduler's side of the connector: for each request, check, look up, claim and account.

No method raises, or blocks while other requests compute: the scheduler's thread serves all requests. A
request that cannot be blended is declined: it runs as a full prefill, and its response states the reason.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kintsugi.core.accounting import Accounting, Outcome, decline
from kintsugi.core.errors import InvalidField, NotBlendable
from kintsugi.core.gate import UNMEASURED
from kintsugi.core.layout import Codec, codec_named
from kintsugi.core.plan import BlendPlan, ChunkHit, exact_end, plan_digest
from kintsugi.core.request import PARAMS_KEY, KintsugiParams, Op
from kintsugi.core.spaces import ChunkSpace, ModelFingerprint, Span, TokenIds
from kintsugi.engine.config import EngineConfig
from kintsugi.engine.protocol import (
    BlendJob,
    JobTokens,
    PassSample,
    StepMetadata,
    WorkerReport,
)
from kintsugi.engine.scheduler import hashing, resets
from kintsugi.engine.scheduler.discovery import Discovery, IdleSaves
from kintsugi.engine.scheduler.gate import Gate
from kintsugi.engine.scheduler.hashing import Salts
from kintsugi.engine.scheduler.lookups import LOOKUPS_MAX, Lookups
from kintsugi.engine.scheduler.matching import (
    Match,
    chunks_of,
    hits_of,
    match_content,
    match_spans,
    probe_of,
    without_prefix,
)
from kintsugi.engine.scheduler.requests import (
    Parking,
    RequestState,
    add_span_keys,
    check_measured,
    check_request,
    check_save,
    is_parked,
    parking_of_saves,
    permit_blend,
    save_job,
    saved_copy,
    take_beside_named,
    ticket_of,
    values_of,
)
from kintsugi.engine.scheduler.stats import BlendStats, Timing
from kintsugi.fusor.control.controller import Planner, PlanRequest, hits_beyond, plan_again, predict_full_s
from kintsugi.fusor.control.forecast import EngineShape, ForecastRegion, terms_of
from kintsugi.fusor.selectors import depends_on_question
from kintsugi.store.protocol.interface import ChunkStore

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)


@dataclass
class SchedulerSide:
    """Handles the requests of one engine. Called from the scheduler's thread only."""

    config: EngineConfig
    store: ChunkStore
    planner: Planner
    gate: Gate
    salts: Salts
    fingerprint: ModelFingerprint
    prefix_token_ids: tuple[int, ...]
    hash_block_size: int
    declined_because: str | None
    """The reason why this engine never blends; None if it blends."""
    engine: EngineShape
    """Figures of the model for forecasts. The worker reports the projection share after the first blend."""
    parking: Parking
    discovery: Discovery
    idle_saves: IdleSaves
    is_consumer: bool = False
    """Whether another engine blends and hands KV over (vLLM's `kv_role`): this one only names blocks."""
    num_ranks: int = 1
    """Number of tensor-parallel ranks. Each loads its part of a chunk."""
    has_windows: bool = False
    """Whether some layers keep only the KV of a window. vLLM then frees the blocks before the window of the
    last claimed token, although the first claimed tokens still attend to them. So nothing is claimed after
    cached tokens, and prefixes are computed again."""
    local_chunk: int | None = None
    """See `worker.support.find_local_chunk`."""
    restores_keys: bool = True
    """See `WorkerFacts`."""
    caches_prefixes: bool = True
    """Whether vLLM's prefix cache is on."""
    _states: dict[str, RequestState] = field(default_factory=dict)
    _refused: dict[str, Accounting] = field(default_factory=dict)
    _context_savers: dict[bytes, str] = field(default_factory=dict)
    """The request whose save computes a context for all that wait for it, by `RequestState.context_name`."""
    _metadata: StepMetadata = field(default_factory=StepMetadata)
    _stats: BlendStats = field(default_factory=BlendStats)
    _timing: Timing = field(default_factory=Timing)
    _lookups: Lookups = field(init=False)
    _saves: Parking = field(init=False)

    def __post_init__(self) -> None:
        self._saves = parking_of_saves(self.parking.cache_tokens)
        self._lookups = Lookups(self.store, self.config.lookup_deadline_ms, self._codecs)

    def on_new_request(self, request: Request) -> None:
        values = values_of(request)
        try:
            unnamed = self.discovery.name_params(request.cache_salt) if values is None else None
            if values is None and unnamed is None:
                return
            params = unnamed or KintsugiParams.from_mapping(values)
            if params.trial is not None:
                request.sampling_params.prompt_logprobs = None  # until `RequestState.report_answer`
            self.salts.apply(request, params.namespace, params.shared, replaces_own=unnamed is not None)
            if params.op is not Op.OFF:
                self._admit(request, params)
        except (InvalidField, NotBlendable) as error:
            self._refuse(request, error)
        except Exception as defect:
            logger.exception("Request %s is prefilled in full: it was not admitted", request.request_id)
            self._states.pop(request.request_id, None)
            self._refuse(request, defect)

    def _refuse(self, request: Request, error: Exception) -> None:
        accounting = self._refused[request.request_id] = decline(error)
        self._stats.tell(ticket_of(request), accounting)

    def _admit(self, request: Request, params: KintsugiParams) -> None:
        """Start the request's lookup. Raises `NotBlendable` or `InvalidField` if it cannot be blended."""
        self._check_blendable(request)
        if (params.op is Op.AUDIT or params.trial is not None) and not self.config.audits:
            raise NotBlendable(
                "no_audits",
                "this engine accepts no audits and trials; set `audits` in the connector's configuration",
            )
        if values_of(request) is not None:
            self.salts.check(request, params.namespace, params.shared)
        if self._lookups.num_waiting >= LOOKUPS_MAX:
            raise NotBlendable("busy", f"{LOOKUPS_MAX} lookups are waiting for the store")
        space, prompt = self._space(params.namespace), TokenIds.of(request.prompt_token_ids)
        if params.op.prefills_chunk:
            space = saved_copy(params, space, prompt)
        if params.op is Op.BLEND:
            self._lookups.check_store(space, prompt[:1])
        is_discovered = self.discovery.covers(params)
        planner, permit = permit_blend(self.gate.state, self.planner, request, params, is_discovered)
        takes = is_discovered and params.spans is not None
        shared = self._space(params.shared) if params.shared else None
        state = RequestState(request, params, space, shared, planner, permit, is_discovered, takes)
        if params.spans is not None:
            spans = add_span_keys(params.spans, space, prompt)
            state.params = dataclasses.replace(params, spans=spans)
        if params.op.prefills_chunk:
            check_save(params, space, prompt)
        elif not space.admits(prompt):
            raise NotBlendable("foreign_prefix", "the prompt does not start with the prefix of its chunks")
        state.ordinary_hasher = request._block_hasher
        self._states[request.request_id] = state
        if params.op.prefills_chunk:
            # A random name, so that a cached copy of the chunk does not replace its computation; `_settle`
            # gives the blocks their exact names.
            self._fork_behind(state.num_before_chunk, request, state, os.urandom(16))
        else:
            if state.params.spans is not None:
                self._fork(request, state, state.params.spans)
            else:
                hashing.set_salt(request, self._salt_of(state))
            self._look_up(request, state)

    def _look_up(self, request: Request, state: RequestState) -> None:
        """Start the lookup if its answer has room."""
        if not self._lookups.has_room:
            return
        prompt, spans = state.prompt, state.params.spans
        if state.is_discovered:
            match, multiple = self.discovery.match, state.params.chunk_tokens_multiple
            state.lookup = self._lookups.start(
                match, state.space, prompt, state.shared, state.is_named, multiple, spans or ()
            )
        elif spans is not None:
            state.lookup = self._lookups.start(match_spans, state.space, spans, prompt, state.shared)
        else:
            state.lookup = self._lookups.start(match_content, state.space, prompt, state.shared)

    def _space(self, namespace: str) -> ChunkSpace:
        name_key = self._lookups.name_key(namespace)
        return self.config.space(self.fingerprint, namespace, self.prefix_token_ids, name_key)

    def _codecs(self) -> frozenset[Codec] | None:
        """Return the codecs of chunks that may be used: the measured one and `raw`; None: all."""
        own = frozenset((Codec.RAW, codec_named(self.config.codec)))
        return None if self.gate.state.report is None else own

    def _check_blendable(self, request: Request) -> None:
        if self.declined_because is not None:
            raise NotBlendable(*self.declined_because.split(": ", 1))
        check_request(request, self.local_chunk)

    def _fork(self, request: Request, state: RequestState, spans: tuple[Span, ...]) -> None:
        """Rename the blocks of this blend, from the first block that is not exact, so that only equal blends
        find them."""
        # Named after the lowest ratio: the planner may raise the ratio, which never makes the KV worse and
        # keeps the name.
        selection = state.permit.selection
        asking = request.prompt_token_ids if depends_on_question(selection) else ()
        digest = plan_digest(state.space, spans, selection, asking, state.takes_others)
        if state.params.trial is not None:
            digest = os.urandom(16)  # its KV is for no other request
        exact = self._find_plain_end(state, spans)
        if state.is_discovered and state.params.spans:
            exact = min(exact, spans[0].end)  # discovery may find other chunks after it
        self._fork_behind(exact, request, state, digest)

    def _find_plain_end(self, state: RequestState, spans: tuple[Span, ...]) -> int:
        """Return the end of the blend's KV that plain prompts may use."""
        if codec_named(self.config.codec) is Codec.RAW and self.restores_keys:
            return exact_end(spans, state.space, state.request.prompt_token_ids)
        # A chunk with rounding errors is good enough for a blend, but not for plain prompts.
        return spans[0].start if spans else len(self.prefix_token_ids)

    def _fork_behind(self, num_exact: int, request: Request, state: RequestState, tag: bytes) -> None:
        """Fork the names of the request's blocks after ``num_exact`` exact tokens."""
        first_block = 0 if self.has_windows else num_exact // self.hash_block_size
        hashing.fork(request, first_block, tag, self.hash_block_size, self._salt_of(state))

    def _salt_of(self, state: RequestState) -> str | None:
        """Return the salt of the request's blocks. A request without a namespace keeps its own until an
        erasure."""
        namespace = state.params.namespace
        salt = self.salts.of(namespace, state.params.shared)
        is_own = not state.is_named and salt == namespace
        own: str | None = state.request.cache_salt
        return own if is_own else salt

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after ``num_computed`` the worker will compute: all but the last, or 0.

        None: vLLM asks again in the next step, because the store has not answered yet or the blend waits
        (`scheduler.requests`).
        """
        state = self._states.get(request.request_id)
        if state is None or state.is_final:
            return 0, False
        try:
            return self._claim(request, state, num_computed)
        except Exception as defect:
            logger.exception("Request %s is prefilled in full: it was not planned", request.request_id)
            state.accounting = state.accounting or decline(defect)
            return 0, False

    def _claim(self, request: Request, state: RequestState, num_computed: int) -> tuple[int | None, bool]:
        if state.params.op.prefills_chunk:
            return self._claim_save(state, num_computed)
        self._timing.record_admission(request)
        match = self._take_match(request, state, num_computed)
        if match is None:
            if state.accounting is None:
                if state.params.spans:
                    # The result is the same whether the lookup ends before or after the leader's blend.
                    name = self._block_name(request, state, state.params.spans[-1].end)
                    state.leader = state.leader or self.parking.leader_of(name)
                return None, False
            self._predict_full(state, num_computed)
            return 0, False
        state.num_prefix_cached = num_computed
        try:
            if state.job is not None or state.checked_at != num_computed:
                self._check(request, state, match, num_computed)
            if self._has_to_wait(request, state):
                return None, False
            state.job = self._plan(request, state, match, num_computed)
        except NotBlendable as error:
            state.account_prefill(error, self.engine.num_layers)
            self._lookups.release(state.lookup)
            if self._timing.probe_is_due(error.reason):
                hits = hits_of(match, state.last, self.num_ranks)
                self._metadata.probes.append(probe_of(hits, match))
            self._predict_full(state, num_computed)
            if error.reason == UNMEASURED and num_computed:
                # The cached tokens may be the blend of a shorter prompt: look again for exact KV.
                hashing.unfork(request, state.ordinary_hasher)
                return None, False
            forked_at = hashing.exact_tokens(request)
            is_exact = state.job is None and forked_at is not None and num_computed <= forked_at
            if state.params.spans is None and is_exact and not self.is_consumer:
                # The whole prompt is computed: a later turn, perhaps with other chunks, finds it as exact KV.
                hashing.unfork(request, state.ordinary_hasher)
            return 0, False
        self._timing.record_plan(request.request_id, state.job.plan.predicted_ttft_s, is_blend=True)
        return state.last - num_computed, True

    def _predict_full(self, state: RequestState, num_computed: int) -> None:
        full_s = predict_full_s(self._asked(state, num_computed, ()))
        self._timing.record_plan(state.request.request_id, full_s, is_blend=False)

    def _claim_save(self, state: RequestState, num_computed: int) -> tuple[int | None, bool]:
        """Claim the tokens of a save: those before the chunk, and the chunk. The fork of the names ensures
        that no token of the chunk is found in the prefix cache.

        Waits for a place, and while another save computes the same context, which is cached afterwards.
        """
        assert state.params.spans is not None
        (span,) = state.params.spans
        assert num_computed <= span.start
        blocks = 0 if self.has_windows or not self.caches_prefixes else span.start // self.hash_block_size
        if state.space.context_token_ids and num_computed < blocks * self.hash_block_size:
            request_id = state.request.request_id
            if self._context_savers.setdefault(state.context_name, request_id) != request_id:
                return None, False
        if not self._saves.admits(state.request.request_id, state.request.num_tokens):
            return None, False
        return span.end - num_computed, True

    def _take_match(self, request: Request, state: RequestState, num_computed: int) -> Match | None:
        """Return the lookup's result; None while it runs, or if it was given up."""
        try:
            if state.lookup is None:
                self._lookups.check_store(state.space, TokenIds.of(request.prompt_token_ids[:1]))
                self._look_up(request, state)
                return None
            match = self._lookups.result(state.lookup, lambda: self._timing.is_alone(request.request_id))
        except NotBlendable as given_up:
            state.accounting = decline(given_up)
            self._lookups.release(state.lookup)
            return None
        if match is None or state.lookup.is_taken:
            return match
        state.lookup.is_taken = True
        if state.params.spans is not None and not state.is_discovered:
            return match
        return self._take_content(request, state, match, num_computed)

    def _take_content(
        self, request: Request, state: RequestState, match: Match, num_computed: int
    ) -> Match | None:
        """Process a lookup by content: count segments, drop chunks in the cached prefix, and name the
        blocks."""
        prompt = state.prompt
        if state.is_discovered:
            match = self.discovery.sight(request.request_id, state.params, state.space, prompt, match)
            self._stats.count_sighted(match)
        if state.params.spans is None:
            match = without_prefix(match, state.space, prompt, num_computed, is_behind=not self.has_windows)
            to_name = match.spans
        else:
            plain_end = self._find_plain_end(state, match.spans)
            match, to_name = take_beside_named(
                match, state, num_computed, self.num_ranks, self.has_windows, plain_end
            )
        assert state.lookup is not None
        state.lookup.replaced_by = match
        if not to_name:
            return match
        # The blocks have just been named: look them up in the prefix cache again.
        state.leader = None
        self._fork(request, state, to_name)
        return None

    def _check(self, request: Request, state: RequestState, match: Match, num_computed: int) -> None:
        """Raise `NotBlendable` if the prompt must not be blended, regardless of the engine's load."""
        if self.is_consumer:
            raise NotBlendable("kv_consumer", "this engine receives KV (kv_role) and does not blend itself")
        hits = hits_of(match, state.last, self.num_ranks)
        end = hits[-1].end if hits else 0
        # Otherwise the prompt has been checked, together with its cached chunks.
        if state.job is None and not state.takes_others:
            exact = exact_end(match.spans, state.space, request.all_token_ids)
            check_measured(state, hits, exact)
        if (hits and num_computed >= end) or (match.num_in_prefix and not match.spans):
            raise NotBlendable("prefix_hit", "the prefix cache holds every chunk already")
        is_blend = num_computed > (hashing.exact_tokens(request) or 0)
        is_rest_short = is_blend and end - num_computed < self.hash_block_size
        if state.leader is not None and state.job is None and is_rest_short:
            raise NotBlendable("prefix_hit", "another blend is cached except for its last, partial block")
        if self.has_windows and num_computed:
            raise NotBlendable(
                "sliding_window", "vLLM would free cached tokens of this prompt before a blend"
            )
        state.block_name = self._block_name(request, state, end)
        state.has_hits, state.checked_at = bool(hits), num_computed

    def _block_name(self, request: Request, state: RequestState, end: int) -> bytes | None:
        """Return `RequestState.block_name` for hits up to ``end``; None if the request needs the figures of
        its own blend."""
        names = request.block_hashes[: end // self.hash_block_size]
        is_shared = self.caches_prefixes and not (state.params.explain or state.params.timeline)
        return bytes(names[-1]) if names and is_shared else None

    def _has_to_wait(self, request: Request, state: RequestState) -> bool:
        """Whether the request waits for another blend in flight of the same KV, or for a free place."""
        if not state.has_hits:
            return False
        leader = self.parking.leader_of(state.block_name)
        if leader is not None and state.leader in (None, leader):
            state.leader = leader
            return True
        for request_id in self.parking.request_ids:
            if not is_parked(self._states[request_id].request):
                self.parking.leave(request_id)
        return not self.parking.admits(request.request_id, request.num_tokens)

    def _plan(self, request: Request, state: RequestState, match: Match, num_computed: int) -> BlendJob:
        plan = self._plan_blend(request, state, match, num_computed)
        tokens = JobTokens(
            request.request_id, list(request.all_token_ids[num_computed : state.last]), num_computed, ()
        )
        return BlendJob(
            tokens,
            plan,
            {hit.key: match.stored[hit.key] for hit in plan.hits},
            state.params.explain,
            state.params.explain or state.params.timeline,
            request.all_token_ids[state.last],
            yields=state.params.trial is not None,
        )

    def _plan_blend(
        self, request: Request, state: RequestState, match: Match, num_computed: int
    ) -> BlendPlan:
        hits = hits_beyond(hits_of(match, state.last, self.num_ranks), num_computed)
        exact = exact_end(match.spans, state.space, request.all_token_ids)
        if state.job is not None:
            # Planned again, because cache blocks ran short or after a preemption. Keep the plan: the tokens
            # generated so far depend on it, and the controller might now decide otherwise.
            return plan_again(state.job.plan, hits, state.computed_instead)
        self._lookups.check_store(state.space, TokenIds.of(request.prompt_token_ids[:1]))
        is_trial = self._timing.trial_is_due()
        asked = self._asked(state, num_computed, hits)
        asked = dataclasses.replace(
            asked,
            options=state.params.options,
            exact_end=exact,
            chunks=chunks_of(match, state.last + 1),
            is_trial=is_trial,
        )
        plan = state.planner.plan(asked)
        if is_trial:
            self._timing.record_trial()
        state.computed_instead = frozenset(hit.start for hit in hits) - {hit.start for hit in plan.hits}
        return plan

    def _asked(self, state: RequestState, num_computed: int, hits: tuple[ChunkHit, ...]) -> PlanRequest:
        return PlanRequest(
            num_tokens=state.last + 1,
            num_computed=num_computed,
            hits=hits,
            engine=self.engine,
            measured=self._timing.measured,
            ahead_s=self._timing.ahead_s,
            is_alone=self._timing.is_alone(state.request.request_id),
        )

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        state = self._states.get(request.request_id)
        if state is None or num_external == 0:
            return
        block_ids = tuple(blocks.get_block_ids())
        state.in_flight, state.block_ids = True, block_ids
        if state.params.op.prefills_chunk:
            self._saves.park(request.request_id, request.num_tokens, None)
            prompt = TokenIds.of(request.prompt_token_ids)
            assert state.params.spans is not None
            start = state.params.spans[0].end - num_external
            claimed = list(request.all_token_ids[start : start + num_external])
            tokens = JobTokens(request.request_id, claimed, start, block_ids)
            self._metadata.saves.append(save_job(state.params, state.space, prompt, tokens))
        elif state.job is not None:
            self._lookups.release(state.lookup)
            self.parking.park(request.request_id, request.num_tokens, state.block_name)
            tokens = dataclasses.replace(state.job.tokens, block_ids=block_ids)
            self._metadata.blends.append(dataclasses.replace(state.job, tokens=tokens))

    def give_up_parked(self, num_used: int) -> bool:
        """Give up all parked requests if they hold all ``num_used`` cache blocks (`resets`)."""
        others = self.idle_saves.block_ids
        given_up = resets.give_up(self._states.values(), others, num_used, self.has_windows)
        self._metadata.cache_is_reset |= given_up
        return given_up

    def update(self, report: WorkerReport | None) -> None:
        """Process the workers' report, if they have one, before the scheduler releases finished requests."""
        if report is None:
            return
        self.declined_because = report.unable or self.declined_because
        try:
            self._learn_from(report)
        except Exception:
            logger.exception("Times of passes could not be evaluated because of a defect")
        for request_id, accounting in report.finished.items():
            state = self._states.get(request_id)
            if state is not None:
                self._settle(state, accounting)
        self.idle_saves.end(report.discovered, self._stats)

    def _learn_from(self, report: WorkerReport) -> None:
        for load in report.loads:
            for transfer in load.transfers:
                self._timing.estimates.observe_transfer(transfer)
            self._timing.estimates.observe_decode(load.decode_s, load.decode_bytes)
        for request_id, accounting in report.finished.items():
            state = self._states.get(request_id)
            if state is not None:
                self._learn(state, accounting, report.passes.get(request_id))

    def _learn(self, state: RequestState, accounting: Accounting, sample: PassSample | None) -> None:
        self._timing.pass_ended(state.request.request_id, sample)
        if sample is None or state.job is None:
            return
        self.engine = dataclasses.replace(self.engine, projection_share=sample.projection_share)
        tokens, plan = state.job.tokens, state.job.plan
        region = ForecastRegion(
            tokens.start, tokens.start + len(tokens.token_ids), plan.exact_end, plan.chunks
        )
        computed = accounting.token_layers_computed
        terms = terms_of(self.engine, plan.selection, plan.hits, region, computed)
        self._timing.estimates.observe_blend(terms, self.engine.num_layers, sample.busy_s)

    def begin_step(self, output: SchedulerOutput) -> StepMetadata:
        """Return the work of an engine step. Called once per step, after its tokens are scheduled."""
        self._lookups.step_began()
        self.parking.step_began()
        self._saves.step_began()
        in_flight = any(state.in_flight for state in self._states.values())
        self._timing.step_began(output, in_flight)
        metadata, self._metadata = self._metadata, StepMetadata()
        metadata.prefills = output.total_num_scheduled_tokens > len(output.num_scheduled_tokens)
        computes = in_flight or output.total_num_scheduled_tokens > 0
        may_begin = not self._states and self.declined_because is None
        self.idle_saves.step(computes, may_begin, metadata, self._lookups.is_store_suspended)
        return metadata

    def end_step(self) -> BlendStats | None:
        """Return the counts since the last call; None without any. Called after each engine step's output."""
        for request, ttft in self._timing.step_ended():
            state = self._states.get(request.request_id)
            if state is not None and state.accounting is not None:
                self._stats.tell(ticket_of(request), ttft.added_to(state.accounting))
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, BlendStats()
        return stats

    def _settle(self, state: RequestState, accounting: Accounting) -> None:
        state.in_flight = False
        self.parking.settle(state.request.request_id)
        self._saves.leave(state.request.request_id)
        state.accounting = state.complete(accounting)
        if accounting.outcome is Outcome.BLENDED:
            state.report_answer()
        if state.params.op.prefills_chunk:
            # The save pass leaves the exact prefill of its tokens in the cache.
            hashing.unfork(state.request, state.ordinary_hasher)
        else:
            self._lookups.record_outcome(state.lookup, accounting)

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """Return the accounting for the response, and cancel the worker's job if it still runs."""
        accounting = self._refused.pop(request.request_id, None)
        state = self._states.pop(request.request_id, None)
        self.parking.leave(request.request_id)
        self._saves.leave(request.request_id)
        self.discovery.request_ended(request.request_id)
        if state is not None:
            if self._context_savers.get(state.context_name) == request.request_id:
                del self._context_savers[state.context_name]
            self._lookups.release(state.lookup)
            if state.in_flight:
                self._metadata.cancelled.append(request.request_id)
            aborted = NotBlendable("aborted", "the request ended before it was blended")
            accounting = state.accounting or decline(aborted)
        ttft = self._timing.forget(request.request_id)
        if accounting is None:
            return None
        accounting = accounting if ttft is None else ttft.added_to(accounting)
        self._stats.count(accounting)
        if values_of(request) is None:
            return None
        return {PARAMS_KEY: accounting.to_mapping()}

    def close(self) -> None:
        for part in (self.gate, self.salts, self._lookups):
            part.close()
