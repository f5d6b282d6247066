"""Shadowing: answers a share of the blended requests again by full prefill, off the critical path.

A connector cannot add requests, so the code that submits requests calls `Shadow.prepare_prompt` before each
request (a sampled one then requests logprobs), `Shadow.take` with its answer, and `Shadow.run_pending` when
the engine is idle. The client's answer is not affected. Full prefill is forced along the blend's own tokens,
up to `ShadowConfig.positions` of them, and the two distributions at each position are compared.

For each shadowed request one stored chunk of its prompt is audited: it is prefilled again and compared with
the stored KV (`fusor.audit`). A damaged chunk is dropped from the store.

A `DriftDetector` observes these comparisons and those of other engines (`quality.evidence`). When it detects
drift, or audits have found several damaged chunks, the report in the store is tripped, and every engine that
uses it stops blending.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from prometheus_client import CollectorRegistry

from kintsugi.core.accounting import ChunkAudit, Outcome
from kintsugi.core.baseline import POSITIONS_MAX, Deviation
from kintsugi.core.errors import InvalidField, KintsugiError
from kintsugi.core.report import Binding, CalibrationReport
from kintsugi.core.spaces import ChunkSpace
from kintsugi.engine.auditing import StoredCopy, find_stored_copies
from kintsugi.engine.local import Generation, Prompt
from kintsugi.fusor.audit import find_damage
from kintsugi.quality import metrics
from kintsugi.quality.drift import DamageDetector, DriftDetector
from kintsugi.quality.effect import WINDOW, Effect, ShadowCounts
from kintsugi.quality.evidence import EvidencePool
from kintsugi.quality.measure import TOP_LOGPROBS
from kintsugi.quality.reports import fetch_report, trip
from kintsugi.quality.sampling import FairSampler, is_sampled
from kintsugi.store.protocol.interface import ChunkStore

logger = logging.getLogger(__name__)


EXCHANGE_S = 30.0
"""Minimum time between two exchanges of evidence with other engines."""
PENDING_MAX = 64
"""Maximum number of answers that wait for their shadow; beyond it the oldest is dropped and counted."""


@dataclass(frozen=True)
class ShadowConfig:
    """Settings of shadowing."""

    share: float = 0.005
    """Share of all requests that may blend, divided evenly among the namespaces that send enough."""
    positions: int = POSITIONS_MAX
    """Maximum number of leading answer tokens to compare; also limited by the calibration's baseline. Without
    `local.FORCING`, a `LocalEngine` compares them up to the first different token."""
    per_minute: float = 0.0
    """Minimum number of requests to shadow per minute, if `share` results in fewer."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise InvalidField("shadow.share", f"{self.share} is outside [0, 1]")
        if not 0.0 <= self.per_minute < float("inf"):
            raise InvalidField("shadow.per_minute", f"{self.per_minute} must be 0 or more")
        if self.positions < 1:
            raise InvalidField("shadow.positions", f"{self.positions} must be at least 1")


class Answers(Protocol):
    """The methods of `engine.local.LocalEngine` that shadowing uses."""

    def space(self, namespace: str) -> ChunkSpace: ...

    def generate(self, prompts: Sequence[Prompt]) -> list[Generation]: ...


def compare_generations(full: Generation, blend: Generation) -> Deviation:
    """Compare the positions that both have, until their tokens differ: an engine that cannot be forced
    continues differently from there."""
    pairs = []
    for index, pair in enumerate(zip(full.top_logprobs, blend.top_logprobs, strict=False)):
        if index and full.token_ids[index - 1] != blend.token_ids[index - 1]:
            break
        pairs.append(pair)
    assert pairs, "an answer has a first token"
    return Deviation.of(
        [metrics.kl_divergence(*pair) for pair in pairs], [not metrics.same_top(*pair) for pair in pairs]
    )


