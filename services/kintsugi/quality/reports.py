"""Writes evidence into the report of a store, and reads reports from stores and files."""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from kintsugi.core.documents import DOCUMENT_BYTES_MAX, next_date
from kintsugi.core.errors import Corrupted, InvalidField, KintsugiError, NotFound, VersionMismatch
from kintsugi.core.evidence import Quality, Tally
from kintsugi.core.plan import Selection
from kintsugi.core.report import (
    CLOSINGS_EACH,
    CLOSINGS_MAX,
    ENTRIES_MAX,
    LATEST_MAX,
    Binding,
    Cell,
    Closing,
    Opening,
    Report,
    ReportEntry,
    ReportPart,
    ServedBlend,
)
from kintsugi.store.protocol.interface import ChunkStore

logger = logging.getLogger(__name__)

EXCHANGE_S = 20.0
"""Minimum time between two exchanges with the store, unless something opens or closes."""


def utc_now() -> datetime:
    return datetime.now(UTC)


class ReportKeeper:
    """One writer's access to a report: its own part, and the last known parts of others. Not thread-safe;
    `exchange` blocks on the store."""

    def __init__(
        self,
        store: ChunkStore | None,
        binding: Binding,
        versions: str,
        quality: Quality,
        now: Callable[[], datetime] = utc_now,
        clock: Callable[[], float] = time.monotonic,
        writer: str = "",
    ) -> None:
        """``store`` None: the report stays in memory. ``writer``: the id of the evidence, which replaces what
        was published under the same id; empty: a new one."""
        self._store = store
        self._binding = binding
        self._quality = quality
        self._now = now
        self._clock = clock
        self._exchanged_s = -float("inf")
        self._is_changed = False
        self.failure = ""
        """Why the last exchange failed; empty if it did not."""
        self._seen: dict[str, int] = {}
        self._part = ReportPart(writer or uuid.uuid4().hex, versions, self.now)
        self.report = self._empty = Report(binding, self.now, ladder=binding.ladder)
        """The evidence of all writers as last read, with this writer's own."""

    @property
    def now(self) -> str:
        """The time: ISO 8601, UTC."""
        return self._now().isoformat(timespec="seconds")

    @property
    def is_due(self) -> bool:
        """Whether `exchange` should be called now."""
        return self._clock() - self._exchanged_s >= EXCHANGE_S

    def record(self, cell: Cell, source: str, selection: Selection, tally: Tally) -> bool:
        """Add the evidence of a pair. Return whether the configuration passes by it for the first time."""
        had_passed = selection in self.report.standing(cell, source, self._quality).passed
        epoch, slot = self.report.epoch(source), self.report.slot(cell, source)
        entries = list(self._part.entries)
        for index, entry in enumerate(entries):
            if (entry.cell, entry.source, entry.epoch, entry.selection) == (cell, source, epoch, selection):
                entries[index] = dataclasses.replace(entry, slot=slot, tally=entry.tally + tally)
                break
        else:
            if len(entries) == ENTRIES_MAX:
                return False
            entries.append(ReportEntry(cell, source, slot, epoch, selection, tally))
        self._change(entries=tuple(entries))
        opens = not had_passed and selection in self.report.standing(cell, source, self._quality).passed
        if opens:
            opening = Opening(cell, source, selection, self.now)
            self._change(openings=(*self._part.openings, opening)[-ENTRIES_MAX:])
        return opens

    def record_served(self, served: ServedBlend) -> None:
        """Add the levels of a served blend, for the trip tests of other engines."""
        latest = (*self._part.latest, served)[-LATEST_MAX:]
        self._change(latest=latest, served=self._part.served + 1)

    def close(self, closing: Closing) -> None:
        """Turn blending off for the sources that the closing covers, in every engine that reads the
        report."""
        if sum(one.source == closing.source for one in self.report.closings) >= CLOSINGS_EACH:
            return  # it stays closed
        self._change(closings=(*self._part.closings, closing)[-CLOSINGS_MAX:])

    def _change(self, **fields: object) -> None:
        self._part = dataclasses.replace(self._part, at=self.now, **fields)  # type: ignore[arg-type]
        self.report = self.report.with_part(self._part, self.report.created)
        self._is_changed = True

    def exchange(self) -> list[ServedBlend]:
        """Read the parts of others, and publish this writer's. Return the blends that other engines served
        and compared since the last call.

        If the store does not answer, nothing changes, and the next call publishes.
        """
        self._exchanged_s = self._clock()
        if self._store is None:
            return []
        try:
            document = self._store.get_report(self._binding.model, self._binding.report_name)
            found = parse_stored(document, self._binding) or self._empty
            self._leave_folded(found)
            self.report = found.with_part(self._part, next_date(self._now(), document))
            if self._is_changed or self._is_lost(found):
                self._store.put_report(self._binding.model, self._binding.report_name, self.report.to_bytes())
                self._is_changed = False
        except KintsugiError as error:
            self.failure = f"the evidence is not shared: {error}"
            logger.warning("the evidence about blends is not shared now: %s", error)
            return []
        self.failure = ""
        return self._take_new()

    def _leave_folded(self, found: Report) -> None:
        """Continue under a new writer id if this writer's part was added to another one. Pairs that were not
        published before are lost; closings are not."""
        if any(self._part.writer in part.folded for part in found.parts):
            new = tuple(one for one in self._part.closings if one not in found.closings)
            self._part = ReportPart(uuid.uuid4().hex, self._part.versions, self.now, closings=new)

    def _is_lost(self, found: Report) -> bool:
        """Whether the store's report lacks what this writer published, because another writer has replaced
        the report at the same time."""
        return bool(self._part.entries or self._part.closings) and self._part not in found.parts

    def _take_new(self) -> list[ServedBlend]:
        new: list[ServedBlend] = []
        for part in self.report.parts:
            count = min(part.served - self._seen.get(part.writer, part.served), len(part.latest))
            if part.writer != self._part.writer and count > 0:
                new += part.latest[-count:]
            self._seen[part.writer] = part.served
        return new


