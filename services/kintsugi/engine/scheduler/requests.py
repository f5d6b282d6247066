"""Requests on the scheduler's side: a request's state and checks, and its place among the parked ones.

vLLM allocates all blocks of a request when the connector claims its tokens, and parks the request until the
worker has blended it. A parked request does not count towards `max_num_seqs`, so vLLM itself sets no bound.
The rules:

- **A blend needs a place.** There are as many places as the worker runs blends at a time, but at most
  `max_num_seqs`. A blend takes a place together with its blocks, and keeps it until the request runs, is
  preempted or ends.
- **Parked prompts fill at most half of the cache**, unless a single prompt is longer.
- **First come, first served.** In every step, vLLM asks about its waiting requests in their order (by arrival
  or priority). The first one takes a free place; after a refusal, all later requests of the step are refused.
  A request whose lookup still runs does not block others. After its answer it is again ahead of all later
  requests in vLLM's queue, so no request starves.
- **The same KV is blended once.** While a blend is in flight, requests that will find its blocks in vLLM's
  prefix cache wait for it. Blocks have the same name only for the same tokens, namespace and parameters
  (`engine.scheduler.hashing`), so no request waits for blocks that it cannot use. A request waits for one
  blend only. If that blend fails, is aborted or misses, the request is blended on its own.

Saves have separate places and a separate share of the cache (`parking_of_saves`), and leave them when their
chunk is stored, so slow puts delay only saves. Plain requests and requests with nothing to load need no
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kintsugi.core.accounting import NO_CHUNK, NOT_SAVED_YET, TICKET, Accounting, Outcome
from kintsugi.core.errors import ForeignChunkKey, InvalidField, InvalidSpan, NotBlendable
from kintsugi.core.gate import GateState, Permit
from kintsugi.core.plan import ChunkHit, exact_end, selection_of
from kintsugi.core.request import PARAMS_KEY, KintsugiParams, Op, check_spans
from kintsugi.core.spaces import ChunkKey, ChunkSpace, Span, TokenIds, anchors_of, token_bytes
from kintsugi.engine.protocol import BlendJob, JobTokens, SaveJob
from kintsugi.engine.scheduler import hashing
from kintsugi.engine.scheduler.lookups import Lookup
from kintsugi.engine.scheduler.matching import Match, count_match, hits_of
from kintsugi.fusor.control.controller import Planner
from kintsugi.models.declines import DeclineReason

if TYPE_CHECKING:
    from vllm.v1.request import Request

CACHE_SHARE_MAX = 0.5
"""Maximum share of the KV cache for parked blends. The rest is for running requests."""
SAVES_SHARE_MAX = 0.25
"""Maximum share of the KV cache for parked saves."""
SAVES_MAX = 64
"""Maximum number of parked saves: several batches, so that one is computed while others are put."""


@dataclass
class RequestState:
    """The state of one request with Kintsugi's parameters."""

    request: Request
    params: KintsugiParams
    space: ChunkSpace
    shared: ChunkSpace | None
    """The space of the namespace whose chunks it may also use."""
    planner: Planner
    """The planner, with the selection that the gate allowed at admission, regardless of later reports."""
    permit: Permit
    """What the gate permitted at admission."""
    is_discovered: bool
    """Whether the request is discovered (`scheduler.discovery`), decided at admission."""
    takes_others: bool
    """Whether a blend may use discovered chunks in addition to the named ones."""
    lookup: Lookup | None = None
    """The request's lookup; None until it may begin."""
    checked_at: int | None = None
    """The number of cached tokens at the last successful `_check`."""
    has_hits: bool = False
    block_name: bytes | None = None
    """vLLM's name of the last full block of the prompt's hits: a request that finds it cached needs no blend.
    None if there is none."""
    leader: str | None = None
    """The request whose blend this request has waited for."""
    job: BlendJob | None = None
    """The job of the last claim, passed to the worker when blocks are allocated."""
    in_flight: bool = False
    block_ids: tuple[list[int], ...] = ()
    """Ids of the cache blocks of the last claim, per KV cache group."""
    ordinary_hasher: hashing.BlockHasher | None = None
    num_prefix_cached: int = 0
    computed_instead: frozenset[int] = frozenset()
    """Starts of the hit chunks that the planner recomputes instead of loading them."""
    accounting: Accounting | None = None
    """The accounting; None until the outcome is known."""

    @property
    def last(self) -> int:
        """Position of the last token before a trial's answer. A blend ends before it; the engine computes the
        rest."""
        trial, length = self.params.trial, int(self.request.num_tokens)
        return length - 1 - (0 if trial is None else trial.answer_tokens)

    @property
    def prompt(self) -> TokenIds:
        """The prompt without a trial's answer."""
        return TokenIds.of(self.request.prompt_token_ids[: self.last + 1])

    @property
    def num_before_chunk(self) -> int:
        """Number of tokens before the chunk of a save."""
        assert self.params.spans is not None
        return self.params.spans[0].start

    @property
    def context_name(self) -> bytes:
        """Names the context of a save: the space's, or the chunk's own."""
        if not self.params.context:
            return self.space.digest
        return self.space.digest + token_bytes(self.request.prompt_token_ids[: self.num_before_chunk])

    @property
    def is_named(self) -> bool:
        """Whether the request itself has Kintsugi's parameters. Otherwise its response omits the
        accounting."""
        return values_of(self.request) is not None

    @property
    def is_final(self) -> bool:
        """Whether no further tokens are claimed. vLLM asks again about a preempted request: if its blended KV
        was freed, it is blended again, because its answer would change otherwise."""
        repeatable = (None, Outcome.BLENDED, Outcome.PREFIX_HIT)
        return (self.accounting and self.accounting.outcome) not in repeatable

    def report_answer(self) -> None:
        """Let vLLM report logprobs along a trial's answer, after the blend. Those of a whole prompt take
        more memory than its prefill, so a trial that is not blended reports none."""
        trial, sampling = self.params.trial, self.request.sampling_params
        if trial is not None and trial.answer_tokens:
            sampling.prompt_logprobs = sampling.logprobs

    def account_prefill(self, error: NotBlendable, num_layers: int) -> None:
        """Account for a prompt that vLLM computes itself, as far as its prefix cache does not hold it. A
        preempted request keeps its outcome: its first tokens were computed that way."""
        if self.accounting is not None:
            return
        length = self.request.num_prompt_tokens
        accounting = Accounting(
            Outcome.PREFIX_HIT if error.reason == "prefix_hit" else Outcome.DECLINED,
            token_layers_computed=float(num_layers * (length - self.num_prefix_cached)),
            token_layers_total=num_layers * length,
        )
        accounting = self.complete(accounting)
        reason = str(error)
        if error.reason == NO_CHUNK and accounting.segments_counted:
            reason = (
                f"{NOT_SAVED_YET}: {accounting.segments_counted} passages are not stored; those that recur "
                f"({accounting.segments_queued}) are saved while the engine is idle, others when they recur"
            )
        self.accounting = replace(accounting, reason=reason)

    def complete(self, accounting: Accounting) -> Accounting:
        """Add the scheduler's part to `accounting`: hit and missed spans, and tokens outside them."""
        match = None if self.lookup is None else self.lookup.answer
        if match is None:
            return accounting
        tokens = None if self.job is None else self.job.tokens
        named = frozenset(self.params.spans or ())
        return replace(
            count_match(accounting, match, tokens, named, self.computed_instead),
            chunks_recomputed=len(self.computed_instead),
            tokens_prefix_cached=self.num_prefix_cached,
        )


