"""Reports about blends, with evidence of one's own choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from kintsugi.core.evidence import STEPS, Tally
from kintsugi.core.gate import GateState
from kintsugi.core.plan import Selection
from kintsugi.core.report import (
    BANDS,
    FILE,
    LADDER,
    Binding,
    Cell,
    Closing,
    Report,
    ReportEntry,
    ReportPart,
    source_of,
)
from kintsugi.core.spaces import ModelFingerprint
from kintsugi.quality.reports import parse_stored
from kintsugi.store.protocol.interface import ChunkStore

FINGERPRINT = ModelFingerprint.of({"weights": "report"})
BINDING = Binding.of(FINGERPRINT, (0,), "raw")
CELL = Cell("declared", 1)
VERSIONS = "kintsugi 1, vllm 2, cpu"
SOURCE = source_of("tenant")
SAFEST = LADDER[0]
HKVD = Selection(0.15)
AT = "2026-01-01T00:00:00+00:00"
ENOUGH_PAIRS = 80
"""Pairs without a loss that pass in each of the first slots, before and after the first closing."""


def tally_of(
    pairs: int,
    loss: float = 0.0,
    chunk_tokens: int = 200,
    num_chunks: int = 5,
    answers: Sequence[tuple[int, int]] = (),
) -> Tally:
    """The tally of equal pairs."""
    return Tally(
        losses=((math.ceil(loss * STEPS - 1e-9), pairs),),
        answers=tuple(answers),
        cost=0.5 * pairs,
        kl=0.001 * pairs,
        changes=((1, pairs),),
        sizes=((int(math.log2(chunk_tokens)), pairs),),
        chunks=((int(math.log2(num_chunks)), pairs),),
    )


def entry_of(
    source: str = SOURCE,
    pairs: int = ENOUGH_PAIRS,
    loss: float = 0.0,
    *,
    cell: Cell = CELL,
    slot: int = 1,
    epoch: int = 0,
    selection: Selection = SAFEST,
    tally: Tally | None = None,
) -> ReportEntry:
    return ReportEntry(
        cell, source, slot, epoch, selection, tally_of(pairs, loss) if tally is None else tally
    )


def part_of(
    *entries: ReportEntry,
    writer: str = "writer",
    versions: str = VERSIONS,
    at: str = AT,
    closings: Sequence[Closing] = (),
) -> ReportPart:
    return ReportPart(writer, versions, at, entries, tuple(closings))


def report_of(*parts: ReportPart, binding: Binding = BINDING, created: str = AT) -> Report:
    return Report(binding, created, parts)


def open_report(namespace: str = "tenant", rungs: int = 1, binding: Binding = BINDING) -> Report:
    """A report in which the first configurations of the ladder passed for a namespace, in `CELL`."""
    entries = [entry_of(source_of(namespace), selection=selection) for selection in LADDER[:rungs]]
    return report_of(part_of(*entries), binding=binding)


def fetch_report(store: ChunkStore, binding: Binding) -> Report | None:
    """The report that a store keeps."""
    return parse_stored(store.get_report(binding.model, binding.report_name), binding)


def measured_state(tally: Tally, *cells: Cell, selection: Selection = HKVD) -> GateState:
    """The state of a gate that is open for all namespaces in these cells, with one configuration."""
    entries = [
        entry_of(FILE, cell=cell, slot=slot, selection=selection, tally=tally)
        for slot, cell in enumerate(cells, 1)
    ]
    report = Report(BINDING, AT, (part_of(*entries),), (selection,))
    return GateState(report=report, versions=VERSIONS)


ANY_SIZE = tuple((size, 400) for size in range(14))


def passing_report(
    binding: Binding,
    selections: Sequence[Selection] = LADDER,
    kind: Literal["declared", "discovered"] = "declared",
    sizes: tuple[tuple[int, int], ...] = ANY_SIZE,
    created: str = "2026-01-01T00:00:00+00:00",
    versions: str = "test",
) -> Report:
    """A report by which the selections pass for prompts of any length: on a file, they lost nothing.

    ``sizes``: rows of (octave of the chunks' mean length, pairs). With an engine's own ``versions`` nothing
    is on probation.
    """
    tally = Tally(losses=((0, 400),), cost=200.0, sizes=sizes, chunks=ANY_SIZE)
    entries = [
        entry_of(FILE, cell=Cell(kind, band), slot=band + 1, selection=selection, tally=tally)
        for band in range(len(BANDS) + 1)
        for selection in selections
    ]
    part = part_of(*entries, writer="test", versions=versions, at=created)
    return Report(binding, created, (part,), tuple(selections))


def edited(document: bytes) -> bytes:
    """The document with another ratio, and its old digest."""
    assert b'"ratio":' in document
    return document.replace(b'"ratio":0.', b'"ratio":0.0', 1)
