"""Writes and reads calibration reports, in a chunk store or in a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kintsugi.core.errors import Corrupted, InvalidField, NotFound, VersionMismatch
from kintsugi.core.report import REPORT_BYTES_MAX, Binding, CalibrationReport
from kintsugi.store.protocol.interface import ChunkStore


def publish(store: ChunkStore, report: CalibrationReport) -> None:
    """Publish a new calibration to all engines of its binding. It replaces the current report, even a tripped
    one: if this clock is behind, `created` is set later than the current report's.

    Raises `InvalidField` if this clock is more than a day ahead of the store's."""
    current = store.get_report(report.binding.model, report.binding.report_name)
    moved = report if current is None else report.created_after(current)
    try:
        _put(store, moved)
    except InvalidField:
        # By the store's clock, the current report is from the future; any other report replaces it.
        if moved == report:
            raise
        _put(store, report)


def publish_shipped(store: ChunkStore, report: CalibrationReport) -> bool:
    """Publish a calibration that was made earlier, unless the store has a report. Return whether it was
    published. Its date does not change, so that a tripped copy on an unreachable shard supersedes it
    later."""
    if store.get_report(report.binding.model, report.binding.report_name) is not None:
        return False
    _put(store, report)
    return True


def _put(store: ChunkStore, report: CalibrationReport) -> None:
    store.put_report(report.binding.model, report.binding.report_name, report.to_bytes())


def fetch_report(store: ChunkStore, binding: Binding) -> CalibrationReport | None:
    """Fetch the report that engines of this binding use; None if it does not exist or cannot be read."""
    document = store.get_report(binding.model, binding.report_name)
    if document is None:
        return None
    try:
        return CalibrationReport.from_bytes(document)
    except (Corrupted, VersionMismatch):
        return None


def trip(store: ChunkStore, report: CalibrationReport, reason: str, at: str) -> bool:
    """Turn blending off for every engine that uses the report, until the next calibration.

    Only this report is tripped: a newer calibration in the store stays as it is. Return whether blending is
    off now.
    """
    current = fetch_report(store, report.binding)
    if current is None or current.tripped is None:
        _put(store, report.as_tripped(reason, at))
        current = fetch_report(store, report.binding)
    return current is None or current.tripped is not None


def write(path: Path, report: CalibrationReport) -> None:
    """Write the report to a file, atomically, because an engine may poll the file."""
    if not path.parent.is_dir():
        raise InvalidField("out", f"{path.parent} is not a folder; create it first")
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(descriptor, "wb") as file:
        file.write(report.to_bytes())
    Path(draft).chmod(0o644)
    Path(draft).replace(path)


def read(path: Path) -> CalibrationReport:
    """Read a report from a file. Raises `NotFound`, `Corrupted` and `VersionMismatch`."""
    if not path.is_file():
        raise NotFound(f"{path} is not a file; create it with kintsugi calibrate --out {path}")
    with path.open("rb") as file:
        return CalibrationReport.from_bytes(file.read(REPORT_BYTES_MAX + 1))