def ticket_of(request: Request) -> str | None:
    """Return the ticket under which the request's accounting is reported before its end; None without one."""
    extra = None if request.sampling_params is None else request.sampling_params.extra_args
    ticket = (extra or {}).get(TICKET)
    return ticket if isinstance(ticket, str) else None


def values_of(request: Request) -> Any:
    """Return a request's Kintsugi parameters as JSON values; None if it has none."""
    params_of_all = request.kv_transfer_params
    return params_of_all.get(PARAMS_KEY) if isinstance(params_of_all, dict) else None


def check_request(request: Request, local_chunk: int | None) -> None:
    """Raise `NotBlendable` for a request with inputs other than token ids, or one that is too long for layers
    that attend within ``local_chunk`` positions. In a longer prompt a border may split a chunk, and its later
    tokens would attend to less than in the chunk's own prefill."""
    if request.lora_request is not None:
        raise NotBlendable("lora", "chunk KV belongs to the base model")
    if request.mm_features:
        raise NotBlendable(
            DeclineReason.MULTIMODAL.value,
            "the prompt has inputs other than text, and chunk KV is for token ids; send text alone to blend",
        )
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        raise NotBlendable("prompt_embeds", "chunk KV is for token ids only")
    if local_chunk is not None and request.num_prompt_tokens > local_chunk:
        raise NotBlendable(
            "attention_chunk",
            f"{request.num_prompt_tokens} tokens exceed the {local_chunk} tokens within which this "
            "model's layers attend; send shorter prompts to blend",
        )
    if request.skip_reading_prefix_cache:
        raise NotBlendable("prompt_logprobs", "logprobs of prompt tokens need their full prefill")


