"""Decide whether a request may be blended, and how. `engine.scheduler.gate` reads the report for it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

from kintsugi.core.errors import BelowMinimum, Corrupted, NotBlendable, VersionMismatch
from kintsugi.core.evidence import Quality
from kintsugi.core.plan import Selection, apply_options
from kintsugi.core.report import (
    SOURCES_KEPT_MAX,
    Allowance,
    Binding,
    Cell,
    Report,
    Standing,
    source_of,
)
from kintsugi.core.request import BlendOptions

LEARNING = "learning"
"""Reason for not blending while too little evidence was measured."""
UNMEASURED = "unmeasured"
"""Reason for not blending a prompt whose chunks differ in size or number from those that were measured."""
CLOSED = "drift"
"""Reason for not blending after wrong answers or damaged chunks were found, until new evidence passes."""
_RATIO_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Permit:
    """The configurations that one request may use."""

    selection: Selection
    allowance: Allowance | None = None
    """What passed; None: nothing is tested."""

    def check_chunks(self, chunk_tokens: Sequence[int]) -> None:
        """Raise `NotBlendable` if the chunks differ in size or number from those that were measured. Exact
        blends (a ratio of 1, or no approximate chunk) never raise."""
        lacking = None if self.allowance is None else self.allowance.lacks(chunk_tokens)
        if lacking is not None:
            raise NotBlendable(UNMEASURED, lacking)


@dataclass(frozen=True)
class GateState:
    """The configurations that a report allows. Replaced as a whole, never changed."""

    reason: str | None = None
    """Why nothing is blended, as one word for metrics' labels; None: the report decides, or nothing is
    tested."""
    detail: str = ""
    report: Report | None = None
    """The evidence; None: nothing is tested."""
    quality: Quality = Quality.BALANCED
    versions: str = ""
    """Versions of this engine, as in `ReportPart.versions`."""

    @cached_property
    def allowance(self) -> Callable[[Cell, str], Allowance | None]:
        """Returns what a source's requests may use in a cell; None: nothing yet. Cached for each request."""
        assert self.report is not None
        found = partial(self.report.allowance, quality=self.quality, versions=self.versions)
        return lru_cache(SOURCES_KEPT_MAX)(found)

    def permit(
        self, namespace: str, is_discovered: bool, num_tokens: int, fallback: Selection, options: BlendOptions
    ) -> Permit:
        """Return what a request may use. ``fallback`` is the engine's own selection, used where nothing is
        tested.

        Raises `NotBlendable` if no configuration, or none with the request's selector, passed for such
        prompts of the namespace, and `BelowMinimum` for a ratio below the lowest that passed. A ratio of 1
        computes what a full prefill does, so any selector may have it.
        """
        if self.reason is not None:
            raise NotBlendable(self.reason, self.detail)
        if self.report is None:
            return Permit(apply_options(fallback, options))
        cell, source = Cell.of(is_discovered, num_tokens), source_of(namespace)
        allowance = self.allowance(cell, source)
        if allowance is None:
            raise NotBlendable(*self._why_closed(cell, source))
        wanted = apply_options(allowance.cheapest, options)
        if options.chosen and wanted.ratio != 1.0:
            _check_options(wanted, allowance)
        return Permit(wanted, allowance)

    def _why_closed(self, cell: Cell, source: str) -> tuple[str, str]:
        assert self.report is not None
        last = self.report.last_closing(source)
        progress = describe_progress(self.report.standing(cell, source, self.quality))
        if last is not None:
            return CLOSED, f"{last.reason} (at {last.at}); {cell}: {progress}"
        return LEARNING, f"{cell}: {progress}"


def describe_progress(standing: Standing) -> str:
    """Describe how far a source's evidence is, in one clause."""
    pairs = standing.tally.pairs
    if standing.missing is None:
        return f"{pairs} prompts were measured, and the loss is {standing.tally.loss:.3f}: too much to pass"
    return f"{pairs} of about {pairs + standing.missing} prompts were measured"


def _check_options(wanted: Selection, allowance: Allowance) -> None:
    """Raise `NotBlendable` for a selector that did not pass, `BelowMinimum` for a ratio below the lowest that
    passed."""
    passed = [one for one in allowance.selections if one.selector == wanted.selector]
    if not passed:
        names = sorted({str(one.selector) for one in allowance.selections})
        raise NotBlendable(
            "selector_not_measured",
            f"{wanted.selector} did not pass at any ratio; passed: {', '.join(names)}",
        )
    lowest = min(one.ratio for one in passed)
    if wanted.ratio < lowest - _RATIO_TOLERANCE:
        raise BelowMinimum(
            "ratio",
            f"{wanted.ratio:g} is below {lowest:g}, the lowest that passed for {wanted.selector}; request "
            f"{lowest:g} or more, or leave it out",
        )


