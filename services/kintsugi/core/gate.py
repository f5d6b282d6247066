"""Decide whether an engine may blend, and how. `engine.scheduler.gate` reads the reports for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kintsugi.core.errors import BelowMinimum, Corrupted, NotBlendable, VersionMismatch
from kintsugi.core.plan import Selection, apply_options
from kintsugi.core.prompt import Domain, PromptShape
from kintsugi.core.report import RATIO_TOLERANCE, Binding, CalibrationReport
from kintsugi.core.request import BlendOptions

OUTSIDE_CALIBRATION = "outside_calibration"
"""Reason for not blending a prompt that is unlike those of the calibration."""
CALIBRATE = "run: kintsugi calibrate --model MODEL --store URL (or --allow-uncalibrated, at your own risk)"


@dataclass(frozen=True)
class GateState:
    """What the report allows. Replaced as a whole, never changed."""

    reason: str | None
    """Why nothing is blended, one word that metrics use; None where the gate is open."""
    detail: str
    default: Selection | None = None
    """Selection of a request without options; None: the engine's configuration decides."""
    limits: Mapping[str, Selection] | None = None
    """The lowest allowed selection by selector; None: no limits."""
    domain: Domain | None = None
    """The prompts that the report covers; None: any."""

    @property
    def is_open(self) -> bool:
        return self.reason is None

    def resolve(self, fallback: Selection, options: BlendOptions) -> Selection:
        """The selection for a request with these options.

        `fallback` is the engine's own selection, used where no report decides. Raises `NotBlendable` if the
        gate is closed or the selector never passed, `BelowMinimum` for a ratio below the lowest that passed.
        A ratio of 1 computes what a full prefill does, so an open gate allows it with any selector.
        `check_shape` checks the prompt later, when its chunks have been found.
        """
        if self.reason is not None:
            raise NotBlendable(self.reason, self.detail)
        default = self.default or fallback
        chosen = options.selector or default.selector
        limit = None if self.limits is None else self.limits.get(chosen)
        if self.limits is not None and limit is None and options.ratio != 1.0:
            raise NotBlendable(
                "selector_not_calibrated",
                f"{chosen} did not pass calibration at any ratio; "
                f"those that did: {', '.join(sorted(self.limits))}",
            )
        start = default if limit is None or chosen == default.selector else limit
        wanted = apply_options(start, options)
        if limit is not None:
            _check_minimum(wanted, limit, options.adaptive_mass)
        return wanted

    def check_shape(self, shape: PromptShape) -> None:
        """Raise `NotBlendable` for a prompt unlike the calibrated ones. Not for exact blends: those with a
        ratio of 1, or without an approximate chunk."""
        departure = None if self.domain is None else self.domain.departure(shape)
        if departure is not None:
            raise NotBlendable(
                OUTSIDE_CALIBRATION,
                f"the prompt has {departure}; calibrate on prompts like those you serve",
            )


def _check_minimum(wanted: Selection, limit: Selection, adaptive_mass: float | None) -> None:
    if wanted.ratio < limit.ratio - RATIO_TOLERANCE:
        raise BelowMinimum(
            "ratio",
            f"{wanted.ratio:g} is below {limit.ratio:g}, the least that passed calibration for "
            f"{limit.selector}; ask for {limit.ratio:g} or more, or leave it out",
        )
    if adaptive_mass is not None and adaptive_mass < (limit.adaptive_mass or 1.0):
        raise BelowMinimum(
            "adaptive_mass",
            f"{adaptive_mass:g} is below {limit.adaptive_mass or 1.0:g}, what passed calibration for "
            f"{limit.selector}; leave it out",
        )


def decide(document: bytes | None, binding: Binding) -> GateState:
    """Return the gate's state for a stored report and an engine with this binding. Never raises."""
    if document is None:
        return GateState("not_calibrated", f"no calibration report for this model; {CALIBRATE}")
    try:
        report = CalibrationReport.from_bytes(document)
    except VersionMismatch as error:
        return GateState("calibration_outdated", f"{error}; {CALIBRATE}")
    except Corrupted as error:
        return GateState("calibration_unreadable", f"{error}; {CALIBRATE}")
    difference = binding.difference(report.binding)
    if difference is not None:
        return GateState("calibration_of_another", f"the calibration report's {difference}; {CALIBRATE}")
    if report.tripped is not None:
        detail = f"{report.tripped.reason} (at {report.tripped.at}); {CALIBRATE}"
        return GateState("drift", detail)
    choice = report.choice
    if choice.selection is None:
        return GateState("calibration_failed", choice.why)
    return GateState(None, choice.why, choice.selection, choice.limits, report.domain)
