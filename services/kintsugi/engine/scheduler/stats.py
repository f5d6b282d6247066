"""Counts and times of the scheduler's side: the plugin's metrics, and the loading controller's measurements.

Counts go over vLLM's channel for connector statistics to the process that serves `/metrics`, and to vLLM's
periodic log line.

**TTFT** here is the time from the scheduler's first consideration of a request (it has left the queue; its
lookup may still run) to the end of the engine step with its first token. A client's TTFT adds queueing,
tokenising and the network.

A step measures prefilling if no blend or save ran beside it. Called from the scheduler's thread only. Cost:
one clock reading at either end of a step, and a loop over its requests if it prefills.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kintsugi.core.accounting import TOLD, Accounting, Outcome, label_of_reason
from kintsugi.engine.scheduler.matching import Match
from kintsugi.fusor.control.estimates import Estimates, Measured
from kintsugi.fusor.control.forecast import count_attention_pairs

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kintsugi.engine.protocol import PassSample

REQUESTS = "requests"
SEGMENTS = "segments"
ERRORS = "prediction_errors"
ERRORS_MAX = 1000
"""Maximum number of errors per outcome that are kept until vLLM logs them."""
ERROR_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
AMOUNTS = (
    "chunks_hit",
    "chunks_missed",
    "tokens_hit",
    "tokens_discovered",
    "tokens_missed",
    "tokens_recomputed",
    "token_layers_computed",
    "token_layers_total",
    "bytes_loaded",
    "load_wait_ms",
    "restarts",
)
"""Fields of `Accounting` that add up over requests."""
REFUSALS_PER_PROBE = 4
"""While blends are refused because loading is slow, a chunk of one refused prompt in this number is read as a
probe, to notice when the store has become fast. The prompt does not wait for the probe."""
TRIAL_FIRST = 2
TRIAL_LAST = 64
"""While blends are refused because computing them is slow, a trial blend shows whether the prediction still
holds. The first trial follows after `TRIAL_FIRST` refused prompts, because a new engine has few measurements.
The number then doubles up to `TRIAL_LAST`."""
STEPS_IN_FLIGHT_MAX = 16


class BlendStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report. `requests/OUTCOME/REASON`, `segments/EVENT` and the names in `AMOUNTS`
    are sums, `prediction_errors/OUTCOME` are lists of relative errors of the predicted TTFT. `told` has the
    accountings of running requests by their tickets (`core.accounting.TICKET`)."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def count(self, accounting: Accounting) -> None:
        """Add one finished request."""
        self._add(f"{REQUESTS}/{accounting.outcome.value}/{reason_label(accounting)}", 1)
        if accounting.outcome is Outcome.BLENDED:
            for name in AMOUNTS:
                self._add(name, getattr(accounting, name))
        if accounting.predicted_ttft_ms is not None and accounting.ttft_ms:
            error = abs(accounting.predicted_ttft_ms - accounting.ttft_ms) / accounting.ttft_ms
            self.data.setdefault(f"{ERRORS}/{accounting.outcome.value}", []).append(error)

    def tell(self, ticket: str | None, accounting: Accounting) -> None:
        """Report the accounting of a running request, without counting it, if it has a ticket."""
        if ticket is not None:
            self.data.setdefault(TOLD, {})[ticket] = accounting.to_mapping()

    def count_segments(self, event: str, number: int) -> None:
        """Count segments that were `counted`, `queued`, refused by the full backlog (`refused`), `saved`, not
        saved because of an error (`failed`)."""
        if number:
            self._add(f"{SEGMENTS}/{event}", number)

    def count_sighted(self, match: Match) -> None:
        """Count the segments of one prompt by what discovery did with them."""
        self.count_segments("counted", match.segments_counted)
        self.count_segments("queued", match.segments_queued)
        self.count_segments("refused", match.segments_refused)

    def _add(self, name: str, amount: float) -> None:
        self.data[name] = self.data.get(name, 0) + amount

    def aggregate(self, other: KVConnectorStats) -> BlendStats:
        for name, amount in other.data.items():
            known = self.data.get(name)
            if isinstance(amount, dict):
                self.data[name] = {**(known or {}), **amount}
            elif isinstance(amount, list):
                self.data[name] = [*(known or ()), *amount][-ERRORS_MAX:]
            else:
                self._add(name, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {
            name: round(statistics.median(amount), 3) if isinstance(amount, list) else amount
            for name, amount in self.data.items()
        }

    def is_empty(self) -> bool:
        return not self.data


def reason_label(accounting: Accounting) -> str:
    """Return the first word of the reason, such as `no_chunk_cached` or `InvalidSpan`; `none` for a blend."""
    return "none" if accounting.outcome is Outcome.BLENDED else label_of_reason(accounting.reason)


class BlendPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Exports `kintsugi_requests_total{outcome, reason}`, `kintsugi_discovery_segments_total{event}`, one
    counter per name in `AMOUNTS`, and `kintsugi_ttft_prediction_error{outcome}`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[prometheus_client.Counter]
        self._requests = counter(
            "kintsugi_requests",
            "Requests for blending or saving, by outcome and reason",
            labelnames=[*labelnames, "outcome", "reason"],
        )
        self._segments = counter(
            "kintsugi_discovery_segments",
            "Segments of prompts by event: counted, queued because they recur, refused because too many "
            "wait, saved, or failed to be saved",
            labelnames=[*labelnames, "event"],
        )
        self._errors = metric_types[prometheus_client.Histogram](
            "kintsugi_ttft_prediction_error",
            "Error of the predicted time to first token ÷ the measured one, both without queueing",
            labelnames=[*labelnames, "outcome"],
            buckets=ERROR_BUCKETS,
        )
        self._amounts = {
            name: counter(
                f"kintsugi_blend_{name}", f"Sum of {name} over blended requests", labelnames=labelnames
            )
            for name in AMOUNTS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.items():
            if name.startswith(f"{REQUESTS}/"):
                _, outcome, reason = name.split("/", 2)
                self._requests.labels(*labels, outcome, reason).inc(amount)
            elif name.startswith(f"{SEGMENTS}/"):
                self._segments.labels(*labels, name.split("/", 1)[1]).inc(amount)
            elif name.startswith(f"{ERRORS}/"):
                for error in amount:
                    self._errors.labels(*labels, name.split("/", 1)[1]).observe(error)
            elif name != TOLD:
                self._amounts[name].labels(*labels).inc(amount)


@dataclass(frozen=True)
class _Step:
    began_s: float
    tokens: int
    pairs: float
    counts: bool
    """Whether no blend or save was running."""


@dataclass
class _Awaited:
    """A request without a first token yet."""

    request: Request
    admitted_s: float
    planned_s: float | None = None
    """Time at which its blend was planned; None if other requests were computed since."""
    pass_s: float | None = None
    """Time for which its pass computed and waited."""
    predicted_s: float | None = None


@dataclass(frozen=True)
class Ttft:
    """One request's time to first token, in seconds since its admission."""

    measured_s: float
    predicted_s: float | None

    def added_to(self, accounting: Accounting) -> Accounting:
        """Return the accounting with the measured and the predicted time, in milliseconds."""
        predicted_ms = None if self.predicted_s is None else round(self.predicted_s * 1e3, 3)
        ttft_ms = round(self.measured_s * 1e3, 3)
        return replace(accounting, ttft_ms=ttft_ms, predicted_ttft_ms=predicted_ms)


