"""Shadowing: answers a share of the blended requests again by full prefill, off the critical path.

A connector cannot add requests, so the code that submits requests calls `Shadow.prepare_prompt` before each
request (a sampled one then asks for logprobs), `Shadow.take` with its answer, and `Shadow.run_pending`
whenever there is time. By then the client has its answer, which never changes. The comparison feeds a
`DriftDetector`; when it detects drift, the report in the store is tripped and every engine that reads it
stops blending.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from kintsugi.core.accounting import Outcome
from kintsugi.core.errors import InvalidField
from kintsugi.core.report import Binding, CalibrationReport
from kintsugi.engine.local import Generation, Prompt
from kintsugi.quality import metrics
from kintsugi.quality.drift import DriftDetector, Observation
from kintsugi.quality.measure import TOP_LOGPROBS
from kintsugi.quality.reports import fetch_report, trip
from kintsugi.quality.sampling import FairSampler, is_sampled
from kintsugi.store.protocol.interface import ChunkStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShadowConfig:
    """How many requests are shadowed, and how."""

    share: float = 0.005
    """Share of all requests that may blend, divided evenly among the namespaces that send enough."""
    positions: int = 1
    """Number of leading answer tokens to compare. More than 1 needs an engine started with
    `local.FORCING`."""
    pending_max: int = 64
    """Maximum number of answers that wait for their shadow; beyond it the oldest is dropped and counted."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise InvalidField("shadow.share", f"{self.share} is outside [0, 1]")
        for name in ("positions", "pending_max"):
            if getattr(self, name) < 1:
                raise InvalidField(f"shadow.{name}", f"{getattr(self, name)} must be at least 1")


@dataclass(eq=False)  # registries keep collectors by identity
class ShadowCounts(Collector):
    """Counts so far. Registered in a `CollectorRegistry`, they are the counters
    `kintsugi_shadow_NAME_total`."""

    compared: int = 0
    dropped: int = 0
    disagreed: int = 0
    trips: int = 0
    kl_sum: float = 0.0
    """Sum over the compared requests, in nats."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, value in dataclasses.asdict(self).items():
            yield CounterMetricFamily(
                f"kintsugi_shadow_{name}", f"Shadowed requests: {name.replace('_', ' ')}", value=value
            )


class Answers(Protocol):
    """The part of `engine.local.LocalEngine` that shadowing needs."""

    def generate(self, prompts: Sequence[Prompt]) -> list[Generation]: ...


def compare_generations(full: Generation, blend: Generation) -> Observation:
    """Compare the positions that both have; `full` was forced along `blend`'s tokens."""
    pairs = list(zip(full.top_logprobs, blend.top_logprobs, strict=False))
    assert pairs, "an answer has a first token"
    return Observation(
        metrics.mean([metrics.kl_divergence(*pair) for pair in pairs]),
        metrics.mean([float(not metrics.same_top(*pair)) for pair in pairs]),
    )


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Shadow:
    """Shadows the requests of one engine. One thread may call `prepare_prompt` and `take`, another
    `run_pending`."""

    def __init__(
        self,
        engine: Answers,
        store: ChunkStore,
        binding: Binding,
        config: ShadowConfig | None = None,
        now: Callable[[], str] = utc_now,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`registry` exports the counts; None does not export them."""
        self.counts = ShadowCounts()
        if registry is not None:
            registry.register(self.counts)
        self._engine = engine
        self._store = store
        self._binding = binding
        self._config = config or ShadowConfig()
        self._now = now
        self._sampler = FairSampler(self._config.share)
        self._pending: deque[tuple[Prompt, Generation]] = deque()
        self._lock = threading.Lock()
        self._report: CalibrationReport | None = None
        self._detector: DriftDetector | None = None

    def prepare_prompt(self, request_id: str, prompt: Prompt) -> Prompt:
        """Return the request to submit: a sampled one asks for logprobs."""
        if prompt.params is None:
            return prompt
        if not is_sampled(request_id, self._sampler.count_request(prompt.params.namespace)):
            return prompt
        return dataclasses.replace(prompt, top_logprobs=max(prompt.top_logprobs, TOP_LOGPROBS))

    def take(self, prompt: Prompt, generation: Generation) -> bool:
        """Take the answer to a prompt from `prepare_prompt`. Returns whether it will be shadowed."""
        blended = (generation.accounting or {}).get("outcome") == Outcome.BLENDED.value
        if not blended or not generation.token_ids or prompt.top_logprobs < TOP_LOGPROBS:
            return False
        with self._lock:
            if len(self._pending) == self._config.pending_max:
                self._pending.popleft()
                self.counts.dropped += 1
            self._pending.append((prompt, generation))
        return True

    @property
    def pending(self) -> int:
        """Number of answers that wait for their shadow."""
        return len(self._pending)

    def run_pending(self, limit: int = 1) -> int:
        """Shadow up to `limit` waiting answers now, at the cost of a full prefill each. Returns their
        number."""
        with self._lock:
            some = [self._pending.popleft() for _ in range(min(limit, len(self._pending)))]
        if not some:
            return 0
        fulls = self._engine.generate([self._full_prefill_prompt(*pair) for pair in some])
        self._follow_report()
        for full, (_, blend) in zip(fulls, some, strict=True):
            self._observe(compare_generations(full, blend))
        return len(some)

    def _full_prefill_prompt(self, prompt: Prompt, generation: Generation) -> Prompt:
        assert prompt.params is not None
        forced = tuple(generation.token_ids[: self._config.positions])
        return Prompt(
            prompt.token_ids,
            None,
            # Only its own tenant may find what it leaves in the prefix cache.
            cache_salt=prompt.params.namespace,
            max_tokens=len(forced),
            top_logprobs=TOP_LOGPROBS,
            ignore_eos=True,
            forced=forced if len(forced) > 1 else None,
        )

    def _follow_report(self) -> None:
        """Start a new detector for a new calibration. Without a report there is nothing to compare with."""
        current = fetch_report(self._store, self._binding)
        if current is None or current.tripped is not None:
            return
        if self._detector is None or current != self._report:
            self._report = current
            chosen = [e.kl_p99 for e in current.entries if e.selection == current.choice.selection]
            self._detector = DriftDetector(current.thresholds, current.noise, max(chosen, default=None))

    def _observe(self, observation: Observation) -> None:
        self.counts.compared += 1
        self.counts.kl_sum += observation.kl
        self.counts.disagreed += observation.disagreement > 0
        if self._detector is None or self._report is None:
            return
        reason = self._detector.observe(observation)
        if reason is None:
            return
        if trip(self._store, self._report, reason, self._now()):
            logger.error("BLENDING IS TURNED OFF for this model: %s; run kintsugi calibrate again", reason)
            self.counts.trips += 1
            self._detector = None
