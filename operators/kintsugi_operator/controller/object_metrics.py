"""Metrics of each object that the operator looks after. They go with the object."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kintsugi_operator.api.status import Condition, ConditionStatus
from kintsugi_operator.controller.queue import ObjectKey
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed import conditions as c

logger = logging.getLogger(__name__)

OBJECTS_MAX = 1000
"""Objects with metrics of their own. Each has about 25 series; further objects have none."""
BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
LABELS = ("kind", "namespace", "name")


@dataclass
class _Measured:
    """What is known of one object."""

    looks: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    """Number of looks by bucket, the last one without a bound."""
    looks_s: float = 0.0
    failures: int = 0
    error: str = ""
    error_at_s: float = 0.0
    generation: int = 0
    generation_since_s: float = 0.0
    generation_lag: int = 0
    is_awaited: bool = False
    ready_s: float | None = None
    conditions: tuple[Condition, ...] = ()


class ObjectMetrics(Collector):
    """Durations, errors, generations and conditions by object."""

    def __init__(self) -> None:
        self._measured: dict[ObjectKey, _Measured] = {}

    @contextmanager
    def time_look(self, key: ObjectKey) -> Iterator[None]:
        """Measure one look at an object, and count it as failed if it raises."""
        one, begun_s = self._of(key), time.perf_counter()
        try:
            yield
        except Exception as error:
            one.failures += 1
            one.error, one.error_at_s = type(error).__name__, time.time()
            raise
        finally:
            took_s = time.perf_counter() - begun_s
            one.looks[sum(took_s > bound for bound in BUCKETS_S)] += 1
            one.looks_s += took_s

    def see(
        self, live: Manifest, observed_generation: int, conditions: Sequence[Condition], now: datetime
    ) -> None:
        """Take over what an object's status says. The time to ready begins when the object is created, or
        when a later generation of it is first seen."""
        metadata = live["metadata"]
        one = self._of(ObjectKey(live["kind"], metadata["namespace"], metadata["name"]))
        generation, is_first_sight = int(metadata.get("generation", 0)), not one.generation
        one.generation_lag = max(generation - max(observed_generation, 0), 0)
        one.conditions = tuple(conditions)
        is_ready = one.generation_lag == 0 and is_settled(conditions)
        if generation != one.generation:
            since = datetime.fromisoformat(str(metadata.get("creationTimestamp") or now.isoformat()))
            one.generation = generation
            one.generation_since_s = (since if generation <= 1 else now).timestamp()
            # An operator that has just started cannot know how long a ready object took.
            one.is_awaited = not (is_first_sight and is_ready)
        if one.is_awaited and is_ready:
            one.is_awaited, one.ready_s = False, max(now.timestamp() - one.generation_since_s, 0.0)

    def forget(self, key: ObjectKey) -> None:
        """Drop the metrics of an object that is gone."""
        self._measured.pop(key, None)

    def _of(self, key: ObjectKey) -> _Measured:
        if key in self._measured:
            return self._measured[key]
        one = _Measured()
        if len(self._measured) < OBJECTS_MAX:
            self._measured[key] = one
        else:
            logger.debug("more than %d objects: %s has no metrics", OBJECTS_MAX, key)
        return one

    def collect(self) -> Iterator[Metric]:
        """The metrics, as Prometheus' client wants them."""
        name = "kintsugi_operator_{}".format
        looks = HistogramMetricFamily(
            name("reconcile_seconds"), "Time that one look at the object took", labels=LABELS
        )
        failures = CounterMetricFamily(name("reconcile_failures"), "Looks that failed", labels=LABELS)
        errors = GaugeMetricFamily(
            name("last_error_timestamp_seconds"),
            "When a look last failed, by error",
            labels=(*LABELS, "error"),
        )
        ready = GaugeMetricFamily(
            name("time_to_ready_seconds"), "Time that the latest generation took to be ready", labels=LABELS
        )
        lag = GaugeMetricFamily(
            name("generation_lag"), "Generations of the spec that the status does not describe", labels=LABELS
        )
        held = GaugeMetricFamily(
            name("condition"),
            "1 if the condition holds, 0 if not; absent where unknown",
            labels=(*LABELS, "condition"),
        )
        for key, one in self._measured.items():
            looks.add_metric(list(key), _cumulate(one.looks), one.looks_s)
            failures.add_metric(list(key), one.failures)
            lag.add_metric(list(key), one.generation_lag)
            if one.error:
                errors.add_metric([*key, one.error], one.error_at_s)
            if one.ready_s is not None:
                ready.add_metric(list(key), one.ready_s)
            for condition in one.conditions:
                if condition.status is not ConditionStatus.UNKNOWN:
                    held.add_metric([*key, condition.type], condition.status is ConditionStatus.TRUE)
        yield from (looks, failures, errors, ready, lag, held)


def is_settled(conditions: Sequence[Condition]) -> bool:
    """Whether an object serves, and nothing that its spec asks for is under way."""
    status = {one.type: one.status for one in conditions}
    return (status.get(c.READY), status.get(c.RECONCILING)) == (ConditionStatus.TRUE, ConditionStatus.FALSE)


def _cumulate(counts: Sequence[int]) -> list[tuple[str, float]]:
    bounds = [*(str(bound) for bound in BUCKETS_S), "+Inf"]
    return [(bound, float(sum(counts[: index + 1]))) for index, bound in enumerate(bounds)]