class Timing:
    """Times of running requests and steps, and the estimates from them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.estimates = Estimates()
        self._running: set[str] = set()
        """Requests of the latest step that have not ended."""
        self._steps: deque[_Step] = deque(maxlen=STEPS_IN_FLIGHT_MAX)
        self._last_end_s = clock()
        self._awaited: dict[str, _Awaited] = {}
        self._first_tokens: dict[str, Ttft] = {}
        self._pass_ends_s: dict[str, float] = {}
        """Predicted end of computation of each pass in flight."""
        self._refusals = {"loading_is_slower": 0, "blending_is_slower": 0}
        self._trial_after = TRIAL_FIRST

    @property
    def measured(self) -> Measured:
        return self.estimates.snapshot()

    @property
    def ahead_s(self) -> float:
        """Predicted seconds until the passes in flight have been computed."""
        return max(0.0, max(self._pass_ends_s.values(), default=0.0) - self.clock())

    def is_alone(self, request_id: str) -> bool:
        """Return whether no other request is being computed."""
        return not self._running - {request_id} and not self._pass_ends_s.keys() - {request_id}

    def record_admission(self, request: Request) -> None:
        """Note that the scheduler considers the request. Only the first call counts."""
        if request.request_id not in self._awaited and request.num_output_tokens == 0:
            self._awaited[request.request_id] = _Awaited(request, self.clock())

    def record_plan(self, request_id: str, ttft_s: float | None, is_blend: bool) -> None:
        """Note whether the request is blended, and its predicted TTFT in seconds from now."""
        now_s = self.clock()
        awaited = self._awaited.get(request_id)
        if awaited is not None:
            awaited.planned_s = now_s if is_blend and self.is_alone(request_id) else None
            awaited.predicted_s = None if ttft_s is None else now_s - awaited.admitted_s + ttft_s
        self._pass_ends_s.pop(
            request_id, None
        )  # a blend that waited for cache blocks may have been declined since
        if is_blend:
            self._pass_ends_s[request_id] = now_s + (ttft_s or 0.0)
            self._disturbs_others({request_id})

    def pass_ended(self, request_id: str, sample: PassSample | None) -> None:
        """Note the end of a blend or save, with a ``sample`` if it had no restarts."""
        self._pass_ends_s.pop(request_id, None)
        awaited = self._awaited.get(request_id)
        if awaited is not None and sample is not None:
            awaited.pass_s = sample.busy_s + sample.load_wait_s

    def forget(self, request_id: str) -> Ttft | None:
        """Drop a request that has ended. Returns its TTFT; None if it had no token."""
        awaited = self._awaited.get(request_id)
        if awaited is not None and awaited.request.num_output_tokens:
            self._first_token(request_id, awaited)
        self._awaited.pop(request_id, None)
        self._pass_ends_s.pop(request_id, None)
        self._running.discard(request_id)
        return self._first_tokens.pop(request_id, None)

    def step_began(self, output: SchedulerOutput, ours_in_flight: bool) -> None:
        tokens = output.total_num_scheduled_tokens
        requests = len(output.num_scheduled_tokens)
        pairs = _pairs(output) if tokens > requests else 0.0
        self._running = set(output.num_scheduled_tokens)
        self._disturbs_others(self._running)
        self._steps.append(_Step(self.clock(), tokens, pairs, not ours_in_flight))

    def _disturbs_others(self, computing: set[str]) -> None:
        """Note that requests without a first token now share the engine, so their tails are not measured."""
        for request_id, awaited in self._awaited.items():
            if len(computing) > (request_id in computing):
                awaited.planned_s = None

    def step_ended(self) -> list[tuple[Request, Ttft]]:
        """Note the end of a step, in the order in which steps began. Returns the requests that have had their
        first token since the last step."""
        now_s = self.clock()
        if self._steps:
            step = self._steps.popleft()
            if step.counts and step.pairs:
                took_s = now_s - max(step.began_s, self._last_end_s)
                self.estimates.observe_step(step.tokens, step.pairs, took_s)
        self._last_end_s = now_s
        begun = [one for one in self._awaited.items() if one[1].request.num_output_tokens]
        return [(awaited.request, self._first_token(name, awaited)) for name, awaited in begun]

    def _first_token(self, request_id: str, awaited: _Awaited) -> Ttft:
        del self._awaited[request_id]
        now_s = self.clock()
        self._first_tokens[request_id] = Ttft(now_s - awaited.admitted_s, awaited.predicted_s)
        if awaited.planned_s is not None and awaited.pass_s is not None:
            self.estimates.observe_tail(now_s - awaited.planned_s - awaited.pass_s)
        return self._first_tokens[request_id]

    def trial_is_due(self) -> bool:
        """Return whether to blend the next prompt even if computing the blend is predicted to be slower."""
        return self._refusals["blending_is_slower"] >= self._trial_after

    def record_trial(self) -> None:
        self._refusals["blending_is_slower"] = 0
        self._trial_after = min(2 * self._trial_after, TRIAL_LAST)

    def probe_is_due(self, reason: str) -> bool:
        """Count a refusal. Returns whether to read a chunk to measure loading again."""
        if reason not in self._refusals:
            return False
        self._refusals[reason] += 1
        return reason == "loading_is_slower" and self._refusals[reason] % REFUSALS_PER_PROBE == 1


def _pairs(output: SchedulerOutput) -> float:
    """Return the number of (query, key) pairs in a step's attention."""
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return sum(
        count_attention_pairs(computed.get(request_id, 0), computed.get(request_id, 0) + tokens)
        for request_id, tokens in output.num_scheduled_tokens.items()
    )