def parse_stored(document: bytes | None, binding: Binding) -> Report | None:
    """Return the report of a stored document; None if there is none, if it cannot be read, or if it belongs
    to another binding."""
    if document is None:
        return None
    try:
        found = Report.from_bytes(document)
    except (Corrupted, VersionMismatch) as error:
        logger.warning("a stored report is ignored: %s", error)
        return None
    return found if found.binding == binding else None


def publish(store: ChunkStore, report: Report) -> None:
    """Add the parts of a report, as from a file, to the report in the store. A part with fewer pairs than the
    store's of the same writer is not added: the same prompts are measured again, and more of them count."""
    binding = report.binding
    document = store.get_report(binding.model, binding.report_name)
    current = parse_stored(document, binding) or Report(binding, "", ladder=report.ladder)
    stored = {part.writer: _count_pairs(part) for part in current.parts}
    for part in report.parts:
        if _count_pairs(part) < stored.get(part.writer, 0):
            continue
        current = current.with_part(part, next_date(utc_now(), document))
    store.put_report(binding.model, binding.report_name, current.to_bytes())


def _count_pairs(part: ReportPart) -> int:
    return sum(entry.tally.pairs for entry in part.entries)


def write(path: Path, report: Report) -> None:
    """Write the report to a file, atomically, because an engine may poll the file."""
    if not path.parent.is_dir():
        raise InvalidField("out", f"{path.parent} is not a folder; create it first")
    draft = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    draft.write_bytes(report.to_bytes())
    draft.replace(path)


def read(path: Path) -> Report:
    """Read a report from a file. Raises `NotFound`, `Corrupted` and `VersionMismatch`."""
    if not path.is_file():
        raise NotFound(f"{path} is not a file; create it with kintsugi calibrate --out {path}")
    with path.open("rb") as file:
        return Report.from_bytes(file.read(DOCUMENT_BYTES_MAX + 1))
