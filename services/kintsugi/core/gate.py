"""Whether an engine may blend, and what: the pure side of the gate. `engine.gate` reads reports for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kintsugi.core.errors import BelowMinimum, Corrupted, NotBlendable, VersionMismatch
from kintsugi.core.report import RATIO_TOLERANCE, Binding, CalibrationReport, Configuration, Limit
from kintsugi.core.request import SelectorName

CALIBRATE = "run: kintsugi calibrate --model MODEL --store URL (or --allow-uncalibrated, at your own risk)"


@dataclass(frozen=True)
class GateState:
    """What the report allows. Replaced as a whole, never changed."""

    reason: str | None
    """Why nothing is blended, one word that metrics use; None where the gate is open."""
    detail: str
    default: Configuration | None = None
    """What a request without wishes gets; None: the engine's configuration decides."""
    limits: Mapping[str, Limit] | None = field(default=None)
    """By selector; None: anything goes."""
    report_digest: str | None = None

    @staticmethod
    def uncalibrated(detail: str) -> GateState:
        """Open, with nothing known: what `allow_uncalibrated` asks for."""
        return GateState(None, detail)

    @property
    def is_open(self) -> bool:
        return self.reason is None

    def check_open(self) -> None:
        """Raises `NotBlendable` where nothing is blended."""
        if self.reason is not None:
            raise NotBlendable(self.reason, self.detail)

    def resolve(
        self, fallback: Configuration, ratio: float | None, selector: SelectorName | None
    ) -> Configuration:
        """The configuration for a request that names some of it.

        `fallback` is the engine's own where no report decides. Raises `NotBlendable` where the gate is
        closed or the selector never passed, `BelowMinimum` for a ratio below what passed. A ratio of 1 is
        a full prefill by another way, and always allowed.
        """
        self.check_open()
        default = self.default or fallback
        chosen = selector or default.selector
        limit = None if self.limits is None else self.limits.get(chosen.value)
        if self.limits is None or (limit is None and ratio == 1.0):
            wanted = default.ratio if ratio is None else ratio
            return Configuration(chosen, wanted, default.check_layer, default.adaptive)
        if limit is None:
            passed = ", ".join(sorted(self.limits))
            raise NotBlendable(
                "selector_not_calibrated",
                f"{chosen.value} did not pass calibration at any ratio; those that did: {passed}",
            )
        if ratio is None:
            ratio = default.ratio if chosen is default.selector else limit.ratio_min
        if ratio < limit.ratio_min - RATIO_TOLERANCE:
            raise BelowMinimum(
                "ratio",
                f"{ratio:g} is below {limit.ratio_min:g}, the least that passed calibration for "
                f"{chosen.value}; ask for {limit.ratio_min:g} or more, or leave it out",
            )
        return Configuration(chosen, ratio, limit.check_layer, limit.adaptive)


def decide(document: bytes | None, binding: Binding) -> GateState:
    """What a stored document means for an engine of this binding. Never raises."""
    if document is None:
        return GateState("not_calibrated", f"no calibration report for this model; {CALIBRATE}")
    try:
        report = CalibrationReport.from_bytes(document)
    except (Corrupted, VersionMismatch) as error:
        return GateState("calibration_unreadable", f"{error}; {CALIBRATE}")
    difference = binding.difference(report.binding)
    if difference is not None:
        return GateState(
            "calibration_of_another",
            f"the calibration report's {difference}; {CALIBRATE}",
            None,
            None,
            report.digest,
        )
    if report.tripped is not None:
        detail = f"{report.tripped.reason} (at {report.tripped.at}); {CALIBRATE}"
        return GateState("drift", detail, None, None, report.digest)
    choice = report.choice
    if choice.configuration is None:
        return GateState("calibration_failed", choice.why, None, None, report.digest)
    return GateState(None, choice.why, choice.configuration, choice.limits, report.digest)