def decide(document: bytes | None, binding: Binding, quality: Quality, versions: str) -> GateState:
    """Return the gate's state for a stored report and an engine with this binding. Never raises.

    A report that cannot be read counts as none, so evidence is collected anew.
    """
    empty = Report(binding, created="", ladder=binding.ladder)
    try:
        report = empty if document is None else Report.from_bytes(document)
    except (VersionMismatch, Corrupted) as error:
        return GateState(detail=str(error), report=empty, quality=quality, versions=versions)
    difference = binding.difference(report.binding)
    if difference is not None:
        return GateState("report_of_another", f"the report's {difference}; remove it")
    return GateState(report=report, quality=quality, versions=versions)


@dataclass(frozen=True)
class GateProgress:
    """The gate of one engine in numbers, for status, console and metrics."""

    state: str
    """`off`: nothing is tested; `closed`, `learning` or `open`."""
    detail: str
    """One sentence."""
    pairs: int = 0
    """Prompts that were measured for the nearest cell and source."""
    pairs_missing: int | None = None
    """Estimated number of further prompts until the next configuration passes; None if unknown, or if there
    is no next one."""
    minutes_missing: int | None = None
    """Estimated minutes until these prompts are measured, at the present rate; None: unknown."""
    cost: float | None = None
    """Mean share of a full prefill's work of the cheapest configuration that is open."""
    kl: float | None = None
    """Its mean KL, in nats."""
    changed: float | None = None
    """Its mean share of changed tokens."""
    loss: float | None = None
    """Its mean loss."""
    loss_upper: float | None = None
    """95 % upper bound of its mean loss."""
    loss_max: float | None = None
    """The limit of the mean loss."""
    since: str | None = None
    """When it opened: ISO 8601, UTC."""


def summarize(state: GateState, namespace: str | None = None) -> GateProgress:
    """Return a gate's progress: of one namespace, or of the source and cell that is nearest to opening."""
    if state.reason is not None:
        return GateProgress("closed", f"{state.reason}: {state.detail}")
    report = state.report
    if report is None:
        return GateProgress("off", "nothing is tested; answers may be wrong without notice")
    source = None if namespace is None else source_of(namespace)
    opened = widest(state, namespace)
    if opened is not None:
        return _open_progress(state, *opened)
    pairs = [(cell, one) for cell in report.cells for one in report.sources(cell) if source in (None, one)]
    if not pairs:
        return GateProgress(
            "learning", f"no prompt was measured yet{f'; {state.detail}' if state.detail else ''}"
        )
    standings = {key: report.standing(*key, state.quality) for key in pairs}
    key = max(pairs, key=lambda one: standings[one].tally.log_wealth(state.quality))
    standing = standings[key]
    return GateProgress(
        "closed" if report.epoch(key[1]) else "learning",
        f"{key[0]}: {describe_progress(standing)}",
        pairs=standing.tally.pairs,
        pairs_missing=standing.missing,
        loss=standing.tally.loss,
        loss_max=state.quality.loss_max,
    )


def widest(state: GateState, namespace: str | None = None) -> tuple[Cell, str, Allowance] | None:
    """Return the cell and source with the cheapest open configuration, and what passed there; None if nothing
    is open. ``namespace``: only this one is considered."""
    report = state.report
    if report is None or state.reason is not None:
        return None
    source = None if namespace is None else source_of(namespace)
    found = [
        (cell, one, allowed)
        for cell in report.cells
        for one in ([source] if source else report.sources(cell))
        if (allowed := state.allowance(cell, one))
    ]
    return max(found, key=lambda one: (len(one[2].selections), one[2].tally.pairs), default=None)


def _open_progress(state: GateState, cell: Cell, source: str, allowed: Allowance) -> GateProgress:
    assert state.report is not None
    tally, pairs = allowed.tally, max(1, allowed.tally.pairs)
    dates = [
        one.at
        for part in state.report.parts
        for one in part.openings
        if one.cell == cell and one.source in ("", source)
    ]
    standing = state.report.standing(cell, source, state.quality)
    cost = tally.cost / pairs
    probation = ", on probation after an upgrade" if allowed.on_probation else ""
    further = (
        ""
        if standing.next is None
        else f"; for a ratio of {standing.next.ratio:g}, {describe_progress(standing)}"
    )
    return GateProgress(
        "open",
        f"{cell}: at {cost:.0%} of a full prefill's work, mean loss {tally.loss:.3f} of at most "
        f"{state.quality.loss_max:.3f}{probation}{further}",
        pairs=tally.pairs,
        pairs_missing=None if standing.next is None else standing.missing,
        cost=cost,
        kl=tally.kl / pairs,
        changed=tally.changed,
        loss=tally.loss,
        loss_upper=tally.loss_upper(0.05),
        loss_max=state.quality.loss_max,
        since=min(dates, default=None),
    )