def permit_blend(
    gate: GateState, planner: Planner, request: Request, params: KintsugiParams, is_discovered: bool
) -> tuple[Planner, Permit]:
    """Return a planner restricted to the configurations that the request may use, and the permission. Raises
    `NotBlendable`."""
    if params.trial is not None:
        selection = selection_of(params.trial)
        return Planner(selection), Permit(selection)
    if params.op.prefills_chunk:
        return planner, Permit(planner.selection)
    permit = gate.permit(
        params.namespace, is_discovered, request.num_prompt_tokens, planner.selection, params.options
    )
    return planner.with_selection(permit.selection), permit


def check_measured(state: RequestState, hits: tuple[ChunkHit, ...], exact: int) -> None:
    """Raise `NotBlendable` if a blend of ``hits`` is approximate and the evidence does not cover these
    chunks. ``exact``: end of the exact KV."""
    is_approximate = any(hit.end > exact for hit in hits)
    if is_approximate and state.permit.selection.ratio != 1.0:
        state.permit.check_chunks([hit.num_tokens for hit in hits])


def take_beside_named(
    match: Match, state: RequestState, num_computed: int, num_ranks: int, has_windows: bool, plain_end: int
) -> tuple[Match, tuple[Span, ...]]:
    """Choose the discovered chunks that a blend uses in addition to the named ones. Returns the match with
    them, and the spans from which the blocks get new names. There are no such spans if the present names
    suffice, which they do unless a chunk before the fork is approximate. ``plain_end``: end of the KV that
    plain prompts may use.

    If the evidence does not cover all chunks together, including those in vLLM's prefix cache, only the
    named chunks are used, and the names differ from those of blends with other chunks.
    """
    request, named = state.request, state.params.spans or ()
    if not _holds_for(match, state, num_ranks):
        state.takes_others = False
        return match.beside(frozenset(named), request.num_tokens), named
    # Models with windows blend nothing after cached tokens.
    reached = request.num_tokens if has_windows and num_computed else num_computed
    match = match.beside(frozenset(named), reached)
    forked_at = min(hashing.exact_tokens(request) or 0, named[0].start)
    before = tuple(span for span in match.spans if plain_end <= span.start < forked_at)
    return match, (*before, *named) if before else ()


def _holds_for(match: Match, state: RequestState, num_ranks: int) -> bool:
    request = state.request
    hits = hits_of(match, state.last, num_ranks)
    exact = exact_end(match.spans, state.space, request.all_token_ids)
    try:
        check_measured(state, hits, exact)
    except NotBlendable:
        return False
    return True


def add_span_keys(spans: tuple[Span, ...], space: ChunkSpace, prompt: TokenIds) -> tuple[Span, ...]:
    """Return the spans with the keys of the copies that are used at their positions.

    A span may have the prepared chunk's key at any position, because clients know that key. Raises
    `ForeignChunkKey` for a span with another key.
    """
    check_spans(spans, len(prompt))
    keyed = []
    for index, span in enumerate(spans):
        tokens = prompt[span.start : span.end]
        key = ChunkKey.of(space.space_at(span.start, prompt), tokens)
        if span.key is not None and span.key != key and span.key != ChunkKey.of(space, tokens):
            raise ForeignChunkKey(
                f"spans[{index}].key",
                f"{span.key} is not the key of these tokens in namespace {space.namespace!r} for this "
                f"model, prefix and context ({key}); put the chunk again, or correct the span",
            )
        keyed.append(Span(span.start, span.end, key))
    return tuple(keyed)


def saved_copy(params: KintsugiParams, space: ChunkSpace, prompt: TokenIds) -> ChunkSpace:
    """Return the space of the copy that a save makes, by the tokens before the chunk."""
    assert params.spans is not None
    if params.context:
        return space
    before = tuple(prompt[: params.spans[0].start])
    return next((copy for copy in space.copies() if copy.lead_token_ids == before), space)


def save_job(
    params: KintsugiParams,
    space: ChunkSpace,
    prompt: TokenIds,
    tokens: JobTokens,
) -> SaveJob:
    """Make the worker's job for a save or an audit that `check_save` accepted."""
    assert params.spans is not None
    (span,) = params.spans
    assert span.key is not None
    return SaveJob(
        tokens,
        space,
        span.key,
        anchors_of(prompt[span.start : span.end], space.name_key),
        span.start,
        span.end,
        is_audit=params.op is Op.AUDIT,
        ttl_s=params.ttl_s or 0.0,
        asked_at_s=params.asked_at_s,
        context_keys=space.context_keys_of([prompt[one.start : one.end] for one in params.context]),
    )


