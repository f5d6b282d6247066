"""Finds segments that recur in prompts. See docs/adr/0013.

A request is *discovered* if its namespace's rules allow it. A lookup thread finds its segments together with
the stored chunks, and the segments are counted when the lookup ends. If the request names chunks, only the
text between them is cut. Recurring segments wait in a backlog until `scheduler.idle_saves` saves them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import blake3
from vllm.config import VllmConfig
from vllm.logger import init_logger

from kintsugi.core.errors import KintsugiError
from kintsugi.core.namespaces import SALT, base_of, narrow
from kintsugi.core.prompt import Domain
from kintsugi.core.request import KintsugiParams, Op
from kintsugi.core.spaces import ChunkKey, ChunkSpace, Span, TokenIds
from kintsugi.discovery.backlog import Backlog, Recurring
from kintsugi.discovery.segments import TOKENS_MIN, find_segments
from kintsugi.discovery.sightings import Sightings
from kintsugi.discovery.token_classes import TokenClasses
from kintsugi.engine.config import DiscoveryConfig
from kintsugi.engine.scheduler.matching import Match, match_content, match_spans, outside
from kintsugi.engine.scheduler.salts import Salts
from kintsugi.models.prompt_form import load_tokenizer
from kintsugi.store.protocol.interface import ChunkStore

logger = init_logger(__name__)

QUESTION_TOKENS_MIN = 6
"""Minimum number of text tokens after the last segment that count as the question. The label of an answer,
such as `Answer:`, has fewer."""


class Discovery:
    """Finds and counts an engine's recurring segments. Except `match`, called from the scheduler's thread."""

    def __init__(
        self,
        config: DiscoveryConfig,
        salts: Salts,
        load_classes: Callable[[], TokenClasses] = TokenClasses.none,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start ``load_classes`` on a thread. No prompt is discovered before it ends, or if it fails."""
        self.config = config
        self.backlog = Backlog(config.share)
        self._salts = salts
        self._sightings = Sightings(config.ttl_s, clock)
        self._told_of: Domain | None = None
        """The calibrated domain of the last warning about segments left out."""
        self._has_told_of_room = False
        self._under_way: dict[str, int] = {}
        """Hashes of running discovered prompts, by request id."""
        self._classes: Future[TokenClasses] | None = None
        if config.enabled:
            thread = ThreadPoolExecutor(1, thread_name_prefix="kintsugi-classes")
            self._classes = thread.submit(load_classes)
            self._classes.add_done_callback(_report_failure)
            thread.shutdown(wait=False)

    def name_params(self, cache_salt: str | None) -> KintsugiParams | None:
        """Return the parameters of a request without a namespace; None if such requests are left to vLLM."""
        namespace = self.config.namespace
        if not (self.config.enabled and namespace):
            return None
        if cache_salt is not None:
            # A salt may have any length; the value of a part is limited.
            namespace = narrow(namespace, {SALT: blake3.blake3(cache_salt.encode()).hexdigest()})
        return KintsugiParams(namespace, discover=True)

    def covers(self, params: KintsugiParams) -> bool:
        """Whether a request with these parameters is discovered."""
        may_store = self.is_ready and params.discover and not params.no_store
        return may_store and params.op is Op.BLEND and params.spans != ()

    @property
    def is_ready(self) -> bool:
        """Whether prompts are discovered: the tokens' classes are loaded, and the store's erasures are
        known."""
        # A text that is seen before erasures are known may be erased unnoticed.
        if self._classes is None or self._salts.cursor is None:
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
        assert self._classes is not None
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
            # The first segment may hold a BOS, which occurs nowhere else, and vLLM's prefix cache finds it.
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
        domain: Domain | None,
    ) -> Match:
        """Count the match's segments, queue the recurring ones, and return the match with the counts.
        Segments whose length lies outside the calibrated ``domain`` are left out, with one warning per
        domain.

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
        if domain is not None:
            outside = {key for key, span in distinct.items() if not domain.holds_chunk(span.num_tokens)}
            if outside:
                self._report_outside(domain, [distinct.pop(key).num_tokens for key in outside])
            match = replace(match, segments_outside=len(outside))
        refused = self.backlog.num_refused
        owner = base_of(params.namespace)
        counts = self._sightings.count(owner, salt, [key.digest for key in distinct])
        ttl_s = min(self.config.ttl_s, params.ttl_s or self.config.ttl_s)
        asked_at_s = self._salts.times.now(params.namespace)
        recurring = [
            Recurring(space, prompt[span.start : span.end], params.shared, salt, ttl_s, asked_at_s)
            for span, count in zip(distinct.values(), counts, strict=True)
            if count >= self.config.sights
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
            "discovery in fewer namespaces (privacy rules, discover: false), or raise discovery.share to "
            "shorten the backlog; "
            'kintsugi_discovery_segments_total{event="refused"} counts segments that the full backlog refused'
        )

    def _report_outside(self, domain: Domain, sizes: Sequence[int]) -> None:
        """Log one warning per calibrated domain that segments of these sizes are left out."""
        if domain == self._told_of:
            return
        self._told_of = domain
        lengths = domain.chunk_tokens
        logger.warning(
            "Segments of prompts are not saved because the calibration report does not cover their length "
            "(here %d to %d tokens; it was measured with chunks of %d to %d on average). Calibrate with "
            "kintsugi calibrate --segments, on prompts like these; "
            'kintsugi_discovery_segments_total{event="outside_calibration"} counts further segments',
            min(sizes),
            max(sizes),
            lengths.low,
            lengths.high,
        )

    def take(self, tokens_max: int) -> list[Recurring]:
        """Return the next segments to save together (`Backlog.take`); none if none wait or saving has used up
        its share. Drops segments of namespaces in which chunks were erased since they were queued."""
        while self.backlog.is_due:
            segments = self.backlog.take(tokens_max)
            first = segments[0]
            if self._salts.of(first.space.namespace, first.shared) == first.salt:
                return segments
        return []

    def request_ended(self, request_id: str) -> None:
        self._under_way.pop(request_id, None)


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
