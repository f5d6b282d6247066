"""Metrics of shadowing: counts, and the effect of blending on the latest requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kintsugi.core.baseline import Baseline, Deviation
from kintsugi.quality import metrics

WINDOW = 1000
"""Number of the latest shadowed requests over which the effect is measured."""


@dataclass(frozen=True)
class Effect:
    """Deviation of blends from full prefill: ``mean``, the 95 % interval from ``low`` to ``high``, and
    ``calibrated``, calibration's mean over the same numbers of positions."""

    requests: int
    agreement: Mapping[str, float]
    """Share of positions at which both have the same most likely token."""
    kl: Mapping[str, float]
    """Nats."""

    @staticmethod
    def of(latest: Sequence[Deviation], baseline: Baseline | None) -> Effect:
        """Measure the effect over `latest`, which has at least one request. Without a baseline nothing is
        ``calibrated``."""
        differing = metrics.share_interval([one.disagreement for one in latest])
        agreement = {"mean": 1 - differing.mean, "low": 1 - differing.high, "high": 1 - differing.low}
        kl = dataclasses.asdict(metrics.mean_interval([one.kl for one in latest]))
        if baseline is not None:
            means = {
                positions: _mean_of(baseline, positions) for positions in {one.positions for one in latest}
            }
            agreement["calibrated"] = 1 - metrics.mean([means[one.positions].disagreement for one in latest])
            kl["calibrated"] = metrics.mean([means[one.positions].kl for one in latest])
        return Effect(len(latest), agreement, kl)


def _mean_of(baseline: Baseline, positions: int) -> Deviation:
    deviations = baseline.deviations(positions)
    return Deviation(
        metrics.mean([one.kl for one in deviations]),
        metrics.mean([one.disagreement for one in deviations]),
        positions,
    )


@dataclass(eq=False)  # registries keep collectors by identity
class ShadowCounts(Collector):
    """Counts since the start, and the effect on the latest requests. Registered in a `CollectorRegistry`,
    the counts are the counters `kintsugi_shadow_NAME_total`."""

    compared: int = 0
    dropped: int = 0
    disagreed: int = 0
    trips: int = 0
    kl_sum: float = 0.0
    """Sum over the compared requests, in nats."""
    pooled: int = 0
    """Requests that other engines shadowed and this one took into account."""
    audited: int = 0
    """Stored chunks that were compared with a new prefill."""
    damaged: int = 0
    """Audited chunks that differed by more than rounding and the codec explain, and were dropped."""
    effect: Effect | None = None
    """Over the latest shadowed requests of all engines; None before the first."""

    def collect(self) -> Iterator[Metric]:
        for name in ("compared", "dropped", "disagreed", "trips", "kl_sum", "pooled"):
            yield CounterMetricFamily(
                f"kintsugi_shadow_{name}",
                f"Shadowed requests: {name.replace('_', ' ')}",
                value=getattr(self, name),
            )
        for name in ("audited", "damaged"):
            yield CounterMetricFamily(
                f"kintsugi_shadow_{name}",
                f"Stored chunks that shadowing prefilled again: {name}",
                value=getattr(self, name),
            )
        yield from self._collect_effect()

    def _collect_effect(self) -> Iterator[Metric]:
        window = "the latest shadowed requests of all engines"
        values = "mean, its 95 % interval (low, high), and calibration's mean (calibrated)"
        agreement = GaugeMetricFamily(
            "kintsugi_shadow_agreement",
            "Share of answer positions at which blend and full prefill agree on the most likely token, over "
            f"{window}: {values}",
            labels=["value"],
        )
        kl = GaugeMetricFamily(
            "kintsugi_shadow_kl",
            f"KL divergence of blends from full prefill in nats, over {window}: {values}",
            labels=["value"],
        )
        requests = GaugeMetricFamily("kintsugi_shadow_window", f"Number of {window}, at most {WINDOW}")
        if self.effect is not None:
            for family, found in ((agreement, self.effect.agreement), (kl, self.effect.kl)):
                for name, value in found.items():
                    family.add_metric([name], value)
            requests.add_metric([], self.effect.requests)
        yield from (agreement, kl, requests)
