"""Shadowing: a share of the blended requests is answered once more by full prefill, off the critical path.

A connector cannot add requests, so whoever submits them does: `Shadow.marked` before a request (it then asks
for logprobs), `Shadow.take` with its answer, `Shadow.run_pending` whenever there is time. The answer has long
been given by then; nothing of it changes. What differs feeds a `DriftDetector`; when that rings, the report
in the store is tripped, and every engine that reads it stops blending.
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
from kintsugi.quality.reports import published, trip
from kintsugi.quality.sampling import EvenDraw, is_sampled
from kintsugi.store.protocol.interface import ChunkStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShadowConfig:
    """How much is shadowed."""

    share: float = 0.005
    """Of the requests that may blend, over all namespaces; of each as many, where it sends enough."""
    positions: int = 1
    """Leading answer tokens that are compared. More than 1 needs an engine started with `local.FORCING`."""
    pending_max: int = 64
    """Answers that may wait for their shadow; the oldest is dropped and counted."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise InvalidField("shadow.share", f"{self.share} is outside [0, 1]")
        for name in ("positions", "pending_max"):
            if getattr(self, name) < 1:
                raise InvalidField(f"shadow.{name}", f"{getattr(self, name)} must be at least 1")


@dataclass(eq=False)  # registries keep collectors by identity
class ShadowCounts(Collector):
    """What was seen so far. In a `CollectorRegistry`: counters `kintsugi_shadow_NAME_total`."""

    compared: int = 0
    dropped: int = 0
    disagreed: int = 0
    trips: int = 0
    kl_sum: float = 0.0
    """Nats, over the compared."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, value in dataclasses.asdict(self).items():
            yield CounterMetricFamily(
                f"kintsugi_shadow_{name}", f"Shadowed requests: {name.replace('_', ' ')}", value=value
            )


class Answers(Protocol):
    """What is needed of `engine.local.LocalEngine`."""

    def generate(self, prompts: Sequence[Prompt]) -> list[Generation]: ...


def compared(full: Generation, blend: Generation) -> Observation:
    """Over the positions that both have; `full` was forced along `blend`'s tokens."""
    pairs = list(zip(full.top_logprobs, blend.top_logprobs, strict=False))
    assert pairs, "an answer has a first token"
    return Observation(
        metrics.mean([metrics.kl_divergence(*pair) for pair in pairs]),
        metrics.mean([float(not metrics.same_top(*pair)) for pair in pairs]),
    )


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Shadow:
    """Shadows the requests of one engine. One thread may mark and take, and one may run what is pending."""

    def __init__(
        self,
        engine: Answers,
        store: ChunkStore,
        binding: Binding,
        config: ShadowConfig | None = None,
        now: Callable[[], str] = utc_now,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`registry` exports the counts; None keeps them here."""
        self.counts = ShadowCounts()
        if registry is not None:
            registry.register(self.counts)
        self._engine = engine
        self._store = store
        self._binding = binding
        self._config = config or ShadowConfig()
        self._now = now
        self._draw = EvenDraw(self._config.share)
        self._pending: deque[tuple[Prompt, Generation]] = deque()
        self._lock = threading.Lock()
        self._report: CalibrationReport | None = None
        self._detector: DriftDetector | None = None

    def prepare_prompt(self, request_id: str, prompt: Prompt) -> Prompt:
        """The request as it is to be submitted: a sampled one asks for logprobs."""
        if prompt.params is None:
            return prompt
        if not is_sampled(request_id, self._draw.chance(prompt.params.namespace)):
            return prompt
        return dataclasses.replace(prompt, top_logprobs=max(prompt.top_logprobs, TOP_LOGPROBS))

    def take(self, prompt: Prompt, generation: Generation) -> bool:
        """Hand in the answer to what `marked` gave; whether it will be shadowed."""
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
        """Answers that wait for their shadow."""
        return len(self._pending)

    def run_pending(self, limit: int = 1) -> int:
        """Shadow up to `limit` waiting answers now; how many. Costs a full prefill each."""
        with self._lock:
            some = [self._pending.popleft() for _ in range(min(limit, len(self._pending)))]
        if not some:
            return 0
        fulls = self._engine.generate([self._in_full(*pair) for pair in some])
        self._follow_report()
        for full, (_, blend) in zip(fulls, some, strict=True):
            self._observe(compared(full, blend))
        return len(some)

    def _in_full(self, prompt: Prompt, generation: Generation) -> Prompt:
        assert prompt.params is not None
        forced = tuple(generation.token_ids[: self._config.positions])
        return Prompt(
            prompt.token_ids,
            None,
            # What it leaves in the prefix cache is its tenant's alone.
            cache_salt=prompt.params.namespace,
            max_tokens=len(forced),
            top_logprobs=TOP_LOGPROBS,
            ignore_eos=True,
            forced=forced if len(forced) > 1 else None,
        )

    def _follow_report(self) -> None:
        """A new calibration starts the watch anew. Without a report there is nothing to hold a blend to."""
        current = published(self._store, self._binding)
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
            logger.error("BLENDING IS TRIPPED OFF for this model: %s; run kintsugi calibrate again", reason)
            self.counts.trips += 1
            self._detector = None
