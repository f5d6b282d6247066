"""Where calibration reports are kept: a store, or a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kintsugi.core.errors import Corrupted, InvalidField, NotFound, VersionMismatch
from kintsugi.core.report import REPORT_BYTES_MAX, Binding, CalibrationReport
from kintsugi.store.protocol.interface import ChunkStore


def publish(store: ChunkStore, report: CalibrationReport) -> None:
    """Put a new calibration where every engine of its binding looks. Replaces what is there, a tripped report
    too: `created` is moved past what is there if this clock is behind."""
    held = store.get_report(report.binding.model, report.binding.report_name)
    _put(store, report if held is None else report.created_after(held))


def publish_shipped(store: ChunkStore, report: CalibrationReport) -> bool:
    """Put a calibration that was made earlier where engines look, if there is none; whether it did. Its date
    stays, so that a tripped copy of it, on a shard that does not answer now, still supersedes it."""
    if store.get_report(report.binding.model, report.binding.report_name) is not None:
        return False
    _put(store, report)
    return True


def _put(store: ChunkStore, report: CalibrationReport) -> None:
    store.put_report(report.binding.model, report.binding.report_name, report.to_bytes())


def published(store: ChunkStore, binding: Binding) -> CalibrationReport | None:
    """The report that engines of this binding go by; None where there is none that can be read."""
    document = store.get_report(binding.model, binding.report_name)
    if document is None:
        return None
    try:
        return CalibrationReport.from_bytes(document)
    except (Corrupted, VersionMismatch):
        return None


def trip(store: ChunkStore, report: CalibrationReport, reason: str, at: str) -> bool:
    """Turn blending off for everybody who reads the report, until somebody calibrates again.

    Only the report that was judged is tripped: the store keeps a calibration that was written meanwhile. True
    if blending is off now.
    """
    current = published(store, report.binding)
    if current is None or current.tripped is None:
        _put(store, report.as_tripped(reason, at))
        current = published(store, report.binding)
    return current is None or current.tripped is not None


def write(path: Path, report: CalibrationReport) -> None:
    """Whole or not at all: an engine may be polling the file."""
    if not path.parent.is_dir():
        raise InvalidField("out", f"{path.parent} is not a folder; make it first")
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(descriptor, "wb") as file:
        file.write(report.to_bytes())
    Path(draft).chmod(0o644)
    Path(draft).replace(path)


def read(path: Path) -> CalibrationReport:
    """Raises `NotFound`, `Corrupted`, `VersionMismatch`."""
    if not path.is_file():
        raise NotFound(f"{path} is not a file; make one with kintsugi calibrate --out {path}")
    with path.open("rb") as file:
        return CalibrationReport.from_bytes(file.read(REPORT_BYTES_MAX + 1))