def check_save(params: KintsugiParams, space: ChunkSpace, prompt: TokenIds) -> None:
    """Raise `InvalidSpan` unless the chunk follows the space's prefix, or its own context after the prefix,
    and is followed by a token."""
    assert params.spans is not None
    (span,) = params.spans
    if span.end >= len(prompt):
        raise InvalidSpan("spans[0]", f"op={params.op} needs one token after the chunk; its KV is not kept")
    if params.context:
        _check_context(params.context, span, space, prompt)
    elif tuple(prompt[: span.start]) != space.lead_token_ids:
        lead = f"prefix of {len(space.prefix_token_ids)} tokens"
        if space.context_token_ids:
            lead += f", with or without its context of {len(space.context_token_ids)} tokens"
        raise InvalidSpan(
            "spans[0]",
            f"op={params.op} needs the chunk directly after the space's {lead}; "
            "after other text it would be another chunk",
        )


def _check_context(context: Sequence[Span], span: Span, space: ChunkSpace, prompt: TokenIds) -> None:
    """Raise `InvalidField` unless the passages fill the place between prefix and chunk."""
    if not space.context_token_ids:
        raise InvalidField(
            "context", "is for services with a context; set model.expert.context, or save without it"
        )
    starts = [len(space.prefix_token_ids), *(one.end for one in context)]
    ends = [*(one.start for one in context), span.start]
    if starts != ends or not space.prefix_matches(prompt):
        raise InvalidField("context", "must name all text between the space's prefix and the chunk")


@dataclass
class _Parked:
    num_tokens: int
    block_name: bytes | None
    is_in_flight: bool = True


@dataclass
class Parking:
    """The parked blends, or the parked saves. Called from the scheduler's thread only."""

    places: int
    """Maximum number of parked requests, at least 1."""
    cache_tokens: int
    """Tokens that the engine's KV cache holds."""
    cache_share_max: float = CACHE_SHARE_MAX
    _parked: dict[str, _Parked] = field(default_factory=dict)
    _has_refused: bool = False
    """Whether a request was refused in the current step."""

    def __post_init__(self) -> None:
        assert self.places >= 1

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._parked)

    def step_began(self) -> None:
        """Note that the requests of a step are scheduled and the next step begins."""
        self._has_refused = False

    def admits(self, request_id: str, num_tokens: int) -> bool:
        """Return whether a prompt of ``num_tokens`` may be parked now. A parked request keeps its place."""
        others = [parked.num_tokens for name, parked in self._parked.items() if name != request_id]
        fits = not others or sum(others) + num_tokens <= self.cache_share_max * self.cache_tokens
        if len(others) >= self.places or not fits:
            self._has_refused = True
        return not self._has_refused

    def park(self, request_id: str, num_tokens: int, block_name: bytes | None) -> None:
        """Park a request whose blocks are allocated and whose blend is in flight.

        ``block_name``: vLLM's name of the last block that other requests may find; None if there is none.
        """
        self._parked[request_id] = _Parked(num_tokens, block_name)

    def leader_of(self, block_name: bytes | None) -> str | None:
        """Return the request whose blend in flight will fill the named block; None if there is none."""
        if block_name is None:
            return None
        flying = {name: one.block_name for name, one in self._parked.items() if one.is_in_flight}
        return next((name for name, fills in flying.items() if fills == block_name), None)

    def settle(self, request_id: str) -> None:
        """Note that the worker has ended the blend. The request keeps its blocks until it runs."""
        parked = self._parked.get(request_id)
        if parked is not None:
            parked.is_in_flight = False

    def leave(self, request_id: str) -> None:
        """Free the place of a request that runs or has ended."""
        self._parked.pop(request_id, None)


def parking_of_saves(cache_tokens: int) -> Parking:
    """Return the places for parked saves, for a KV cache of ``cache_tokens``."""
    return Parking(SAVES_MAX, cache_tokens, SAVES_SHARE_MAX)


def is_parked(request: Request) -> bool:
    """Return whether a request that took a place still waits and holds its blocks. A preempted request holds
    none and needs a place again."""
    status, has_blocks = request.status, request.num_computed_tokens > 0
    if status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return True
    return bool(status != RequestStatus.RUNNING and has_blocks)
