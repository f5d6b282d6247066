"""The plugin's counters, over vLLM's channel for connector statistics.

The scheduler's side counts; vLLM passes the counts to the process that serves `/metrics` and to its periodic
log line.
"""

from __future__ import annotations

import statistics
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kintsugi.core.accounting import TOLD, Accounting, Outcome, label_of_reason
from kintsugi.engine.scheduler.matching import Match

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


class BlendStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report: sums as `requests/OUTCOME/REASON`, `segments/EVENT` and one entry per
    name in `AMOUNTS`, lists of relative errors of predicted TTFT as `prediction_errors/OUTCOME`, and as
    `told` the accountings of running requests by their tickets (`core.accounting.TICKET`)."""

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
        saved because of an error (`failed`), or left out because of their length (`outside_calibration`)."""
        if number:
            self._add(f"{SEGMENTS}/{event}", number)

    def count_sighted(self, match: Match) -> None:
        """Count the segments of one prompt by what discovery did with them."""
        self.count_segments("counted", match.segments_counted)
        self.count_segments("queued", match.segments_queued)
        self.count_segments("outside_calibration", match.segments_outside)
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
            "wait, saved, failed to be saved, or left out because the calibration report does not cover "
            "their length",
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
                f"kintsugi_blend_{name}", f"Sum over blended requests of {name}", labelnames=labelnames
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
