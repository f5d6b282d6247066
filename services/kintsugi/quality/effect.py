"""How far blends were from full prefill lately, beside what calibration measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi.core.baseline import Baseline, Deviation
from kintsugi.quality.metrics import Interval, mean_interval, share_interval

WINDOW = 1000
"""Latest shadowed requests that an effect is measured over."""


@dataclass(frozen=True)
class Effect:
    """Means over shadowed requests, with 95 % intervals, and calibration's means over as many positions."""

    requests: int
    agreement: Interval
    """Share of positions whose most likely token is full prefill's."""
    kl: Interval
    """Nats."""
    agreement_calibrated: float | None = None
    """None where the report has no baseline."""
    kl_calibrated: float | None = None

    def __str__(self) -> str:
        text = f"{self.requests} requests shadowed: agreement {self.agreement}"
        if self.agreement_calibrated is not None:
            text += f" (calibrated {self.agreement_calibrated:.3f})"
        text += f", KL {self.kl} nats"
        return text if self.kl_calibrated is None else f"{text} (calibrated {self.kl_calibrated:.3f})"


def measure_effect(latest: Sequence[Deviation], baseline: Baseline | None) -> Effect:
    """The effect over `latest`, which holds at least one request."""
    differing = share_interval([one.disagreement for one in latest])
    agreement = Interval(1 - differing.mean, 1 - differing.high, 1 - differing.low)
    kl = mean_interval([one.kl for one in latest])
    if baseline is None:
        return Effect(len(latest), agreement, kl)
    counted = {one.positions for one in latest}
    calibrated = {positions: _mean_deviation(baseline.deviations(positions)) for positions in counted}
    means = [calibrated[one.positions] for one in latest]
    return Effect(
        len(latest),
        agreement,
        kl,
        1 - sum(mean.disagreement for mean in means) / len(means),
        sum(mean.kl for mean in means) / len(means),
    )


def _mean_deviation(deviations: Sequence[Deviation]) -> Deviation:
    return Deviation(
        sum(one.kl for one in deviations) / len(deviations),
        sum(one.disagreement for one in deviations) / len(deviations),
    )