def count_positions(generation: Generation, limit: int) -> int:
    """Return the number of leading positions to compare. The token that ends an answer is not compared,
    unless it is the whole answer."""
    length = min(len(generation.token_ids), len(generation.top_logprobs))
    ended = generation.finish_reason == "stop" and length > 1
    return min(limit, length - ended)


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Shadow:
    """Shadows the requests of one engine. One thread may call `prepare_prompt` and `take`, another one
    `run_pending`."""

    def __init__(
        self,
        engine: Answers,
        store: ChunkStore,
        binding: Binding,
        config: ShadowConfig | None = None,
        now: Callable[[], str] = utc_now,
        registry: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`registry` exports the counts; None: they are not exported. `now` returns the date of a trip,
        `clock` returns seconds."""
        self.counts = ShadowCounts()
        if registry is not None:
            registry.register(self.counts)
        self._engine = engine
        self._store = store
        self._binding = binding
        self._config = config or ShadowConfig()
        self._now = now
        self._clock = clock
        self._sampler = FairSampler(self._config.share, per_minute=self._config.per_minute, now=clock)
        self._pending: deque[tuple[Prompt, Generation]] = deque()
        self._lock = threading.Lock()
        self._report: CalibrationReport | None = None
        self._detector: DriftDetector | None = None
        self._damage = DamageDetector()
        # Seeded, so that equal runs audit the same chunks.
        self._picks = random.Random(0)
        self._pool = EvidencePool(store, binding, uuid.uuid4().hex)
        self._unshared: list[Deviation] = []
        self._latest: deque[Deviation] = deque(maxlen=WINDOW)
        self._exchanged_s = -float("inf")

    @property
    def positions(self) -> int:
        """Number of leading positions of an answer that `take` needs: one more than are compared, because the
        last one may be the token that ends the answer."""
        return self._config.positions + 1

    def prepare_prompt(self, request_id: str, prompt: Prompt) -> Prompt:
        """Return the request to submit; a sampled one requests logprobs."""
        if prompt.params is None:
            return prompt
        if not is_sampled(request_id, self._sampler.count_request(prompt.params.namespace)):
            return prompt
        return dataclasses.replace(prompt, top_logprobs=max(prompt.top_logprobs, TOP_LOGPROBS))

    def take(self, prompt: Prompt, generation: Generation) -> bool:
        """Queue the answer to a prompt from `prepare_prompt`. Return whether it is queued."""
        blended = (generation.accounting or {}).get("outcome") == Outcome.BLENDED.value
        if not blended or not generation.token_ids or prompt.top_logprobs < TOP_LOGPROBS:
            return False
        with self._lock:
            if len(self._pending) == PENDING_MAX:
                self._pending.popleft()
                self.counts.dropped += 1
            self._pending.append((prompt, generation))
        return True

    @property
    def pending(self) -> int:
        """Number of answers that wait for their shadow."""
        return len(self._pending)

    def run_pending(self, limit: int = 1) -> int:
        """Shadow up to `limit` waiting answers now. Each takes a full prefill and a prefill of one chunk.
        Return the number of shadowed answers."""
        with self._lock:
            some = [self._pending.popleft() for _ in range(min(limit, len(self._pending)))]
        if not some:
            return 0
        self._follow_report()
        fulls = self._engine.generate([self._full_prefill_prompt(*pair) for pair in some])
        for full, (_, blend) in zip(fulls, some, strict=True):
            self._record(compare_generations(full, blend))
        for prompt, _ in some:
            self._audit(prompt)
        self._exchange()
        baseline = None if self._report is None else self._report.baseline
        self.counts.effect = Effect.of(self._latest, baseline)
        return len(some)

    def _full_prefill_prompt(self, prompt: Prompt, generation: Generation) -> Prompt:
        assert prompt.params is not None
        baseline = None if self._report is None else self._report.baseline
        # Positions that calibration did not measure cannot be compared.
        limit = (
            self._config.positions if baseline is None else min(self._config.positions, baseline.positions)
        )
        forced = tuple(generation.token_ids[: count_positions(generation, limit)])
        return Prompt(
            prompt.token_ids,
            None,
            # Only the request's own tenant may find its blocks in the prefix cache.
            cache_salt=prompt.params.namespace,
            max_tokens=len(forced),
            top_logprobs=TOP_LOGPROBS,
            ignore_eos=True,
            forced=forced if len(forced) > 1 else None,
        )

    def _follow_report(self) -> None:
        """Start a new detector for a new calibration. Without a baseline there is nothing to compare with."""
        current = fetch_report(self._store, self._binding)
        if current is None or current.baseline is None or current.tripped is not None:
            self._detector = None
            return
        if self._detector is None or current != self._report:
            self._report = current
            self._detector = DriftDetector(current.baseline, current.thresholds, current.noise)
            self._damage = DamageDetector()
            self._unshared.clear()
            self._latest.clear()
            self._exchanged_s = -float("inf")

    def _record(self, deviation: Deviation) -> None:
        """Count a comparison of this engine."""
        self.counts.compared += 1
        self.counts.kl_sum += deviation.kl
        self.counts.disagreed += deviation.disagreement > 0
        if self._report is not None:
            self._unshared.append(deviation)
        self._observe(deviation)

    def _exchange(self) -> None:
        """Exchange deviations with other engines, and observe theirs."""
        if self._report is None or self._clock() - self._exchanged_s < EXCHANGE_S:
            return
        self._exchanged_s = self._clock()
        others = self._pool.exchange(self._report.created, self._unshared)
        self._unshared.clear()
        for deviation in others:
            self.counts.pooled += 1
            self._observe(deviation)

    def _observe(self, deviation: Deviation) -> None:
        self._latest.append(deviation)
        if self._detector is None or self._report is None:
            return
        reason = self._detector.observe(deviation)
        if reason is not None:
            self._trip(self._report, reason)

    def _audit(self, prompt: Prompt) -> None:
        """Audit one of the chunks that the prompt's blend loaded.

        Only while there is a report to trip: a faulty engine finds every chunk damaged, and must not drop
        chunks after the trip.
        """
        if self._detector is None or self._report is None:
            return
        try:
            audited = self._audit_one_of(prompt)
        except KintsugiError as error:
            logger.warning("the audit of a shadowed request's chunk failed: %s", error)
            return
        if audited is None:
            return
        chunk, audit = audited
        damage = find_damage(audit)
        self.counts.audited += 1
        if damage is not None:
            self.counts.damaged += 1
            self._drop(chunk, damage)
        reason = self._damage.observe(chunk.key, damage)
        if reason is not None:
            self._trip(self._report, reason)

    def _audit_one_of(self, prompt: Prompt) -> tuple[StoredCopy, ChunkAudit] | None:
        """Audit a random chunk of the prompt. Return None if the store has none, or if the engine
        declines."""
        assert prompt.params is not None
        space = self._engine.space(prompt.params.namespace)
        chunks = find_stored_copies(self._store, space, prompt.token_ids, prompt.params.spans)
        if not chunks:
            return None
        chunk = self._picks.choice(chunks)
        (generation,) = self._engine.generate([chunk.prompt])
        accounting = generation.accounting or {}
        if accounting.get("outcome") != Outcome.AUDITED.value:
            logger.warning("chunk %s is not audited: %s", chunk.key, accounting.get("reason"))
            return None
        return chunk, ChunkAudit(**accounting["audit"])

    def _drop(self, chunk: StoredCopy, damage: str) -> None:
        namespace = chunk.space.namespace
        logger.error(
            "stored chunk %s of namespace %s is damaged and dropped: %s", chunk.key, namespace, damage
        )
        try:
            self._store.delete(namespace, [chunk.key])
        except KintsugiError as error:
            logger.warning("chunk %s may still be stored: %s", chunk.key, error)

    def _trip(self, report: CalibrationReport, reason: str) -> None:
        if trip(self._store, report, reason, self._now()):
            logger.error("BLENDING IS TURNED OFF for this model: %s; run kintsugi calibrate again", reason)
            self.counts.trips += 1
            self._detector = None
